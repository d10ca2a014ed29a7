"""Linears with adapters, read from a post-grad graph.

Forward, an adapter is `s * (x @ A) @ B`, added to `x @ W`. Backward, the gradient of the input is a sum of
the same form: `s * (dY @ B^T) @ A^T`, added to `dY @ W^T`. So one reading serves both. Casts on the way are
looked through where their dtype holds that of the products or of the result: what they round is kept exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...graph.additions import added_matrix, has_size_of, is_sum, summands
from ...graph.products import CASTS, RESHAPES, Product, is_floating, product, restored, through
from ...operands import holds, value
from ...reasons import Reason
from .adapters import Adapter, Step, adapter_of, step, weighted
from .columns import parts_of
from .reached import (
    NO_PRODUCT,
    alone,
    is_added_to_product,
    leads_to_adapter,
    leads_to_products,
    sums_behind,
)

aten = torch.ops.aten

BROADCAST = Reason.TERMS("a term of the sum is broadcast")
TWO_TENSORS = Reason.TERMS("the adapter is multiplied by more than one tensor")


@dataclass(frozen=True)
class Term:
    """`scale * factor * node`, which is no product that is read.

    Attributes:
        node: what is added: of the size of the sum; or a vector, a bias, which is added to each row.
        factor: a tensor of one element by which it is multiplied as well, or None.
    """

    node: fx.Node
    scale: float = 1.0
    factor: fx.Node | None = None

    @property
    def is_bias(self) -> bool:
        """Whether it is a vector."""
        return value(self.node).dim() == 1


@dataclass
class Linear:
    """A sum of products, some of which are adapters.

    Attributes:
        root: the node that holds it.
        bases: products that are no adapters, with their factors in `scale`; one may have a bias.
        offsets: vectors that are added beside the bias of the bases.
        rest: the only one of these that a grouped GEMM adds; or None.
        inner: the nodes between the products and the root.
        problem: why it is not one operation, or "".
        top: the last addition: the root, or what that casts.
    """

    root: fx.Node
    bases: list[Product] = field(default_factory=list)
    adapters: list[Adapter] = field(default_factory=list)
    offsets: list[Term] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    rest: fx.Node | None = None
    inner: list[fx.Node] = field(default_factory=list)
    problem: str = ""
    top: fx.Node | None = None

    def fails(self, problem: str) -> None:
        """Say why it is not one operation, unless that is known."""
        self.problem = self.problem or problem

    def check_casts(self, terms: Iterable[fx.Node]) -> str:
        """Why a cast rounds the sum to less precision than its terms and its result have; or ""."""
        dtypes = [value(node).dtype for node in (self.root, *terms)]
        casts = [value(node).dtype for node in self.inner if node.target in CASTS]
        if all(holds(cast, *dtypes) for cast in casts):
            return ""
        return Reason.ROUNDED("a partial sum is rounded to a dtype of lower precision")


def linears(products: Sequence[Product]) -> list[Linear]:
    """Every sum with an adapter in it, in the order of the graph; and every adapter that is in none."""
    adapters = [a for p in products if (a := adapter_of(p.node)) is not None]
    # A matrix between A and B is no B.
    between = {through(a.middle, RESHAPES) for a in adapters if a.middle is not None}
    adapters = [a for a in adapters if a.up.node not in between]
    found: list[Linear] = []
    taken: set[fx.Node] = set()
    problems: dict[fx.Node, str] = {}
    for node in reversed(sums_behind(a.up.node for a in adapters)):
        if node not in taken:
            read = _read(node)
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
        # that are not narrow between them, such as two linears in a row, or the gradients of A and B.
        rank, sizes = value(a.up.a).shape[1], (value(a.down.a).shape[1], value(node).shape[1])
        plain = a.middle is None and not any(known_true(size < 2 * rank) for size in sizes)
        # Several may read it: the gradient of a factor does as well.
        added = bool(sums_behind([node])) or any(map(is_added_to_product, node.users))
        if node not in inside and (plain or added):
            found.append(Linear(node, problem=problems.get(node) or alone(node)))
    return sorted(found, key=lambda linear: linear.root)


def read_again(linear: Linear) -> Linear:
    """A linear as it is now: others may have replaced what it was read with."""
    if linear.top is not None:
        return _read(linear.top)
    found = product(linear.root)
    return linear if linear.problem or found is None else Linear(linear.root, [found])


def _is_around(read: Linear, top: fx.Node) -> bool:
    """Whether the last addition only adds something to a linear, such as a residual: a pointwise tail."""
    arguments = [x for x, _ in summands(top)] or top.args[:1]
    for node in arguments if read.rest is not None else ():
        found = sum_in(node)
        if found is None:
            continue
        inner = _read(found)
        whole = (len(read.adapters), len(read.bases), "")
        if inner.rest is None and (len(inner.adapters), len(inner.bases), inner.problem) == whole:
            return True
    return False


def sum_in(node: Any) -> fx.Node | None:
    """The addition behind casts and reshapes, which nothing else reads."""
    while isinstance(node, fx.Node) and len(node.users) == 1 and not is_sum(node):
        if node.target not in RESHAPES and node.target not in CASTS:
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) and len(node.users) == 1 else None


def _read(top: fx.Node) -> Linear:
    """Read a tree of additions as a linear; its `problem` says why it is none."""
    linear = Reader(top).linear
    if not linear.adapters:
        return linear
    for term in linear.terms:
        whole = is_floating(term.node) and str(value(term.node).numel()) == str(value(linear.root).numel())
        if linear.rest is not None:
            linear.fails(Reason.TERMS("the sum has more than one term that is not a product"))
        elif term.scale != 1 or term.factor is not None or not isinstance(term.node, fx.Node):
            linear.fails(Reason.TERMS("a term that is not a product has a scale factor"))
        elif not whole:
            linear.fails(BROADCAST)
        else:
            linear.rest = restored(term.node) or term.node
    rounded = linear.check_casts(base.node for base in linear.bases)
    if rounded or not linear.bases:
        linear.problem = rounded or NO_PRODUCT
    elif _two_biases(linear):
        linear.fails(Reason.TERMS("the sum has both a bias and another term"))
    # One order for all sums of the same products: tables know them by it.
    linear.bases.sort(key=lambda p: p.inner, reverse=True)
    return linear


class Reader:
    """Reads a tree of additions and subtractions.

    Args:
        alone: whether only what has an adapter in it is read, perhaps behind a mask: all else is a term. By
            default, what has a product in it.
    """

    def __init__(self, top: fx.Node, alone: bool = False) -> None:
        self.top, self.alone = top, alone
        self.linear = Linear(cast_behind(top), top=top)
        self.pad = (0, 0)  # of what is visited
        if self.linear.root is not top:
            self.linear.inner.append(top)
        found = product(top)
        if found is None:
            self._add(top, 1.0)
        elif not alone or adapter_of(top) is not None:
            self._product(found, Step(top))

    def _add(self, node: fx.Node, scale: float) -> None:
        for argument, sign in summands(node):
            if self.alone and not has_size_of(argument, node):
                self.linear.fails(BROADCAST)
            else:
                self._visit(argument, Step(argument, scale * sign))

    def _visit(self, node: Any, by: Step) -> None:
        """Read a node, times what `by` has."""
        linear = self.linear
        is_read = leads_to_adapter if self.alone else leads_to_products
        if not isinstance(node, fx.Node) or len(node.users) != 1 or not is_read(node):
            return linear.terms.append(Term(node, by.scale, by.factor))
        found = product(node)
        if found is not None:
            return self._product(found, by)
        linear.inner.append(node)
        added = summands(node) if by.is_number else []
        if added and (self.alone or all(has_size_of(argument, node) for argument, _ in added)):
            return self._add(node, by.scale)
        if not self.alone and (parts := parts_of(node)):
            outside = self.pad
            for part, before, behind in parts:
                self.pad = outside[0] + before, outside[1] + behind
                self._visit(part, by)
            self.pad = outside
            return None
        below = step(node)
        if below is not None and (self.alone or below.kept is None):
            if by.factor is not None and below.factor is not None:
                linear.fails(TWO_TENSORS)
            if by.kept is not None and below.kept is not None:
                linear.fails(Reason.TERMS("two masks are applied to the adapter"))
            both = Step(below.inner, by.scale * below.scale, below.factor or by.factor, below.kept or by.kept)
            return self._visit(below.inner, both)
        vector = weighted(node) if by.factor is None and not self.alone else None
        if vector is not None:
            linear.inner.extend(vector.inner[1:])
            self._product(vector.up, Step(node, by.scale * vector.scale, vector.vector))
            linear.adapters[-1] = replace(linear.adapters[-1], over=vector.over)
            return None
        linear.inner.pop()
        return linear.terms.append(Term(node, by.scale, by.factor))

    def _product(self, found: Product, by: Step) -> None:
        linear, bias, matrix = self.linear, found.bias, added_matrix(found)
        read = adapter_of(found.node)
        taken = any(base.bias is not None for base in linear.bases)
        opens = matrix is not None and (
            read is not None or (len(matrix.users) == 1 and leads_to_products(matrix))
        )
        changed = taken or by.scale != 1
        if read is None and (by.factor is not None or (matrix is not None and not opens and changed)):
            return linear.terms.append(Term(found.node, by.scale, by.factor))
        if opens:
            if found.node is not self.top:
                linear.inner.append(found.node)
            self._visit(matrix, by)
            bias = None
        elif matrix is None and bias is not None and (read is not None or changed):
            linear.offsets.append(Term(bias, by.scale, by.factor))
            if by.kept is not None:
                linear.fails(Reason.TERMS("a mask is applied to an adapter with a bias"))
            bias = None
        if read is None:
            return linear.bases.append(replace(found, bias=bias, scale=by.scale * found.scale))
        if by.factor is not None and read.factor is not None:
            linear.fails(TWO_TENSORS)
        scale, factor = by.scale * read.scale, by.factor or read.factor
        return linear.adapters.append(replace(read, scale=scale, factor=factor, pad=self.pad, kept=by.kept))


def _two_biases(linear: Linear) -> bool:
    """Whether a matrix is added, and something else: the operation has one bias."""
    biases = [p.bias for p in linear.bases if p.bias is not None]
    matrices = [bias for bias in biases if value(bias).dim() == 2]
    others = len(biases) - len(matrices) + len(linear.offsets)
    return (linear.rest is not None and bool(biases or others)) or (bool(matrices) and others > 0)


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
