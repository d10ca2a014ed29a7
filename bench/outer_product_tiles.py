"""Which tiles of the kernels of `outer_product_linear` are fastest on a GPU.

    linear n432->512 b2048       the forward
    factors n432->512 b2048      the gradient of the factors
    weight n432->512 b2048       the gradient of the weight

in float32 as TF32 and in bfloat16, for one matrix of 432 features in both places. Each candidate is compared
with the tiles in force, and timed on the device alone, side by side with them. What wins goes by hand into
`LINEAR`, `FACTORS`, `WEIGHT` and `BLOCK_Q` of `inductor_fusions/fusions/outer_product_linear/launch.py`;
`bench.outer_product` then measures the whole.

    python -m bench.outer_product_tiles --out tiles.json --only 'b2048 float32' --budget 300
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import tuning
from bench.common import DTYPES, Json, interleave, is_fatal, one_line, relative_error
from inductor_fusions.budget import worst

Candidate = tuple[int, Mapping[str, int]]

#: Tiles and warps of each kernel that are tried, each with two numbers of stages.
SHAPES: dict[str, tuple[dict[str, int], ...]] = {
    "linear": tuple(
        {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps}
        for m, n, warps in (
            (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 64, 8), (256, 128, 8),
            (64, 256, 4),
        )
    ),
    "factors": tuple(
        {"BLOCK_M": m, "BLOCK_N": n, "DEEP": deep, "num_warps": warps}
        for m, n, deep in ((128, 32, 4), (128, 64, 2), (128, 128, 1), (128, 64, 1), (64, 64, 4), (256, 32, 2))
        for warps in (4, 8)
    ),
    "weight": tuple(
        {"BLOCK_R": r, "BLOCK_N": n, "BLOCK_M": m, "num_warps": warps}
        for r, n, m, warps in (
            (128, 128, 32, 4), (128, 128, 32, 8), (128, 256, 32, 8), (256, 128, 32, 8), (128, 128, 64, 8),
        )
    ),
}  # fmt: skip
STAGES = {"linear": (3, 4), "factors": (2, 3), "weight": (3, 4)}
#: Columns of a block, by the size of an element.
BLOCKS = {4: (32, 64), 2: (64, 128)}
#: How far the result of a candidate may be from that of the tiles in force: other orders of sums, and what
#: they are rounded to.
CLOSE = {4: 1e-3, 2: 4e-3}
#: Calls that give the same bits, or a candidate has a race.
REPEATS = 10


@dataclass(frozen=True)
class Row:
    """A kernel at a size.

    Attributes:
        kernel: "linear", "factors" or "weight".
        rows: samples.
        dtype: "float32" or "bfloat16".
        features, columns: of the linear.
    """

    kernel: str
    rows: int
    dtype: str
    features: int = 432
    columns: int = 512

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.kernel} n{self.features}->{self.columns} b{self.rows} {self.dtype}"


KERNELS = ("linear", "factors", "weight")


def grid(quick: bool) -> list[Row]:
    """What is measured, the most important first."""
    if quick:
        return [Row(kernel, 16, "float32", 24, 16) for kernel in KERNELS]
    return [
        Row(kernel, rows, dtype)
        for rows in (2048, 128)
        for dtype in ("float32", "bfloat16")
        for kernel in KERNELS
    ]


def candidates(kernel: str, size: int) -> list[Candidate]:
    """Columns of a block, and tiles, for elements of `size` bytes."""
    return [
        (block, {**shape, "num_stages": stages})
        for block, shape, stages in itertools.product(BLOCKS[size], SHAPES[kernel], STAGES[kernel])
    ]


def named(block: int, tile: Mapping[str, int]) -> str:
    """A candidate in words."""
    return ", ".join([f"BLOCK_Q {block}", *(f"{name} {value}" for name, value in tile.items())])


def launchers(row: Row, device: str) -> Callable[..., Any]:
    """A call of the kernel of a row: `call(tile, block)` gives its results."""
    from inductor_fusions.fusions.outer_product_linear import launch

    torch.manual_seed(0)
    dtype = DTYPES[row.dtype]
    u = torch.randn(row.rows, row.features, device=device).to(dtype)
    w = (torch.randn(row.columns, row.features**2, device=device) / row.features).to(dtype)
    dy = torch.randn(row.rows, row.columns, device=device).to(dtype)
    calls: dict[str, Callable[..., Any]] = {
        "linear": lambda tile, block: (launch.linear(u, u, w, tile, block),),
        "factors": lambda tile, block: launch.factors(dy, u, u, w, True, tile, block)[:1],
        "weight": lambda tile, block: (launch.weight(dy, u, u, tile, block),),
    }
    return calls[row.kernel]


def measure(row: Row, device: str, quick: bool) -> Json:
    """One row of the results: microseconds of each candidate, "now" those in force."""
    from inductor_fusions.fusions.outer_product_linear import launch

    call = launchers(row, device)
    size = DTYPES[row.dtype].itemsize
    force = {"linear": launch.LINEAR, "factors": launch.FACTORS, "weight": launch.WEIGHT}[row.kernel][size]
    block = launch.BLOCK_Q[size]
    chosen = candidates(row.kernel, size)
    if quick:  # in Triton's interpreter
        small = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_R": 16, "DEEP": 1, "num_warps": 4, "num_stages": 2}
        force, block = {name: small[name] for name in force}, 16
        chosen = [(16, {**force, "BLOCK_N": 32})]
    expected = call(force, block)
    calls: dict[str, Callable[[], Any]] = {"now": partial(call, force, block)}
    skipped: Json = {}
    for candidate_block, tile in chosen:
        name = named(candidate_block, tile)
        if (candidate_block, tile) == (block, force):
            continue
        try:
            results = call(tile, candidate_block)
            far = worst(relative_error(x, y) for x, y in zip(results, expected, strict=True))
            again = [call(tile, candidate_block) for _ in range(1 if quick else REPEATS)]
        except Exception as error:  # mostly: more shared memory than there is
            if is_fatal(error):
                raise
            skipped[name] = one_line(error)
            continue
        if not far <= CLOSE[size]:
            skipped[name] = f"off by {far:.1e}"
            continue
        if not all(torch.equal(x, y) for each in again for x, y in zip(each, results, strict=True)):
            skipped[name] = "not the same bits each time"
            continue
        calls[name] = partial(call, tile, candidate_block)
    rounds, seconds = (2, 1e-3) if quick else (5, 5e-3)
    times = interleave(calls, device, rounds, seconds, max_calls=10, run_ahead=device == "cuda")
    found = {name: round(1e6 * t.median, 2) for name, t in times.items()}
    best = min(found, key=found.__getitem__)
    return {
        "key": row.key, "now": named(block, force), "best": best,
        "gain": round(found["now"] / found[best], 3),
        "times_us": dict(sorted(found.items(), key=lambda item: item[1])), "skipped": skipped,
    }  # fmt: skip


def main() -> None:
    """The command line."""
    options = tuning.parser("bench.outer_product_tiles", __doc__, parallel=False).parse_args()
    torch.set_float32_matmul_precision("high")
    tuning.one_by_one(
        "bench.outer_product_tiles",
        options,
        grid(options.quick),
        lambda row: measure(row, options.device, options.quick),
        lambda found: f"{found['best']}: {found['gain']}x of {found['now']}, {len(found['skipped'])} skipped",
    )


if __name__ == "__main__":
    main()
