# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""The kernels of `dot_interaction`, and what launches them.

All products of the features of one sample are one small matrix, which stays in registers. Only the selected
pairs are written to memory. The backward reads their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...decisions.schema import padded
from ...lowering import launched
from .op import Pairs

#: The most features, the most pairs of a tensor, and the widest features, that a thread block holds.
MOST_FEATURES = 64
MOST_PAIRS = 4096
WIDEST = 256


@triton.jit
def interaction_kernel(
    t, dense, out, samples,
    t_rows, t_features, t_columns, dense_rows, dense_columns, out_rows,
    F: tl.constexpr, D: tl.constexpr, X: tl.constexpr, UPPER: tl.constexpr, DIAGONAL: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_X: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """out[b] = dense[b], and behind it t[b, i] . t[b, j] for each pair of the triangle, row by row."""
    f = tl.arange(0, BLOCK_F)
    d = tl.arange(0, BLOCK_D)
    x = tl.arange(0, BLOCK_X)
    i, j = f[:, None], f[None, :]
    if UPPER:
        wanted = (j > i - DIAGONAL) & (j < F)
        slot = i * (F - 1 + DIAGONAL) - i * (i - 1) // 2 + (j - i - 1 + DIAGONAL)
    else:
        wanted = (j < i + DIAGONAL) & (i < F)
        slot = i * (i - 1) // 2 + i * DIAGONAL + j
    for sample in range(SAMPLES):
        b = (tl.program_id(0) * SAMPLES + sample).to(tl.int64)
        there = b < samples
        features = tl.load(
            t + b * t_rows + f[:, None] * t_features + d[None, :] * t_columns,
            mask=(f[:, None] < F) & (d[None, :] < D) & there, other=0.0,
        )  # fmt: skip
        products = tl.dot(features, tl.trans(features))
        to = out + b * out_rows
        tl.store(to + X + slot, products.to(out.dtype.element_ty), mask=wanted & there)
        if X > 0:
            in_x = (x < X) & there
            tl.store(to + x, tl.load(dense + b * dense_rows + x * dense_columns, mask=in_x), mask=in_x)


@triton.jit
def gradient_kernel(
    dy, t, dt, samples,
    dy_rows, dy_columns, t_rows, t_features, t_columns,
    F: tl.constexpr, D: tl.constexpr, X: tl.constexpr, UPPER: tl.constexpr, DIAGONAL: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """dt[b] = (G + G') t[b], where G has the gradient of a pair where its product was."""
    f = tl.arange(0, BLOCK_F)
    d = tl.arange(0, BLOCK_D)
    i, j = f[:, None], f[None, :]
    first, second = tl.maximum(i, j), tl.minimum(i, j)
    if UPPER:
        slot = second * (F - 1 + DIAGONAL) - second * (second - 1) // 2 + (first - second - 1 + DIAGONAL)
    else:
        slot = first * (first - 1) // 2 + first * DIAGONAL + second
    held = (first < F) & (second < first + DIAGONAL)
    for sample in range(SAMPLES):
        b = (tl.program_id(0) * SAMPLES + sample).to(tl.int64)
        there = b < samples
        g = tl.load(dy + b * dy_rows + (X + slot) * dy_columns, mask=held & there, other=0.0)
        if DIAGONAL:
            g = tl.where(i == j, g + g, g)
        in_t = (f[:, None] < F) & (d[None, :] < D) & there
        features = tl.load(
            t + b * t_rows + f[:, None] * t_features + d[None, :] * t_columns, mask=in_t, other=0.0
        )
        gradient = tl.dot(g, features)
        at = dt + b * (F * D) + f[:, None] * D + d[None, :]
        tl.store(at, gradient.to(dt.dtype.element_ty), mask=in_t)


@triton.jit
def pairs_kernel(
    t, dense, cells, out, samples,
    t_rows, t_features, t_columns, dense_rows, dense_columns, out_rows,
    F: tl.constexpr, D: tl.constexpr, X: tl.constexpr, P: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_P: tl.constexpr,
    SAMPLES: tl.constexpr,
):  # fmt: skip
    """out[b] = dense[b], and behind it t[b, i] . t[b, j] for each cell i * F + j."""
    f = tl.arange(0, BLOCK_F)
    d = tl.arange(0, BLOCK_D)
    x = tl.arange(0, BLOCK_X)
    p = tl.arange(0, BLOCK_P)
    cell = tl.load(cells + p, mask=p < P, other=0).to(tl.int32)
    place = cell // F * BLOCK_F + cell % F
    for sample in range(SAMPLES):
        b = (tl.program_id(0) * SAMPLES + sample).to(tl.int64)
        there = b < samples
        features = tl.load(
            t + b * t_rows + f[:, None] * t_features + d[None, :] * t_columns,
            mask=(f[:, None] < F) & (d[None, :] < D) & there, other=0.0,
        )  # fmt: skip
        products = tl.reshape(tl.dot(features, tl.trans(features)), [BLOCK_F * BLOCK_F])
        to = out + b * out_rows
        wanted = tl.gather(products, place, 0)
        tl.store(to + X + p, wanted.to(out.dtype.element_ty), mask=(p < P) & there)
        if X > 0:
            in_x = (x < X) & there
            tl.store(to + x, tl.load(dense + b * dense_rows + x * dense_columns, mask=in_x), mask=in_x)


@triton.jit
def pairs_gradient_kernel(
    dy, t, last, before, dt, samples,
    dy_rows, dy_columns, t_rows, t_features, t_columns,
    F: tl.constexpr, D: tl.constexpr, X: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """dt[b] = (G + G') t[b], where G has the gradients of all pairs of a cell.

    last (F, F): the last pair of each cell; before (P,): the one before it of the same cell; -1: none.
    """
    f = tl.arange(0, BLOCK_F)
    d = tl.arange(0, BLOCK_D)
    i, j = f[:, None], f[None, :]
    slots = tl.load(last + i * F + j, mask=(i < F) & (j < F), other=-1)
    for sample in range(SAMPLES):
        b = (tl.program_id(0) * SAMPLES + sample).to(tl.int64)
        there = b < samples
        slot = slots
        g = tl.zeros([BLOCK_F, BLOCK_F], dtype=tl.float32)
        while tl.max(tl.max(slot, 1), 0) >= 0:  # once, where no pair is there twice
            held = slot >= 0
            g += tl.load(dy + b * dy_rows + (X + slot) * dy_columns, mask=held & there, other=0.0)
            slot = tl.load(before + slot, mask=held, other=-1)
        in_t = (f[:, None] < F) & (d[None, :] < D) & there
        features = tl.load(
            t + b * t_rows + f[:, None] * t_features + d[None, :] * t_columns, mask=in_t, other=0.0
        )
        gradient = tl.dot((g + tl.trans(g)).to(features.dtype), features)
        at = dt + b * (F * D) + f[:, None] * D + d[None, :]
        tl.store(at, gradient.to(dt.dtype.element_ty), mask=in_t)


def interaction(t: Tensor, dense: Tensor | None, pairs: Pairs, tiles: Sequence[int]) -> Tensor:
    """t (B, F, D), dense (B, X) -> (B, X + number of pairs)."""
    (samples, f, d), x = t.shape, 0 if dense is None else dense.shape[1]
    count = pairs.shape[0] if isinstance(pairs, Tensor) else pairs.count(f)
    out = t.new_empty((samples, x + count))
    if not out.numel():
        return out
    per_block, warps, *_ = tiles or default_tiles(f, d)
    held = t if dense is None else dense
    if isinstance(pairs, Tensor):
        kernel, given = pairs_kernel, [pairs.contiguous()]
        which = {"P": count, "BLOCK_P": padded(count)}
    else:
        kernel, given = interaction_kernel, []
        which = {"UPPER": pairs.upper, "DIAGONAL": pairs.diagonal}
    with torch.cuda.device_of(t):  # Triton launches on the current device
        launched(kernel)[(_blocks(samples, per_block),)](
            t, held, *given, out, samples, *t.stride(), held.stride(0), held.stride(-1), out.shape[1],
            F=f, D=d, X=x, BLOCK_F=padded(f), BLOCK_D=padded(d), BLOCK_X=padded(x), SAMPLES=per_block,
            num_warps=warps, **which,
        )  # fmt: skip
    return out


def gradient(dy: Tensor, t: Tensor, x: int, pairs: Pairs, tiles: Sequence[int]) -> Tensor:
    """The gradient of t, from that of the result (B, x + number of pairs)."""
    samples, f, d = t.shape
    dt = t.new_empty((samples, f, d))
    if not dt.numel():
        return dt
    *_, per_block, warps = tiles or default_tiles(f, d)
    if isinstance(pairs, Tensor):
        p = torch.arange(pairs.shape[0], device=t.device)
        earlier = (pairs[:, None] == pairs) & (p < p[:, None])
        of_cell = torch.arange(f * f, device=t.device)[:, None] == pairs
        before, last = (torch.where(mask, p, -1).amax(1).to(torch.int32) for mask in (earlier, of_cell))
        kernel, given, which = pairs_gradient_kernel, [last, before], {}
    else:
        kernel, given = gradient_kernel, []
        which = {"UPPER": pairs.upper, "DIAGONAL": pairs.diagonal}
    with torch.cuda.device_of(t):
        launched(kernel)[(_blocks(samples, per_block),)](
            dy, t, *given, dt, samples, *dy.stride(), *t.stride(),
            F=f, D=d, X=x, BLOCK_F=padded(f), BLOCK_D=padded(d), SAMPLES=per_block, num_warps=warps, **which,
        )  # fmt: skip
    return dt


def default_tiles(features: int, width: int) -> tuple[int, int, int, int]:
    """Samples of a thread block and its warps, forward and backward, where no table says more."""
    warps = min(4, max(1, padded(features) * padded(width) // 2048))
    return 1, warps, 1, warps


def _blocks(size: Any, block: int) -> Any:
    return (size + block - 1) // block
