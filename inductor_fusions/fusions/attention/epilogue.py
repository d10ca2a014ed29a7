"""The effect of each operation between the softmax and the product with v on the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph import torch_ops
from ...graph.dims import permutation, reduced, selection
from ...graph.regions import graphs
from ...graph.torch_ops import Op, dropout_p, read, value
from ...operands import same_shape, tensor
from ...reasons import Reason
from .arrangement import Arrangement, Misplaced, is_view
from .masks import Interpreter, is_one_or_zero
from .no_product import WITHOUT_NUMPY, by_numpy
from .normal_form import Attention, Term
from .operands import Operand
from .read_elsewhere import one_by_one
from .structure import narrowed
from .written_out import sums_at

#: Operations that choose among weights.
_CHOOSES = frozenset("topk max argmax sort".split())
_ELEMENTWISE = Reason.NO_PRODUCT("the weights are multiplied elementwise, not by a matrix product")


def passed(
    site: Attention, op: Op, node: fx.Node, number: Callable[[Any], float | None], at: Arrangement
) -> Arrangement:
    """Read an operation that keeps the weights, such as a view or a dropout; the arrangement behind it."""
    before, after = tensor(node), tensor(op.node)
    if op.name == "nan_to_num":
        if op["nan"] is not None and number(op["nan"]) != 0.0:
            raise between(op, node)
        site.drops_nan = True
    elif op.name == "dropout":
        p = dropout_p(op)
        if p and site.dropout:
            raise Reason.DROPOUT.rejected("two dropouts follow the softmax")
        site.dropout = site.dropout or p
    elif is_view(op):
        below = None if before is None or after is None else at.viewed(before.shape, after.shape)
        if below is None:
            raise Misplaced(Reason.IN_BETWEEN(f"{op.name} reshapes the query or key dim of the weights"))
        return below
    elif (dims := permutation(op)) is not None:
        return at.below(dims)
    elif op.name == "expand":
        if before is None or after is None or not same_shape(before.shape, after.shape):
            raise Reason.SHAPES.rejected("the attention weights are expanded")
    elif op.name in torch_ops.CASTS:
        if after is None or not after.is_floating_point():
            raise Reason.MIXED_DTYPES.rejected(
                "the attention weights are cast to a dtype that is not floating point"
            )
    elif op.name == "sum" and site.behind and reduced(op)[0] == at.columns:
        raise Rejected(_ELEMENTWISE)
    elif op.name not in torch_ops.COPIES:
        raise between(op, node)
    return at


def normalised(node: fx.Node, users: list[fx.Node], at: Arrangement) -> tuple[fx.Node, float, bool] | None:
    """What divides weights by their sum over the keys; what is added to the sum; whether it is bounded.

    None where nothing divides them.
    """
    division, weights = read(users[-1]) if users else None, tensor(node)
    if division is None or division.inplace or weights is None or division.input is not node:
        return None
    if division.name == "normalize":
        p, dim, least = division["p"], division["dim"], division["eps"]
        dim = 1 if dim is None else dim
        plain = p in (1, 1.0) and isinstance(dim, int) and (dim % weights.dim(),) == at.columns
        small = least is None or (isinstance(least, float) and least <= 0.5)
        return (users[-1], 0.0, True) if plain and small and len(users) == 1 else None
    sums = sums_at(division["other"]) if division.name == "div" and len(users) == 2 else None
    if sums is None or sums.zero is not None or sums.inverse or sums.order or sums.of is not node:
        return None
    if not sums.keeps or users[0] is not sums.nodes[-1]:
        return None
    alone = all(len(readers(each)) == 1 for each in sums.nodes)
    small = sums.least <= 0.5 and 0 <= sums.more <= 0.5 and division["rounding_mode"] is None
    over_keys = isinstance(sums.dim, int) and (sums.dim % weights.dim(),) == at.columns
    bounded = sums.more > 0 or sums.least > 0
    return (users[-1], sums.more, bounded) if alone and small and over_keys else None


def check_sum(site: Attention, bounded: bool) -> None:
    """Refuse weights whose sum is not 1 where a query sees a key, or 0 elsewhere without a bound above 0."""
    if site.behind or site.dropout or site.sink is not None or site.drops_nan:
        raise Reason.IN_BETWEEN.rejected("the weights are divided by their sum, which is not 1")
    if site.zeroed is not None and not bounded and site.terms:
        raise Reason.EMPTY_ROWS.rejected(
            "a row of weights may be fully masked, and is then divided by its sum of 0",
            "weights.sum(-1, keepdim=True).clamp(min=1e-9)",
        )


def scaler(
    op: Op, weights: fx.Node, at: Arrangement, interpreter: Interpreter, by_keys: bool = False
) -> tuple[str, Any, tuple[Any, ...]] | None:
    """What weights are multiplied or divided by, where it is the same for all keys: the result is as well.

    Args:
        by_keys: where it is the same for all queries instead: the values are.
    """
    if op.inplace or op.name not in ("mul", "div") or op["rounding_mode"] is not None:
        return None
    by = op["other"] if op.input is weights else op.input
    shape, after = tuple(value(weights).shape), tensor(op.node)
    if by is weights or (op.name == "div" and op.input is not weights):
        return None
    if after is None or not after.is_floating_point() or not same_shape(shape, after.shape):
        return None
    if isinstance(by, (int, float)):
        return (op.name, by, at.sizes(shape)) if by and math.isfinite(by) else None
    seen = narrowed(Term(at.seen(by, shape), at.sizes(shape)), interpreter).node
    varies = tensor(seen)
    if varies is None or not known_true([1, 1, *varies.shape][-2 if by_keys else -1] == 1):
        return None
    return op.name, seen, at.sizes(shape)


def zeroed(op: Op, weights: fx.Node, interpreter: Interpreter, at: Arrangement) -> Term | None:
    """`masked_fill(weights, condition, 0)`, `weights * seen.float()` and the like as a fill; or None."""
    condition: Any = None
    if op.name == "masked_fill":
        condition, kept, fill, hides = op["mask"], op.input, op["value"], True
    elif op.name == "where":
        condition, kept, fill, hides = op["condition"], op.input, op["other"], False
        if fill is weights:
            kept, fill, hides = fill, kept, True
    elif op.name == "mul":
        condition = _of_ones(op["other"] if op.input is weights else op.input, interpreter)
        kept, fill, hides = weights, 0.0, False
    mask, before, after = tensor(condition), tensor(weights), tensor(op.node)
    if mask is None or mask.dtype != torch.bool:
        return None
    if kept is not weights or fill is None or interpreter.number(fill) != 0.0:
        return None
    if before is None or after is None or not same_shape(before.shape, after.shape):
        return None
    return Term(at.seen(condition, before.shape), at.sizes(before.shape), fill=0.0, hides=hides)


def _of_ones(factor: Any, interpreter: Interpreter) -> Any:
    """Where a factor is 1, if it is a cast of a boolean tensor, or proved to be 1 or 0; None of others."""
    op, operand = read(factor), Operand.of(factor)
    if op is not None and op.name in torch_ops.CASTS:
        factor = op.input
    held = tensor(factor)
    if operand is None or held is None or held.dtype == torch.bool:
        return factor
    takes_no_gradient = held.is_floating_point() and not held.requires_grad
    return operand.then("bool") if takes_no_gradient and is_one_or_zero(interpreter.read(operand)) else None


def without_column(op: Op, first: bool) -> fx.Node | None:
    """What holds the weights without their last column, or their first one, where an operation drops it."""
    node, parts = op.node, value(op.node)
    if isinstance(parts, (tuple, list)):
        if len(parts) != 2 or len(readers(node)) != 1:
            return None
        (node,) = readers(node)
    taken = selection(node)
    before = None if taken is None else tensor(taken.source)
    if taken is None or before is None or taken.dims != [before.dim() - 1]:
        return None
    part, columns = taken.index[-1], before.shape[-1]
    start, stop = (1, columns) if first else (0, columns - 1)
    if not isinstance(part, slice) or part.step is not None:
        return None
    return node if known_true(part.start == start) and known_true(part.stop == stop) else None


def between(op: Op, weights: fx.Node) -> Rejected:
    """Why weights cannot be read further down than an operation."""
    before, after = tensor(weights), tensor(op.node)
    if graphs(op.node):
        return Reason.IN_BETWEEN.rejected(
            f"{op.said} is between the softmax and the product with v, or computes that product",
            "compute the softmax and the product with v both inside of it, or both outside",
        )
    if isinstance(value(op.node), (tuple, list)) and (found := one_by_one(readers(op.node))):
        return found
    wider = not (before is None or after is None or same_shape(before.shape, after.shape))
    if op.name == "mul" and (wider or [by.name for by in map(read, readers(op.node)) if by] == ["sum"]):
        return Rejected(_ELEMENTWISE)
    if op.name in torch_ops.ADDING:
        return Reason.IN_BETWEEN.rejected(f"{op.name} also adds a tensor to the product with v", "torch.bmm")
    numpy = by_numpy(op)
    if numpy or op.name in torch_ops.UNREAD_PRODUCTS:
        return Reason.IN_BETWEEN.rejected(
            f"the weights are read by {numpy or op.said}, which is not read",
            WITHOUT_NUMPY if numpy else "torch.matmul",
        )
    if op.name in _CHOOSES:
        return Reason.IN_BETWEEN.rejected(
            f"{op.said} chooses among the weights, as a router of experts does, so they are no attention's"
        )
    return Reason.IN_BETWEEN.rejected(f"{op.said} is between the softmax and the product with v")
