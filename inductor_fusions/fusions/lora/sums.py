"""Matches sums with adapters that are no grouped GEMM, in a post-grad graph.

Either no product is added to the adapters, as with a quantised base, whose operation is its own; or masks are
between their products and the sum, as in the backward of a dropout in front of each adapter. All terms that
are no adapters are the base; what is added around the adapters and the products is left outside.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...graph.products import (
    CASTS,
    RESHAPES,
    Product,
    is_floating,
    product,
    scaled,
    value,
)
from ...operands import holds
from ...reasons import Reason
from .adapters import Adapter, adapter_of, has_size_of, times_tensor
from .masks import masked
from .recognise import NO_PRODUCT, Linear, added_matrix, additions_behind, cast_behind, is_sum, summands

aten = torch.ops.aten

TWO_TENSORS = Reason.TERMS("the adapter is multiplied by more than one tensor")


@dataclass(frozen=True)
class Term:
    """`scale * factor * node`, which is no adapter.

    Attributes:
        node: what is added: of the size of the sum; or a vector, which is added to each row.
        scale: its factor.
        factor: a tensor of one element by which it is multiplied as well, or None.
    """

    node: fx.Node
    scale: float
    factor: fx.Node | None = None

    @property
    def is_bias(self) -> bool:
        """Whether it is a vector: an adapter's bias."""
        return value(self.node).dim() == 1


@dataclass(frozen=True)
class Added:
    """An adapter behind its mask.

    Attributes:
        adapter: with all its factors.
        kept: the mask, a bool tensor with as many elements as the result; or None.
    """

    adapter: Adapter
    kept: fx.Node | None


@dataclass
class Sum:
    """A sum with adapters in it.

    Attributes:
        top: the last addition.
        root: the node that holds the sum: a cast behind it, or itself.
        added: the adapters.
        terms: what else is added.
        inner: the nodes in between.
        problem: why it is not read, or "".
    """

    top: fx.Node
    root: fx.Node
    added: list[Added] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    inner: list[fx.Node] = field(default_factory=list)
    problem: str = ""

    @property
    def is_of_functions(self) -> bool:
        """Whether nothing but functions of skinny GEMMs is added up: as in the backward of a small MLP."""
        return bool(self.problem) and all(one.adapter.middle is not None for one in self.added)


def sums(found: Sequence[Linear]) -> list[Sum]:
    """The sums whose adapters pass a mask, or have no product beside them, in the order of the graph.

    Args:
        found: what a graph has of linears with adapters; those that are part of a sum here have a problem
            there, or are added to what passes a mask.
    """
    if not found:
        return []  # there is no adapter at all
    alone = {linear.root for linear in found if linear.problem == NO_PRODUCT}
    result: list[Sum] = []
    taken: set[fx.Node] = set()
    # Of linears without a problem, a factor may be read as a mask.
    ups = [a.up.node for linear in found for a in linear.adapters if a.factor is not None]
    for node in reversed(additions_behind([*ups, *(each.root for each in found if each.problem)])):
        if node in taken:
            continue
        read = innermost(node)
        if not read.added or read.top in taken:
            continue
        has_masks = any(one.kept is not None for one in read.added)
        if has_masks or all(one.adapter.up.node in alone for one in read.added):
            taken.update((read.top, *read.inner))
            result.append(read)
    return result[::-1]


def without(found: Sequence[Linear], taken: Sequence[Sum]) -> list[Linear]:
    """The linears that have no part in a sum of these."""
    ups = {one.adapter.up.node for each in taken for one in each.added}
    return [
        linear
        for linear in found
        if linear.root not in ups and not any(a.up.node in ups for a in linear.adapters)
    ]


def innermost(top: fx.Node) -> Sum:
    """The smallest sum in a tree of additions that has all of its adapters and of its products."""
    while True:
        read = sum_at(top)
        if read.problem == "" and not read.added:
            return read
        arguments = [x for x, _ in summands(top)] or list(top.args[:1])
        parts = [(x, _Reader().visit(x, 1.0)) for x in arguments]
        inside = [x for x, part in parts if part.added]
        others = [x for x, part in parts if not part.added]
        if len(inside) != 1 or len(others) != 1 or _leads_to_product(others[0]):
            return read
        deeper = _sum_in(inside[0])
        if deeper is None:
            return read
        top = deeper


def _sum_in(node: Any) -> fx.Node | None:
    """The addition behind casts and reshapes."""
    while isinstance(node, fx.Node) and len(node.users) == 1 and not is_sum(node):
        if node.target not in RESHAPES and node.target not in CASTS:
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) and len(node.users) == 1 else None


def _leads_to_product(node: Any) -> bool:
    """Whether a term is a product, or a sum with one."""
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        if product(node) is not None:
            return True
        if summands(node):
            return any(_leads_to_product(x) for x, _ in summands(node))
        step = scaled(node)
        if step is None and node.target not in RESHAPES and node.target not in CASTS:
            return False
        node = step[0] if step is not None else node.args[0]
    return False


def sum_at(top: fx.Node) -> Sum:
    """The tree of additions under a node."""
    found = _Reader().sum(top, 1.0)
    root = cast_behind(top)
    inner = [*found.inner, *([top] if root is not top else [])]
    read = Sum(top, root, found.added, found.terms, inner, found.problem)
    if read.added and all(term.is_bias for term in read.terms):
        read.problem = Reason.NO_BASE(
            "the adapter is added only to a bias, not to a term of the shape of the result"
        )
    if not read.added or read.problem:
        return read
    ups = [one.adapter.up.node for one in read.added]
    size = str(value(root).numel())
    if any(str(value(node).numel()) != size for node in ups):
        read.problem = Reason.SHAPES("the terms of the sum have different shapes")
    elif any(not term.is_bias and str(value(term.node).numel()) != size for term in read.terms):
        read.problem = Reason.TERMS("a term of the sum is broadcast")
    else:
        # What rounds the sum on its way, to less than its terms have and the result.
        dtypes = [value(node).dtype for node in (root, *ups, *(term.node for term in read.terms))]
        casts = [value(node).dtype for node in inner if node.target in CASTS]
        if not all(holds(cast, *dtypes) for cast in casts):
            read.problem = Reason.ROUNDED("a partial sum is rounded to a dtype of lower precision")
    return read


@dataclass
class _Part:
    """What is read of a part of a tree."""

    added: list[Added] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    inner: list[fx.Node] = field(default_factory=list)
    problem: str = ""

    def with_part(self, other: _Part) -> _Part:
        """Both."""
        return _Part(
            self.added + other.added,
            self.terms + other.terms,
            self.inner + other.inner,
            self.problem or other.problem,
        )


class _Reader:
    """Reads a tree of additions: what has no adapter in it is one term."""

    def sum(self, node: fx.Node, scale: float) -> _Part:
        """An addition."""
        found = product(node)
        matrix = added_matrix(found)
        if found is not None and matrix is not None:
            up = self._adapter(replace(found, bias=None), scale, None, None, [])
            return _Part() if up is None else up.with_part(self.visit(matrix, scale))
        part = _Part()
        for argument, sign in summands(node):
            if not has_size_of(argument, node):
                part = part.with_part(_Part(problem=Reason.TERMS("a term of the sum is broadcast")))
            else:
                part = part.with_part(self.visit(argument, scale * sign))
        return part

    def visit(self, node: Any, scale: float) -> _Part:
        """What is added."""
        return self._with_adapters(node, scale) or _Part(terms=[Term(node, scale)])

    def _with_adapters(self, node: Any, scale: float) -> _Part | None:
        if not isinstance(node, fx.Node) or node.op != "call_function" or len(node.users) != 1:
            return None
        if is_sum(node):
            found = self.sum(node, scale)
            return replace(found, inner=[*found.inner, node]) if found.added else None
        chain = self._chain(node, scale)
        if chain is not None:
            return chain
        step = scaled(node)
        if step is None and (node.target not in RESHAPES and node.target not in CASTS):
            return None
        inner, by = step if step is not None else (node.args[0], 1.0)
        read = self._with_adapters(inner, scale * by) if is_floating(inner) else None
        return None if read is None else replace(read, inner=[*read.inner, node])

    def _chain(self, node: Any, scale: float) -> _Part | None:
        """An adapter behind casts, reshapes, factors and a mask."""
        factor: fx.Node | None = None
        kept: fx.Node | None = None
        inner: list[fx.Node] = []
        problem = ""
        while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
            found = product(node)
            if found is not None:
                if added_matrix(found) is not None:
                    return None
                read = self._adapter(found, scale, factor, kept, inner)
                return None if read is None else replace(read, problem=problem or read.problem)
            step, by, mask = scaled(node), times_tensor(node), masked(node)
            inner.append(node)
            if step is not None:
                node, scale = step[0], scale * step[1]
            elif by is not None:
                problem = problem or (TWO_TENSORS if factor is not None else "")
                node, factor = by
            elif mask is not None:
                if kept is not None:
                    problem = problem or Reason.TERMS("two masks are applied to the adapter")
                node, kept, times = mask
                scale *= times
            elif (node.target in RESHAPES or node.target in CASTS) and is_floating(node.args[0]):
                node = node.args[0]
            else:
                return None
        return None

    def _adapter(
        self,
        up: Product,
        scale: float,
        factor: fx.Node | None,
        kept: fx.Node | None,
        inner: list[fx.Node],
    ) -> _Part | None:
        """An adapter, where a product is the second one of one."""
        read = adapter_of(up.node)
        if read is None:
            return None
        part = _Part(inner=list(inner))
        if factor is not None and read.factor is not None:
            part.problem = TWO_TENSORS
        factor = factor or read.factor
        if up.bias is not None:
            part.terms.append(Term(up.bias, scale, factor))
            if kept is not None:
                part.problem = part.problem or Reason.TERMS("a mask is applied to an adapter with a bias")
        part.added.append(Added(replace(read, scale=scale * read.scale, factor=factor), kept))
        return part


def downs_of(found: Collection[Sum]) -> set[fx.Node]:
    """The down-projections of their adapters."""
    return {one.adapter.down.node for each in found for one in each.added}
