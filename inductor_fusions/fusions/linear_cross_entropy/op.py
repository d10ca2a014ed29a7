"""The operations of the loss head, their gradients and FLOPs.

`linear_cross_entropy` is a loss: one number. Its gradient of the logits is known up to a factor as soon as
they are, so that the forward makes the gradients of its operands from the same logits, and the backward
multiplies them by the gradient of the loss. `linear_softmax_rows` has one result for each row. What gradient
it gets is known in the backward alone, which makes the logits again.

Neither has all logits in memory: `chunks` has the loop over them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ... import _inductor
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


@torch.library.custom_op("inductor_fusions::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    h: Tensor,
    w: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor | None,
    logits: Tensor | None,
    scale: float,
    cap: float,
    ignore_index: int,
    smoothing: float,
    mean: bool,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """F.cross_entropy of scale * (h @ w.T + bias), or of cap * tanh(of that) where cap is not 0.

    Args:
        h: (rows, H).
        w: (V, H).
        bias: (V,) or None.
        labels: (rows,), int64.
        weights: (V,), of the classes, or None.
        logits: (rows, V), h @ w.T + bias, where something else needs them all; None: they are made here.
        scale, cap, ignore_index, smoothing: numbers.
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
    loss = (own * (found.lse - found.picked)).sum()
    if smoothing:
        loss = (1 - smoothing) * loss + even * (whole * found.lse * there - found.total).sum()
    return loss / divisor, found.dh, found.dw, found.db


@torch.library.custom_op("inductor_fusions::linear_softmax_rows", mutates_args=())
def _rows(
    h: Tensor,
    w: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor | None,
    scale: float,
    cap: float,
    totals: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of y = scale * (h @ w.T + bias), or cap * tanh(of that): y[label], the logsumexp, the sum.

    Args:
        h, w, bias, weights, scale, cap: as of `linear_cross_entropy`.
        labels: (rows,), int64; -1: the results of the row are 0, and so is its gradient.
        totals: whether the sum of y * weights is wanted; else it is empty.

    Returns:
        Three vectors (rows,) in float32 or float64.
    """
    _check(h, w, bias, labels)
    _within(labels, labels == -1, w.shape[0])
    weights = None if weights is None else weights.to(wide_dtype(h.dtype))
    found = walk(h, Head(w, bias, scale, cap), labels, weights, totals)
    return found.picked.clone(), found.lse.clone(), found.total.clone()


@torch.library.custom_op("inductor_fusions::linear_softmax_rows_gradient", mutates_args=())
def _gradient(
    d_picked: Tensor,
    d_lse: Tensor,
    d_total: Tensor,
    h: Tensor,
    w: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    weights: Tensor | None,
    scale: float,
    cap: float,
    totals: bool,
    wants: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of h, w and bias, empty where they are not wanted."""
    there = labels >= 0
    wide = wide_dtype(h.dtype)
    soft, hot = (torch.where(there, d, 0) for d in (d_lse, -d_picked))
    flat = torch.where(there, -d_total, 0) if totals else None
    weights = None if weights is None else weights.to(wide)
    found = walk(
        h, Head(w, bias, scale, cap), labels, weights, False, Pulls(soft, hot, flat), wants
    )  # fmt: skip
    return found.dh, found.dw, found.db


#: What graphs call.
LINEAR_CROSS_ENTROPY: Any = torch.ops.inductor_fusions.linear_cross_entropy.default
SOFTMAX_ROWS: Any = torch.ops.inductor_fusions.linear_softmax_rows.default
GRADIENT: Any = torch.ops.inductor_fusions.linear_softmax_rows_gradient.default


def _empty_gradients(h: Tensor, w: Tensor, bias: Tensor | None, wants: list[bool]) -> tuple[Tensor, ...]:
    operands = (h, w, bias)
    return tuple(
        h.new_empty(0) if x is None or not wanted else x.new_empty(x.shape)
        for x, wanted in zip(operands, wants, strict=True)
    )


@_linear_cross_entropy.register_fake
def _(
    h: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None,
    logits: Tensor | None, scale: float, cap: float, ignore_index: int, smoothing: float, mean: bool,
    wants: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(h, w, bias, labels)
    return h.new_empty((), dtype=wide_dtype(h.dtype)), *_empty_gradients(h, w, bias, wants)


@_rows.register_fake
def _(
    h: Tensor, w: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None, scale: float,
    cap: float, totals: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(h, w, bias, labels)
    wide = wide_dtype(h.dtype)
    one = (h.shape[0],)
    return (*(h.new_empty(one, dtype=wide) for _ in range(2)), h.new_empty(one if totals else 0, dtype=wide))


@_gradient.register_fake
def _(
    d_picked: Tensor, d_lse: Tensor, d_total: Tensor, h: Tensor, w: Tensor, bias: Tensor | None,
    labels: Tensor, weights: Tensor | None, scale: float, cap: float, totals: bool, wants: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    return _empty_gradients(h, w, bias, wants)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, *gradients = output
    ctx.mark_non_differentiable(*gradients)
    wants = inputs[-1]
    ctx.save_for_backward(*(d if wanted else None for d, wanted in zip(gradients, wants, strict=True)))


def _backward(ctx: Any, d: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
    found = [
        d * gradient if needed and gradient is not None else None
        for gradient, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[:3], strict=True)
    ]
    return (*found, *(None,) * 9)


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    h, w, bias, labels, weights, *ctx.options = inputs
    ctx.save_for_backward(h, w, bias, labels, weights)


def _backward_rows(ctx: Any, d_picked: Tensor, d_lse: Tensor, d_total: Tensor) -> tuple[Tensor | None, ...]:
    h, w, bias, labels, weights = ctx.saved_tensors
    wants = list(ctx.needs_input_grad[:3])
    made = GRADIENT(d_picked, d_lse, d_total, h, w, bias, labels, weights, *ctx.options, wants)
    found = [gradient if wanted else None for gradient, wanted in zip(made, wants, strict=True)]
    return (*found, *(None,) * 5)


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup)
_rows.register_autograd(_backward_rows, setup_context=_setup_rows)


def _count(h_shape: Any, w_shape: Any, products: int) -> int:
    return int(2 * products * h_shape[0] * w_shape[0] * w_shape[1])


@register_flop_formula(torch.ops.inductor_fusions.linear_cross_entropy)
def flops(h_shape: Any, w_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Two for each multiplication and addition of the logits, and of each gradient that is made with them."""
    wants = kwargs.get("wants", args[-1])
    return _count(h_shape, w_shape, 1 + sum(wants[:2]))


@register_flop_formula(torch.ops.inductor_fusions.linear_softmax_rows)
def rows_flops(h_shape: Any, w_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Those of the logits."""
    return _count(h_shape, w_shape, 1)


@register_flop_formula(torch.ops.inductor_fusions.linear_softmax_rows_gradient)
def gradient_flops(
    d_picked: Any, d_lse: Any, d_total: Any, h_shape: Any, w_shape: Any, *args: Any, **kwargs: Any
) -> int:
    """Those of the logits, which are made again, and of each gradient."""
    wants = kwargs.get("wants", args[-1])
    return _count(h_shape, w_shape, 1 + sum(wants[:2]))
