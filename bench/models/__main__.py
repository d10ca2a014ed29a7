"""The command line of `bench.models`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

import inductor_fusions
from bench import models
from bench.common import Budget, Json, Progress, Results, free, is_fatal, one_line, own_settings
from bench.model_cases import CASES, Case, quick_case
from bench.models.measure import Settings, measure, set_up, warm_up, work
from bench.models.report import describe
from bench.models.variants import AUTOTUNED, MARKERS, MODES, wanted_variants
from bench.pool import run_tasks
from bench.provenance import environment

#: About how long a case takes on a GPU, by whether it trains, and how much longer where it is autotuned.
SECONDS = {False: 50.0, True: 80.0}
AUTOTUNED_SECONDS = {False: 120.0, True: 240.0}


def apply_settings(settings: Sequence[str]) -> None:
    """Put toggles into the environment and start again: a backward is compiled in a thread of autograd,
    which sees what the environment said at the import, and no assignment of this thread."""
    wanted: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        variable = "INDUCTOR_FUSIONS" if name == "enabled" else f"INDUCTOR_FUSIONS_{name.upper()}"
        if not equals or variable not in inductor_fusions.config.variables():
            raise SystemExit(
                f"--set takes NAME=VALUE with a toggle of inductor_fusions.config, not {setting!r}"
            )
        wanted[variable] = value
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "bench.models", *sys.argv[1:]])


def read_options() -> argparse.Namespace:
    """The command line."""
    summary = (models.__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m bench.models", description=summary)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file; cases that it has are skipped")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--only", type=re.compile, help="only cases whose name matches this expression")
    add("--budget", type=float, help="seconds after which no case is started that would not end")
    add("--mode", choices=MODES, help="compile every case in this mode")
    add(
        "--variants",
        type=variant_names,
        default=(),
        help=f"of {','.join(MARKERS)}; by default the first four, and all in some cases",
    )
    add("--rounds", type=int, default=24, help="interleaved blocks of each variant")
    add("--jobs", type=int, default=1, help="processes that compile side by side; one at a time is timed")
    add("--quick", action="store_true", help="2 layers, tiny inputs: to try the script")
    add("--again", action="store_true", help="measure and replace cases that the file has too")
    add("--list", action="store_true", help="name the cases and stop")
    add("--compiles", type=int, default=1, help="compile stock and fused so often; the first is left out")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a toggle of inductor_fusions.config, for this run; repeatable",
    )
    return parser.parse_args()


def variant_names(text: str) -> tuple[str, ...]:
    """Names with commas.

    Raises:
        argparse.ArgumentTypeError: one of them is no variant.
    """
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in MARKERS]:
        raise argparse.ArgumentTypeError(f"no variant: {', '.join(unknown)}; there are {', '.join(MARKERS)}")
    return names


def select(options: argparse.Namespace) -> list[Case]:
    """The cases that the options choose."""
    cases = [quick_case(case) if options.quick else case for case in CASES]
    if options.mode:
        cases = [
            replace(case, mode=options.mode, name=f"{case.name.removesuffix(f' {case.mode}')} {options.mode}")
            for case in cases
        ]
        cases = list({case.name: case for case in cases}.values())
    return [case for case in cases if not options.only or options.only.search(case.name)]


def autotunes(case: Case, asked: Sequence[str]) -> bool:
    """Whether Inductor times GEMMs while it compiles the case: that needs the device alone."""
    return case.mode == "max-autotune" or bool(set(AUTOTUNED) & set(wanted_variants(case, asked)))


def expected_seconds(case: Case, asked: Sequence[str], quick: bool) -> float:
    """About how long a case takes, compiling included."""
    if quick:
        return 20.0 if case.train else 15.0
    alone = AUTOTUNED_SECONDS[case.train] if autotunes(case, asked) else 0.0
    return SECONDS[case.train] + alone


def lacking(cases: Sequence[Case], asked: Sequence[str], rows: Sequence[Json]) -> list[Case]:
    """The cases that have no row, or one from before they were autotuned."""
    tried = {str(row["name"]): {*row.get("median_ms", ()), *(row.get("failed") or ())} for row in rows}
    needed = {
        case.name: set(AUTOTUNED) & set(wanted_variants(case, asked))
        if case.mode != "max-autotune"
        else set()
        for case in cases
    }
    return [case for case in cases if case.name not in tried or needed[case.name] - tried[case.name]]


def run(options: argparse.Namespace, cases: Sequence[Case], results: Results) -> list[str]:
    """Measure the cases that the file lacks, while the budget lasts; the names of those that failed."""
    asked: tuple[str, ...] = options.variants
    settings = Settings(options.device, options.quick, asked, options.rounds, options.compiles)
    budget = Budget(options.budget)
    todo = list(cases) if options.again else lacking(cases, asked, results.rows)
    tasks = [(case, settings, i % 2 == 1) for i, case in enumerate(todo)]
    together = [task for task in tasks if options.jobs > 1 and not autotunes(task[0], asked)]
    alone = [task for task in tasks if task not in together]
    failed: list[str] = []
    with Progress(len(todo)) as progress:

        def done(case: Case, row: Json) -> None:
            if "raised" in row:
                progress.step(f"{case.name}: failed: {row['raised']}")
                failed.append(case.name)
            else:
                results.append(row)
                progress.step(f"{case.name}: {describe(row)}")

        died = {"raised": "the process died"}
        longest = max((expected_seconds(case, asked, options.quick) for case, _, _ in together), default=0.0)
        for task, row in run_tasks(
            work, together, options.jobs, lambda: budget.left > longest, deadline=lambda: budget.left
        ):
            done(task[0], row or died)
        set_up()
        if alone and budget.left > 0:
            progress.say("warming up")
            warm_up(options.device)
        for case, _, fused_first in alone:
            if budget.left < expected_seconds(case, asked, options.quick):
                progress.say(f"{case.name}: left for the next run, {budget.left:.0f} s are too few")
                continue
            start = time.monotonic()

            def say(text: str, name: str = case.name) -> None:
                progress.say(f"{name}: {text}")

            try:
                row = measure(case, settings, fused_first, say)
                row["seconds"] = round(time.monotonic() - start, 1)
                done(case, {**asdict(case), **row})
            except Exception as error:
                if is_fatal(error):
                    raise
                done(case, {"raised": one_line(error, 300)})
            free(options.device)
    left = len(todo) - progress.done
    print(f"{len(results.rows)} cases in {options.out}, {left} left, {len(failed)} failed")
    print(f"{budget.elapsed:.0f} s")
    return failed


def main() -> None:
    """The command line."""
    options = read_options()
    apply_settings(options.set)
    cases = select(options)
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return
    header = environment(options.device, "bench.models")
    header["inductor_fusions"] = getattr(inductor_fusions, "__version__", None)
    header["jobs"] = options.jobs
    header["settings"] = own_settings()
    results = Results(options.out, header, key=lambda row: str(row["name"]))
    failed = run(options, cases, results)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
