"""The operation `inductor_fusions::dot_interaction`, its gradient and FLOPs.

    y[b] = dense[b], and behind it the sum over d of t[b, i, d] * t[b, j, d] for each pair i, j

The pairs are a triangle, or given by a tensor of cells i * F + j of the matrix of all products. Its values
need not be known, and a pair may occur more than once. The operation does not check that each cell is one of
the matrix: the indexing that makes the tensor does.

On CUDA devices one kernel reads t once and writes y, without the matrix of all products; so does the
backward. Inductor launches both as it does its own. Elsewhere they are what torch makes of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...decisions import unsupported
from ...lowering import define

#: Dtypes that the kernels multiply.
DTYPES = (torch.bfloat16, torch.float16)


class Triangle(NamedTuple):
    """The pairs of one triangle of the matrix of products, row by row."""

    upper: bool
    diagonal: bool

    def count(self, features: Any) -> Any:
        """How many pairs there are."""
        return features * (features - 1) // 2 + features * self.diagonal

    def indices(self, features: int, device: Any = None) -> Tensor:
        """(2, pairs): their rows and columns."""
        if self.upper:
            return torch.triu_indices(features, features, 1 - self.diagonal, device=device)
        return torch.tril_indices(features, features, self.diagonal - 1, device=device)


#: A triangle, or the cells i * F + j of the pairs: an int64 vector.
Pairs: TypeAlias = Triangle | Tensor


def has_kernel(t: Tensor) -> bool:
    """Whether the kernels take these features."""
    return t.dtype in DTYPES and not unsupported(t.device) and fits(t.shape[1], t.shape[2])


def fits(features: Any, width: Any) -> bool:
    """Whether the features of a sample, and their products, fit into a thread block."""
    from . import kernels

    return bool(0 < features <= kernels.MOST_FEATURES and 0 < width <= kernels.WIDEST)


def takes(pairs: Any) -> bool:
    """Whether a number of cells is known, and fits into a thread block."""
    from . import kernels

    return isinstance(pairs, int) and 0 < pairs <= kernels.MOST_PAIRS


def _is_computed_by_kernel(t: Tensor, pairs: Pairs) -> bool:
    return has_kernel(t) and (isinstance(pairs, Triangle) or takes(pairs.shape[0]))


def _check(t: Tensor, dense: Tensor | None, pairs: Pairs) -> None:
    """Refuse operands that do not fit together.

    Raises:
        ValueError: t is no batch of floating features, dense no matrix of their dtype, or there are no cells.
        RuntimeError: t and dense have different numbers of samples.
    """
    if t.dim() != 3 or not t.is_floating_point():
        raise ValueError("dot products need floating features of shape (samples, features, width)")
    if dense is not None:
        if dense.dim() != 2 or dense.dtype != t.dtype:
            raise ValueError("dense must be a matrix with the dtype of the features")
        torch._check(dense.shape[0] == t.shape[0], lambda: "t and dense have different numbers of samples")
    if isinstance(pairs, Tensor) and (pairs.dim() != 1 or pairs.dtype != torch.int64):
        raise ValueError("cells of dot_interaction must be an int64 vector")


def _pairs(cells: Tensor | None, upper: bool, diagonal: bool) -> Pairs:
    return Triangle(upper, diagonal) if cells is None else cells


def _of_pairs(pairs: Pairs, t: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the pairs in the matrix of all products."""
    if isinstance(pairs, Triangle):
        first, second = pairs.indices(t.shape[1], t.device).unbind()
        return first, second
    return pairs // t.shape[1], pairs % t.shape[1]


def _dot_interaction(
    t: Tensor, dense: Tensor | None, cells: Tensor | None, upper: bool, diagonal: bool, tiles: list[int]
) -> Tensor:
    """The pairs of a batch of features.

    Args:
        t: (samples, features, width).
        dense: (samples, columns), of the dtype of t; or None.
        cells: int64 vector; None: the pairs are a triangle.
        upper, diagonal: which triangle.
        tiles: samples of a thread block and warps, forward and backward; empty: those of the package.

    Returns:
        (samples, columns + number of pairs).
    """
    pairs = _pairs(cells, upper, diagonal)
    _check(t, dense, pairs)
    if _is_computed_by_kernel(t, pairs):
        from . import kernels

        return kernels.interaction(t, dense, pairs, tiles)
    first, second = _of_pairs(pairs, t)
    found = torch.bmm(t, t.transpose(1, 2))[:, first, second]
    return found if dense is None else torch.cat([dense, found], 1)


def _gradient(
    dy: Tensor, t: Tensor, x: int, cells: Tensor | None, upper: bool, diagonal: bool, tiles: list[int]
) -> Tensor:
    """The gradient of t; dense has x columns."""
    pairs = _pairs(cells, upper, diagonal)
    if _is_computed_by_kernel(t, pairs):
        from . import kernels

        return kernels.gradient(dy, t, x, pairs, tiles)
    samples, features, _ = t.shape
    first, second = _of_pairs(pairs, t)
    g = t.new_zeros((samples, features, features))
    every = torch.arange(samples, device=t.device)[:, None]
    # Cells may name a pair more than once.
    g = g.index_put((every, first, second), dy[:, x:], accumulate=cells is not None)
    return torch.bmm(g + g.transpose(1, 2), t)


def _empty(
    t: Tensor, dense: Tensor | None, cells: Tensor | None, upper: bool, diagonal: bool, tiles: list[int]
) -> Tensor:
    pairs = _pairs(cells, upper, diagonal)
    _check(t, dense, pairs)
    count = pairs.count(t.shape[1]) if isinstance(pairs, Triangle) else pairs.shape[0]
    return t.new_empty((t.shape[0], (0 if dense is None else dense.shape[1]) + count))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    t, dense, cells, *ctx.options = inputs
    ctx.x = 0 if dense is None else dense.shape[1]
    ctx.save_for_backward(*((t, cells) if ctx.needs_input_grad[0] else (None, None)))


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    t, cells = ctx.saved_tensors
    dt = GRADIENT(dy, t, ctx.x, cells, *ctx.options) if ctx.needs_input_grad[0] else None
    # Not a view: an operation's gradients may not share memory with what comes in.
    ddense = dy[:, : ctx.x].clone() if ctx.needs_input_grad[1] else None
    return dt, ddense, None, *[None] * len(ctx.options)


def _flops(t_shape: Any) -> int:
    """Two for each multiplication and addition of all products, as the matrix product has them."""
    samples, features, width = t_shape
    return int(2 * samples * features * features * width)


def _always(*_: Any) -> bool:
    """A graph holds the parts of the operation, even if they are no kernel."""
    return True


GRADIENT = define(
    "dot_interaction_gradient", _gradient, lambda dy, t, *_: t.new_empty(t.shape),
    flops=lambda dy, t, *_: _flops(t), launches=_always,
)  # fmt: skip
DOT_INTERACTION = define(
    "dot_interaction", _dot_interaction, _empty, flops=lambda t, *_: _flops(t), setup=_setup,
    backward=_backward, launches=_always,
)  # fmt: skip
