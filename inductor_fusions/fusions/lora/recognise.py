"""Linears with adapters, read from a post-grad graph.

Forward, an adapter is `s * (x @ A) @ B`, added to `x @ W`. Backward, the gradient of the input is a sum of
the same form: `s * (dY @ B^T) @ A^T`, added to `dY @ W^T`. So one reading serves both. Casts on the way are
looked through where their dtype holds that of the products or of the result: what they round is kept exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...block_mm import guards
from ...graph.products import (
    CASTS,
    DIV,
    MUL,
    PRODUCTS,
    RESHAPES,
    VIEWS,
    Product,
    is_factor,
    is_floating,
    is_pointwise,
    product,
    restored,
    scaled,
    tensor,
    through,
    value,
)
from ...operands import holds
from ...reasons import Reason, Said
from .adapters import Adapter, adapter_of, has_size_of, times_tensor, weighted
from .columns import parts_of

aten = torch.ops.aten

#: What a term passes on its way into a sum, beside what is pointwise: Inductor pads what an addmm adds.
_PASSED = VIEWS | {*PRODUCTS, aten.constant_pad_nd.default, aten.cat.default}

#: Of a sum without a base: it may be added to what is in memory (`sums`).
NO_PRODUCT = Reason.NO_BASE("the adapter is not added to a product that only this sum reads")


@dataclass(frozen=True)
class Offset:
    """`scale * vector`, added to each row.

    Attributes:
        vector: a bias that an adapter has, or a second one of the bases; shape (N,).
        scale: its factor.
        factor: a tensor of one element by which it is multiplied as well, or None.
    """

    vector: fx.Node
    scale: float
    factor: fx.Node | None


@dataclass
class Linear:
    """A sum of products, some of which are adapters.

    Attributes:
        root: the node that holds it.
        bases: products that are no adapters, with their factors in `scale`; one may have a bias.
        adapters: the adapters.
        offsets: vectors that are added beside the bias of the bases.
        rest: what else is added; or None.
        inner: the nodes between the products and the root.
        problem: why it is not a grouped GEMM, or "".
    """

    root: fx.Node
    bases: list[Product] = field(default_factory=list)
    adapters: list[Adapter] = field(default_factory=list)
    offsets: list[Offset] = field(default_factory=list)
    rest: fx.Node | None = None
    inner: list[fx.Node] = field(default_factory=list)
    problem: str = ""


def linears(products: Sequence[Product]) -> list[Linear]:
    """Every sum with an adapter in it, in the order of the graph; and every adapter that is in none.

    Args:
        products: those of the graph.
    """
    adapters = [a for p in products if (a := adapter_of(p.node)) is not None]
    # A matrix between A and B is no B.
    between = {through(a.middle, RESHAPES) for a in adapters if a.middle is not None}
    adapters = [a for a in adapters if a.up.node not in between]
    found: list[Linear] = []
    taken: set[fx.Node] = set()
    problems: dict[fx.Node, str] = {}
    for node in reversed(additions_behind(a.up.node for a in adapters)):
        if node not in taken:
            read = _Reader(node).read()
            if read.problem:  # perhaps what it adds is a linear
                # Of sums around each other, the reason of the innermost one with a base.
                known = {} if read.bases else problems
                problems.update({a.up.node: read.problem for a in read.adapters if a.up.node not in known})
            elif read.adapters and not _is_around(read, node):
                taken.update(read.inner)
                found.append(read)
    inside = {a.up.node for linear in found for a in linear.adapters}
    for a in adapters:
        node = a.up.node
        # Two products with a function between them are an adapter only where something is added. So are those
        # with few columns: in a backward they are gradients of A and B.
        plain = a.middle is None and not known_true(value(node).shape[1] < value(a.up.a).shape[1])
        if node not in inside and (plain or additions_behind([node])):
            found.append(Linear(node, problem=problems.get(node) or alone(node)))
    return sorted(found, key=lambda linear: linear.root)


def additions_behind(ups: Iterable[fx.Node]) -> list[fx.Node]:
    """The additions, in the order of the graph, that may have some of these products in them."""
    found, seen = set[fx.Node](), set[fx.Node]()
    for node in ups:
        while node not in seen and node.op == "call_function":
            seen.add(node)
            if is_sum(node):
                found.add(node)
            if len(node.users) != 1:
                break
            (node,) = node.users
            if not (is_pointwise(node) or node.target in _PASSED):
                break
    return sorted(found)


def summands(node: fx.Node) -> list[tuple[Any, float]]:
    """What an addition or a subtraction adds up, with the factor of each; nothing for other nodes."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or not is_floating(node):
        return []
    alpha = node.kwargs.get("alpha", 1)
    if not is_factor(alpha):
        return []
    sign = 1.0 if node.target is aten.add.Tensor else -1.0
    return [(node.args[0], 1.0), (node.args[1], sign * float(alpha))]


def added_matrix(found: Product | None) -> fx.Node | None:
    """The matrix that an addmm adds to its product."""
    bias = found.bias if found is not None else None
    return bias if bias is not None and value(bias).dim() == 2 else None


def is_sum(node: fx.Node) -> bool:
    return bool(summands(node)) or added_matrix(product(node)) is not None


def _is_around(read: Linear, top: fx.Node) -> bool:
    """Whether the last addition only adds something to a linear, such as a residual: a pointwise tail."""
    arguments = [x for x, _ in summands(top)] or top.args[:1]
    for node in arguments if read.rest is not None else ():
        while isinstance(node, fx.Node) and len(node.users) == 1 and node.target in (*RESHAPES, *CASTS):
            node = node.args[0]
        if not isinstance(node, fx.Node) or len(node.users) != 1 or not is_sum(node):
            continue
        inner = _Reader(node).read()
        whole = (len(read.adapters), len(read.bases), "")
        if inner.rest is None and (len(inner.adapters), len(inner.bases), inner.problem) == whole:
            return True
    return False


class _Reader:
    """Reads a tree of additions and subtractions."""

    def __init__(self, top: fx.Node) -> None:
        self.linear = Linear(cast_behind(top))
        self.top = top
        self.pad = (0, 0)  # of what is visited

    def read(self) -> Linear:
        """The tree as a linear, with a problem where it is none."""
        linear = self.linear
        if linear.root is not self.top:
            linear.inner.append(self.top)
        found = product(self.top)
        if found is not None:
            self._product(found, 1.0, None)
        else:
            self._add(self.top, 1.0)
        if not linear.adapters:
            return linear
        # What rounds the sum on its way, to less than the products have and the result.
        dtypes = [value(node).dtype for node in (linear.root, *(base.node for base in linear.bases))]
        casts = [value(node).dtype for node in linear.inner if node.target in CASTS]
        if not all(holds(cast, *dtypes) for cast in casts):
            linear.problem = Reason.ROUNDED("a partial sum is rounded to a dtype of lower precision")
        elif not linear.bases:
            linear.problem = NO_PRODUCT
        elif _two_biases(linear):
            linear.problem = linear.problem or Reason.TERMS("the sum has both a bias and another term")
        # One order for all sums of the same products: tables know them by it.
        linear.bases.sort(key=lambda p: p.inner, reverse=True)
        return linear

    def _add(self, node: fx.Node, scale: float) -> None:
        for argument, sign in summands(node):
            self._visit(argument, scale * sign, None)

    def _visit(self, node: Any, scale: float, factor: fx.Node | None) -> None:
        linear = self.linear
        if not isinstance(node, fx.Node) or len(node.users) != 1:
            return self._rest(node, scale, factor)
        found = product(node)
        if found is not None:
            return self._product(found, scale, factor)
        if node.op == "call_function" and is_floating(node) and _leads_to_products(node):
            inner = node.args[0] if node.args else None
            if (
                factor is None
                and summands(node)
                and all(has_size_of(argument, node) for argument in node.args)
            ):
                linear.inner.append(node)
                return self._add(node, scale)
            if (node.target in RESHAPES or node.target in CASTS) and is_floating(inner):
                linear.inner.append(node)
                return self._visit(inner, scale, factor)
            parts = parts_of(node) or ()
            if parts:
                linear.inner.append(node)
                outside = self.pad
                for part, before, behind in parts:
                    self.pad = outside[0] + before, outside[1] + behind
                    self._visit(part, scale, factor)
                self.pad = outside
                return None
            step, by = scaled(node), times_tensor(node)
            if step is not None:
                linear.inner.append(node)
                return self._visit(step[0], scale * step[1], factor)
            if by is not None:
                linear.inner.append(node)
                self._one_tensor(factor)
                return self._visit(by[0], scale, by[1])
            vector = weighted(node) if factor is None else None
            if vector is not None:
                linear.inner.extend(vector.inner)
                self._product(vector.up, scale * vector.scale, vector.vector)
                linear.adapters[-1] = replace(linear.adapters[-1], over=vector.over)
                return None
        return self._rest(node, scale, factor)

    def _product(self, found: Product, scale: float, factor: fx.Node | None) -> None:
        linear, bias = self.linear, found.bias
        read = adapter_of(found.node)
        if read is None and factor is not None:
            return self._rest(found.node, scale, factor)
        if read is not None and read.factor is not None:
            self._one_tensor(factor)
        matrix = added_matrix(found)
        taken = any(base.bias is not None for base in linear.bases)
        if matrix is not None and (read is not None or _is_term(matrix)):
            if found.node is not self.top:
                linear.inner.append(found.node)
            self._visit(matrix, scale, factor)
            bias = None
        elif matrix is not None and (taken or scale != 1):
            return self._rest(found.node, scale, factor)
        elif matrix is None and bias is not None and (read is not None or taken or scale != 1):
            linear.offsets.append(Offset(bias, scale, factor))
            bias = None
        if read is None:
            linear.bases.append(replace(found, bias=bias, scale=scale * found.scale))
        else:
            read = replace(read, scale=scale * read.scale, factor=factor or read.factor, pad=self.pad)
            linear.adapters.append(read)
        return None

    def _one_tensor(self, factor: fx.Node | None) -> None:
        if factor is not None:
            self.linear.problem = self.linear.problem or Reason.TERMS(
                "the adapter is multiplied by more than one tensor"
            )

    def _rest(self, node: Any, scale: float, factor: fx.Node | None) -> None:
        linear = self.linear
        if linear.rest is not None:
            linear.problem = linear.problem or Reason.TERMS(
                "the sum has more than one term that is not a product"
            )
        elif scale != 1 or factor is not None or not isinstance(node, fx.Node):
            linear.problem = linear.problem or Reason.TERMS("a term that is not a product has a scale factor")
        elif not is_floating(node) or str(value(node).numel()) != str(value(linear.root).numel()):
            linear.problem = linear.problem or Reason.TERMS("a term of the sum is broadcast")
        else:
            linear.rest = restored(node) or node


def _two_biases(linear: Linear) -> bool:
    """Whether a matrix is added, and something else: the operation has one bias."""
    biases = [p.bias for p in linear.bases if p.bias is not None]
    matrices = [bias for bias in biases if value(bias).dim() == 2]
    others = len(biases) - len(matrices) + len(linear.offsets)
    return (linear.rest is not None and bool(biases or others)) or (bool(matrices) and others > 0)


def _leads_to_products(node: fx.Node) -> bool:
    """Whether there is a product or a sum behind casts, reshapes and factors."""
    while node.op == "call_function" and product(node) is None and not summands(node) and not parts_of(node):
        by = scaled(node) or times_tensor(node)
        if by is None and weighted(node) is not None:
            return True
        if node.target in RESHAPES or node.target in CASTS:
            step = node.args[0]
        elif by is not None:
            step = by[0]
        else:
            return False
        if not isinstance(step, fx.Node) or len(step.users) != 1:
            return False
        node = step
    return node.op == "call_function"


def _is_term(node: fx.Node) -> bool:
    return len(node.users) == 1 and _leads_to_products(node)


def alone(up: fx.Node) -> Said:
    """Why the result of an adapter is not part of a sum of products."""
    node = up
    for _ in range(8):
        if len(node.users) != 1:
            return _read_elsewhere(node)
        (user,) = node.users
        if user.op == "output":
            return Reason.NO_BASE(
                "this graph returns the result of the adapter without adding it to anything"
            )
        by = _other_factor(user, node)
        if by is not None and times_tensor(user) is None:
            if any(reader.dtype == torch.bool for reader in _sources(by)):
                return Reason.BEHIND_ADAPTER("a mask is applied to the result of the adapter")
            how = "divided" if user.target in DIV else "multiplied"
            return Reason.BEHIND_ADAPTER(
                f"the result of the adapter is {how} by a tensor before the addition, as in DoRA"
            )
        if user.target is aten.where.self:
            return Reason.BEHIND_ADAPTER(
                "the result of the adapter passes through torch.where, which can remove NaN"
            )
        if summands(user) or added_matrix(product(user)) is node:
            return NO_PRODUCT
        if by is None and user.target not in RESHAPES and user.target not in CASTS and scaled(user) is None:
            return Reason.NO_BASE(
                f"{guards.called(user)} reads the result of the adapter before it is added to a base"
            )
        node = user
    return Reason.NO_BASE("the result of the adapter is not added to anything")


def _read_elsewhere(node: fx.Node) -> Said:
    """What else there is that reads the result of an adapter."""
    scaled_by = any(_other_factor(user, node) is not None for user in node.users)
    reason = "the gradient of a factor" if scaled_by else "the backward"
    return guards.read_elsewhere("the result of the adapter", node.users, reason)


def _other_factor(user: fx.Node, node: fx.Node) -> fx.Node | None:
    """The tensor that a value is multiplied with, or divided by."""
    if user.target not in (*MUL, *DIV) or len(user.args) != 2 or user.args[0] is user.args[1]:
        return None
    first, second = user.args
    by = second if first is node else first if user.target in MUL else None
    return by if isinstance(by, fx.Node) and tensor(by) is not None else None


def _sources(node: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    found = tensor(node)
    if found is not None:
        yield found
        if depth:
            for other in node.all_input_nodes:
                yield from _sources(other, depth - 1)


def cast_behind(top: fx.Node) -> fx.Node:
    """The narrowing cast that is all that reads a sum, or the sum."""
    node = top
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function" or not (user.target in RESHAPES or user.target in CASTS):
            break
        if not is_floating(user):
            break
        node = user
        if user.target in CASTS:
            narrows = holds(value(top).dtype, value(node).dtype) and value(node).dtype != value(top).dtype
            return node if narrows else top
    return top


def is_row_major(found: torch.Tensor) -> bool:
    """Whether a tensor is row-major, without gaps."""
    wanted: Any = 1
    for length, stride in zip(reversed(found.shape), reversed(found.stride()), strict=True):
        if not known_true(length == 1) and not known_true(stride == wanted):
            return False
        wanted = wanted * length
    return True
