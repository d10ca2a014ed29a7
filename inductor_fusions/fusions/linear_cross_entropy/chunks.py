"""Logits of a linear, a chunk of rows at a time: what a loss needs of each row, and gradients.

    y[i] = scale * (h[i] @ w.T + bias)            or cap * tanh(scale * (h[i] @ w.T + bias))

A chunk of logits is one product of the library's, in the dtype that stock has for all of them. Its rows are
then read for their logsumexp, and overwritten by the gradients of the logits, which two more products read.
On CUDA devices one kernel does that (`kernels`), elsewhere operations of torch do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...decisions import unsupported

#: Bytes of logits that are in memory at a time, at most: products of fewer rows take longer.
CHUNK = {"cuda": 2**30, "cpu": 32 * 2**20}
#: A chunk is at most this part of all logits.
PART = 2
#: Rows of a chunk are a multiple of it, where they are as many.
ROWS = 128
#: Chunks whose gradients of a weight may be rounded to bfloat16 one after the other: the error grows with the
#: root of half of their number, and stays within the budget. More are added up in float32.
MOST_ROUNDED = 16
#: Bytes of a float32 sum of the gradient of a weight that are never too many.
WIDE_SUM = 256 * 2**20


@dataclass(frozen=True)
class Head:
    """A linear, and what is done to each of its results.

    Attributes:
        w: (V, H).
        bias: (V,) or None.
        scale: factor of each result.
        cap: bound of a tanh behind it; 0: there is none.
    """

    w: Tensor
    bias: Tensor | None
    scale: float
    cap: float


@dataclass(frozen=True)
class Pulls:
    """Gradients of the logits: soft[i] * p[j] - hot[i] * (j == label[i]) - flat[i] * weights[j]
    - spread[i] * p[j] * (log(p[j]) + entropy(p)), where p is softmax(y[i]).

    Attributes:
        soft, hot: (rows,).
        flat, spread: (rows,), or None.
    """

    soft: Tensor
    hot: Tensor
    flat: Tensor | None = None
    spread: Tensor | None = None

    def of(self, rows: slice) -> Pulls:
        """The gradients of some rows."""
        flat, spread = (None if each is None else each[rows] for each in (self.flat, self.spread))
        return Pulls(self.soft[rows], self.hot[rows], flat, spread)


@dataclass(frozen=True)
class Found:
    """Statistics of each row, of shape (rows,), and gradients; a gradient that was not asked for is empty.

    Attributes:
        log_p: y[i, label[i]] - lse[i], the logarithm of the label's probability.
        lse: the logsumexp of y[i].
        total: the sum of y[i, j] * weights[j]; empty where it was not asked for.
        entropy: of softmax(y[i]); empty where it was not asked for.
        dh, dw, db: in the dtypes of h, w and bias.
    """

    log_p: Tensor
    lse: Tensor
    total: Tensor
    entropy: Tensor
    dh: Tensor
    dw: Tensor
    db: Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


def chunk_rows(rows: int, columns: int, itemsize: int, device: str) -> int:
    """How many rows of logits are in memory at a time."""
    limit = min(CHUNK.get(device, CHUNK["cpu"]), rows * columns * itemsize // PART)
    most = limit // (columns * itemsize)
    most = max(1, most if most < ROWS else most // ROWS * ROWS)
    each = -(-rows // -(-rows // most))  # of about the same size
    return min(most, -(-each // ROWS) * ROWS)


def walk(
    h: Tensor,
    head: Head,
    labels: Tensor,
    weights: Tensor | None = None,
    totals: bool = False,
    pulls: Pulls | None = None,
    wants: Sequence[bool] = (False, False, False),
    logits: Tensor | None = None,
    entropy: bool = False,
    clamped: bool = False,
) -> Found:
    """Read the logits of all rows, chunk by chunk.

    Args:
        h: (rows, H), of the dtype of the weight.
        labels: (rows,), in 0..V-1; negative: the row is left out, its results and gradients are 0.
        weights: (V,), in the wide dtype; None: all are 1.
        totals: whether `total` is wanted.
        pulls: gradients of the logits, where gradients are wanted.
        wants: which of dh, dw and db are wanted.
        logits: (rows, V), what the linear gives, where it is there; it is not changed.
        entropy: whether `entropy` is wanted.
        clamped: whether a class of probability 0 adds 0 to an entropy if its logit is -inf; else NaN.
    """
    rows, columns = h.shape[0], head.w.shape[0]
    wide = wide_dtype(h.dtype)
    stats = torch.zeros((2 + totals + entropy, rows), dtype=wide, device=h.device)
    step = chunk_rows(rows, columns, h.itemsize, h.device.type) if rows else 1
    sums = _Sums(h, head, -(-rows // step), wants)
    buffer = h.new_empty((min(step, rows), columns))
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        x = buffer[: some.stop - first]
        if logits is not None:
            x.copy_(logits[some])
        elif head.bias is None:
            torch.mm(h[some], head.w.t(), out=x)
        else:
            torch.addmm(head.bias, h[some], head.w.t(), out=x)
        part = None if pulls is None else pulls.of(some)
        _rows(x, labels[some], head, weights, stats[:, some], part, totals, entropy, clamped)
        if pulls is not None:
            sums.add(x, some)
    none = stats.new_empty(0)
    found = stats[0], stats[1], stats[2] if totals else none, stats[-1] if entropy else none
    return Found(*found, *sums.results())


def _rows(
    x: Tensor, labels: Tensor, head: Head, weights: Tensor | None, stats: Tensor, pulls: Pulls | None,
    totals: bool, entropy: bool, clamped: bool,
) -> None:  # fmt: skip
    """Write what a chunk of logits gives into `stats`, and the gradients of the logits over them."""
    if has_kernel(x):
        from . import kernels

        kernels.rows(x, labels, head.scale, head.cap, weights, stats, pulls, totals, entropy, clamped)
        return
    y = x.to(stats.dtype)
    if head.scale != 1:
        y = y * head.scale
    bent = None
    if head.cap:
        bent = y.tanh()
        y = bent * head.cap
    there, at = labels >= 0, labels.clamp(min=0)[:, None]
    if totals:
        stats[2] = torch.where(there, y.sum(1) if weights is None else y @ weights, 0)
    logs = y.log_softmax(1)
    log_p = logs.gather(1, at)
    stats[0] = torch.where(there, log_p[:, 0], 0)
    stats[1] = torch.where(there, (y.gather(1, at) - log_p)[:, 0], 0)
    kept = logs.clamp(min=torch.finfo(logs.dtype).min) if clamped else logs
    if entropy:
        stats[-1] = torch.where(there, -(logs.exp() * kept).sum(1), 0)
    if pulls is None:
        return
    if pulls.spread is None:
        d = logs.exp_().mul_(pulls.soft[:, None])
    else:
        # log(p) + entropy, without the digits that both share
        p, seen = logs.exp(), y - y.amax(1, keepdim=True)
        seen = seen.clamp(min=torch.finfo(y.dtype).min) if clamped else seen
        seen = seen - (p * seen).sum(1, keepdim=True)
        d = p * pulls.soft[:, None] - pulls.spread[:, None] * seen.mul_(p)
    d.scatter_add_(1, at, -pulls.hot[:, None])
    if pulls.flat is not None:
        d.sub_(pulls.flat[:, None] if weights is None else pulls.flat[:, None] * weights)
    if bent is not None:
        d.mul_((1 - bent * bent).mul_(head.cap))
    if head.scale != 1:
        d.mul_(head.scale)
    x.copy_(d)


def has_kernel(x: Tensor) -> bool:
    """Whether the kernel reads such logits."""
    halves = torch.bfloat16, torch.float16, torch.float32
    return x.dtype in halves and not unsupported(x.device)


class _Sums:
    """The gradients that chunks add to.

    Args:
        wants: which of dh, dw and db are wanted.
    """

    def __init__(self, h: Tensor, head: Head, chunks: int, wants: Sequence[bool]) -> None:
        self.h, self.w, self.bias = h, head.w, head.bias
        # Each is a tensor of its own: results of an operation share no memory.
        self.dh, self.dw, self.db = (h.new_empty(0) for _ in range(3))
        wide, self.fresh = wide_dtype(h.dtype), False
        if wants[0]:
            self.dh = h.new_empty(h.shape)
        if wants[1]:
            bytes_wide = self.w.numel() * wide.itemsize
            rounded = h.is_cuda and h.dtype == torch.bfloat16
            rounded = rounded and chunks <= MOST_ROUNDED and bytes_wide > WIDE_SUM
            shape, dtype = self.w.shape, h.dtype if rounded else wide
            # The first product writes it, where there are rows and the dtypes are the same.
            self.fresh = dtype == h.dtype and chunks > 0
            self.dw = (torch.empty if self.fresh else torch.zeros)(shape, dtype=dtype, device=h.device)
        if wants[2] and head.bias is not None:
            self.db = torch.zeros(self.w.shape[0], dtype=wide, device=h.device)

    def add(self, d: Tensor, rows: slice) -> None:
        """The gradients of a chunk of logits."""
        if self.dh.numel():
            torch.mm(d, self.w, out=self.dh[rows])
        if self.dw.numel():
            if self.fresh:
                torch.mm(d.t(), self.h[rows], out=self.dw)
            else:
                _add_product(self.dw, d.t(), self.h[rows])
            self.fresh = False
        if self.db.numel():
            self.db += d.sum(0, dtype=self.db.dtype)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """dh, dw and db in the dtypes of what they are gradients of."""
        db = self.db if self.bias is None else self.db.to(self.bias.dtype)
        return self.dh, self.dw.to(self.w.dtype), db


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, rounded once to the dtype of the total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total += a @ b
