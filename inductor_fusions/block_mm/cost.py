"""How long a configuration takes on a Hopper GPU (`decisions/gemm_times.py`).

The tiles of the nearest measured problem are often wrong for a problem that fills the device otherwise.
`python -m bench.tile_model` says how much is lost by what is chosen.
"""

from __future__ import annotations

from collections import Counter

from ..decisions.gemm_times import CONSTANTS, Work
from ..decisions.problems import FEW_ROWS
from . import configurations
from .configurations import Config
from .problem import Problem

#: The configuration of the nearest measured problem is kept if it is modelled to take at most so many times
#: the least time, because it may know what the model does not.
DOUBT = 1.06
#: Of a multiprocessor: bytes of shared memory, and registers.
SHARED, REGISTERS = 228 * 1024, 65536


def is_modelled(problem: Problem, arch: int) -> bool:
    """Whether the model was fitted to such problems: many rows, 16 bits, compute capability 9.0."""
    rows = min(512 if m is None else m for m in problem.rows)
    return arch == 90 and problem.dtype.itemsize == 2 and rows > FEW_ROWS and None not in problem.inner


def work(choice: Config, problem: Problem, processors: int) -> Work:
    """What a configuration has to do.

    Args:
        choice: "tiled" or "persistent".
        problem: one that `is_modelled`; a symbolic number of rows counts as 512.
        processors: multiprocessors of the device.
    """
    tiles, inner = _tiles(choice, problem)
    together = choice.per_processor if choice.template == "persistent" else _together(choice, problem)
    columns = choice.block_n * (2 if problem.gated else 1)
    kernel = choice.template, choice.block_m, columns, choice.num_warps, choice.num_stages
    share = 0.5 if problem.gated else 1.0
    return Work(kernel, inner, choice.block_k, -(-tiles // processors), together, problem.activation, share)


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
