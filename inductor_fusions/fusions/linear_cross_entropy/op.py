"""The operations of the loss head, their gradients and FLOPs.

`linear_cross_entropy` is a loss: one number. The logits determine their gradient up to a factor. So the
forward computes the gradients of its operands from the same logits, and the backward multiplies them by the
gradient of the loss. `linear_softmax_rows` has one result for each row. Its incoming gradient is known only
in the backward, which recomputes the logits.

Neither has all logits in memory: `chunks` has the loop over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _inductor
from ...lowering import define
from .chunks import Head, Pulls, walk, wide_dtype


def _check(h: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor) -> None:
    if h.dim() != 2 or w.dim() != 2 or labels.dim() != 1:
        raise ValueError("a loss head needs h (rows, H), w (V, H) and labels (rows,)")
    if not (h.is_floating_point() and h.dtype == w.dtype) or labels.dtype != torch.int64:
        raise ValueError("h and w of a loss head need one floating dtype, and labels int64")
    if bias is not None and (bias.dtype != h.dtype or bias.dim() != 1):
        raise ValueError("the bias of a loss head must be a vector with the dtype of h")
    torch._check(h.shape[0] == labels.shape[0], lambda: "h and labels have different numbers of rows")
    torch._check(h.shape[1] == w.shape[1], lambda: "h and w have different numbers of columns")


def _within(labels: Tensor, ignored: Tensor | bool, columns: int) -> None:
    """Raise, on a device with its asserts, where a label is none of the columns."""
    fits = (labels >= 0) & (labels < columns) | ignored
    _inductor.assert_on_device(fits.all(), "a label is out of bounds")


def _linear_cross_entropy(
    h: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None, logits: Tensor | None,
    scale: float, cap: float, ignore_index: int, smoothing: float, mean: bool, wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """F.cross_entropy of scale * (h @ w.T + bias), or of cap * tanh(of that) where cap is not 0.

    Args:
        h: (rows, H).
        w: (V, H).
        bias: (V,) or None.
        labels: (rows,), int64.
        weights: (V,), of the classes, or None.
        logits: (rows, V), h @ w.T + bias, where something else needs them all; None: they are made here.
        mean: whether the sum is divided by the weights of the labels that count.
        wants: whether the gradients of h, w and bias are wanted.

    Returns:
        The loss, in float32 or float64, and its gradients, empty where they are not wanted.
    """
    _check(h, w, bias, labels)
    wide, columns = wide_dtype(h.dtype), w.shape[0]
    there = labels != ignore_index
    _within(labels, ~there, columns)
    labels = torch.where(there, labels, -1)
    weights = None if weights is None else weights.to(wide)
    ones = there.to(wide)
    own = ones if weights is None else weights[labels.clamp(min=0)] * ones
    whole = columns if weights is None else weights.sum()
    divisor = own.sum() if mean else 1
    even = smoothing / columns if smoothing else 0.0

    def pulled(factor: Any) -> Tensor:
        # A mean over nothing divides by 0: what is left out has no gradient all the same.
        return torch.where(there, factor / divisor, 0)

    pulls = None
    if any(wants):
        hot = pulled((1 - smoothing) * own)
        soft = hot + pulled(ones * even * whole) if smoothing else hot
        flat = pulled(ones * even) if smoothing else None
        pulls = Pulls(soft, hot, flat)
    found = walk(h, Head(w, bias, scale, cap), labels, weights, smoothing != 0, pulls, wants, logits)
    loss = -(own * found.log_p).sum()
    if smoothing:
        loss = (1 - smoothing) * loss + even * (whole * found.lse * there - found.total).sum()
    return loss / divisor, found.dh, found.dw, found.db


def _rows(
    h: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None, scale: float,
    cap: float, totals: bool, entropy: bool, clamped: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Log-probability of the label, logsumexp, sum and entropy of each row of y = scale * (h @ w.T + bias),
    or of cap * tanh(that).

    Args:
        labels: (rows,), int64; -1: the results of the row are 0, and so is its gradient.
        totals: whether the sum of y * weights is wanted; else it is empty.
        entropy: whether the entropy of softmax(y) is wanted; else it is empty.
        clamped: whether a class of probability 0 adds 0 to the entropy if its logit is -inf; else NaN.

    Returns:
        Four vectors (rows,) in float32 or float64.
    """
    _check(h, w, bias, labels)
    _within(labels, labels == -1, w.shape[0])
    weights = None if weights is None else weights.to(wide_dtype(h.dtype))
    head = Head(w, bias, scale, cap)
    found = walk(h, head, labels, weights, totals, entropy=entropy, clamped=clamped)
    return found.log_p.clone(), found.lse.clone(), found.total.clone(), found.entropy.clone()


def _gradient(
    d_log_p: Tensor, d_lse: Tensor, d_total: Tensor, d_entropy: Tensor | None, h: Tensor, w: Tensor,
    bias: Tensor | None, labels: Tensor, weights: Tensor | None, scale: float, cap: float, totals: bool,
    clamped: bool, wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of h, w and bias, empty where they are not wanted.

    Args:
        d_entropy: of the entropy; None: nothing differentiates it.
    """
    there = labels >= 0
    wide = wide_dtype(h.dtype)
    soft, hot = (torch.where(there, d, 0) for d in (d_lse - d_log_p, -d_log_p))
    flat = torch.where(there, -d_total, 0) if totals else None
    spread = None if d_entropy is None else torch.where(there, d_entropy, 0)
    weights = None if weights is None else weights.to(wide)
    found = walk(
        h, Head(w, bias, scale, cap), labels, weights, False, Pulls(soft, hot, flat, spread), wants,
        entropy=spread is not None, clamped=clamped,
    )  # fmt: skip
    return found.dh, found.dw, found.db


def _empty_gradients(operands: Sequence[Any], wants: list[bool]) -> tuple[Tensor, ...]:
    return tuple(
        operands[0].new_empty(0) if x is None or not wanted else x.new_empty(x.shape)
        for x, wanted in zip(operands, wants, strict=True)
    )


def _empty_loss(
    h: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    _check(h, w, bias, labels)
    return h.new_empty((), dtype=wide_dtype(h.dtype)), *_empty_gradients((h, w, bias), others[-1])


def _empty_rows(
    h: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    _check(h, w, bias, labels)
    totals, entropy, _ = others[-3:]
    wanted = True, True, totals, entropy
    return tuple(h.new_empty(h.shape[0] if each else 0, dtype=wide_dtype(h.dtype)) for each in wanted)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    wants = inputs[-1]
    ctx.save_for_backward(*(d if wanted else None for d, wanted in zip(gradients, wants, strict=True)))


def _backward(ctx: Any, d: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    found = [
        _times(d, gradient) if needed and gradient is not None else None
        for gradient, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[:3], strict=True)
    ]
    return (*found, *(None,) * 9)


def _times(d: Tensor, gradient: Tensor) -> Tensor:
    """The product, with the zeros of rows that are left out: `d` is inf where a sum is divided by none."""
    return torch.where(gradient == 0, gradient, d * gradient)


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    h, w, bias, labels, weights, *ctx.options = inputs
    ctx.set_materialize_grads(False)  # an entropy that nothing differentiates has none
    ctx.save_for_backward(h, w, bias, labels, weights)


def _backward_rows(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    h, w, bias, labels, weights = ctx.saved_tensors
    scale, cap, totals, _, clamped = ctx.options
    *first, d_entropy = given
    wide = wide_dtype(h.dtype)
    first = [h.new_zeros(labels.shape, dtype=wide) if d is None else d for d in first]
    wants = list(ctx.needs_input_grad[:3])
    made = GRADIENT(
        *first, d_entropy, h, w, bias, labels, weights, scale, cap, totals, clamped, wants
    )  # fmt: skip
    found = [gradient if wanted else None for gradient, wanted in zip(made, wants, strict=True)]
    return (*found, *(None,) * 7)


def _flops(h: Any, w: Any, wants: Any = ()) -> int:
    """Two for each multiplication and addition of the logits, and of each gradient that is made with them."""
    return int(2 * (1 + sum(wants[:2])) * h[0] * w[0] * w[1])


LINEAR_CROSS_ENTROPY = define(
    "linear_cross_entropy", _linear_cross_entropy, _empty_loss,
    flops=lambda h, w, *others: _flops(h, w, others[-1]), setup=_setup, backward=_backward,
)  # fmt: skip
GRADIENT = define(
    "linear_softmax_rows_gradient", _gradient,
    lambda *given: _empty_gradients(given[4:7], given[-1]),
    flops=lambda *given: _flops(given[4], given[5], given[-1]),
)  # fmt: skip
SOFTMAX_ROWS = define(
    "linear_softmax_rows", _rows, _empty_rows, flops=lambda h, w, *_: _flops(h, w),
    setup=_setup_rows, backward=_backward_rows,
)  # fmt: skip
