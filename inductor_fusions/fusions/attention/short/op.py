"""`inductor_fusions::short_attention` and its backward: eager and fake kernels, gradient, FLOPs.

Nothing but the inputs is kept for the backward: a softmax over one tile is computed anew for less than
reading it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ....lowering import define
from .plan import MOST_KEYS


def forward(
    q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor], numbers: list[float], scale: float, causal: bool
) -> Tensor:
    check(q, k, v, masks, numbers)
    weights = _scores(q, k, masks, numbers, scale, causal).softmax(-1)
    return _result(q, v).copy_(weights @ v.to(weights.dtype))


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor], numbers: list[float], scale: float,
    causal: bool, windows: int,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k and v, and of the scores where `windows` is not 0.

    The gradient of the scores is (parts, period, heads, queries, keys) in float32: each part is the sum over
    `windows` samples that are a period apart (the last one over those that are left).
    """
    scores = _scores(q, k, masks, numbers, scale, causal)
    weights = scores.softmax(-1)
    wide = [t.to(scores.dtype) for t in (grad, q, k, v)]
    grad, wide_q, wide_k, wide_v = wide
    change = weights * (grad @ wide_v.mT - (weights * (grad @ wide_v.mT)).sum(-1, keepdim=True))
    kept = _where_kept(change, masks)
    made = [
        _like(q).copy_(kept @ wide_k * scale),
        _like(k).copy_(kept.mT @ wide_q * scale),
        _like(v).copy_(weights.mT @ grad),
    ]
    if windows:
        by_period = change.unflatten(0, (-1, period(masks)))
        made.append(torch.stack([part.sum(0) for part in by_period.split(windows)]).to(_score_dtype(q)))
    return made


def check(q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Tensor], numbers: Sequence[float]) -> None:
    """Refuse arguments that do not fit together."""
    for fault in _faults(q, k, v, masks, numbers):
        raise ValueError(fault)


def _faults(
    q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Tensor], numbers: Sequence[float]
) -> Iterator[str]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            yield f"{name} of short_attention must be (batch, heads, length, dim), not {x.dim()}-D"
        if not x.is_floating_point() or x.dtype != q.dtype:
            yield f"q, k and v of short_attention need one floating dtype; {name} is {x.dtype}"
    for name, x in (("k", k), ("v", v)):
        for dim, size in ((0, "batch"), (1, "number of heads")):
            if x.shape[dim] != q.shape[dim]:
                yield f"{name} of short_attention needs the {size} of q, {q.shape[dim]}, not {x.shape[dim]}"
    if k.shape[3] != q.shape[3]:
        yield f"k of short_attention needs the head dim of q, {q.shape[3]}, not {k.shape[3]}"
    if v.shape[2] != k.shape[2]:
        yield f"v of short_attention needs the length of k, {k.shape[2]}, not {v.shape[2]}"
    for name, length in (("q", q.shape[2]), ("k", k.shape[2])):
        if length > MOST_KEYS:
            yield f"{name} of short_attention may have at most {MOST_KEYS} rows, not {length}"
    if len(masks) != len(numbers):
        yield f"short_attention needs one number for each of its {len(masks)} masks"
    for i, mask in enumerate(masks):
        if mask.dim() != 4:
            yield f"masks[{i}] of short_attention must be 4-D, not {mask.dim()}-D"
    whole, repeats = (*q.shape[:3], k.shape[2]), period(masks)
    for i, mask in enumerate(masks):
        if not (mask.is_floating_point() or mask.dtype == torch.bool):
            yield f"masks[{i}] of short_attention must be floating or boolean, not {mask.dtype}"
        first = mask.shape[0]
        if first != q.shape[0] and (q.shape[0] % first or repeats % first):
            yield (
                f"the first size of masks[{i}] of short_attention, {first}, must divide the batch "
                f"({q.shape[0]}) and the largest first size of a mask ({repeats})"
            )
        for dim in (1, 2, 3):
            own = mask.shape[dim]
            if own != 1 and own != whole[dim]:
                yield f"masks[{i}] of short_attention has size {own} in dim {dim}, not 1 or {whole[dim]}"


def period(masks: Sequence[Tensor]) -> Any:
    """The number of samples after which the masks repeat."""
    found: Any = 1
    for mask in masks:
        if mask.shape[0] > found:
            found = mask.shape[0]
    return found


def _score_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _scores(
    q: Tensor, k: Tensor, masks: Sequence[Tensor], numbers: Sequence[float], scale: float, causal: bool
) -> Tensor:
    """The masked scores, in float32 (float64 for float64)."""
    dtype = _score_dtype(q)
    scores = (q.to(dtype) @ k.to(dtype).mT) * scale
    for mask, number in zip(masks, numbers, strict=True):
        given = _repeated(mask, q.shape[0])
        if mask.dtype == torch.bool:
            scores = torch.where(given, scores, number)
        else:
            scores = scores + given.to(dtype) * number
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def _repeated(mask: Tensor, batch: int) -> Tensor:
    """The mask of each sample: that of its number modulo the first size."""
    return mask if mask.shape[0] == 1 else mask.repeat(batch // mask.shape[0], 1, 1, 1)


def _where_kept(change: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """A gradient of scores where no mask has replaced them."""
    for mask in masks:
        if mask.dtype == torch.bool:
            change = torch.where(_repeated(mask, change.shape[0]), change, 0.0)
    return change


def dense(batch: Any, heads: Any, length: Any, dim: Any) -> tuple[Any, ...]:
    """Strides of (batch, heads, length, dim) whose heads lie beside each other, as projections want them."""
    return (length * heads * dim, dim, heads * dim, 1)


def _like(x: Tensor, dim: Any = None) -> Tensor:
    shape = x.shape if dim is None else (*x.shape[:3], dim)
    return x.new_empty_strided(shape, dense(*shape))


def _result(q: Tensor, v: Tensor) -> Tensor:
    return _like(q, v.shape[3])


def _empty(
    q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor], numbers: list[float], *_: Any
) -> Tensor:  # fmt: skip
    check(q, k, v, masks, numbers)
    return _result(q, v)


def _empty_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor], *others: Any
) -> list[Tensor]:
    windows = others[-1]
    made = [_like(q), _like(k), _like(v)]
    if windows:
        repeats = period(masks)
        parts = (q.shape[0] // repeats + windows - 1) // windows
        made.append(q.new_empty((parts, repeats, q.shape[1], q.shape[2], k.shape[2]), dtype=_score_dtype(q)))
    return made


# -- gradient -------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, masks, ctx.numbers, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *masks)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    from .plan import windows_of

    q, k, v, *masks = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[3])
    windows = windows_of(q.shape, k.shape[2], period(masks)) if any(wanted) else 0
    dq, dk, dv, *change = SHORT_ATTENTION_BACKWARD(
        grad, q, k, v, masks, ctx.numbers, ctx.scale, ctx.causal, windows
    )
    dmasks: list[Tensor | None] = [None] * len(masks)
    if change:
        total = change[0].sum(0)
        for i in reversed(range(len(masks))):
            if masks[i].dtype == torch.bool:
                total = torch.where(_repeated(masks[i], total.shape[0]), total, 0.0)
            elif wanted[i]:
                dmasks[i] = _summed(total, masks[i].shape, ctx.numbers[i]).to(masks[i].dtype)
    # An empty list of numbers looks like a list of tensors, which wants a list of gradients.
    return dq, dk, dv, dmasks, None if masks else [], None, None


def _summed(change: Tensor, shape: Sequence[Any], number: float) -> Tensor:
    """The gradient of a mask from that of the scores of one period."""
    if shape[0] != change.shape[0]:
        change = change.unflatten(0, (-1, shape[0])).sum(0)
    dims = [dim for dim in (1, 2, 3) if shape[dim] == 1 and change.shape[dim] != 1]
    change = change.sum(dims, keepdim=True) if dims else change
    return change if number == 1.0 else change * number


def _flops(q: Any, k: Any, columns: Any) -> int:
    """Two for each multiplication and addition of products of the scores with this many columns."""
    return int(2 * q[0] * q[1] * q[2] * k[2] * columns)


SHORT_ATTENTION_BACKWARD = define(
    "short_attention_backward", _backward, _empty_gradients,
    flops=lambda grad, q, k, v, *_: _flops(q, k, 3 * q[3] + 2 * v[3]),
)  # fmt: skip
SHORT_ATTENTION = define(
    "short_attention", forward, _empty, flops=lambda q, k, v, *_: _flops(q, k, q[3] + v[3]),
    setup=_setup, backward=_gradient,
)  # fmt: skip
