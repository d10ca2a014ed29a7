"""The operations `inductor_fusions::dot_interaction` and `dot_pairs`, their gradients and FLOPs.

    y[b] = dense[b], and behind it the sum over d of t[b, i, d] * t[b, j, d] for each pair i, j

The pairs of `dot_interaction` are a triangle. Those of `dot_pairs` are given by a tensor of cells i * F + j
of the matrix of all products. Its values need not be known, and a pair may occur more than once. The
operation does not check that each cell is one of the matrix: the indexing that makes the tensor does.

On CUDA devices one kernel reads t once and writes y, without the matrix of all products; so does the
backward. Inductor launches both as it does its own. Elsewhere they are what torch makes of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

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
    return t.is_cuda and torch.version.hip is None and t.dtype in DTYPES and fits(t.shape[1], t.shape[2])


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
        raise ValueError("cells of dot_pairs must be an int64 vector")


def _of_pairs(pairs: Pairs, t: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the pairs in the matrix of all products."""
    if isinstance(pairs, Triangle):
        first, second = pairs.indices(t.shape[1], t.device).unbind()
        return first, second
    return pairs // t.shape[1], pairs % t.shape[1]


def _forward(t: Tensor, dense: Tensor | None, pairs: Pairs, tiles: list[int]) -> Tensor:
    _check(t, dense, pairs)
    if _is_computed_by_kernel(t, pairs):
        from . import kernels

        return kernels.interaction(t, dense, pairs, tiles)
    first, second = _of_pairs(pairs, t)
    found = torch.bmm(t, t.transpose(1, 2))[:, first, second]
    return found if dense is None else torch.cat([dense, found], 1)


def _differentiate(dy: Tensor, t: Tensor, x: int, pairs: Pairs, tiles: list[int]) -> Tensor:
    if _is_computed_by_kernel(t, pairs):
        from . import kernels

        return kernels.gradient(dy, t, x, pairs, tiles)
    samples, features, _ = t.shape
    first, second = _of_pairs(pairs, t)
    g = t.new_zeros((samples, features, features))
    every = torch.arange(samples, device=t.device)[:, None]
    # Cells may name a pair more than once.
    g = g.index_put((every, first, second), dy[:, x:], accumulate=isinstance(pairs, Tensor))
    return torch.bmm(g + g.transpose(1, 2), t)


def _dot_interaction(
    t: Tensor, dense: Tensor | None, upper: bool, diagonal: bool, tiles: list[int]
) -> Tensor:
    """`tiles`: samples of a thread block and warps, forward and backward; empty: those of the package."""
    return _forward(t, dense, Triangle(upper, diagonal), tiles)


def _dot_pairs(t: Tensor, dense: Tensor | None, cells: Tensor, tiles: list[int]) -> Tensor:
    """`tiles` as in `dot_interaction`."""
    return _forward(t, dense, cells, tiles)


def _interaction_gradient(
    dy: Tensor, t: Tensor, x: int, upper: bool, diagonal: bool, tiles: list[int]
) -> Tensor:
    """The gradient of t; dense has x columns."""
    return _differentiate(dy, t, x, Triangle(upper, diagonal), tiles)


def _pairs_gradient(dy: Tensor, t: Tensor, x: int, cells: Tensor, tiles: list[int]) -> Tensor:
    """The gradient of t; dense has x columns."""
    return _differentiate(dy, t, x, cells, tiles)


def _empty(t: Tensor, dense: Tensor | None, pairs: Pairs) -> Tensor:
    _check(t, dense, pairs)
    count = pairs.count(t.shape[1]) if isinstance(pairs, Triangle) else pairs.shape[0]
    return t.new_empty((t.shape[0], (0 if dense is None else dense.shape[1]) + count))


def _empty_gradient(dy: Tensor, t: Tensor, *_: Any) -> Tensor:
    return t.new_empty(t.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    t, dense, *options = inputs
    ctx.x = 0 if dense is None else dense.shape[1]
    ctx.options = [each for each in options if not isinstance(each, Tensor)]
    tensors = [t, *(each for each in options if isinstance(each, Tensor))]
    ctx.save_for_backward(*(tensors if ctx.needs_input_grad[0] else [None] * len(tensors)))


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    t, *cells = ctx.saved_tensors
    operation, options = PAIRS_GRADIENT if cells else GRADIENT, [*cells, *ctx.options]
    dt = operation(dy, t, ctx.x, *options) if ctx.needs_input_grad[0] else None
    # Not a view: an operation's gradients may not share memory with what comes in.
    ddense = dy[:, : ctx.x].clone() if ctx.needs_input_grad[1] else None
    return dt, ddense, *[None] * len(options)


def _flops(t_shape: Any) -> int:
    """Two for each multiplication and addition of all products, as the matrix product has them."""
    samples, features, width = t_shape
    return int(2 * samples * features * features * width)


def _always(*_: Any) -> bool:
    """A graph holds the parts of the operation, even if they are no kernel."""
    return True


GRADIENT = define(
    "dot_interaction_gradient", _interaction_gradient, _empty_gradient, flops=lambda dy, t, *_: _flops(t),
    launches=_always,
)  # fmt: skip
DOT_INTERACTION = define(
    "dot_interaction", _dot_interaction,
    lambda t, dense, upper, diagonal, tiles: _empty(t, dense, Triangle(upper, diagonal)),
    flops=lambda t, *_: _flops(t), setup=_setup, backward=_backward, launches=_always,
)  # fmt: skip
PAIRS_GRADIENT = define(
    "dot_pairs_gradient", _pairs_gradient, _empty_gradient, flops=lambda dy, t, *_: _flops(t),
    launches=_always,
)  # fmt: skip
DOT_PAIRS = define(
    "dot_pairs", _dot_pairs, lambda t, dense, cells, tiles: _empty(t, dense, cells),
    flops=lambda t, *_: _flops(t), setup=_setup, backward=_backward, launches=_always,
)  # fmt: skip
