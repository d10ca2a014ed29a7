"""Walks from a softmax down to the products of the weights with values.

What the operations in between do to the weights is in `epilogue`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from torch import fx

from ..._inductor import known_true
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph import torch_ops
from ...graph.dims import reduced
from ...graph.einsum import equation
from ...graph.torch_ops import PRODUCTS, Op, read, reads_metadata, value
from ...operands import same_shape, tensor
from ...reasons import Reason
from . import einsum, epilogue
from .arrangement import OVER_ANOTHER_DIM, OWN_KEYS, OWN_VALUES, Arrangement, Misplaced, permuted
from .assigned import condition as assigned_to
from .assigned import tests_nan
from .masks import Interpreter
from .normal_form import Attention, Result, Term
from .operands import Operand, product
from .read_elsewhere import read_by_other, several
from .structure import narrowed
from .written_out import SOFTMAXES

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
    site.results = [_result(first, walk.node, at, site.k)]
    for other in others:
        with contextlib.suppress(Rejected):
            result = _result(other, walk.node, at, site.k)
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
            zeroed = epilogue.zeroed(fill, self.node, self.interpreter, self.at)
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
        site, again = self.site, epilogue.normalised(self.node, users, self.at)
        if again is None:
            return False
        division, more, bounded = again
        epilogue.check_sum(site, bounded)
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
            if node not in (op.input, *op.rest[:1]):  # they are written into something else
                raise epilogue.between(op, node)
            raise Reason.OVERWRITTEN.rejected(f"{op.name}_ overwrites the attention weights")
        scaler = epilogue.scaler(op, node, at, self.interpreter)
        zeroed = epilogue.zeroed(op, node, self.interpreter, at) if scaler is None else None
        if scaler is None and zeroed is None and (site.sink is None or self.dropped):
            scaler = epilogue.scaler(op, node, at, self.interpreter, by_keys=True)
        if scaler is not None:
            site.behind.append(scaler)
        elif zeroed is not None:
            self._set_to_zero(zeroed, keeps_nan=op.name == "mul")
        elif op.input is not node:
            raise epilogue.between(op, node)
        elif (rest := self._without_column(op)) is not None:
            self.dropped = True
            site.chain += [*op.node.users] if rest is not op.node else []
            site.chain.append(op.node)
            self.node = rest
            return
        else:
            self.at = epilogue.passed(site, op, node, self.number, at)
        site.chain.append(op.node)
        self.node = op.node

    def _without_column(self, op: Op) -> fx.Node | None:
        """The weights without the column of the sink, where an operation drops it."""
        sink, at = self.site.sink, self.at
        if sink is None or self.dropped or at.columns != (len(at.order) - 1,):
            return None
        return epilogue.without_column(op, sink.first)

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


def _result(op: Op, node: fx.Node, at: Arrangement, k: Operand) -> Result:
    """A product of the weights, which a node holds, with values; `k` are the keys that they are of."""
    if op.node.kwargs.get("out") is not None:
        raise Reason.OVERWRITTEN.rejected("the product with v writes to a given tensor (out=)")
    weights, made = tensor(node), tensor(op.node)
    assert weights is not None and made is not None
    found = equation(op) if op.name in torch_ops.EQUATIONS else einsum.of_repeated(op, node)
    if found is not None:
        v, shape, dims = einsum.values(op, found, node, at)
        result = Result(op.node, v, at.sizes(weights.shape), shape, dims)
    else:
        result = _matrices(op, node, at, k)
    if not known_true(product(made.shape) == product(result.shape)):
        raise Reason.SHAPES.rejected("the weights are broadcast in the product with v")
    return result


def _alike(first: Result, second: Result) -> bool:
    """Whether two results may be parts of one, with the same dtypes and gradients."""
    one, other = value(first.node), value(second.node)
    same = one.dtype == other.dtype and one.requires_grad == other.requires_grad
    return same and first.v.value.dtype == second.v.value.dtype and same_shape(first.lead, second.lead)


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
        return _has_two(op)
    read_by = readers(node)
    return len(read_by) == 1 and _is_difference(read_by[0], steps - 1)


def _has_two(op: Op) -> bool:
    """Whether a sum of weights is one of two softmaxes, or of two parts of one, such as two heads."""
    left, right = _softmax_of(op.input), _softmax_of(op["other"])
    if left is None or right is None or left.node is not right.node:
        return True
    whole = product(value(left.node).shape)
    return all(known_true(product(value(side).shape) < whole) for side in (op.input, op["other"]))


def _is_of_softmax(node: Any) -> bool:
    """Whether a node holds weights of a softmax, of all keys."""
    softmax, own = _softmax_of(node), tensor(node)
    made, dims = (None, None) if softmax is None else (tensor(softmax.node), reduced(softmax)[0])
    if made is None or own is None or not dims:
        return False
    keys = dims[0] - made.dim()
    return own.dim() >= -keys and known_true(own.shape[keys] == made.shape[keys])


def _softmax_of(node: Any, steps: int = 6) -> Op | None:
    """The softmax of which a node holds elements, perhaps times others."""
    op = read(node)
    if op is None or steps == 0 or op.name in _RESULTS:
        return None
    if isinstance(op.input, fx.Node) and reads_metadata(op.node, op.input):
        return None
    if op.name in SOFTMAXES:
        return op
    sides = (op.input, op["other"]) if op.name == "mul" else (op.input,)
    return next((found for side in sides if (found := _softmax_of(side, steps - 1)) is not None), None)


def _varies(k: Operand, place: int, rank: int) -> bool:
    """Whether the keys differ along a leading dim of scores of a rank."""
    return len(k.shape) <= rank and not known_true(k.padded(rank).shape[place] == 1)


def _matrices(op: Op, node: fx.Node, at: Arrangement, k: Operand) -> Result:
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
        one = known_true(weights.shape[last[0]] == 1)  # a dim that the keys need not have
        raise Misplaced(OWN_VALUES if one or not _varies(k, single.lead.index(last[0]), rank) else OWN_KEYS)
    if single is None or (single.rows[0], single.columns[0]) != last:
        raise Misplaced(OVER_ANOTHER_DIM if at.rows or at.columns != last[1:] else OWN_KEYS)
    v, lead = permuted(operand, (*single.lead, *last)), single.sizes(weights.shape)
    lengths = weights.shape[single.rows[0]], operand.shape[-1 if is_left else -2]
    dims = (*(single.lead.index(d) for d in range(rank - 2)), *last)
    return Result(op.node, v, lead, (*lead, *lengths), dims)
