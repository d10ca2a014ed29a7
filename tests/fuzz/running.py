"""Runs of random programs, in batches from one seed each, in one process or several, with a report."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisException, UnsatisfiedAssumption
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.common import Results
from bench.provenance import environment
from tests.fuzz import attentions, calls, mask_values, masks, products, situations
from tests.fuzz.judge import Judged, judge, judge_mask, judge_products
from tests.support.dynamo import spend_less

KINDS: dict[str, Any] = {
    "attentions": attentions.attentions, "masks": masks.masked, "projections": products.projections,
    "chains": products.chains, "adapters": products.adapters, "situations": situations.situations,
    "calls": calls.calls, "mask_values": mask_values.mask_values,
}  # fmt: skip
#: What judges a kind that is no attention alone.
JUDGES: dict[str, Any] = {
    "situations": situations.judge_situation, "calls": calls.judge_calls,
    "mask_values": mask_values.judge_values,
}  # fmt: skip
#: Kinds whose fused kernels a CPU has, so that Inductor's code for it can be judged.
ON_A_CPU = ("attentions", "masks", "situations", "calls")
#: Programs that are drawn from one seed: what the report counts, and what a resumed run skips.
BATCH = 100


@dataclass
class Batch:
    """What became of the programs of one kind that were drawn from one seed.

    Attributes:
        kind, seed: of the programs.
        rejected: programs that do not run eagerly, or give no numbers: not judged.
        judged: programs that were judged, a wrong one included; those tried to make it smaller are not.
        fused: of those, with a fused site at least.
        code: of those, judged by the code that Inductor makes for the device, not by the graphs alone.
        stock_wrong: of those, wrong (or raising) in the same way without the fusions.
        sites: fusion -> fused sites.
        failures: 1 where a program was judged wrong, which ends the batch.
        seconds: it took.
        script: of the smallest program that was judged wrong.
    """

    kind: str
    seed: int
    rejected: int = 0
    judged: int = 0
    fused: int = 0
    code: int = 0
    stock_wrong: int = 0
    sites: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    seconds: float = 0.0
    script: str = ""

    @property
    def key(self) -> str:
        """Kind and seed."""
        return f"{self.kind} {self.seed}"

    def count(self, judged: Judged) -> None:
        """One program that was judged right."""
        self.judged += 1
        self.fused += bool(judged.fused)
        self.code += judged.code
        self.stock_wrong += bool(judged.stock_wrong)
        self.sites.update(judged.fused)

    def row(self) -> dict[str, Any]:
        values = {name: value for name, value in vars(self).items() if name != "script"}
        return {"key": self.key, **values, "sites": dict(self.sites), "seconds": round(self.seconds, 1)}


def judge_any(kind: str, drawn: Any, code: bool = False) -> Judged:
    """Judge a program of a kind, or a program and its mask."""
    if kind == "masks":
        return judge_mask(*drawn, code=code)
    if kind in JUDGES:
        return JUDGES[kind](drawn, code)
    return judge(drawn, code) if kind == "attentions" else judge_products(drawn, code)


def written(kind: str, drawn: Any, title: str, error: BaseException, code: bool = False) -> str:
    """A failure as a script."""
    program = drawn[0] if isinstance(drawn, tuple) else drawn
    comment = "\n".join(f"# {line}" for line in f"{title}\n{error}".splitlines()[:12])
    how = "code" if code else "graphs" if kind in ON_A_CPU else "products"
    return f"{comment}\n{program.script(how)}\n\n"


def run_batch(
    kind: str,
    examples: int,
    number: int,
    share: float,
    step: Callable[[], object] = lambda: None,
    device: str | None = None,
) -> Batch:
    """Judge some programs, until one is wrong.

    Args:
        share: of the programs whose code is judged, where the kind has some for a CPU.
        device: where programs run; there the code of every kind is judged.
    """
    spend_less()
    batch = Batch(kind, number)
    which = random.Random(number)
    failed: list[tuple[Any, BaseException, bool]] = []  # the last one that fails is the smallest
    start = time.monotonic()

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
        # A smaller program must fail in the same way as the first.
        has_code = kind in ON_A_CPU or device is not None
        code = failed[0][2] if failed else has_code and which.random() < share
        torch.manual_seed(0)
        try:
            judged = judge_any(kind, drawn, code)
        except UnsatisfiedAssumption:
            batch.rejected += not failed
            raise
        except Exception as error:
            if isinstance(error, HypothesisException):
                raise
            batch.judged += not failed
            batch.code += code and not failed
            failed.append((drawn, error, code))
            raise
        if not failed:
            batch.count(judged)
            step()

    with torch.device(device) if device is not None else contextlib.nullcontext():
        try:
            run()
        except Exception as error:
            drawn, error, code = failed[-1] if failed else (None, error, False)
            batch.failures = 1
            title = f"{batch.key}{', its code' if code else ''}: {type(error).__name__}"
            batch.script = written(kind, drawn, title, error, code) if drawn else f"# {title}: {error}\n"
    batch.seconds = time.monotonic() - start
    return batch


def run_batches(
    todo: Sequence[tuple[str, int, int]],
    share: float,
    jobs: int,
    step: Callable[[str, int], object],
    device: str | None = None,
) -> Iterator[Batch]:
    """Each batch when it is done.

    Args:
        todo: kind, seed and number of programs of each.
        share, device: as in `run_batch`.
        jobs: processes; with one, everything runs here.
        step: called with a kind and how many of its programs are done.
    """
    if jobs == 1:
        for kind, number, size in todo:
            yield run_batch(kind, size, number, share, lambda kind=kind: step(kind, 1), device)
        return
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        jobs, mp_context=spawned, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        running = {
            pool.submit(run_batch, kind, size, number, share, device=device): size
            for kind, number, size in todo
        }
        for done in as_completed(running):
            batch = done.result()
            step(batch.kind, running[done])
            yield batch


def fuzz(
    examples: int,
    seed: int,
    kinds: Sequence[str],
    out: Path,
    batch: int = BATCH,
    share: float = 0.0,
    report: Results | None = None,
    jobs: int = 1,
    device: str | None = None,
) -> int:
    """Judge random programs, the kinds in turns.

    Args:
        out: the file that each failure is appended to.
        share: of the programs whose code is judged.
        report: grows by a row after each batch, and says which batches there are already.

    Returns:
        The number of failures, those in the report included.
    """
    failures = 0
    code, idle = Counter[str](), Counter[str]()
    starts = range(0, examples, batch)
    planned = [(k, seed + start // batch, min(batch, examples - start)) for start in starts for k in kinds]
    todo = [one for one in planned if report is None or f"{one[0]} {one[1]}" not in report]
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        left = Counter[str]()
        for kind, _, size in todo:
            left[kind] += size
        tasks = {k: progress.add_task(k, total=examples, completed=examples - left[k]) for k in kinds}

        def advance(kind: str, count: int) -> None:
            progress.advance(tasks[kind], count)

        for done in run_batches(todo, share, jobs, advance, device):
            failures += done.failures
            code[done.kind] += done.code
            idle[done.kind] += done.stock_wrong
            if report is not None:  # a resumed run may be of another commit
                report.append({**done.row(), "commit": report.data["commit"]})
            if done.failures:
                progress.print(f"{done.key}: see {out}", markup=False)
                with out.open("a") as file:
                    file.write(done.script)
    for kind in kinds:
        if 2 * idle[kind] > code[kind]:
            console.print(
                f"{kind}: the code of {idle[kind]} of {code[kind]} programs is wrong in stock as well, and "
                "says nothing of the fusions",
                style="red",
            )
    return failures if report is None else sum(row["failures"] for row in report.rows)


def provenance(device: str | None = None, **settings: Any) -> dict[str, Any]:
    """The header of a report: device, versions, commit, date and settings."""
    head = environment(device or "cpu", "tests.fuzz")
    del head["transformers"]  # no program needs it
    return {**head, "settings": settings}
