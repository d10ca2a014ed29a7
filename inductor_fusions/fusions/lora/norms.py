"""Vectors that multiply an adapter, before autograd, which then saves no result of the adapter for them.

    v * (y + s * l)    of `(v - 1) * y + v * (s * l) + y`: DoRA as torchtune, NVlabs and PEFT write it
    (g * h) B          of `g * (h B)`: g is one number, or one for each row, such as the gates of a router
    h (B v)            of `v * (h B)`: v has one number for each column, as in VeRA

Each is fewer operations on large tensors in the backward, and no more in the forward. So it is no slower
where the linear is left to stock. As a sum inside a vector, and as a product between A and B, the graph after
autograd has a linear with an adapter as any other.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import fx

from ..._inductor import was_erased
from ...derivatives import check_operation
from ...fusion import Candidate, Rejected
from ...graph.builder import Builder
from ...graph.torch_ops import CASTS, VIEWS, Op, linear_of, read
from ...liveness import erase_dead_readers, is_dead, readers
from ...operands import check_device, check_kind, holds, tensor
from ...reasons import Reason
from ...writes import check_between, check_kept
from .adapters import MOST_RANK
from .inputs import Inputs
from .op import LORA_DOWN, LORA_DROPPED_DOWN

if TYPE_CHECKING:
    from ..._inductor import Match

#: How far A may be from B, and B from the sum.
_STEPS = 12
#: What may be between A and B.
_POINTWISE = CASTS | frozenset("dropout mul div relu gelu silu tanh sigmoid contiguous".split())


def vectors(scope: Inputs, match: Match) -> Candidate | None:
    """An adapter that a vector multiplies in front of a sum."""
    up = match.output_node()
    if not _is_up(up):
        return None
    return _normalised(up, scope) or _moved(up, scope)


def _is_up(node: fx.Node) -> bool:
    """Whether a node is the second product of an adapter."""
    found = linear_of(node)
    if found is None or found[3] is not None:
        return False
    narrow, wide = tensor(found[0]), tensor(node)
    if narrow is None or wide is None or not wide.is_floating_point():
        return False
    rank, columns = narrow.shape[-1], wide.shape[-1]
    if not isinstance(rank, int) or not isinstance(columns, int) or not 2 * rank <= columns:
        return False
    return rank <= MOST_RANK and _has_down(found[0], rank)


def _has_down(node: Any, rank: int) -> bool:
    """Whether a narrow matrix is a function of a product with a wide one."""
    for _ in range(_STEPS):
        source = linear_of(node)
        if source is None and isinstance(node, fx.Node) and node.target in (LORA_DOWN, LORA_DROPPED_DOWN):
            source = node.args[0], node.args[1], True, None  # type: ignore[assignment]
        x = tensor(source[0]) if source is not None else None
        if x is not None:
            return isinstance(x.shape[-1], int) and x.shape[-1] >= 2 * rank
        op = read(node)
        if op is None or op.name not in _POINTWISE:
            return False
        sides, out = (op.input, op["other"]), tensor(node)
        shape = None if out is None else out.shape
        whole = [x for x in sides if (found := tensor(x)) is not None and found.shape == shape]
        node = whole[0] if len(whole) == 1 else None
    return False


def scaled_by(op: Op) -> tuple[Any, float] | None:
    """What an operation multiplies by a number, and the number."""
    if op.name == "neg":
        return op.input, -1.0
    if op.name not in ("mul", "div") or op.rest or set(op.args) - {"input", "other"}:
        return None
    x, by = op.input, op["other"]
    if op.name == "mul" and isinstance(x, (int, float)):
        x, by = by, x
    if not isinstance(by, (int, float)) or isinstance(by, bool) or not math.isfinite(by):
        return None
    if op.name == "div":
        return (x, 1 / by) if by else None
    return x, float(by)


def _made(make: Builder, target: str | Callable[..., Any], *args: Any) -> fx.Node:
    """A new call, which takes a gradient where an argument does."""
    node = make.call(target, *args)
    if any((found := tensor(each)) is not None and found.requires_grad for each in args):
        make.value(node).requires_grad_()
    return node


def _cast(make: Builder, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if make.value(node).dtype == dtype else _made(make, "to", node, dtype)


def _erase(nodes: list[fx.Node]) -> None:
    """Remove nodes that nothing reads any more, the last ones first."""
    erase_dead_readers(nodes)
    for node in sorted(nodes, reverse=True):
        if not was_erased(node) and not node.users:
            node.graph.erase_node(node)


# -- a sum inside a vector ---------------------------------------------------------------------------------


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


#: By what two terms are one: ("up", node), ("base", input, weight) or ("bias", node).
_Terms = dict[tuple[Any, ...], _Term]


@dataclass
class _Reader:
    """Reads a tree of sums and products as a polynomial in one vector.

    Attributes:
        columns: of the result.
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

    def read(self, node: Any, depth: int = _STEPS) -> _Terms | None:
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
        if _is_up(node):
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
            and found.shape[-1] == found.numel() == self.columns
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
    """What a node is a view of."""
    while (view := read(node)) is not None and view.name in VIEWS and not view.inplace:
        node = view.input
    return node


def _normalised(up: fx.Node, scope: Inputs) -> Candidate | None:
    """The smallest sum around an adapter that is a vector times a sum."""
    node, columns = up, up.meta["example_value"].shape[-1]
    for _ in range(_STEPS):
        found = readers(node)
        op = read(found[0]) if len(found) == 1 else None
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
    """Such a sum, which becomes the product of the vector with a sum.

    Args:
        top: the sum.
        reader: what is between.
        base: the term of the linear.
        up: that of the adapter.
        inside, outside: the biases that the vector multiplies, and the others.
        scope: of the graph.
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
        out = top.meta["example_value"]
        given = [self.base.node, self.up.node, self.reader.vector]
        given += [each.node for each in (*self.inside, *self.outside)]
        values = [value for each in given if (value := tensor(each)) is not None]
        check_kind(*values, out)
        if out.dtype != functools.reduce(torch.promote_types, [value.dtype for value in values]):
            raise Rejected(Reason.MIXED_DTYPES("the sum is not in the dtype of its terms"))
        if any(each.meta["example_value"].shape != out.shape for each in inner):
            raise Rejected(Reason.SHAPES("a term of the sum is broadcast"))
        # Also what reads one by the name that it had before a write in place.
        users = [user for node in inner - {top} for user in node.users if user not in inner]
        if not all(map(is_dead, users)):
            raise Rejected(Reason.USED_ELSEWHERE("a term of the sum is also read elsewhere"))
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
            total = _made(make, F.linear, x, w) if rows else _made(make, torch.matmul, x, w)
            total = total if wanted is None else _made(make, operator.add, total, wanted)
        dtype, ratio = make.value(top).dtype, self.up.by / self.base.by
        total, added = _cast(make, total, dtype), _cast(make, self.up.node, dtype)
        added = added if ratio == 1 else _made(make, operator.mul, added, ratio)
        total = _made(make, operator.mul, _made(make, operator.add, total, added), vector)
        total = total if self.base.by == 1 else _made(make, operator.mul, total, self.base.by)
        for each in self.outside:
            term = each.node if each.alone == 1 else _made(make, operator.mul, each.node, each.alone)
            total = _made(make, operator.add, total, term)
        gone = list(dict.fromkeys(self.reader.inner))
        top.replace_all_uses_with(total)
        _erase(gone)
        return "the vector times the sum"


# -- a factor behind the adapter ---------------------------------------------------------------------------


def _moved(up: fx.Node, scope: Inputs) -> Candidate | None:
    """A trained tensor that multiplies an adapter in front of a sum, or any that divides it."""
    node, between, scale = up, [up], 1.0
    while True:
        found = readers(node)
        op = read(found[0]) if len(found) == 1 else None
        if op is None or op.inplace:
            return None
        between.append(op.node)
        step = scaled_by(op)
        if step is None or step[0] is not node:
            break
        node, scale = op.node, scale * step[1]
    if op.name not in ("mul", "div") or op.rest or set(op.args) != {"input", "other"}:
        return None
    first, second = op.input, op["other"]
    by = second if first is node else first if op.name == "mul" else None
    factor = tensor(by)
    if not isinstance(by, fx.Node) or factor is None or not factor.is_floating_point():
        return None
    if not _is_added(op.node):
        return None
    # Without a gradient nothing is saved for it, and factors are read after autograd, but for quotients.
    out = tensor(op.node)
    if op.name == "mul" and not (factor.requires_grad and out is not None and out.requires_grad):
        return None
    return Moved(up, between, by, scale, op.name, scope)


def _is_added(node: fx.Node) -> bool:
    """Whether a value is part of a sum, perhaps times numbers."""
    for _ in range(_STEPS):
        found = readers(node)
        op = read(found[0]) if len(found) == 1 else None
        if op is None:
            return False
        if op.name in ("add", "sub"):
            return True
        if scaled_by(op) is None and op.name not in CASTS:
            return False
        node = op.node
    return False


class Moved(Candidate):
    """An adapter times a tensor, which moves in front of B, or to B.

    Args:
        up: the product with B.
        between: the nodes from it to the one that multiplies it, which is the last.
        by: the tensor.
        scale: the factor of the numbers in between.
        how: "mul" or "div".
        scope: of the graph.
    """

    reported = False

    def __init__(
        self, up: fx.Node, between: list[fx.Node], by: fx.Node, scale: float, how: str, scope: Inputs
    ) -> None:
        self.up, self.between, self.by, self.scale, self.scope = up, between, by, scale, scope
        self.anchor = between[-1]
        self.how = operator.mul if how == "mul" else operator.truediv

    def guard(self) -> None:
        values = [each.meta["example_value"] for each in (*self.between, *self.up.all_input_nodes)]
        out, factor = values[0], self.by.meta["example_value"]
        check_kind(*values, factor)
        if any(each.dtype != out.dtype for each in (*values, factor)):
            raise Rejected(Reason.MIXED_DTYPES("the adapter and its factor have different dtypes"))
        if out.dtype == torch.float16:
            raise Rejected(Reason.RANGE("x @ A may overflow in float16 where the result does not"))
        if any(each.meta["example_value"].shape != out.shape for each in self.between):
            raise Rejected(Reason.SHAPES("the adapter is broadcast"))
        if not (self._is_of_rows(factor) or self._is_of_columns(factor)):
            raise Rejected(Reason.BEHIND_ADAPTER("the factor has another number for each element"))
        check_between(
            self.between, self.anchor, "the adapter and its factor", self.scope.modes, self.scope.effects
        )
        check_kept([*self.up.all_input_nodes, self.by], self.anchor, self.scope.effects)
        check_operation(self.between, self.scope.derivatives)
        check_device(out)

    def _is_of_rows(self, factor: torch.Tensor) -> bool:
        return factor.numel() == 1 or factor.shape[-1] == 1

    def _is_of_columns(self, factor: torch.Tensor) -> bool:
        return bool(factor.shape[-1] == factor.numel() == self.up.meta["example_value"].shape[-1])

    def rewrite(self) -> str:
        make, found = Builder(self.anchor), linear_of(self.up)
        assert found is not None
        h, b, rows, _ = found
        factor = make.value(self.by)
        if self._is_of_rows(factor):
            h = _made(make, self.how, h, self.by)
        else:
            by = _made(make, "reshape", self.by, *((-1, 1) if rows else (1, -1)))
            b = _made(make, self.how, b, by)
        out = _made(make, F.linear if rows else torch.matmul, h, b)
        out = out if self.scale == 1 else _made(make, operator.mul, out, self.scale)
        self.anchor.replace_all_uses_with(out)
        _erase(self.between)
        return "a factor between both products"
