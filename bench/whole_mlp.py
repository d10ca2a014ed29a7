# ruff: noqa: E731
"""Measure what fusing an MLP can bring: its first half, and all of it in one kernel.

    up w256 t4096       gelu(x W1 + b1): x of 4096 rows and 256 columns, 1024 hidden ones
    mlp w256 t4096      gelu(x W1 + b1) W2 + b2

Hidden layers are four times as wide; gelu is the one with tanh, which the library has as an epilogue.

    stock          torch.compile: a matrix product of the library, and a pointwise kernel
    max_autotune   `mlp` alone: the same with mode="max-autotune-no-cudagraphs"
    triton         `up` alone: Triton kernels for the product, with bias and gelu as their epilogue
    epilogue       bias and gelu in the library's product (aten._addmm_activation)
    bare           `up` alone: the product, without bias and gelu
    whole          `mlp` alone: one kernel, whose hidden layer stays in registers; the fastest of some tiles

    python -m bench.whole_mlp --out bench/results/whole_mlp_h200.json --budget 600
    TRITON_INTERPRET=1 python -m bench.whole_mlp --quick --device cpu --out /tmp/try.json
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from bench import tuning
from bench.common import (
    DTYPES,
    Json,
    apart,
    both_clocks,
    compiled_only,
    error_limit,
    fresh_cache,
    interleave,
    relative_error,
    skipping,
)
from bench.suites import peak_rates
from inductor_fusions import config

#: Tokens and hidden columns of a step, warps, stages.
TILES = (
    (16, 64, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2),
    (128, 32, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3),
)  # fmt: skip
#: Sums of the result that a thread may hold.
MOST_SUMS = 128
#: Options of `torch.compile`, by variant.
COMPILED: dict[str, Json] = {
    "stock": {},
    "max_autotune": {"mode": "max-autotune-no-cudagraphs"},
    "triton": {"options": {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}},
}


@triton.jit
def mlp_kernel(
    x, w1, b1, w2, b2, out, tokens, hidden,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[t] = gelu(x[t] w1' + b1) w2' + b2, with w1 (hidden, WIDTH) and w2 (WIDTH, hidden) of nn.Linear."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, WIDTH)
    h = tl.arange(0, BLOCK_H)
    at = t.to(tl.int64)[:, None] * WIDTH + k[None, :]
    there = t[:, None] < tokens
    rows = tl.load(x + at, mask=there, other=0.0)
    sums = tl.zeros((BLOCK_T, WIDTH), dtype=tl.float32)
    for start in range(0, hidden, BLOCK_H):
        n = start + h
        up = tl.load(w1 + n[None, :] * WIDTH + k[:, None])
        z = tl.dot(rows, up) + tl.load(b1 + n).to(tl.float32)[None, :]
        # z (1 + tanh(u)) / 2 = z sigmoid(2 u)
        z = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
        down = tl.load(w2 + k[None, :] * hidden + n[:, None])
        sums = tl.dot(z.to(rows.dtype), down, sums)
    y = sums + tl.load(b2 + k).to(tl.float32)[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=there)


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        part: "up", the first half, or "mlp".
        width: columns of x and of the result of an MLP.
        tokens: rows of x.
    """

    part: str
    width: int
    tokens: int

    @property
    def hidden(self) -> int:
        """Columns of the hidden layer."""
        return 4 * self.width

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.part} w{self.width} t{self.tokens}"


def grid(quick: bool) -> list[Row]:
    """What is measured, in an order in which a run that is cut short has seen all of the range."""
    if quick:
        return [Row(part, 16, 24) for part in ("mlp", "up")]
    return [
        Row(part, width, tokens)
        for many in ((65536, 64, 4096), (1024, 16384, 256))
        for part in ("mlp", "up")
        for width in (64, 256, 512, 128)
        for tokens in many
    ]


def work(row: Row, size: int) -> Json:
    """FLOPs, and the bytes that have to be moved, by how much is fused."""
    t, w, h = row.tokens, row.width, row.hidden
    layer = t * h * size
    if row.part == "up":
        needed = size * (t * w + w * h + h) + layer
        return {"flops": 2 * t * w * h, "bytes": {"epilogue": needed, "unfused": needed + 2 * layer}}
    needed = size * (2 * t * w + 2 * w * h + h + w)
    return {
        "flops": 4 * t * w * h,
        "bytes": {"whole": needed, "epilogue": needed + 2 * layer, "unfused": needed + 4 * layer},
    }


def roofline(done: Json, peak: Json, dtype: str) -> dict[str, float]:
    """The least time in microseconds that the measured rates of a device allow, by how much is fused."""
    compute = done["flops"] / (peak["tflops"][dtype] * 1e12)
    return {
        name: round(1e6 * max(compute, moved / (peak["gb_per_s"] * 1e9)), 3)
        for name, moved in done["bytes"].items()
    }


def whole(row: Row, operands: list[torch.Tensor], tile: tuple[int, int, int, int]) -> torch.Tensor:
    """The MLP in one kernel."""
    out = torch.empty_like(operands[0])
    mlp_kernel[(math.ceil(row.tokens / tile[0]),)](*operands, out, **_settings(row, tile))
    return out


def _settings(row: Row, tile: tuple[int, int, int, int]) -> Json:
    block_t, block_h, warps, stages = tile
    return {
        "tokens": row.tokens, "hidden": row.hidden, "WIDTH": row.width,
        "BLOCK_T": block_t, "BLOCK_H": block_h, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def compile_all(row: Row, operands: list[torch.Tensor], tiles: Sequence[tuple[int, int, int, int]]) -> None:
    """Compile the kernel with each tile, side by side: wide ones take many seconds."""

    def compile_one(tile: tuple[int, int, int, int]) -> None:
        mlp_kernel.warmup(*operands, operands[0], **_settings(row, tile), grid=(1,))

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, tiles))


def fastest(row: Row, operands: list[torch.Tensor], device: str) -> tuple[int, int, int, int]:
    """The tile of the whole MLP that takes the least time; those that do not fit are left out.

    Raises:
        RuntimeError: none fits.
    """
    calls: dict[Any, Callable[[], object]] = {}
    # With larger ones the sums alone would take more registers than a thread has to spare.
    tiles = [tile for tile in TILES if tile[0] * row.width <= MOST_SUMS * 32 * tile[2]]
    if device == "cuda":
        compile_all(row, operands, tiles)
    for tile in tiles if device == "cuda" else tiles[:1]:
        try:
            whole(row, operands, tile)
        except triton.runtime.errors.OutOfResources:
            continue
        calls[tile] = lambda tile=tile: whole(row, operands, tile)
    if not calls:
        raise RuntimeError("no tile fits")
    if len(calls) == 1:
        return next(iter(calls))
    times = interleave(calls, device, 3, 0.005, run_ahead=device == "cuda")
    return min(times, key=lambda tile: times[tile].median)


def up(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """The first half."""
    return F.gelu(F.linear(x, w1, b1), approximate="tanh")


def mlp(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
) -> torch.Tensor:
    """All of it."""
    return F.linear(up(x, w1, b1), w2, b2)


def with_epilogue(part: str, operands: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Bias and gelu by the library."""
    x, w1, b1, w2, b2 = operands
    first = lambda: torch.ops.aten._addmm_activation(b1, x, w1.t(), use_gelu=True)
    return first if part == "up" else lambda: torch.addmm(b2, first(), w2.t())


def variants(row: Row, operands: list[torch.Tensor], device: str, quick: bool) -> tuple[Json, Json, Json]:
    """What is timed, by name; what was skipped, and why; the tile of the kernel of ours."""
    fn = up if row.part == "up" else mlp
    names = ["stock", "triton" if row.part == "up" else "max_autotune"]
    if quick:  # autotuning takes minutes on a CPU
        names = names[:1]
    calls: Json = {}
    skipped: Json = {}
    extra: Json = {}
    torch._dynamo.reset()
    for name in names:
        with skipping(skipped, name), config.patch(enabled=False), fresh_cache():
            compiled = torch.compile(apart(fn, name), dynamic=False, **COMPILED[name])
            compiled(*operands)
            calls[name] = lambda compiled=compiled: compiled(*operands)
    if device == "cuda":  # that of a CPU is another gelu
        calls["epilogue"] = with_epilogue(row.part, operands)
    if row.part == "up":
        calls["bare"] = lambda: operands[0] @ operands[1].t()
    elif device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        with skipping(skipped, "whole"):
            tile = fastest(row, operands, device)
            extra["tile"] = dict(zip(("tokens", "hidden", "warps", "stages"), tile, strict=True))
            calls["whole"] = lambda: whole(row, operands, tile)
    return calls, skipped, extra


def measure(row: Row, device: str, dtype: str, peak: Json, quick: bool) -> Json:
    """One row of the results."""
    torch.manual_seed(0)
    w, h = row.width, row.hidden
    shapes = (row.tokens, w), (h, w), (h,), (w, h), (w,)
    scales = 1.0, w**-0.5, 0.1, h**-0.5, 0.1
    operands = [
        (torch.randn(shape, device=device) * scale).to(DTYPES[dtype])
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    with torch.no_grad():
        calls, skipped, extra = variants(row, operands, device, quick)
        exact = (up if row.part == "up" else mlp)(*(t.double() for t in operands))
        with compiled_only():
            error = {name: relative_error(call(), exact) for name, call in calls.items() if name != "bare"}
            del exact
            rounds, block = (3, 0.001) if quick else (7, 0.02)
            times = both_clocks(calls, device, rounds, block)
    done = work(row, operands[0].element_size())
    limit = error_limit(error.get("stock"), DTYPES[dtype])
    return {
        "key": row.key, "part": row.part, "width": w, "hidden": h, "tokens": row.tokens, "dtype": dtype,
        **times, **done, "roofline_us": roofline(done, peak, dtype), "error": error,
        "wrong": [name for name, value in error.items() if not value <= limit], "skipped": skipped, **extra,
    }  # fmt: skip


def main() -> None:
    """The command line."""
    options = tuning.parser("bench.whole_mlp", __doc__, parallel=False).parse_args()
    # The interpreter has no bfloat16.
    dtype = "bfloat16" if options.device == "cuda" else "float32"
    peak = {} if options.list else peak_rates(options.device, [dtype])
    tuning.run(
        "bench.whole_mlp", options, grid(options.quick),
        lambda row, *_: measure(row, options.device, dtype, peak, options.quick),
        lambda found: (
            f"{found.get('device_us') or found['times_us']}, "
            f"wrong {found['wrong']}, skipped {found['skipped']}"
        ),
        header={"peak": peak},
    )  # fmt: skip


if __name__ == "__main__":
    main()
