"""An adapter inside a sum that a vector multiplies, before autograd: DoRA.

    v * (y + s * l)    of `(v - 1) * y + v * (s * l) + y`, as torchtune, NVlabs and PEFT write it

It is fewer operations on large tensors in the backward, and no more in the forward. So it is no slower where
the linear is left to stock. Inside the vector, the graph after autograd has a linear with an adapter as any
other.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..._inductor import known_true
from ...effects.derivatives import check_operation
from ...effects.liveness import is_dead, only_reader, replace
from ...effects.writes import check_between
from ...fusion import Candidate
from ...graph.builder import Builder
from ...graph.torch_ops import CASTS, VIEWS, Op, linear_of, read, scaled_by
from ...operands import check_device, check_kind, holds, same_shape, tensor, value
from ...reasons import Reason
from .inputs import Inputs
from .second_product import MOST_STEPS, cast, is_up, made


@dataclass(frozen=True)
class _Term:
    """`(by * v + alone) * node`, where v is the vector.

    Attributes:
        node: a product, or a vector that is added to each row.
    """

    node: fx.Node
    by: float
    alone: float

    def times(self, number: float) -> _Term:
        return _Term(self.node, self.by * number, self.alone * number)

    def plus(self, other: _Term | None) -> _Term:
        """The sum of two that have equal nodes."""
        return self if other is None else _Term(self.node, self.by + other.by, self.alone + other.alone)


#: The terms of a sum by key; terms with equal keys are added up. Keys are
#: ("up", node), ("base", input, weight, whether by rows) or ("bias", node).
_Terms = dict[tuple[Any, ...], _Term]


@dataclass
class _Reader:
    """Reads a tree of sums and products as a polynomial in one vector.

    Attributes:
        vector: the node that multiplies, as it is broadcast.
        key: the vector without views.
        inner: the operations in between, and the products.
        early: the operations that compute `v + number`.
    """

    columns: Any
    vector: fx.Node | None = None
    key: fx.Node | None = None
    inner: list[fx.Node] = field(default_factory=list)
    early: list[fx.Node] = field(default_factory=list)

    def read(self, node: Any, depth: int = MOST_STEPS) -> _Terms | None:
        """The terms; None where something else is added."""
        op, found = read(node), tensor(node)
        if op is None or found is None or not found.is_floating_point() or depth == 0:
            return None
        product = linear_of(node)
        if product is not None:
            self.inner.append(op.node)
            return self._product(op.node, *product)
        terms = self._combined(op, depth - 1)
        if terms is not None:
            self.inner.append(op.node)
        return terms

    def _product(self, node: fx.Node, x: fx.Node, w: fx.Node, rows: bool, bias: Any) -> _Terms | None:
        if is_up(node):
            return {("up", node): _Term(node, 0.0, 1.0)}
        terms: _Terms = {("base", x, w, rows): _Term(node, 0.0, 1.0)}
        if bias is not None:
            if not self._is_vector(bias):
                return None
            terms["bias", bias] = _Term(bias, 0.0, 1.0)
        return terms

    def _combined(self, op: Op, depth: int) -> _Terms | None:
        scaled = scaled_by(op)
        if scaled is not None:
            terms = self.read(scaled[0], depth)
            return None if terms is None else {key: each.times(scaled[1]) for key, each in terms.items()}
        if op.name in CASTS and not op.inplace:
            inside, out = tensor(op.input), tensor(op.node)
            wider = inside is not None and out is not None and holds(out.dtype, inside.dtype)
            return self.read(op.input, depth) if wider else None
        if op.rest or set(op.args) != {"input", "other"}:
            return None
        first, second = op.input, op["other"]
        if op.name in ("add", "sub"):
            left, right = (self._vector(x) or self.read(x, depth) for x in (first, second))
            if left is None or right is None:
                return None
            sign = 1.0 if op.name == "add" else -1.0
            total = dict(left)
            for key, each in right.items():
                total[key] = each.times(sign).plus(total.get(key))
            return total
        if op.name != "mul":
            return None
        for x, by in ((first, second), (second, first)):
            if self._is_vector(by) and not self._is_vector(x):
                return self._times(self.read(x, depth), by)
        return None

    def _vector(self, node: Any) -> _Terms | None:
        """A vector that is added to each row."""
        return {("bias", node): _Term(node, 0.0, 1.0)} if self._is_vector(node) else None

    def _is_vector(self, node: Any) -> bool:
        found = tensor(node)
        return (
            found is not None
            and found.is_floating_point()
            and found.dim() > 0
            and known_true(found.shape[-1] == self.columns)
            and known_true(found.numel() == self.columns)
        )

    def _times(self, terms: _Terms | None, by: fx.Node) -> _Terms | None:
        """Terms times `v + number`; None where they are multiplied by v already."""
        offset, node = 0.0, _viewed(by)
        op = read(node)
        shown = [node, by]
        if op is not None and op.name in ("add", "sub") and not op.inplace:
            number = op["other"]
            if set(op.args) == {"input", "other"} and isinstance(number, (int, float)):
                offset, node = (number if op.name == "add" else -number), _viewed(op.input)
                shown = [node, op.input]
                self.early.append(op.node)
        if terms is None or any(each.by for each in terms.values()):
            return None
        vector = next(filter(self._is_vector, shown), None)
        if vector is None or (self.vector is not None and self.key is not node):
            return None
        self.key, self.vector = node, vector
        return {name: _Term(x.node, x.alone, x.alone * offset) for name, x in terms.items()}


def _viewed(node: Any) -> Any:
    """The node that a node views."""
    while (view := read(node)) is not None and view.name in VIEWS and not view.inplace:
        node = view.input
    return node


def normalised(up: fx.Node, scope: Inputs) -> Candidate | None:
    """The smallest sum around an adapter that is a vector times a sum."""
    node, columns = up, value(up).shape[-1]
    for _ in range(MOST_STEPS):
        op = read(only_reader(node))
        if op is None:
            return None
        node = op.node
        if op.name not in ("add", "sub"):
            if op.name not in CASTS | {"mul", "div", "neg"}:
                return None
            continue
        reader = _Reader(columns)
        terms = reader.read(node)
        site = None if terms is None else Normalised.of(node, reader, terms, scope)
        if site is not None:
            return site
    return None


class Normalised(Candidate):
    """A sum that becomes the product of a vector with a sum.

    Args:
        base: the term of the linear.
        inside, outside: the biases that the vector multiplies, and the others.
    """

    reported = False

    def __init__(
        self, top: fx.Node, reader: _Reader, base: _Term, up: _Term, inside: list[_Term],
        outside: list[_Term], scope: Inputs,
    ) -> None:  # fmt: skip
        self.anchor, self.reader, self.base, self.up = top, reader, base, up
        self.inside, self.outside, self.scope = inside, outside, scope

    @classmethod
    def of(cls, top: fx.Node, reader: _Reader, terms: _Terms, scope: Inputs) -> Candidate | None:
        """The site of these terms, where it has this form."""
        bases = [each for key, each in terms.items() if key[0] == "base"]
        ups = [each for key, each in terms.items() if key[0] == "up"]
        biases = [each for key, each in terms.items() if key[0] == "bias" and (each.by or each.alone)]
        if len(bases) != 1 or len(ups) != 1 or any(x.alone or not x.by for x in (*bases, *ups)):
            return None
        inside = [each for each in biases if (each.by, each.alone) == (bases[0].by, 0.0)]
        outside = [each for each in biases if each.by == 0]
        if len(inside) + len(outside) != len(biases) or len(inside) > 1:
            return None
        return cls(top, reader, bases[0], ups[0], inside, outside, scope)

    def guard(self) -> None:
        top, inner, scope = self.anchor, set(self.reader.inner), self.scope
        assert self.reader.vector is not None
        out = value(top)
        given = [self.base.node, self.up.node, self.reader.vector]
        given += [each.node for each in (*self.inside, *self.outside)]
        values = [found for each in given if (found := tensor(each)) is not None]
        check_kind(*values, out)
        if out.dtype != functools.reduce(torch.promote_types, [each.dtype for each in values]):
            raise Reason.MIXED_DTYPES.rejected("the sum is not in the dtype of its terms")
        if not all(same_shape(value(each).shape, out.shape) for each in inner):
            raise Reason.SHAPES.rejected("a term of the sum is broadcast")
        # Also what reads one by the name that it had before a write in place.
        users = [user for node in inner - {top} for user in node.users if user not in inner]
        if not all(map(is_dead, users)):
            raise Reason.USED_ELSEWHERE.rejected("a term of the sum is also read elsewhere")
        known = [node for node in scope.effects if node not in inner]
        check_between([*inner, *self.reader.early], top, "the linear and the sum", scope.modes, known)
        check_operation(inner, scope.derivatives)
        check_device(out)

    def rewrite(self) -> str:
        top, vector = self.anchor, self.reader.vector
        make = Builder(top)
        found = linear_of(self.base.node)
        assert found is not None
        x, w, rows, bias = found
        wanted = self.inside[0].node if self.inside else None
        total = self.base.node
        if bias is not wanted:
            total = made(make, F.linear, x, w) if rows else made(make, torch.matmul, x, w)
            total = total if wanted is None else made(make, operator.add, total, wanted)
        dtype, ratio = make.value(top).dtype, self.up.by / self.base.by
        total, added = cast(make, total, dtype), cast(make, self.up.node, dtype)
        added = added if ratio == 1 else made(make, operator.mul, added, ratio)
        total = made(make, operator.mul, made(make, operator.add, total, added), vector)
        total = total if self.base.by == 1 else made(make, operator.mul, total, self.base.by)
        for each in self.outside:
            term = each.node if each.alone == 1 else made(make, operator.mul, each.node, each.alone)
            total = made(make, operator.add, total, term)
        replace(top, total, self.reader.inner)
        return "the vector times the sum"
