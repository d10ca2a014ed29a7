"""The tiles of adapters' kernels where no row has the very problem: what they lose, and whether waves help.

    python -m bench.tune_lora --odd --no-autotune --out bench/results/tiles_lora_h100.json --budget 540
    python -m bench.lora_tiles bench/results/tiles_lora_h100.json --json bench/results/tile_model_lora.json

The first command times nearly all configurations (`first_us`) of problems that fill a device badly. The
second judges, of each kernel, by how much longer than the fastest configuration a problem takes in that of

    usual      the package: that of the nearest problem of another width, or the default one
    unfitted   the model of tiles (`block_mm/cost.py`), by constants that nothing was fitted to
    held out   the same, by constants that were fitted without this width
    fitted     the same, by constants that were fitted to all times

The usual one is kept where the model says that it takes at most so many times the least time: each way of the
model is judged with several such doubts. Grouped GEMMs start from the constants of cost.py, which are their
"unfitted" ones. No device is needed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.common import Json
from bench.lora.candidates import Choice, shape_of
from bench.lora.rows import ALONE
from bench.regret import WIDTHS, only
from bench.tile_model import FOLDS, constants_of, fit, flat, kept_of, longer, processors
from inductor_fusions.block_mm import cost, heuristics
from inductor_fusions.block_mm.cost import Constants, Work
from inductor_fusions.block_mm.problem import Problem
from inductor_fusions.decisions import tables
from inductor_fusions.decisions.tables import Table
from inductor_fusions.fusions.lora import accumulate_kernel, narrow

#: Of the file: it is made of results, without a device.
HEAD: Json = {"schema": 1, "device": "none", "torch": "any", "command": "python -m bench.lora_tiles"}
#: Least configurations of a problem that is judged.
FEWEST = 4
#: By how many times a configuration has to be faster than the usual one to be taken.
DOUBTS = (1.0, 1.1, 1.25)
#: The share of a time that is a kernel's own at least.
LEAST = 0.2
#: Threads that a multiprocessor has room for.
THREADS = 2048
#: What a fit starts from. A skinny GEMM whose K is split up launches another kernel, which adds the parts up.
START = {
    "slowest": 1.5, "latency": 0.004, "launch whole": 2.0, "launch parts": 4.0,
    "start whole": 1.0, "start parts": 1.0, "store whole": 1.0, "store parts": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """A kernel whose configurations are judged.

    Attributes:
        section: of the tables.
        width: of a row, what is left out together.
        row: a problem as a row has it.
        shape: a problem, of JSON.
        usual: the configuration that the package takes.
        work: what a configuration has to do, on so many multiprocessors.
        constants: those of the package; None if it has none.
    """

    section: str
    width: Callable[[Json], Any]
    row: Callable[[Any], Json]
    shape: Callable[[Json], Any]
    usual: Callable[[Any], Any]
    work: Callable[[Any, Any, int], Work]
    constants: Constants | None = None


@dataclass(frozen=True)
class Case:
    """A problem of a kernel.

    Attributes:
        width: of the linear; it is left out of a fit together with all others of the same.
        stock, times: microseconds, of stock and of the configurations.
    """

    width: tuple[Any, ...]
    shape: Any
    stock: float
    times: Mapping[Any, float]


def narrow_work(choice: narrow.Config, shape: narrow.Shape, processors: int) -> Work:
    """A thread block multiplies some rows with one part of K: a step takes what it reads."""
    columns = sum(map(narrow.padded, shape.ranks))
    part = -(-(shape.inner or 0) // choice.splits)
    inner = -(-part // choice.block_k) * choice.block_k
    blocks = -(-(shape.rows or 512) // choice.block_m) * choice.splits
    held = narrow.shared_bytes(choice, shape)
    kind = "whole" if choice.splits == 1 else "parts"
    together = _together(held, choice.num_warps)
    return Work(kind, (choice.block_m + columns, 128), inner, -(-blocks // processors), together)


def added_work(choice: accumulate_kernel.Config, shape: accumulate_kernel.Shape, processors: int) -> Work:
    """A thread block reads and writes one tile; its products are short."""
    blocks = -(-(shape.rows or 512) // choice.block_m) * -(-shape.columns // choice.block_n)
    inner = sum(map(narrow.padded, shape.inner))
    tile, together = (choice.block_m, choice.block_n), _together(0, choice.num_warps)
    return Work("whole", tile, inner, -(-blocks // processors), together)


def _together(held: int, warps: int) -> int:
    """Thread blocks that a multiprocessor has room for; `held` bytes of shared memory in each."""
    return max(1, min(cost.SHARED // (held + 1024), THREADS // (32 * warps)))


def _block(problem: Problem) -> Any:
    """The configuration of the nearest problem, whatever the model of tiles says."""
    with (
        mock.patch.object(heuristics, "capability", lambda device: 90),
        mock.patch.object(cost, "is_modelled", lambda problem, arch: False),
    ):
        return heuristics.choose(problem, torch.device("cuda"), problem.tokens)


def _usual(module: Any) -> Callable[[Any], Any]:
    return lambda shape: module.measured(shape, torch.device("cuda")) or module.default(shape)


def _shape(kind: type[Any]) -> Callable[[Json], Any]:
    return lambda found: shape_of(kind, found)


#: By the attribute of a `Choice`.
KERNELS: dict[str, Kernel] = {
    "narrow": Kernel(
        "narrow_mm", WIDTHS["narrow_mm"], narrow.key, _shape(narrow.Shape), _usual(narrow), narrow_work
    ),
    "added": Kernel(
        "lora_accumulate", lambda row: row["columns"], accumulate_kernel.key,
        _shape(accumulate_kernel.Shape), _usual(accumulate_kernel), added_work,
    ),
    "block": Kernel(
        "block_mm", WIDTHS["block_mm"], lambda problem: problem.key, _shape(Problem), _block, cost.work,
        cost.CONSTANTS,
    ),
}  # fmt: skip


def usual_of(kernel: Kernel, shape: Any, name: str) -> Any:
    """What a problem gets on a device without rows of its width, from the tables of all devices."""
    width, found = kernel.width(kernel.row(shape)), {}
    for other in tables.names():
        table = tables.load(other) or Table({})
        kept = [row for row in table.get(kernel.section, ()) if kernel.width(row) != width]
        found[other] = Table({**table, kernel.section: kept})
    with only(found, name):
        return kernel.usual(shape)


def cases(rows: Sequence[Json], name: str, kernel: Kernel) -> Iterator[Case]:
    """The problems of one kernel, of rows of bench.tune_lora.

    In front of a grouped GEMM and of a kernel that adds to what is in memory there is a skinny GEMM: its
    time, of a row of its own, is taken off.
    """
    downs = {_down(row): row["first_us"]["defaults"] for row in rows if _is_down(row)}
    for row in rows:
        first = 0.0 if row["kind"] in ALONE else downs.get(_down(row), 0.0)
        times = {}
        for text, time in row.get("first_us", {}).items():
            choice = Choice.named(text) if text != "stock" else Choice()
            config = getattr(choice, name)
            if config is not None and choice == Choice(**{name: config}):
                times[config] = max(time - first, LEAST * time)
        if len(times) >= FEWEST:
            shape, stock = kernel.shape(row["shapes"][name]), row["first_us"]["stock"]
            yield Case((row["inner"], *row["outer"]), shape, stock - first, times)


def _is_down(row: Json) -> bool:
    return row["kind"] == "down" and "defaults" in row.get("first_us", {})


def _down(row: Json) -> tuple[Any, ...]:
    """What the skinny GEMM in front of a kernel depends on."""
    return row["inner"], row["tokens"], row["rank"], row["adapters"]


def judge(kernel: Kernel, found: Sequence[Case], name: str) -> tuple[Json, Constants]:
    """What each way loses, and the constants that were fitted to all times."""
    count = processors(name)
    points = {
        i: [(kernel.work(choice, case.shape, count), math.log(time)) for choice, time in case.times.items()]
        for i, case in enumerate(found)
    }
    widths = sorted({case.width for case in found})
    fold = [widths.index(case.width) % FOLDS for case in found]
    every = range(len(found))
    start = flat(kernel.constants) if kernel.constants else START

    def fitted(some: Sequence[int]) -> Constants:
        return fit([point for i in some for point in points[i]], start)

    all_of, unfitted = fitted(every), kernel.constants or constants_of(START)
    without = [fitted([i for i in every if fold[i] != part]) for part in range(FOLDS)]
    by: dict[str, Callable[[int], Constants]] = {
        "unfitted": lambda i: unfitted, "held out": lambda i: without[fold[i]], "fitted": lambda i: all_of,
    }  # fmt: skip
    losses: dict[str, list[float]] = {}
    gains: dict[str, list[float]] = {}
    best = 0.0
    for i, case in enumerate(found):
        usual = usual_of(kernel, case.shape, name)
        if usual not in case.times:
            continue
        chosen = {"usual": usual}
        for way, constants in by.items():
            chosen |= {
                f"{way}, doubt {d}": _choose(kernel, case, usual, constants(i), d, count) for d in DOUBTS
            }
        fastest = min(case.times.values())
        best += max(0.0, math.log(case.stock / fastest))
        for way, choice in chosen.items():
            losses.setdefault(way, []).append(case.times[choice] / fastest - 1)
            gains.setdefault(way, []).append(case.stock / case.times[choice])
    ways = {way: {**longer(losses[way]), **kept_of(gains[way], best)} for way in losses}
    return {"problems": len(losses.get("usual", ())), "of": len(found), "ways": ways}, all_of


def _choose(kernel: Kernel, case: Case, usual: Any, by: Constants, doubt: float, processors: int) -> Any:
    def time(choice: Any) -> float:
        return kernel.work(choice, case.shape, processors).microseconds(by)

    best = min(case.times, key=time)
    return usual if time(usual) <= doubt * time(best) else best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("times", type=Path, help="a file of bench.tune_lora --odd")
    parser.add_argument("--json", type=Path, help="where to write the constants and the judgement")
    arguments = parser.parse_args()
    measured = json.loads(arguments.times.read_text())
    name = tables.slug(measured["device"])
    result: Json = {**HEAD, "of": name, "kernels": {}}
    for kind, kernel in KERNELS.items():
        found = list(cases(measured["rows"], kind, kernel))
        if not found:
            continue
        judgement, constants = judge(kernel, found, name)
        print(f"{kind}: {judgement['problems']} of {judgement['of']} problems")
        for way, values in judgement["ways"].items():
            print(f"  {way:20} " + ", ".join(f"{column} {value}" for column, value in values.items()))
        result["kernels"][kind] = {"constants": flat(constants), **judgement}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
