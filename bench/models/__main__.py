"""The command line of `bench.models`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import inductor_fusions
from bench import models, tuning
from bench.common import Budget, own_settings
from bench.model_cases import CASES, WIDTHS, Case, quick_case
from bench.models.measure import Settings, work
from bench.models.report import describe
from bench.models.variants import AUTOTUNED, MARKERS, wanted_variants

#: About how long a case takes, until one has taken longer: on a GPU, there where it is autotuned, and quick.
SECONDS, AUTOTUNED_SECONDS, QUICK_SECONDS = 80.0, 320.0, 20.0


def variant_names(text: str) -> tuple[str, ...]:
    """Names with commas.

    Raises:
        argparse.ArgumentTypeError: one of them is no variant.
    """
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in MARKERS]:
        raise argparse.ArgumentTypeError(f"no variant: {', '.join(unknown)}; there are {', '.join(MARKERS)}")
    return names


def autotunes(case: Case, asked: Sequence[str]) -> bool:
    """Whether Inductor times GEMMs while it compiles the case: that needs the device alone."""
    return bool(set(AUTOTUNED) & set(wanted_variants(case, asked)))


def run(module: str, options: argparse.Namespace, cases: Sequence[Case]) -> list[str]:
    """Measure the cases that the file lacks, while the budget lasts; the names of those that failed.

    What is autotuned comes last, in this process alone.
    """
    settings = Settings(options.device, options.quick, options.variants, options.rounds, options.compiles)
    jobs, budget = options.jobs or 1, Budget(options.budget)
    header = {"inductor_fusions": inductor_fusions.__version__, "jobs": jobs, "settings": own_settings()}
    turns = {case.name: i % 2 == 1 for i, case in enumerate(cases)}
    failed: list[str] = []
    for tuned, processes, seconds in ((False, jobs, SECONDS), (True, 1, AUTOTUNED_SECONDS)):
        groups = [[case] for case in cases if autotunes(case, options.variants) is tuned]
        if options.budget is not None:
            options.budget = max(0.0, budget.left)
        if groups:
            failed += tuning.measure(
                module, options, groups, work, lambda group: (group[0], settings, turns[group[0].name]),
                describe, processes, QUICK_SECONDS if options.quick else seconds, header,
            )[1]  # fmt: skip
    return failed


def command(module: str, doc: str | None, cases: Sequence[Case]) -> None:
    """The command line of a script that measures these models."""
    parser = tuning.parser(module, doc)
    add = parser.add_argument
    add(
        "--variants", type=variant_names, default=(),
        help=f"of {','.join(MARKERS)}; by default those that a case has, and autotuned ones in some cases",
    )  # fmt: skip
    add("--rounds", type=int, default=24, help="interleaved blocks of each variant")
    add("--compiles", type=int, default=1, help="compile stock and fused so often; the first is left out")
    options = parser.parse_args()
    sized = [quick_case(case) if options.quick else case for case in cases]
    tuning.end(run(module, options, tuning.select(sized, options)))


if __name__ == "__main__":
    command("bench.models", models.__doc__, (*CASES, *WIDTHS))
