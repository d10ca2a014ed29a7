"""From a softmax down to the product of the weights with v: casts, dropout, zeros, a sink's column."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph import torch_ops
from ...graph.dims import permutation, selection
from ...graph.torch_ops import PRODUCTS, Op, dropout_p, read, reads_metadata, tensor, value
from ...operands import same_shape
from ...reasons import Reason
from . import einsum
from .arrangement import OVER_ANOTHER_DIM, OWN_KEYS, OWN_VALUES, Arrangement, Misplaced, is_view, permuted
from .assigned import condition as assigned_to
from .assigned import tests_nan
from .masks import Interpreter
from .no_product import WITHOUT_NUMPY, by_numpy
from .normal_form import Attention, Result, Term
from .operands import Operand, product
from .read_elsewhere import read_by_other, several
from .structure import narrowed
from .written_out import SOFTMAXES, sums_at

MERGED = Reason.IN_BETWEEN(
    "a view merges the queries with a leading dim, and operations other than masks and biases follow it"
)


def read_epilogue(
    site: Attention, interpreter: Interpreter, at: Arrangement, *,
    beside: Collection[fx.Node], merged: bool, dropped: bool,
) -> None:  # fmt: skip
    """Read from the softmax down to the product with the values, into `site`.

    Args:
        at: what the dims of the softmax are.
        beside: nodes that read the weights and are part of the softmax.
        merged: whether the queries count as leading dims, the last of them at the product.
        dropped: whether the weights have no column for a sink.
    """
    walk = _Walk(site, interpreter, at, beside, dropped)
    first, *others = walk.to_products()
    if site.sink is not None and not walk.dropped:
        raise Reason.SINK.rejected(
            "the column that is concatenated to the scores is not dropped after the softmax"
        )
    if merged and (site.behind or site.zeroed):
        raise Rejected(MERGED)
    at = walk.at.split() if merged else walk.at
    site.results = [_result(first, walk.node, at)]
    for other in others:
        with contextlib.suppress(Rejected):
            result = _result(other, walk.node, at)
            if _alike(site.results[0], result):
                site.results.append(result)
                continue
        raise Reason.WEIGHTS.rejected(f"the attention weights are {read_by_other(other.node)}")


class _Walk:
    """Walks from the softmax down to the products, an operation at a time, and reads each into `site`.

    Attributes:
        node: the weights, as far as they are read.
        at: what their dims are.
        beside: nodes that read the weights and are read already.
        dropped: whether the weights have no column for a sink.
    """

    def __init__(
        self, site: Attention, interpreter: Interpreter, at: Arrangement,
        beside: Collection[fx.Node], dropped: bool,
    ) -> None:  # fmt: skip
        self.site, self.interpreter, self.number = site, interpreter, interpreter.number
        self.node, self.at, self.beside, self.dropped = site.softmax, at, {*beside}, dropped

    def to_products(self) -> list[Op]:
        """Walk down to the products with values; returns them."""
        while True:
            users = self._users()
            if self._nan_tested(users) or self._assigned(users) or self._normalised(users):
                continue
            ops = [op for op in map(read, users) if op is not None]
            if ops and len(ops) == len(users) and all(op.name in PRODUCTS for op in ops):
                return ops
            if len(users) != 1:
                raise several(users)
            if not ops:
                raise Reason.WEIGHTS.rejected("the attention weights are returned")
            self._step(ops[0])

    def _users(self) -> list[fx.Node]:
        """What reads the values of the weights; what reads their shape alone is noted."""
        read_by = [reader for reader in readers(self.node) if reader not in self.beside]
        users = [u for u in read_by if not reads_metadata(u, self.node)]
        self.site.readers.extend(u for u in read_by if reads_metadata(u, self.node))
        if any(map(_is_difference, users)):
            raise Rejected(
                _DIFFERENCE, "subtract the results of two attentions, if their rounding is acceptable"
            )
        return users

    def _nan_tested(self, users: list[fx.Node]) -> bool:
        """Read `weights[weights.isnan()] = 0` and `masked_fill(weights, weights != weights, 0)`."""
        if len(users) < 2 or not tests_nan(users[0], self.node) or readers(users[0]) != users[1:2]:
            return False
        fill, masked = read(users[1]), assigned_to(users[1], self.node)
        if masked is not None and len(users) == 3 and self.number(masked[1]) == 0.0:
            self.beside |= {*users[:2]}
        elif len(users) == 2 and fill is not None and fill.name in ("masked_fill", "where"):
            zeroed = _zeroed(fill, self.node, self.number, self.at)
            if zeroed is None or not zeroed.hides:
                return False
            self.node = fill.node
        else:
            return False
        self.site.chain += users[:2]
        self.site.drops_nan = True
        return True

    def _assigned(self, users: list[fx.Node]) -> bool:
        """Read `weights[condition] = 0` in front of the only other reader as a fill."""
        masked = assigned_to(users[0], self.node) if len(users) == 2 else None
        if masked is None or self.number(masked[1]) != 0.0:
            return False
        shape = value(self.node).shape
        self._set_to_zero(Term(self.at.seen(masked[0], shape), self.at.sizes(shape), fill=0.0))
        self.site.chain.append(users[0])
        self.beside.add(users[0])
        return True

    def _normalised(self, users: list[fx.Node]) -> bool:
        """Read a division by the sum over the keys."""
        site, again = self.site, _normalised(self.node, users, self.at)
        if again is None:
            return False
        division, more, bounded = again
        _check_sum(site, bounded)
        if more:
            site.behind.append(("div", 1.0 + more, site.softmax_lead))
        site.renormalised = True
        site.chain += users  # the division is the last of them
        self.node = division
        return True

    def _step(self, op: Op) -> None:
        """Read the only operation on the weights."""
        site, node, at = self.site, self.node, self.at
        if op.inplace and op.name not in ("dropout", "masked_fill"):
            raise Reason.OVERWRITTEN.rejected(f"{op.name}_ overwrites the attention weights")
        scaler = _scaler(op, node, at, self.interpreter)
        zeroed = _zeroed(op, node, self.number, at) if scaler is None else None
        if scaler is None and zeroed is None and (site.sink is None or self.dropped):
            scaler = _scaler(op, node, at, self.interpreter, by_keys=True)
        if scaler is not None:
            site.behind.append(scaler)
        elif zeroed is not None:
            self._set_to_zero(zeroed, keeps_nan=op.name == "mul")
        elif op.input is not node:
            raise _between(op, node)
        elif (rest := self._without_column(op)) is not None:
            self.dropped = True
            site.chain += [*op.node.users] if rest is not op.node else []
            site.chain.append(op.node)
            self.node = rest
            return
        else:
            self.at = _passed(site, op, node, self.number, at)
        site.chain.append(op.node)
        self.node = op.node

    def _without_column(self, op: Op) -> fx.Node | None:
        """The weights without the column of the sink, where an operation drops it."""
        sink, at = self.site.sink, self.at
        if sink is None or self.dropped or at.columns != (len(at.order) - 1,):
            return None
        return _without_column(op, sink.first)

    def _set_to_zero(self, zeroed: Term, keeps_nan: bool = False) -> None:
        """Read what sets weights to 0: whole rows, or keys."""
        site, zeroed = self.site, narrowed(zeroed, self.interpreter)
        mask = tensor(zeroed.node)
        if mask is not None and known_true([1, *mask.shape][-1] == 1):
            site.behind.append(zeroed.as_scaler())
        elif site.zeroed is not None:
            raise Reason.MASK.rejected("weights are set to 0 twice after the softmax")
        else:
            site.zeroed, site.keeps_nan = zeroed, keeps_nan


def _result(op: Op, node: fx.Node, at: Arrangement) -> Result:
    """A product of the weights, which a node holds, with values."""
    if op.node.kwargs.get("out") is not None:
        raise Reason.OVERWRITTEN.rejected("the product with v writes to a given tensor (out=)")
    weights, made = tensor(node), tensor(op.node)
    assert weights is not None and made is not None
    if op.name in torch_ops.EQUATIONS:
        v, shape, dims = einsum.values(op, node, at)
        result = Result(op.node, v, at.sizes(weights.shape), shape, dims)
    else:
        result = _matrices(op, node, at)
    if not known_true(product(made.shape) == product(result.shape)):
        raise Reason.SHAPES.rejected("the weights are broadcast in the product with v")
    return result


def _alike(first: Result, second: Result) -> bool:
    """Whether two results may be parts of one, with the same dtypes and gradients."""
    one, other = value(first.node), value(second.node)
    same = one.dtype == other.dtype and one.requires_grad == other.requires_grad
    return same and first.v.value.dtype == second.v.value.dtype and same_shape(first.lead, second.lead)


def _passed(
    site: Attention, op: Op, node: fx.Node, number: Callable[[Any], float | None], at: Arrangement
) -> Arrangement:
    """Read an operation that keeps the weights, such as a view or a dropout; the arrangement behind it."""
    before, after = tensor(node), tensor(op.node)
    if op.name == "nan_to_num":
        if op["nan"] is not None and number(op["nan"]) != 0.0:
            raise _between(op, node)
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
            raise Reason.MIXED_DTYPES.rejected("the attention weights are cast to integers")
    elif op.name not in torch_ops.COPIES:
        raise _between(op, node)
    return at


def _normalised(node: fx.Node, users: list[fx.Node], at: Arrangement) -> tuple[fx.Node, float, bool] | None:
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
    if sums is None or sums.zero is not None or sums.of is not node:
        return None
    if not sums.keeps or users[0] is not sums.nodes[-1]:
        return None
    alone = all(len(readers(each)) == 1 for each in sums.nodes)
    small = sums.least <= 0.5 and 0 <= sums.more <= 0.5 and division["rounding_mode"] is None
    over_keys = isinstance(sums.dim, int) and (sums.dim % weights.dim(),) == at.columns
    bounded = sums.more > 0 or sums.least > 0
    return (users[-1], sums.more, bounded) if alone and small and over_keys else None


def _check_sum(site: Attention, bounded: bool) -> None:
    """Refuse weights whose sum is not 1 where a query sees a key, or 0 elsewhere without a bound above 0."""
    if site.behind or site.dropout or site.sink is not None or site.drops_nan:
        raise Reason.IN_BETWEEN.rejected("the weights are divided by their sum, which is not 1")
    if site.zeroed is not None and not bounded:
        raise Reason.EMPTY_ROWS.rejected(
            "a fully masked row of weights is divided by its sum of 0",
            "weights.sum(-1, keepdim=True).clamp(min=1e-9)",
        )


#: Operations on weights whose results are no weights.
_RESULTS = PRODUCTS | {"sum"}
_DIFFERENCE = Reason.IN_BETWEEN(
    "the weights of two softmaxes are subtracted or added (differential attention), and fused attentions "
    "would round both results first, so that a subtraction loses digits"
)


def _is_difference(node: fx.Node, steps: int = 4) -> bool:
    """Whether a node, or what alone reads it, subtracts or adds weights of two softmaxes."""
    op = read(node)
    if op is None or op.name in _RESULTS or steps == 0:
        return False
    if op.name in ("sub", "add") and all(map(_is_of_softmax, (op.input, op["other"]))):
        return True
    read_by = readers(node)
    return len(read_by) == 1 and _is_difference(read_by[0], steps - 1)


def _is_of_softmax(node: Any, steps: int = 6) -> bool:
    """Whether a node holds weights of a softmax, by elements, or parts of them."""
    op = read(node)
    if op is None or steps == 0 or op.name in _RESULTS:
        return False
    if isinstance(op.input, fx.Node) and reads_metadata(op.node, op.input):
        return False
    sides = (op.input, op["other"]) if op.name == "mul" else (op.input,)
    return op.name in SOFTMAXES or any(_is_of_softmax(side, steps - 1) for side in sides)


def _between(op: Op, weights: fx.Node) -> Rejected:
    """Why weights cannot be read further down than an operation."""
    before, after = tensor(weights), tensor(op.node)
    wider = not (before is None or after is None or same_shape(before.shape, after.shape))
    if op.name == "mul" and (wider or [by.name for by in map(read, readers(op.node)) if by] == ["sum"]):
        return Reason.NO_PRODUCT.rejected("the weights are multiplied elementwise, not by a matrix product")
    if op.name in torch_ops.ADDING:
        return Reason.IN_BETWEEN.rejected(f"{op.name} also adds a tensor to the product with v", "torch.bmm")
    if numpy := by_numpy(op):
        return Reason.IN_BETWEEN.rejected(
            f"the weights are read by {numpy}, which is not read", WITHOUT_NUMPY
        )
    return Reason.IN_BETWEEN.rejected(f"{op.name} is between the softmax and the product with v")


def _matrices(op: Op, node: fx.Node, at: Arrangement) -> Result:
    """A product of matrices, of which either may be the weights."""
    weights, result = tensor(node), tensor(op.node)
    is_left = op.input is node
    other = op["other"] if is_left else op.input
    operand = Operand.of(other) if isinstance(other, fx.Node) else None
    if operand is None or operand.value.dim() < 2 or op.input is op["other"]:
        raise Reason.NO_PRODUCT.rejected("the weights are not multiplied by a matrix of values")
    assert weights is not None and result is not None
    if result.dim() != weights.dim():
        raise Reason.SHAPES.rejected("the weights are broadcast in the product with v")
    rank, single = weights.dim(), at.single(weights.shape)
    last = (rank - 2, rank - 1) if is_left else (rank - 1, rank - 2)
    if single is not None and single.rows[0] != last[0] and single.columns[0] == last[1]:
        raise Misplaced(OWN_VALUES)
    if single is None or (single.rows[0], single.columns[0]) != last:
        raise Misplaced(OVER_ANOTHER_DIM if at.rows or at.columns != last[1:] else OWN_KEYS)
    v, lead = permuted(operand, (*single.lead, *last)), single.sizes(weights.shape)
    lengths = weights.shape[single.rows[0]], operand.shape[-1 if is_left else -2]
    dims = (*(single.lead.index(d) for d in range(rank - 2)), *last)
    return Result(op.node, v, lead, (*lead, *lengths), dims)


def _scaler(
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


def _zeroed(op: Op, weights: fx.Node, number: Callable[[Any], float | None], at: Arrangement) -> Term | None:
    """`masked_fill(weights, condition, 0)`, `weights * seen.float()` and the like as a fill; or None."""
    if op.name == "masked_fill":
        condition, kept, fill, hides = op["mask"], op.input, op["value"], True
    elif op.name == "where":
        condition, kept, fill, hides = op["condition"], op.input, op["other"], False
        if fill is weights:
            kept, fill, hides = fill, kept, True
    elif op.name == "mul":
        kept, condition = weights, op["other"] if op.input is weights else op.input
        factor = read(condition)
        if factor is not None and factor.name in torch_ops.CASTS:
            condition = factor.input
        fill, hides = 0.0, False  # what is no boolean is refused
    else:
        return None
    mask, before, after = tensor(condition), tensor(weights), tensor(op.node)
    if kept is not weights or mask is None or mask.dtype != torch.bool or fill is None or number(fill) != 0.0:
        return None
    if before is None or after is None or not same_shape(before.shape, after.shape):
        return None
    return Term(at.seen(condition, before.shape), at.sizes(before.shape), fill=0.0, hides=hides)


def _without_column(op: Op, first: bool) -> fx.Node | None:
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
