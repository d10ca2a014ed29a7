"""Which tiles of the kernel of `outer_product_linear` are fastest on a GPU: "n432->512 b2048",

in float32 as TF32 and in bfloat16, for one matrix of 432 features in both places. Each candidate is compared
with the tiles in force, and timed on the device alone, side by side with them. What wins goes by hand into
`LINEAR` and `BLOCK_Q` of `inductor_fusions/fusions/outer_product_linear/launch.py`;
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
from bench.common import DTYPES, Json, interleave, relative_error, skipping

Candidate = tuple[int, Mapping[str, int]]

#: Tiles and warps that are tried, each with two numbers of stages.
SHAPES: tuple[dict[str, int], ...] = tuple(
    {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps}
    for m, n, warps in (
        (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8), (256, 64, 8), (256, 128, 8), (64, 256, 4),
    )
)  # fmt: skip
STAGES = (3, 4)
#: Columns of a block, by the size of an element.
BLOCKS = {4: (32, 64), 2: (64, 128)}
#: How far the result of a candidate may be from that of the tiles in force: other orders of sums, and what
#: they are rounded to.
CLOSE = {4: 1e-3, 2: 4e-3}
#: Calls that give the same bits, or a candidate has a race.
REPEATS = 10


@dataclass(frozen=True)
class Row:
    """The kernel at a size.

    Attributes:
        rows: samples.
        dtype: "float32" or "bfloat16".
        features, columns: of the linear.
    """

    rows: int
    dtype: str
    features: int = 432
    columns: int = 512

    @property
    def key(self) -> str:
        """Its name."""
        return f"linear n{self.features}->{self.columns} b{self.rows} {self.dtype}"


def grid(quick: bool) -> list[Row]:
    """What is measured, the most important first."""
    if quick:
        return [Row(16, "float32", 24, 16)]
    return [Row(rows, dtype) for rows in (2048, 128) for dtype in ("float32", "bfloat16")]


def candidates(size: int) -> list[Candidate]:
    """Columns of a block, and tiles, for elements of `size` bytes."""
    return [
        (block, {**shape, "num_stages": stages})
        for block, shape, stages in itertools.product(BLOCKS[size], SHAPES, STAGES)
    ]


def named(block: int, tile: Mapping[str, int]) -> str:
    """A candidate in words."""
    return ", ".join([f"BLOCK_Q {block}", *(f"{name} {value}" for name, value in tile.items())])


def launchers(row: Row, device: str) -> Callable[..., Any]:
    """A call of the kernel of a row: `call(tile, block)` gives its result."""
    from inductor_fusions.fusions.outer_product_linear import launch

    torch.manual_seed(0)
    dtype = DTYPES[row.dtype]
    u = torch.randn(row.rows, row.features, device=device).to(dtype)
    w = (torch.randn(row.columns, row.features**2, device=device) / row.features).to(dtype)
    return lambda tile, block: launch.linear(u, u, w, tile, block)


def measure(row: Row, device: str, quick: bool) -> Json:
    """One row of the results: microseconds of each candidate, "now" those in force."""
    from inductor_fusions.fusions.outer_product_linear import launch

    call = launchers(row, device)
    size = DTYPES[row.dtype].itemsize
    force, block = launch.LINEAR[size], launch.BLOCK_Q[size]
    chosen = candidates(size)
    if quick:  # in Triton's interpreter
        force, block = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2}, 16
        chosen = [(16, {**force, "BLOCK_N": 32})]
    expected = call(force, block)
    calls: dict[str, Callable[[], Any]] = {"now": partial(call, force, block)}
    skipped: Json = {}
    for candidate_block, tile in chosen:
        name = named(candidate_block, tile)
        if (candidate_block, tile) == (block, force):
            continue
        with skipping(skipped, name):  # mostly: more shared memory than there is
            result = call(tile, candidate_block)
            far = relative_error(result, expected)
            again = [call(tile, candidate_block) for _ in range(1 if quick else REPEATS)]
            if not far <= CLOSE[size]:
                skipped[name] = f"off by {far:.1e}"
            elif not all(torch.equal(each, result) for each in again):
                skipped[name] = "not the same bits each time"
            else:
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


def describe(row: Json) -> str:
    """A row in one line."""
    return f"{row['best']}: {row['gain']}x of {row['now']}, {len(row['skipped'])} skipped"


def main() -> None:
    """The command line."""
    torch.set_float32_matmul_precision("high")
    tuning.script("bench.outer_product_tiles", __doc__, grid, measure, describe)


if __name__ == "__main__":
    main()
