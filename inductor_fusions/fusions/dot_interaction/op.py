"""The operation `inductor_fusions::dot_interaction`, its gradients and FLOPs.

    y[b] = dense[b], and behind it the sum over d of t[b, i, d] * t[b, j, d] for each pair i, j of a triangle

On CUDA devices one kernel reads t once and writes y, without the matrix of all products; so does the
backward. Inductor launches both as it does its own. Elsewhere they are what torch makes of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...lowering import define

#: Dtypes that the kernels multiply.
DTYPES = (torch.bfloat16, torch.float16)


def check_features(name: str, t: Tensor, dense: Tensor | None) -> None:
    """Refuse operands that the operation `name` does not take.

    Raises:
        ValueError: t is no batch of floating features, or dense no matrix of their dtype.
        RuntimeError: they have different numbers of samples.
    """
    if t.dim() != 3 or not t.is_floating_point():
        raise ValueError(f"{name} needs floating features of shape (samples, features, width)")
    if dense is not None:
        if dense.dim() != 2 or dense.dtype != t.dtype:
            raise ValueError("dense must be a matrix with the dtype of the features")
        torch._check(dense.shape[0] == t.shape[0], lambda: "t and dense have different numbers of samples")


def has_kernel(t: Tensor) -> bool:
    """Whether the kernels compute this."""
    return t.is_cuda and torch.version.hip is None and t.dtype in DTYPES and fits(t.shape[1], t.shape[2])


def fits(features: Any, width: Any) -> bool:
    """Whether the features of a sample, and their products, fit into a thread block."""
    from . import kernels

    return bool(0 < features <= kernels.MOST_FEATURES and 0 < width <= kernels.WIDEST)


def pair_count(features: Any, diagonal: bool) -> Any:
    """How many pairs a triangle has."""
    return features * (features - 1) // 2 + features * diagonal


def triangle(features: int, upper: bool, diagonal: bool, device: Any = None) -> Tensor:
    """(2, pairs): rows and columns of the pairs, row by row."""
    if upper:
        return torch.triu_indices(features, features, 1 - diagonal, device=device)
    return torch.tril_indices(features, features, diagonal - 1, device=device)


def _interact(
    t: Tensor, dense: Tensor | None, upper: bool, diagonal: bool, tiles: list[int], wrap: Any
) -> Tensor:
    if has_kernel(t):
        from . import kernels

        return kernels.interaction(t, dense, upper, diagonal, tiles, wrap)
    first, second = triangle(t.shape[1], upper, diagonal, t.device).unbind()
    pairs = torch.bmm(t, t.transpose(1, 2))[:, first, second]
    return pairs if dense is None else torch.cat([dense, pairs], 1)


def _differentiate(
    dy: Tensor, t: Tensor, x: int, upper: bool, diagonal: bool, tiles: list[int], wrap: Any
) -> Tensor:
    if has_kernel(t):
        from . import kernels

        return kernels.gradient(dy, t, x, upper, diagonal, tiles, wrap)
    first, second = triangle(t.shape[1], upper, diagonal, t.device).unbind()
    g = t.new_zeros((t.shape[0], t.shape[1], t.shape[1]))
    g[:, first, second] = dy[:, x:]
    return torch.bmm(g + g.transpose(1, 2), t)


def as_it_is(kernel: Any) -> Any:
    """What launches a kernel in eager mode."""
    return kernel


def _dot_interaction(
    t: Tensor, dense: Tensor | None, upper: bool, diagonal: bool, tiles: list[int]
) -> Tensor:
    """`tiles`: samples of a thread block and warps, forward and backward; empty: those of the package."""
    check_features("dot_interaction", t, dense)
    with torch.cuda.device_of(t):  # Triton launches on the current one
        return _interact(t, dense, upper, diagonal, tiles, as_it_is)


def _gradient(dy: Tensor, t: Tensor, x: int, upper: bool, diagonal: bool, tiles: list[int]) -> Tensor:
    """The gradient of t; dense has x columns."""
    with torch.cuda.device_of(t):
        return _differentiate(dy, t, x, upper, diagonal, tiles, as_it_is)


def _empty(t: Tensor, dense: Tensor | None, upper: bool, diagonal: bool, tiles: list[int]) -> Tensor:
    check_features("dot_interaction", t, dense)
    columns = 0 if dense is None else dense.shape[1]
    return t.new_empty((t.shape[0], columns + pair_count(t.shape[1], diagonal)))


def empty_gradient(dy: Tensor, t: Tensor, *_: Any) -> Tensor:
    """The fake kernel of the gradient of t."""
    return t.new_empty(t.shape)


def traced(fn: Any) -> Any:
    """`fn` with kernels that a graph can hold."""
    return lambda *args: fn(*args, torch.library.wrap_triton)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    t, dense, *ctx.options = inputs
    ctx.x = 0 if dense is None else dense.shape[1]
    ctx.save_for_backward(t if ctx.needs_input_grad[0] else None)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (t,) = ctx.saved_tensors
    dt = GRADIENT(dy, t, ctx.x, *ctx.options) if ctx.needs_input_grad[0] else None
    # Not a view: an operation's gradients may not share memory with what comes in.
    ddense = dy[:, : ctx.x].clone() if ctx.needs_input_grad[1] else None
    return dt, ddense, None, None, None


def count_flops(t_shape: Any) -> int:
    """Two for each multiplication and addition of all products, as the matrix product has them."""
    samples, features, width = t_shape
    return int(2 * samples * features * features * width)


GRADIENT = define(
    "dot_interaction_gradient", _gradient, empty_gradient, flops=lambda dy, t, *_: count_flops(t),
    traced=traced(_differentiate),
)  # fmt: skip
DOT_INTERACTION = define(
    "dot_interaction", _dot_interaction, _empty, flops=lambda t, *_: count_flops(t), setup=_setup,
    backward=_backward, traced=traced(_interact),
)  # fmt: skip
