"""The constants of the models of GEMMs (`decisions/gemm_times.py`): fitted to measured times, and judged.

    python -m bench.tile_model --json bench/results/tile_model.json

Fitted and judged are the grouped GEMMs of more than 64 rows whose configurations were all timed (`first_us`
of `bench.tune_projections`). The fit has the least mean error of the logarithms of all times. A problem is
judged by the configuration that it gets without rows of its width:

    nearest     that of the nearest problem
    held out    the model's, by constants that were fitted without this width
    other GPUs  the model's, by constants that were fitted to the times of the other GPUs
    shipped     the model's, by the constants of the package
    fitted      the model's, by constants that were fitted to all times

How much longer than the fastest configuration does it take, and which share of the logarithms of the gains
over stock is kept, where the decision without this width is for the kernel at all? The file has the constants
that are fitted if they choose better than the shipped ones, else the shipped ones. No device is needed.

The constants of stock's products are fitted to stock's times of the same problems.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import projections, tune_projections
from bench.common import Json
from bench.regret import SLOW, SLOWER, WIDTHS, only
from inductor_fusions.block_mm import configurations, cost, heuristics
from inductor_fusions.block_mm.configurations import Config
from inductor_fusions.block_mm.problem import Problem
from inductor_fusions.decisions import Query, decide, devices, gemm_times, tables
from inductor_fusions.decisions.gemm_times import Constants, Kernel, Library, Work
from inductor_fusions.decisions.problems import FEW_ROWS
from inductor_fusions.decisions.tables import Table

#: Of the file: it is made of results, without a device.
HEAD: Json = {"schema": 1, "device": "none", "torch": "any", "command": "python -m bench.tile_model"}
#: Where all configurations of problems were timed, and how many of one at least.
RESULTS = Path(__file__).parent / "results"
TIMED = {"nvidia_h100_80gb_hbm3": "projections_h100.json", "nvidia_h200": "projections_h200.json"}
FEWEST = 6
#: Parts of the widths, each of which is left out of a fit in turn.
FOLDS = 5
#: The factors by which a fit changes a constant, as logarithms.
STEPS = (0.8, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.006)
#: What a factor of e between a constant and its start adds to the mean error: times may not tell it.
PULL = 5e-5


@dataclass(frozen=True)
class Timed:
    """A problem whose configurations were timed.

    Attributes:
        row: the problem as a table's row.
        stock, times: microseconds.
    """

    row: Json
    problem: Problem
    stock: float
    times: Mapping[Config, float]

    @property
    def width(self) -> Hashable:
        """What is left out together."""
        return WIDTHS["block_mm"](self.row)


def timed(results: Path) -> list[Timed]:
    """The problems of a file of bench.tune_projections."""
    found = []
    for result in json.loads(results.read_text())["rows"]:
        times = dict(result.get("first_us", {}))
        if result["tokens"] <= FEW_ROWS or len(times) < FEWEST:
            continue
        sizes = {n: tuple(result[n]) for n in ("inner", "outer")}
        row = projections.Row(result["kind"], result["tokens"], dtype=result["dtype"], **sizes)
        row = replace(row, activation=result["activation"], conv1d=result.get("conv1d", False))
        with FakeTensorMode():
            problem = projections.problem(row, projections.make(row, "cpu", 0))
        key = {**result["problem"], "tokens": result["tokens"]}
        stock = times.pop("stock")
        found.append(Timed(key, problem, stock, {tune_projections.named(n): t for n, t in times.items()}))
    return found


# The fit -----------------------------------------------------------------------------------------------


def label(kernel: Kernel) -> str:
    """A kernel in the name of its constant."""
    return " ".join(map(str, kernel))


def flat(constants: Constants) -> dict[str, float]:
    """The constants by names such as "slowness tiled 128 256 8 4", "latency", "store tiled"."""
    found: dict[str, float] = {}
    for name, value in vars(constants).items():
        if isinstance(value, Mapping):
            for key, each in value.items():
                found[f"{name} {key if isinstance(key, str) else label(key)}"] = each
        else:
            found[name] = value
    return found


def constants_of(values: Mapping[str, float]) -> Constants:
    """What `flat` was made of."""
    parts: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        group, _, key = name.partition(" ")
        parts.setdefault(group, {})[key] = value
    slowness: dict[Kernel, float] = {}
    for key, each in parts.get("slowness", {}).items():
        template, *sizes = key.split()
        rows, columns, warps, stages = map(int, sizes)
        slowness[template, rows, columns, warps, stages] = each
    (unlisted,), (latency,) = parts["unlisted"].values(), parts["latency"].values()
    by_name = (parts[name] for name in ("launch", "start", "store", "activation"))
    return Constants(slowness, unlisted, latency, *by_name)


#: What a fit starts from: all tiles alike.
START = {
    **dict.fromkeys(flat(cost.CONSTANTS), 1.0), "latency": 0.25, "unlisted": 2.0,
    **{name: 1.5 for name in flat(cost.CONSTANTS) if name.startswith("slowness")},
    **{name: 0.3 for name in flat(cost.CONSTANTS) if name.startswith("activation")},
}  # fmt: skip
#: Fitted last, to what the others leave: together, activations would take the place of `start` and `store`.
LAST = [name for name in START if name.startswith("activation")]


#: What a configuration has to do, and the logarithm of its time.
Point = tuple[Work, float]


def points(problems: Iterable[tuple[str, Timed]]) -> list[Point]:
    """All times of problems, each with the name of its device."""
    return [
        (cost.work(choice, each.problem, processors(name)), math.log(time))
        for name, each in problems
        for choice, time in each.times.items()
    ]


def fit(points: Sequence[Point]) -> Constants:
    """The constants with the least mean error of the logarithms of times.

    One constant after the other is made larger or smaller, until none makes the error smaller; then in
    smaller steps.
    """
    parts = {name: [point for point in points if _depends(point[0], name)] for name in START}

    def errors(name: str, tried: Mapping[str, float]) -> float:
        far = math.log(tried[name] / START[name]) ** 2
        return error(parts[name], constants_of(tried)) + PULL * len(points) * far

    first = _descent({**START, **dict.fromkeys(LAST, 0.0)}, errors, [n for n in START if n not in LAST])
    return constants_of(_descent({**first, **{name: START[name] for name in LAST}}, errors, LAST))


def fit_library(problems: Sequence[tuple[str, Timed]]) -> Library:
    """The constants of stock's products with the least mean error of the logarithms of its times."""
    start = Library(launch=2.0, slowness=1.0, store=1.0, bandwidth=3.0)

    def errors(name: str, tried: Mapping[str, float]) -> float:
        return library_error(problems, Library(**tried))

    return Library(**_descent(asdict(start), errors, list(asdict(start))))


def library_error(problems: Sequence[tuple[str, Timed]], by: Library) -> float:
    """The mean error of the logarithms of stock's times."""
    errors = [
        abs(math.log(gemm_times.of_row(each.row).stock(processors(name), by) / each.stock))
        for name, each in problems
    ]
    return statistics.mean(errors)


def _descent(
    start: Mapping[str, float], errors: Callable[[str, Mapping[str, float]], float], names: Sequence[str]
) -> dict[str, float]:
    """Constants with the least errors, of which those may be left out that one constant does not change.

    Args:
        names: of the constants that are changed.
    """
    values = dict(start)
    for step in STEPS:
        better = True
        while better:
            better = False
            for name in names:
                least = errors(name, values) * (1 - 1e-6)
                for factor in (math.exp(step), math.exp(-step)):
                    tried = {**values, name: values[name] * factor}
                    if errors(name, tried) < least:
                        values, better = tried, True
                        break
    return {name: float(f"{value:.3g}") for name, value in values.items()}


def _depends(work: Work, name: str) -> bool:
    """Whether the time of a work depends on a constant."""
    group, _, key = name.partition(" ")
    kernel = label(work.kernel)
    if group == "slowness":
        return key == kernel
    if group == "activation":
        return key == work.activation
    return f"slowness {kernel}" not in START if group == "unlisted" else key in ("", work.kernel[0])


def error(points: Sequence[Point], by: Constants) -> float:
    """The errors of the logarithms of times, summed up."""
    return sum(abs(math.log(work.microseconds(by)) - log) for work, log in points)


def processors(name: str) -> int:
    """Multiprocessors of a device."""
    found = devices.known(name)
    assert found is not None, name
    return found.multiprocessors


def folds(problems: Mapping[str, Sequence[Timed]]) -> dict[Hashable, int]:
    """The part of each width: widths of all devices together, evenly spread."""
    widths = sorted({each.width for some in problems.values() for each in some}, key=str)
    return {width: i % FOLDS for i, width in enumerate(widths)}


# The judgement -----------------------------------------------------------------------------------------

#: The constants by which a problem of a device is judged; None: it gets the nearest problem's configuration.
By = Callable[[str, Timed], Constants | None]


def judge(name: str, table: Table, problems: Sequence[Timed], ways: Mapping[str, By]) -> Json:
    """What each way keeps of the gains, over the problems whose nearest problem's configuration was timed."""
    gains: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {way: [] for way in ways}
    best = 0.0
    for each in problems:
        kept = [row for row in table["block_mm"] if WIDTHS["block_mm"](row) != each.width]
        with only({name: Table({**table, "block_mm": kept})}, name):
            if choice(each, None) not in each.times:
                continue
            times = {way: each.times[choice(each, by(name, each))] for way, by in ways.items()}
            pays = decide(Query("block_mm", each.row), torch.device("cuda")).kernel is not None
        fastest = min(each.times.values())
        best += max(0.0, math.log(each.stock / fastest))
        for way, time in times.items():
            losses[way].append(time / fastest - 1)
            gains[way] += [each.stock / time] if pays else []
    found = {way: {**longer(losses[way]), **kept_of(gains[way], best)} for way in ways}
    return {"problems": len(losses["nearest"]), "ways": found}


def choice(each: Timed, by: Constants | None) -> Config:
    """The configuration that a problem gets on a Hopper GPU, of those that were timed."""
    candidates = [found for found in configurations.candidates(each.problem, 90) if found in each.times]
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        mock.patch.object(configurations, "candidates", lambda problem, arch: candidates),
        mock.patch.object(cost, "is_modelled", lambda problem, arch: by is not None),
        mock.patch.object(cost, "CONSTANTS", by),
    ):
        return heuristics.choose(each.problem, torch.device("cuda"), each.row["tokens"])


def longer(losses: Sequence[float]) -> Json:
    """Of relative losses of time."""
    tenth = sorted(losses)[int(0.9 * len(losses))]
    found = {"mean": statistics.mean(losses), "nine_tenths_below": tenth, "most": max(losses)}
    return {name: round(value, 3) for name, value in found.items()}


def kept_of(gains: Sequence[float], best: float) -> Json:
    """Of the gains of the problems that get the kernel; `best` is the logarithm of all possible gains."""
    return {
        "kernel": len(gains),
        "kept": round(sum(map(math.log, gains)) / best, 3),
        "below_0.98": sum(gain < SLOW for gain in gains),
        "below_0.95": sum(gain < SLOWER for gain in gains),
        "worst": round(min(gains), 3),
    }


def shipped() -> dict[str, By]:
    """The nearest problem's configuration, and what the package chooses."""
    constants = cost.CONSTANTS
    return {"nearest": lambda name, each: None, "shipped": lambda name, each: constants}


def fitted_ways(problems: Mapping[str, Sequence[Timed]], fitted: Constants) -> dict[str, By]:
    """The ways by constants that are fitted here."""
    every = [(name, each) for name, some in problems.items() for each in some]
    fold = folds(problems)
    without = [fit(points(entry for entry in every if fold[entry[1].width] != i)) for i in range(FOLDS)]
    others = {name: fit(points(entry for entry in every if entry[0] != name)) for name in problems}
    return {
        "held out": lambda name, each: without[fold[each.width]],
        "other GPUs": lambda name, each: others[name],
        "fitted": lambda name, each: fitted,
    }


def judged(problems: Mapping[str, Sequence[Timed]], ways: Mapping[str, By]) -> Json:
    """The judgement of each device."""
    found = {}
    for name, some in problems.items():
        table = tables.load(name)
        assert table is not None, name
        found[name] = judge(name, table, some, ways)
    return found


# The command -------------------------------------------------------------------------------------------


def loss(judgement: Json, way: str) -> float:
    """How much longer a way takes than the fastest configurations, on the mean over all GPUs."""
    found = [(each["problems"], each["ways"][way]["mean"]) for each in judgement.values()]
    return float(sum(count * mean for count, mean in found) / sum(count for count, _ in found))


def show(judgement: Json) -> None:
    """The judgement as a table."""
    for name, found in judgement.items():
        print(f"{name}: {found['problems']} problems")
        for i, (way, values) in enumerate(found["ways"].items()):
            if i == 0:
                print(f"{'':12}" + " ".join(f"{column:>17}" for column in values))
            print(f"{way:12}" + " ".join(f"{value:>17}" for value in values.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the constants and the judgement")
    arguments = parser.parse_args()
    problems = {name: timed(RESULTS / file) for name, file in TIMED.items()}
    every = [(name, each) for name, some in problems.items() for each in some]
    fitted, library = fit(points(every)), fit_library(every)
    judgement = judged(problems, {**shipped(), **fitted_ways(problems, fitted)})
    better = loss(judgement, "fitted") < loss(judgement, "shipped")
    constants = flat(fitted if better else cost.CONSTANTS)
    for name, value in flat(fitted).items():
        print(f"{name:20} shipped {flat(cost.CONSTANTS)[name]:8} fitted {value:8}")
    show(judgement)
    print(f"The {'fitted' if better else 'shipped'} constants are better.")
    error = round(library_error(every, library), 3)
    print(f"Stock: {library}, mean error {error}; shipped: {gemm_times.LIBRARY}")
    if arguments.json is not None:
        result = {**HEAD, "constants": constants, "fitted": flat(fitted), "judgement": judgement}
        result |= {"library": asdict(library), "library_error": error}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
