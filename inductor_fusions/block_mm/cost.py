"""How long a configuration takes on a Hopper GPU: waves of tiles, and what each tile and each launch cost.

The tiles of the nearest measured problem are often wrong for a problem that fills the device otherwise: one
tile more than multiprocessors doubles the time. `python -m bench.tile_model` fits the constants to the times
of all configurations (`first_us` in bench/results/projections_*.json), and says how much is lost by what is
chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..decisions.problems import FEW_ROWS
from . import configurations
from .configurations import Config
from .problem import Problem

#: Microseconds for one element of K of a tile of 128 x 256, if a multiprocessor multiplied at its full rate.
STEP = 0.01


@dataclass(frozen=True)
class Constants:
    """What is fitted.

    Attributes:
        slowness: what tiles lose, by their rows and columns: small ones read more for each result.
        slowest: the same of tiles that are not listed.
        latency: microseconds for one step of K that no tile goes below, because loads take that long.
        launch, start, store: microseconds of a launch, of each tile, and of storing a tile of 128 x 256, by
            template. A persistent kernel makes descriptors of its bulk copies first, and stores a tile while
            it multiplies the next.
    """

    slowness: Mapping[tuple[int, int], float]
    slowest: float
    latency: float
    launch: Mapping[str, float]
    start: Mapping[str, float]
    store: Mapping[str, float]


CONSTANTS = Constants(
    slowness={
        (128, 256): 1.08, (256, 128): 1.19, (128, 128): 1.28, (64, 256): 1.29, (128, 192): 1.3,
        (64, 192): 1.54, (64, 128): 1.67, (128, 96): 1.69, (128, 64): 1.7, (64, 96): 2.22, (64, 64): 2.22,
    },
    slowest=3.49,
    latency=0.221,
    launch={"persistent": 4.45, "tiled": 0.299},
    start={"persistent": 0.284, "tiled": 1.17},
    store={"persistent": 1.3, "tiled": 3.04},
)  # fmt: skip
#: The configuration of the nearest measured problem is kept if it is modelled to take at most so many times
#: the least time, because it may know what the model does not.
DOUBT = 1.1
#: Of a multiprocessor: bytes of shared memory, and registers.
SHARED, REGISTERS = 228 * 1024, 65536


def is_modelled(problem: Problem, arch: int) -> bool:
    """Whether the model was fitted to such problems: many rows, 16 bits, compute capability 9.0."""
    rows = min(512 if m is None else m for m in problem.rows)
    return arch == 90 and problem.dtype.itemsize == 2 and rows > FEW_ROWS and None not in problem.inner


@dataclass(frozen=True)
class Work:
    """What a configuration has to do for a problem.

    Attributes:
        tile: rows and columns; of a gated pair the columns of both.
        inner: the mean of K of a tile, in whole steps.
        depth: K of a step.
        each: tiles of the multiprocessor that has most of them.
        together: thread blocks that a multiprocessor has room for.
    """

    template: str
    tile: tuple[int, int]
    inner: float
    depth: int
    each: int
    together: int

    def microseconds(self, by: Constants) -> float:
        """The time, as the model has it."""
        area = self.tile[0] * self.tile[1] / (128 * 256)
        step = STEP * by.slowness.get(self.tile, by.slowest) * area
        ends = by.start[self.template] + by.store[self.template] * area
        full, rest = divmod(self.each, self.together)
        time = full * (max(self.together * step, by.latency / self.depth) * self.inner + ends)
        time += (max(rest * step, by.latency / self.depth) * self.inner + ends) if rest else 0.0
        return by.launch[self.template] + time


def work(choice: Config, problem: Problem, processors: int) -> Work:
    """What a configuration has to do.

    Args:
        choice: "tiled" or "persistent".
        problem: one that `is_modelled`; a symbolic number of rows counts as 512.
        processors: multiprocessors of the device.
    """
    tiles, inner = _tiles(choice, problem)
    together = choice.per_processor if choice.template == "persistent" else _together(choice, problem)
    tile = choice.block_m, choice.block_n * (2 if problem.gated else 1)
    return Work(choice.template, tile, inner, choice.block_k, -(-tiles // processors), together)


def microseconds(choice: Config, problem: Problem, processors: int) -> float:
    """The time of a configuration for a problem; the arguments are those of `work`."""
    return work(choice, problem, processors).microseconds(CONSTANTS)


def _tiles(choice: Config, problem: Problem) -> tuple[int, float]:
    """The number of tiles, and the mean of K of one, in whole steps."""
    inner: Counter[int] = Counter()
    for group, k in zip(problem.groups, problem.inner, strict=True):
        inner[group] += -(-(k or 0) // choice.block_k) * choice.block_k
    columns = [sum(problem.columns)] if choice.across else problem.columns[: 1 if problem.gated else None]
    counts = [
        -(-(512 if m is None else m) // choice.block_m) * -(-n // choice.block_n)
        for m, n in zip(problem.rows, columns, strict=False)
    ]
    total = sum(counts)
    return total, sum(count * inner[group] for group, count in enumerate(counts)) / total


def _together(choice: Config, problem: Problem) -> int:
    """Thread blocks that a multiprocessor has room for."""
    columns = choice.block_n * (2 if problem.gated else 1)
    threads = 32 * choice.num_warps
    registers = max(64, choice.block_m * columns // threads + 64) * threads
    shared = configurations.shared_bytes(choice, problem) + 1024
    return max(1, min(SHARED // shared, REGISTERS // registers))
