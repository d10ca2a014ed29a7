"""How long GEMMs take on a Hopper GPU: waves of tiles, and what each tile and each launch cost.

One tile more than multiprocessors doubles the time (wave quantization), so that sizes that differ little may
differ by a wave. Tiles are chosen by the model of the package's kernels (`block_mm/cost.py`). Beside a model
of what stock does, it says by how much gains of nearby problems differ (`speedup`).
`python -m bench.tile_model` fits the constants of both to the times in bench/results/projections_*.json.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Microseconds for one element of K of a tile of 128 x 256, if a multiprocessor multiplied at its full rate.
STEP = 0.01
#: The results of a tile of that size.
AREA = 128 * 256

#: A compiled template: its name, rows and columns of its tile (of a gated pair of both), warps and stages.
Kernel = tuple[str, int, int, int, int]


@dataclass(frozen=True)
class Constants:
    """Of the package's kernels.

    Attributes:
        slowness: what kernels lose: small tiles read more for each result, few stages wait for loads.
        unlisted: the same of kernels that are not listed, none of which was timed.
        latency: microseconds for one step of K that no tile goes below, because loads take that long.
        launch, start, store: microseconds of a launch, of each tile, and of storing a tile of 128 x 256, by
            template. A persistent kernel makes descriptors of its bulk copies first, and stores a tile while
            it multiplies the next.
        activation: microseconds in which eight warps apply one to a tile of 128 x 256. Others cost nothing.
    """

    slowness: Mapping[Kernel, float]
    unlisted: float
    latency: float
    launch: Mapping[str, float]
    start: Mapping[str, float]
    store: Mapping[str, float]
    activation: Mapping[str, float]


CONSTANTS = Constants(
    slowness={
        ("persistent", 128, 256, 8, 3): 1.1, ("persistent", 128, 256, 8, 4): 1.08,
        ("persistent", 256, 128, 8, 3): 1.2, ("persistent", 64, 256, 4, 4): 1.27,
        ("persistent", 128, 128, 4, 3): 1.32, ("persistent", 128, 128, 8, 3): 1.79,
        ("persistent", 128, 128, 8, 4): 1.24, ("persistent", 64, 128, 4, 4): 1.52,
        ("tiled", 128, 256, 8, 4): 1.13, ("tiled", 128, 192, 8, 4): 1.37, ("tiled", 64, 256, 4, 4): 1.33,
        ("tiled", 64, 256, 8, 4): 1.41, ("tiled", 128, 128, 4, 4): 1.4, ("tiled", 128, 128, 8, 4): 1.23,
        ("tiled", 128, 128, 8, 6): 1.36, ("tiled", 64, 192, 4, 4): 1.59, ("tiled", 64, 192, 4, 6): 1.51,
        ("tiled", 128, 96, 4, 4): 1.7, ("tiled", 128, 96, 8, 4): 1.74, ("tiled", 128, 96, 8, 7): 1.86,
        ("tiled", 64, 128, 4, 3): 2.14, ("tiled", 64, 128, 4, 4): 1.69, ("tiled", 64, 128, 4, 6): 1.5,
        ("tiled", 64, 128, 8, 4): 2.0, ("tiled", 128, 64, 4, 4): 1.63, ("tiled", 128, 64, 8, 4): 1.83,
        ("tiled", 64, 96, 4, 4): 2.22, ("tiled", 64, 96, 4, 5): 2.1, ("tiled", 64, 96, 4, 6): 1.5,
        ("tiled", 64, 64, 4, 3): 2.14, ("tiled", 64, 64, 4, 4): 2.2, ("tiled", 64, 64, 4, 5): 1.5,
        ("tiled", 64, 64, 4, 6): 1.5, ("tiled", 64, 32, 4, 4): 3.36,
    },
    unlisted=2.0,
    latency=0.29,
    launch={"persistent": 4.32, "tiled": 0.226},
    start={"persistent": 0.46, "tiled": 1.5},
    store={"persistent": 1.18, "tiled": 1.95},
    activation={"gelu": 1.07, "gelu_tanh": 0.376, "silu": 1.35},
)  # fmt: skip
#: Results up to which a multiprocessor works at two tiles at once, by template.
TWO_AT_ONCE = {"persistent": 128 * 128, "tiled": 64 * 128}
#: Elements of K that a kernel multiplies in a step.
STEP_OF_K = 64


@dataclass(frozen=True)
class Work:
    """What a configuration has to do for a problem.

    Attributes:
        inner: the mean of K of a tile, in whole steps.
        depth: K of a step.
        each: tiles of the multiprocessor that has most of them.
        together: thread blocks that a multiprocessor has room for.
        activation: its name, or "".
        share: of the results, to which it is applied: half of a gated pair.
    """

    kernel: Kernel
    inner: float
    depth: int
    each: int
    together: int
    activation: str = ""
    share: float = 1.0

    def microseconds(self, by: Constants) -> float:
        """The time, as the model has it."""
        template, rows, columns, warps, _ = self.kernel
        area = rows * columns / AREA
        step = STEP * by.slowness.get(self.kernel, by.unlisted) * area
        ends = by.start[template] + by.store[template] * area
        ends += by.activation.get(self.activation, 0.0) * self.share * area * 8 / warps
        full, rest = divmod(self.each, self.together)
        time = full * (max(self.together * step, by.latency / self.depth) * self.inner + ends)
        time += (max(rest * step, by.latency / self.depth) * self.inner + ends) if rest else 0.0
        return by.launch[template] + time


@dataclass(frozen=True)
class Library:
    """Of stock: products of the library, and pointwise kernels behind them.

    Attributes:
        launch: microseconds of a product beside its tiles.
        slowness: what its tiles lose, of any size.
        store: microseconds of storing a tile of 128 x 256.
        bandwidth: megabytes that pointwise kernels read and write in a microsecond.
    """

    launch: float
    slowness: float
    store: float
    bandwidth: float


LIBRARY = Library(launch=3.0, slowness=1.16, store=0.498, bandwidth=2.89)
#: Rows and columns of the library's tiles.
LIBRARY_TILES = (
    (128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (64, 64), (192, 192), (192, 128), (128, 192),
    (256, 192), (320, 128), (256, 64),
)  # fmt: skip


@dataclass(frozen=True)
class Gemms:
    """GEMMs that one kernel computes, and stock one after the other.

    Attributes:
        products: rows, columns and K of each.
        groups: of each, which result it belongs to: products of one are added.
        passes: how many results of the first one's size the pointwise kernel behind them reads and writes.
        activation: of the results, or of the first one of a gated pair.
    """

    products: tuple[tuple[int, int, int], ...]
    groups: tuple[int, ...]
    passes: int = 0
    activation: str = ""

    def stock(self, processors: int, by: Library = LIBRARY) -> float:
        """Microseconds that stock takes for all."""
        (rows, columns, _), *_ = self.products
        megabytes = 2 * rows * columns / 1e6 / by.bandwidth  # of 16 bits each
        passes = self.passes + len(self.products) - self.groups[-1] - 1  # products of one result are added
        return passes * megabytes + sum(_library(product, processors, by) for product in self.products)

    def grouped(self, processors: int) -> float:
        """Microseconds of the package's fastest kernel."""
        inner = [0] * (self.groups[-1] + 1)
        sizes: dict[int, tuple[int, int]] = {}
        for group, (rows, columns, k) in zip(self.groups, self.products, strict=True):
            inner[group] += k
            sizes[group] = rows, columns
        found, share = [], 1 / len(sizes)
        for kernel in CONSTANTS.slowness:
            template, m, n, *_ = kernel
            counts = [-(-rows // m) * -(-columns // n) for rows, columns in sizes.values()]
            each = -(-sum(counts) // processors)
            depth = sum(count * inner[group] for group, count in zip(sizes, counts, strict=True))
            together = 2 if m * n <= TWO_AT_ONCE[template] else 1
            work = Work(kernel, depth / sum(counts), STEP_OF_K, each, together, self.activation, share)
            found.append(work.microseconds(CONSTANTS))
        return min(found)


def _library(product: tuple[int, int, int], processors: int, by: Library) -> float:
    rows, columns, k = product

    def time(m: int, n: int) -> float:
        waves = -(-(-(-rows // m) * -(-columns // n)) // processors)
        return waves * m * n / AREA * (STEP * by.slowness * k + by.store)

    return by.launch + min(time(m, n) for m, n in LIBRARY_TILES)


def of_row(row: Mapping[str, Any]) -> Gemms:
    """The GEMMs of a problem of "block_mm", and of one of "lora" without its adapters."""
    tokens = row["tokens"]
    if "outer" in row:  # linears that share an input, or whose results are added
        (first, *_), count = row["outer"], len(row["inner"])
        if count > 1:
            return Gemms(tuple((tokens, first, k) for k in row["inner"]), (0,) * count)
        products = tuple((tokens, n, row["inner"][0]) for n in row["outer"])
        return Gemms(products, tuple(range(len(products))))
    kind, columns = row["kind"], row["n"]
    if kind == "shared_b":  # gradients of weights, whose rows are not tokens
        products = tuple((m, n, tokens) for m, n in zip(row["m"], columns, strict=True))
        return Gemms(products, tuple(range(len(products))))
    count = len(row["k"])
    groups = tuple(row.get("groups") or ((0,) * count if kind == "sum" else range(count)))
    products = tuple((tokens, columns[group], k) for group, k in zip(groups, row["k"], strict=True))
    activation = row.get("activation", "")
    return Gemms(products, groups, 3 if kind == "gated" else 2 if activation else 0, activation)


@functools.lru_cache(maxsize=4096)  # an estimate asks for each row of a table
def speedup(gemms: Gemms, processors: int) -> float:
    """What one kernel gains over stock, as the models have it: a logarithm.

    2,048 x 2,304 results are 144 tiles of 128 x 256, which is one more wave than 132 multiprocessors take at
    once, and 132 tiles of 192 x 192, which the library has.

    Args:
        processors: multiprocessors of the device.
    """
    return math.log(gemms.stock(processors) / gemms.grouped(processors))
