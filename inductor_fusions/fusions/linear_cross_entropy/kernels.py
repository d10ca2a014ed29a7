# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
"""The kernel of the loss head: one thread block reads a row of logits twice, and the second time from L2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .chunks import Pulls

#: Columns of a step, and warps, which fill a multiprocessor: rows that are read at once fit into L2.
BLOCK, WARPS = 8192, 32


@triton.jit
def bend(x, scale, cap, CAPPED: tl.constexpr):
    """y = scale * x or cap * tanh(scale * x), and dy / dx without the factor `scale`."""
    y = x * scale
    slope = tl.full(y.shape, 1.0, tl.float32)
    if CAPPED:
        # tanh(|y|) = (1 - e) / (1 + e) with e = exp(-2 |y|), which does not overflow.
        e = tl.exp(-2.0 * tl.abs(y))
        bent = (1.0 - e) / (1.0 + e)
        bent = tl.where(y < 0, -bent, bent)
        y = cap * bent
        slope = cap * 4.0 * e / ((1.0 + e) * (1.0 + e))  # 1 - tanh^2 without its cancellation
    return y, slope


@triton.jit
def rows_kernel(
    x, labels, weights, stats, soft, hot, flat, spread,
    columns, x_rows, stats_rows, scale, cap,
    CAPPED: tl.constexpr, TOTALS: tl.constexpr, WEIGHTED: tl.constexpr, PULLS: tl.constexpr,
    FLAT: tl.constexpr, ENTROPY: tl.constexpr, CLAMPED: tl.constexpr, SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """stats[:, i] = log-probability of the label, logsumexp, weighted sum and entropy of row i; x[i] = the
    gradient of the logits."""
    i = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + i)
    row = x + i * x_rows
    j = tl.arange(0, BLOCK)
    if label < 0:
        if PULLS:
            for first in range(0, columns, BLOCK):
                zero = tl.zeros((BLOCK,), tl.float32).to(x.dtype.element_ty)
                tl.store(row + first + j, zero, mask=first + j < columns)
        return
    # Of each lane; they are brought together once, at the end.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    depth = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        inside = first + j < columns
        found = tl.load(row + first + j, mask=inside, other=0.0).to(tl.float32)
        y, _ = bend(found, scale, cap, CAPPED)
        if TOTALS:
            w = tl.load(weights + first + j, mask=inside, other=0.0) if WEIGHTED else 1.0
            total += tl.where(inside, y * w, 0.0)
        y = tl.where(inside, y, float("-inf"))
        bound = tl.maximum(largest, y)
        # A lane that has seen minus infinity alone has no sum yet.
        shift = tl.where(bound == float("-inf"), 0.0, bound)
        rescale, e = tl.exp(largest - shift), tl.exp(y - shift)
        if ENTROPY:  # the sum of e * (y - largest), whose terms have one sign
            below = tl.where(inside if not CLAMPED else y > float("-inf"), y - shift, 0.0)
            moved = tl.where(largest == float("-inf"), 0.0, largest - shift)
            depth = rescale * depth + rescale * norm * moved + e * below
        norm = rescale * norm + e
        largest = bound
    most = tl.max(largest, 0)
    # The logsumexp in two parts: y - lse would lose the digits of a log-probability that is near 0.
    share = tl.exp(largest - most)
    whole = tl.sum(norm * share, 0)
    above = tl.log(whole)
    picked, _ = bend(tl.load(row + label + tl.arange(0, 1)).to(tl.float32), scale, cap, CAPPED)
    tl.store(stats + i + tl.arange(0, 1), (picked - most) - above)
    tl.store(stats + stats_rows + i, most + above)
    if TOTALS:
        tl.store(stats + 2 * stats_rows + i, tl.sum(total, 0))
    if ENTROPY:
        moved = tl.where(largest == float("-inf"), 0.0, largest - most)
        mean = tl.sum(share * depth + share * norm * moved, 0) / whole  # of y - most
        tl.store(stats + (2 + TOTALS) * stats_rows + i, above - mean)
    if PULLS:
        of_all = tl.load(soft + i)
        of_label = tl.load(hot + i)
        of_entropy = tl.load(spread + i) if SPREAD else 0.0
        tl.debug_barrier()  # the label's logit is read before it is overwritten
        for first in range(0, columns, BLOCK):
            inside = first + j < columns
            found = tl.load(row + first + j, mask=inside, other=0.0).to(tl.float32)
            y, slope = bend(found, scale, cap, CAPPED)
            log_p = (y - most) - above
            p = tl.exp(log_p)
            d = of_all * p
            if SPREAD:
                # log(p) + entropy, without the digits that both share
                seen = tl.where(y > float("-inf"), y - most, 0.0) if CLAMPED else y - most
                d -= of_entropy * (p * (seen - mean))  # 0 of the lowest number
            d = tl.where(first + j == label, d - of_label, d)
            if FLAT:
                w = tl.load(weights + first + j, mask=inside, other=0.0) if WEIGHTED else 1.0
                d -= tl.load(flat + i) * w
            tl.store(row + first + j, (d * slope * scale).to(x.dtype.element_ty), mask=inside)


def rows(
    x: Tensor,
    labels: Tensor,
    scale: float,
    cap: float,
    weights: Tensor | None,
    stats: Tensor,
    pulls: Pulls | None,
    totals: bool = False,
    entropy: bool = False,
    clamped: bool = False,
    block: int = BLOCK,
    warps: int = WARPS,
) -> None:
    """Logits (rows, V): what they give goes to `stats`, the gradients of the logits over them.

    Args:
        x: contiguous rows, which are overwritten where there are `pulls`.
        labels: (rows,), int64.
        weights: (V,) float32, or None.
        stats: (2 to 4, rows) float32: log-probability, logsumexp, and the total and the entropy where wanted.
        pulls: see there; None: there are no gradients. Its `spread` needs the entropy.
        totals, entropy, clamped: as `chunks.walk` has them.
        block, warps: columns of a step, and warps of a thread block.
    """
    given = [None] * 4 if pulls is None else [pulls.soft, pulls.hot, pulls.flat, pulls.spread]
    block = min(block, triton.next_power_of_2(x.shape[1]))
    none = stats
    with torch.cuda.device_of(x):  # Triton launches on the current one
        rows_kernel[(x.shape[0],)](
            x, labels, none if weights is None else weights, stats,
            *(none if each is None else each for each in given),
            x.shape[1], x.stride(0), stats.stride(0), scale, cap,
            CAPPED=bool(cap), TOTALS=totals, WEIGHTED=weights is not None,
            PULLS=pulls is not None, FLAT=given[2] is not None, ENTROPY=entropy, CLAMPED=clamped,
            SPREAD=given[3] is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
