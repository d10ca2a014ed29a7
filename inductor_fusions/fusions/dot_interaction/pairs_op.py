"""The operation `inductor_fusions::dot_pairs`, its gradient and FLOPs: pairs that a tensor names.

    y[b] = dense[b], and behind it the sum over d of t[b, i, d] * t[b, j, d] for each cell i * F + j

As `dot_interaction`, whose pairs are a triangle. What the tensor holds need not be known, and a pair may be
there more than once. Every cell is one of the matrix: what makes them checks that, as torch's indexing does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...lowering import define
from .op import as_it_is, check_features, count_flops, empty_gradient, has_kernel, traced


def _check(t: Tensor, dense: Tensor | None, cells: Tensor) -> None:
    check_features("dot_pairs", t, dense)
    if cells.dim() != 1 or cells.dtype != torch.int64:
        raise ValueError("cells of dot_pairs must be an int64 vector")


def takes(pairs: Any) -> bool:
    """Whether a number of pairs is known, and fits into a thread block."""
    from . import kernels

    return isinstance(pairs, int) and 0 < pairs <= kernels.MOST_PAIRS


def _has_kernel(t: Tensor, cells: Tensor) -> bool:
    return has_kernel(t) and takes(cells.shape[0])


def _pairs(t: Tensor, dense: Tensor | None, cells: Tensor, tiles: list[int], wrap: Any) -> Tensor:
    if _has_kernel(t, cells):
        from . import kernels

        return kernels.pairs(t, dense, cells, tiles, wrap)
    pairs = torch.bmm(t, t.transpose(1, 2)).flatten(1)[:, cells]
    return pairs if dense is None else torch.cat([dense, pairs], 1)


def _differentiate(dy: Tensor, t: Tensor, x: int, cells: Tensor, tiles: list[int], wrap: Any) -> Tensor:
    if _has_kernel(t, cells):
        from . import kernels

        return kernels.pairs_gradient(dy, t, x, cells, tiles, wrap)
    samples, features, _ = t.shape
    g = t.new_zeros((samples, features * features)).index_add(1, cells, dy[:, x:])
    g = g.view(samples, features, features)
    return torch.bmm(g + g.transpose(1, 2), t)


def _dot_pairs(t: Tensor, dense: Tensor | None, cells: Tensor, tiles: list[int]) -> Tensor:
    """`tiles` as in `dot_interaction`."""
    _check(t, dense, cells)
    with torch.cuda.device_of(t):  # Triton launches on the current one
        return _pairs(t, dense, cells, tiles, as_it_is)


def _gradient(dy: Tensor, t: Tensor, x: int, cells: Tensor, tiles: list[int]) -> Tensor:
    """The gradient of t; dense has x columns."""
    with torch.cuda.device_of(t):
        return _differentiate(dy, t, x, cells, tiles, as_it_is)


def _empty(t: Tensor, dense: Tensor | None, cells: Tensor, tiles: list[int]) -> Tensor:
    _check(t, dense, cells)
    return t.new_empty((t.shape[0], (0 if dense is None else dense.shape[1]) + cells.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    t, dense, cells, ctx.tiles = inputs
    ctx.x = 0 if dense is None else dense.shape[1]
    ctx.save_for_backward(*((t, cells) if ctx.needs_input_grad[0] else (None, None)))


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    t, cells = ctx.saved_tensors
    dt = PAIRS_GRADIENT(dy, t, ctx.x, cells, ctx.tiles) if ctx.needs_input_grad[0] else None
    # Not a view: an operation's gradients may not share memory with what comes in.
    ddense = dy[:, : ctx.x].clone() if ctx.needs_input_grad[1] else None
    return dt, ddense, None, None


PAIRS_GRADIENT = define(
    "dot_pairs_gradient", _gradient, empty_gradient, flops=lambda dy, t, *_: count_flops(t),
    traced=traced(_differentiate),
)  # fmt: skip
DOT_PAIRS = define(
    "dot_pairs", _dot_pairs, _empty, flops=lambda t, *_: count_flops(t), setup=_setup, backward=_backward,
    traced=traced(_pairs),
)  # fmt: skip
