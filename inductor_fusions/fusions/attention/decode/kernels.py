# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
"""The kernels of `decode_attention`, and what launches them.

Flash decoding (Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023): the keys of a
head are split over thread blocks, and a second kernel joins the parts. Here `order_kernel` lists the tiles of
keys that the mask shows to some query, once for all layers that share a mask. The parts take the tiles of the
list in turns, so they are equally long however much of a cache is in use. The queries of all heads that share
keys are the rows of one tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....decisions.schema import padded
from ....lowering import launched
from .op import TILE_ROWS

#: exp(x) = exp2(x * LOG2_E)
LOG2_E = tl.constexpr(1.4426950408889634)
#: Kinds of masks.
NO_MASK, BOOLEAN, ADDITIVE = (tl.constexpr(kind) for kind in range(3))
#: Elements of a mask that `order_kernel` reads at once.
CHUNK = 4096


@triton.jit
def order_kernel(
    mask, lowest, order, keys, tiles, heads, group, queries,
    mask_b, mask_h, mask_q, mask_k, lowest_b, lowest_h, lowest_q,
    IS_BOOLEAN: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """order[b, h] = how many tiles hold a key that a query of the group sees, and which ones."""
    pid = tl.program_id(0)
    b = (pid // heads).to(tl.int64)
    h = pid % heads
    count = 0
    to = order + pid.to(tl.int64) * (tiles + 1)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        j = tile[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        seen = tl.zeros((TILES,), tl.int32)
        for r in range(group * queries):
            head, i = h * group + r // queries, r % queries
            at = mask + b * mask_b + head * mask_h + i * mask_q + j * mask_k
            if IS_BOOLEAN:
                shown = tl.load(at, mask=j < keys, other=0).to(tl.int32)
            else:
                bound = tl.load(lowest + b * lowest_b + head * lowest_h + i * lowest_q)
                value = tl.load(at, mask=j < keys, other=float("-inf")).to(tl.float32)
                # NaN is shown, so that the result is NaN.
                shown = tl.where(value <= bound, 0, 1)
            seen = tl.maximum(seen, tl.max(shown, 1))
        place = count + tl.cumsum(seen, 0)
        tl.store(to + place, tile, mask=(seen != 0) & (tile < tiles))
        count += tl.sum(seen)
    tl.store(to, count)


@triton.jit
def part_kernel(
    q, k, v, mask, lowest, order, acc_out, most_out, total_out, kv_heads, queries, keys,
    q_b, q_h, q_i, q_d, k_b, k_h, k_j, k_d, v_b, v_h, v_j, v_e, mask_b, mask_h, mask_i, mask_j,
    lowest_b, lowest_h, lowest_i, order_b, order_h,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, BY_ROW: tl.constexpr, SCALE: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One part of the keys: sum of exp(score - most) * v, most, and the sum of the weights alone."""
    pid = tl.program_id(0)
    split = tl.program_id(1)
    b = (pid // kv_heads).to(tl.int64)
    h = pid % kv_heads
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_row = row < GROUP * queries
    head, i = h * GROUP + row // queries, row % queries
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    in_d, in_e = d < D, e < E
    x = tl.load(
        q + b * q_b + (head * q_h + i * q_i)[:, None] + (d * q_d)[None, :],
        mask=in_row[:, None] & in_d[None, :], other=0.0,
    )  # fmt: skip
    if KIND == NO_MASK:
        count = tl.cdiv(tl.minimum(queries, keys) if CAUSAL else keys, BLOCK_N)
    else:
        listed = order + b * order_b + h * order_h
        count = tl.load(listed)
    if KIND == ADDITIVE:
        if BY_ROW:
            bound = tl.load(
                lowest + b * lowest_b + head * lowest_h + i * lowest_i, mask=in_row, other=float("-inf")
            )[:, None]  # fmt: skip
        else:
            bound = tl.load(lowest + b * lowest_b)
    at_k = k + b * k_b + h.to(tl.int64) * k_h + (d * k_d)[:, None]
    at_v = v + b * v_b + h.to(tl.int64) * v_h + (e * v_e)[None, :]
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for step in range(split, count, tl.num_programs(1)):
        if KIND == NO_MASK:
            tile = step
        else:
            tile = tl.load(listed + 1 + step)
        j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        in_j = j < keys
        far = j.to(tl.int64)
        if KIND == NO_MASK:
            shown = in_j[None, :]
            held = in_j
            if CAUSAL:
                shown = shown & (j[None, :] <= i[:, None])
        else:
            if BY_ROW:
                at = mask + b * mask_b + (head * mask_h + i.to(tl.int64) * mask_i)[:, None]
                value = tl.load(
                    at + (far * mask_j)[None, :], mask=in_row[:, None] & in_j[None, :], other=0
                )  # fmt: skip
                there = in_row[:, None] & in_j[None, :]
            else:
                value = tl.load(mask + b * mask_b + far * mask_j, mask=in_j, other=0)
                there = in_j
            if KIND == BOOLEAN:
                shown = there & (value != 0)
            else:
                value = value.to(tl.float32)
                shown = there & ((value > bound) | (value != value))
            if BY_ROW:
                held = tl.max(shown.to(tl.int32), 0) != 0
            else:
                held = shown
                shown = shown[None, :]
                if KIND == ADDITIVE:
                    value = value[None, :]
        y = tl.load(at_k + (far * k_j)[None, :], mask=in_d[:, None] & in_j[None, :], other=0.0)
        # What no row sees is not read: weights of 0 do not hide NaN.
        z = tl.load(at_v + (far * v_j)[:, None], mask=held[:, None] & in_e[None, :], other=0.0)
        score = tl.dot(x, y) * SCALE
        if KIND == ADDITIVE:
            score += value
        score = tl.where(shown, score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        # Not in powers of two from the start: the lowest number of a dtype has no room for a factor.
        weight = tl.exp2((score - base[:, None]) * LOG2_E)
        less = tl.exp2((most - base) * LOG2_E)
        total = total * less + tl.sum(weight, 1)
        acc = tl.dot(weight.to(z.dtype), z, acc * less[:, None])
        most = higher
    at_row = (b * kv_heads * GROUP + head) * queries + i
    if not IS_SPLIT:
        acc = tl.where(total[:, None] == 0, 0.0, acc / total[:, None])
        at_row = (b * queries + i) * (kv_heads * GROUP) + head
    else:
        at_row += split * tl.num_programs(0).to(tl.int64) * GROUP * queries
        tl.store(most_out + at_row, most, mask=in_row)
        tl.store(total_out + at_row, total, mask=in_row)
        in_row = in_row & (split < count)
    tl.store(
        acc_out + at_row[:, None] * E + e[None, :], acc.to(acc_out.dtype.element_ty),
        mask=in_row[:, None] & in_e[None, :],
    )  # fmt: skip


@triton.jit
def join_kernel(
    acc, most, total, out, heads, queries, splits,
    E: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One row of the result, of all its parts."""
    pid = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0).to(tl.int64)
    s, e = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_E)
    at = s * rows + pid
    each = tl.load(most + at, mask=s < splits, other=float("-inf"))
    amount = tl.load(total + at, mask=s < splits, other=0.0)
    highest = tl.max(each, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    share = tl.exp2((each - base) * LOG2_E)
    read = (each != float("-inf"))[:, None] & (e < E)[None, :]
    part = tl.load(acc + at[:, None] * E + e[None, :], mask=read, other=0.0)
    whole = tl.sum(amount * share, 0)
    result = tl.sum(part * share[:, None], 0) / whole
    # A fully masked row is zero, as SDPA has it.
    result = tl.where(whole == 0, 0.0, result)
    b, head, i = pid // (heads * queries), pid // queries % heads, pid % queries
    to = out + ((b * queries + i) * heads + head) * E + e
    tl.store(to, result.to(out.dtype.element_ty), mask=e < E)


def order(mask: Tensor, lowest: Tensor | None, kv_heads: int, block_n: int) -> Tensor:
    """(B or 1, kv_heads or 1, 1 + number of tiles), int32: how many tiles are seen, and which ones.

    Args:
        mask: (B or 1, H or 1, Q or 1, K), boolean or floating.
        lowest: (B or 1, H or 1, Q or 1): up to which number a floating one hides; None of a boolean one.
        kv_heads: how many heads keys have.
    """
    batch, mask_heads, queries, keys = mask.shape
    heads = 1 if mask_heads == 1 else kv_heads
    tiles = (keys + block_n - 1) // block_n
    found = mask.new_empty((batch, heads, tiles + 1), dtype=torch.int32)
    bounds = mask if lowest is None else lowest
    launched(order_kernel)[(batch * heads,)](
        mask, bounds, found, keys, tiles, heads, mask_heads // heads, queries, *steps(mask),
        *steps(bounds)[:3], IS_BOOLEAN=mask.dtype == torch.bool, BLOCK_N=block_n,
        TILES=max(1, CHUNK // block_n), num_warps=8,
    )  # fmt: skip
    return found


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lowest: Tensor | None, listed: Tensor | None,
    scale: float, causal: bool, most_queries: int, tiles: Sequence[int],
) -> Tensor:  # fmt: skip
    """(B, H, Q, E), laid out (B, Q, H, E).

    Args:
        q, k, v: (B, H, Q, D), (B, kv_heads, K, D), (B, kv_heads, K, E).
        mask, lowest, listed: as in `order`, and what that gives; None without a mask.
        scale, causal: as in SDPA.
        most_queries: of which there are no more.
        tiles: keys of a tile, parts of the keys, warps, stages.
    """
    (batch, heads, queries, d), kv_heads, keys, e = q.shape, k.shape[1], k.shape[2], v.shape[3]
    block_n, splits, warps, stages = tiles
    group = heads // kv_heads
    block_m = max(16, min(TILE_ROWS, padded(group * most_queries)))
    out = q.new_empty((batch, queries, heads, e))
    # What a kernel does not read must be something in memory: Inductor would write q once more for it.
    unread = k if listed is None else listed
    wide = torch.float32
    if splits > 1:
        acc = q.new_empty((splits, batch, heads, queries, e), dtype=wide)
        most, total = (q.new_empty((splits, batch, heads, queries), dtype=wide) for _ in range(2))
    else:
        acc, most, total = out, unread, unread
    kind = NO_MASK if mask is None else BOOLEAN if mask.dtype == torch.bool else ADDITIVE
    held, bounds, list_ = (unread if x is None else x for x in (mask, lowest, listed))
    by_row = mask is not None and not (mask.shape[1] == 1 and mask.shape[2] == 1)
    part_programs = (batch * kv_heads, splits, (group * queries + block_m - 1) // block_m)
    launched(part_kernel)[part_programs](
        q, k, v, held, bounds, list_, acc, most, total, kv_heads, queries, keys,
        *q.stride(), *k.stride(), *v.stride(), *steps(held), *steps(bounds)[:3], *steps(list_)[:2],
        KIND=kind.value, CAUSAL=causal, BY_ROW=by_row, SCALE=scale, GROUP=group, D=d, E=e,
        IS_SPLIT=splits > 1, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=padded(d), BLOCK_E=padded(e),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        launched(join_kernel)[(batch * heads * queries,)](
            acc, most, total, out, heads, queries, splits,
            E=e, BLOCK_S=padded(splits, 1), BLOCK_E=padded(e), num_warps=4 if splits > 8 else 1,
        )  # fmt: skip
    return out.transpose(1, 2)


def steps(tensor: Tensor) -> tuple[Any, ...]:
    """The strides of a tensor, 0 in dims of size 1, which stand for any number of elements."""
    return tuple(
        0 if isinstance(size, int) and size == 1 else stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
