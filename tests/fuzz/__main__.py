"""A long run of random programs: `make fuzz`, or `python -m tests.fuzz --examples 20000 --seed 1`.

Each failure is minimised and appended to a file as a script. The exit status is 1 if there was one.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.fuzz import products, programs
from tests.fuzz.judge import judge, judge_mask, judge_products

KINDS: dict[str, Any] = {
    "attentions": programs.attentions,
    "masks": programs.masked,
    "projections": products.projections,
    "adapters": products.adapters,
}


def judge_any(kind: str, drawn: Any) -> None:
    """Judge a program of a kind, or a program and its mask."""
    if kind == "masks":
        judge_mask(*drawn)
    elif kind == "attentions":
        judge(drawn)
    else:
        judge_products(drawn)


def written(drawn: Any, title: str, error: BaseException) -> str:
    """A failure as a script."""
    program = drawn[0] if isinstance(drawn, tuple) else drawn
    comment = "\n".join(f"# {line}" for line in f"{title}\n{error}".splitlines()[:12])
    return f"{comment}\n{program.script()}\n\n"


def batch_of(kind: str, examples: int, number: int, step: Any) -> tuple[Any, BaseException] | None:
    """Run some programs; the minimised failure and its error, if there is one."""
    last: list[tuple[Any, BaseException]] = []

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(KINDS[kind]())
    def run(drawn: Any) -> None:
        step()
        torch.manual_seed(0)
        try:
            judge_any(kind, drawn)
        except Exception as error:
            if type(error).__module__.startswith("hypothesis"):
                raise
            last.append((drawn, error))  # the last one that fails is the smallest
            raise

    try:
        run()
    except Exception as error:
        return last[-1] if last else (None, error)
    return None


def fuzz(examples: int, seed: int, kinds: Sequence[str], out: Path, batch: int = 250) -> int:
    """Run `examples` programs of each kind; the number of failures, each appended to `out`."""
    failures = 0
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        for kind in kinds:
            task = progress.add_task(kind, total=examples)
            for start in range(0, examples, batch):
                number = seed + start // batch
                done = min(batch, examples - start)
                found = batch_of(kind, done, number, lambda task=task: progress.advance(task))
                progress.update(task, completed=start + done)
                if found is not None:
                    failures += 1
                    title = f"{kind}, seed {number}"
                    progress.print(f"{title}: {type(found[1]).__name__}, see {out}", markup=False)
                    with out.open("a") as file:
                        file.write(written(found[0], title, found[1]))
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=10_000, help="programs of each kind (%(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of the first batch (drawn, and printed)")
    parser.add_argument("--only", choices=sorted(KINDS), action="append", help="one kind (all)")
    parser.add_argument("--out", type=Path, default=Path("fuzz_failures.py"), help="failures (%(default)s)")
    options = parser.parse_args(argv)
    number = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {number}", file=sys.stderr)
    failures = fuzz(options.examples, number, options.only or list(KINDS), options.out)
    print(f"{failures} failures", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
