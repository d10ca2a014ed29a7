"""The configurations of adapters' kernels where no row has the very problem: how much they lose.

    python -m bench.tune_lora --odd --no-autotune --out bench/results/tiles_lora_h100.json --budget 540
    python -m bench.lora_tiles bench/results/tiles_lora_{h100,h200}.json \\
        --json bench/results/tile_model_lora.json

The first command times nearly all configurations (`first_us`) of problems that fill a device badly. The
second says, of each kernel, how much longer than the fastest configuration a problem takes in these, and it
needs no device:

    chosen            that it gets without rows of its width
    without tables    that it gets without any table
    measured          the fastest of those that are tried if it is measured without any table
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
from bench.tile_model import kept_of, longer
from inductor_fusions.block_mm import heuristics
from inductor_fusions.block_mm.problem import Problem
from inductor_fusions.decisions import tables
from inductor_fusions.decisions.tables import Table
from inductor_fusions.fusions.lora import accumulate_kernel, lowering, narrow
from inductor_fusions.worker.measuring import TRIALS

#: Of the file: it is made of results, without a device.
HEAD: Json = {"schema": 1, "device": "none", "torch": "any", "command": "python -m bench.lora_tiles"}
#: Least configurations of a problem that is judged.
FEWEST = 4
#: The share of a time that is a kernel's own at least.
LEAST = 0.2
DEVICE = torch.device("cuda")
#: The compute capability for which configurations are chosen.
ARCH = 90


@dataclass(frozen=True)
class Kernel:
    """A kernel whose configurations are judged.

    Attributes:
        section: of the tables.
        width: of a row, what is left out together.
        row: a problem as a row has it.
        kind: the class of a problem, which JSON is read as.
        chosen: the configuration of a problem.
        candidates: those that are tried if it is measured, the most promising first.
    """

    section: str
    width: Callable[[Json], Any]
    row: Callable[[Any], Json]
    kind: type[Any]
    chosen: Callable[[Any], Any]
    candidates: Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Case:
    """A problem of a kernel; `stock` and `times` of its configurations are in microseconds."""

    shape: Any
    stock: float
    times: Mapping[Any, float]


def _grouped(find: Callable[[Problem], Any]) -> Callable[[Problem], Any]:
    """`find` on a device of this compute capability."""

    def found(problem: Problem) -> Any:
        with mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: divmod(ARCH, 10)):
            return find(problem)

    return found


#: By the attribute of a `Choice`.
KERNELS: dict[str, Kernel] = {
    "narrow": Kernel(
        "narrow_mm", WIDTHS["narrow_mm"], narrow.key, narrow.Shape,
        lambda shape: lowering.choose(shape, DEVICE), narrow.candidates,
    ),
    "added": Kernel(
        "lora_accumulate", lambda row: row["columns"], accumulate_kernel.key, accumulate_kernel.Shape,
        lambda shape: accumulate_kernel.choose(shape, DEVICE), accumulate_kernel.candidates,
    ),
    "block": Kernel(
        "block_mm", WIDTHS["block_mm"], lambda problem: problem.key, Problem,
        _grouped(lambda problem: heuristics.choose(problem, DEVICE, problem.tokens)),
        _grouped(lambda problem: heuristics.candidates(problem, DEVICE)),
    ),
}  # fmt: skip


def chosen(kernel: Kernel, shape: Any, name: str) -> Any:
    """What a problem gets on a device without rows of its width, from the tables of all devices."""
    width, found = kernel.width(kernel.row(shape)), {}
    for other in tables.names():
        table = tables.load(other) or Table({})
        kept = [row for row in table.get(kernel.section, ()) if kernel.width(row) != width]
        found[other] = Table({**table, kernel.section: kept})
    with only(found, name):
        return kernel.chosen(shape)


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
            shape = shape_of(kernel.kind, row["shapes"][name])
            yield Case(shape, row["first_us"]["stock"] - first, times)


def _is_down(row: Json) -> bool:
    return row["kind"] == "down" and "defaults" in row.get("first_us", {})


def _down(row: Json) -> tuple[Any, ...]:
    """What the skinny GEMM in front of a kernel depends on."""
    return row["inner"], row["tokens"], row["rank"], row["adapters"]


def judge(kernel: Kernel, found: Sequence[Case], name: str) -> Json:
    """What each way to choose loses, where the configurations were timed."""
    losses: dict[str, list[float]] = {"chosen": [], "without tables": [], "measured": []}
    gains: dict[str, list[float]] = {way: [] for way in losses}
    best = 0.0
    for case in found:
        with only({}, name):
            usual, candidates = kernel.chosen(case.shape), kernel.candidates(case.shape)
        others = [each for each in candidates if each != usual][:TRIALS]
        one = chosen(kernel, case.shape, name)
        if not {one, usual} <= case.times.keys():
            continue
        times = {
            "chosen": case.times[one],
            "without tables": case.times[usual],
            "measured": min(case.times[each] for each in (usual, *others) if each in case.times),
        }
        fastest = min(case.times.values())
        best += max(0.0, math.log(case.stock / fastest))
        for way, time in times.items():
            losses[way].append(time / fastest - 1)
            gains[way].append(case.stock / time)
    ways = {way: {**longer(losses[way]), **kept_of(gains[way], best)} for way in losses}
    return {"problems": len(losses["chosen"]), "of": len(found), "ways": ways}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("times", type=Path, nargs="+", help="files of bench.tune_lora --odd")
    parser.add_argument("--json", type=Path, help="where to write the judgement")
    arguments = parser.parse_args()
    result: Json = {**HEAD, "devices": {}}
    for path in arguments.times:
        measured = json.loads(path.read_text())
        name = tables.slug(measured["device"])
        kernels = result["devices"][name] = {}
        for kind, kernel in KERNELS.items():
            found = list(cases(measured["rows"], kind, kernel))
            if not found:
                continue
            judgement = kernels[kind] = judge(kernel, found, name)
            print(f"{name}, {kind}: {judgement['problems']} of {judgement['of']} problems")
            for way, values in judgement["ways"].items():
                print(f"  {way:14} " + ", ".join(f"{column} {value}" for column, value in values.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
