"""Linears that share an operand, and sums of linears, as one grouped GEMM.

Forward: the projections of one input (QKV, gate and up, the keys and values of all decoder layers).
Backward: the gradient of that input, a sum of products; and those of the weights, which share the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .. import operands
from .._inductor import Match, was_erased
from ..block_mm import emit, guards
from ..block_mm.lowering import MOST_PRODUCTS
from ..block_mm.sums import Sum, sum_of_products
from ..fusion import Candidate, Fusion, Rejected, Reported, Scope, nodes_of
from ..graph.additions import additions_behind
from ..graph.builder import Builder, substitute
from ..graph.facts import facts
from ..graph.placement import Place, earliest, find
from ..graph.products import (
    PRODUCTS,
    Product,
    batched_linear,
    identity,
    operands_of,
    product,
    products_of,
    same_sizes,
)
from ..operands import value
from ..reasons import Reason


def _sharing(found: Sequence[Product], operand: str) -> list[list[Product]]:
    """The products with one operand in common, two or more of them, in graph order."""
    key: Callable[[Product], Any] = lambda p: identity(getattr(p, operand))  # noqa: E731
    groups: dict[Any, list[Product]] = {}
    for p in found:
        if value(p.a).device.type != "meta":
            groups.setdefault((key(p), value(p.a).dtype), []).append(p)
    return [group for group in groups.values() if len(group) >= 2]


class SharedOperand(Candidate):
    """Two or more products with a left or a right operand in common.

    Attributes:
        left_over: members that were not fused with the others, and may be fused with each other.
        why: why they were not.
    """

    def __init__(self, graph: fx.Graph, group: Sequence[Product], operand: str) -> None:
        first = getattr(group[0], operand)
        self.graph, self.group = graph, [replace(p, **{operand: first}) for p in group]
        self.anchor = group[0].node
        self.left_over: list[Product] = []
        self.why: Rejected | None = None
        self.place: Place | None = None
        self.kernel = ""

    def describe(self) -> dict[str, str]:
        return described(self.group)

    def guard(self) -> None:
        operands.check_device(value(self.anchor))
        fit, reason = [], None
        for p in self.group:
            try:
                guards.check_products([p])
            except Rejected as miss:
                reason = reason or miss
            else:
                fit.append(p)
        if len(fit) < 2:
            assert reason is not None
            raise reason
        chosen = self._longest(fit)
        self.left_over = [p for p in fit if p not in chosen]
        # One order for all groups of the same sizes: tables know them by it.
        self.group = sorted(chosen, key=_sizes, reverse=True)
        self.kernel = guards.kernel([[p] for p in self.group])

    def _longest(self, fit: list[Product]) -> list[Product]:
        """The longest prefix of the products that one operation can compute."""
        memory, reason = facts(self.graph).memory, None
        for count in range(len(fit), 1, -1):
            try:
                self.place = find(fit[:count])
                memory.check(fit[:count], self.place.before)
            except Rejected as miss:
                reason = reason or miss
            else:
                self.why = reason
                return fit[:count]
        # Perhaps only the first product is in the way of the others.
        self.left_over = fit[1:]
        assert reason is not None
        raise reason

    def rewrite(self) -> str:
        assert self.place is not None
        outputs = emit.insert(self.place, self.anchor, [[p] for p in self.group])
        for p, output in zip(self.group, outputs, strict=True):
            substitute(p.node, output)
        return self.kernel


def described(group: Sequence[Product]) -> dict[str, str]:
    """The input and the weights of products, for the report."""
    return {"input": guards.text(group[0].a), "weights": ", ".join(guards.text(p.b) for p in group)}


def _sizes(p: Product) -> tuple[int, ...]:
    """The sizes of the result of a product; 0 for a symbolic one."""
    return tuple(size if isinstance(size, int) else 0 for size in value(p.node).shape)


class SumOfProducts(Candidate):
    """A sum whose terms are products, but for one at most."""

    def __init__(self, graph: fx.Graph, found: Sum) -> None:
        self.graph, self.sum = graph, found
        self.anchor = found.root
        self.place = Place(found.root, (), ())
        self.sizes: list[Any] = []
        self.kernel = ""

    def describe(self) -> dict[str, str]:
        return {"terms": ", ".join(f"{guards.text(p.a)} @ {guards.text(p.b)}" for p in self.sum.terms)}

    def guard(self) -> None:
        terms, root = self.sum.terms, self.anchor
        guards.check_products(terms)
        guards.check_result(root, terms[0].node)
        if len(terms) > MOST_PRODUCTS:
            raise Reason.LIMIT.rejected(f"the sum has more than {MOST_PRODUCTS} products")
        first = value(terms[0].node).shape
        if not all(same_sizes(value(p.node).shape, first) for p in terms):
            raise Reason.SHAPES.rejected("the terms of the sum have different shapes")
        if str(value(root).shape[-1]) != str(first[1]):
            raise Reason.SHAPES.rejected("the number of columns of the sum differs from that of its terms")
        if self.sum.rest is not None and any(not isinstance(size, int) for size in first):
            raise Reason.SYMBOLIC.rejected("the sum has a symbolic size and a term that is not a product")
        self.sizes = emit.sizes_of(root, terms[0].node, self.sum.inner)
        # As early as can be: the operands of a sum are larger than the sum, as a rule.
        rest = [self.sum.rest] if self.sum.rest is not None else []
        self.place = earliest([*operands_of(terms), *rest])
        facts(self.graph).memory.check(terms, self.place.before, [root])
        self.kernel = guards.kernel([terms])

    def rewrite(self) -> str:
        terms, root = list(self.sum.terms), self.sum.root
        place = self.place.hoist()  # in front of the new view
        if self.sum.rest is not None:
            first = terms[0]
            rows = list(value(first.node).shape)
            rest = emit.reshaped(Builder(place.before, root), self.sum.rest, rows)
            terms[0] = Product(first.node, first.a, first.b, rest, first.scale)
        (output,) = emit.insert(place, root, [terms], dtype=value(root).dtype)
        substitute(root, emit.reshaped(Builder(root), output, self.sizes))
        return self.kernel


FUSION = Fusion(
    name="qkv",
    stage="post_grad",
    summary="linears that share an input, and their gradients, to one grouped GEMM",
)


@FUSION.group(lambda: (*PRODUCTS, torch.ops.aten.bmm.default))
def read(scope: Scope, matches: Sequence[Match]) -> Iterator[Candidate]:
    """Sums first, since a sum needs no memory for its terms; then what shares a, then what shares b.

    Linears with frozen weights on an input that is not contiguous are batches of products: reported alone.
    """
    graph, inside = scope.graph, set[fx.Node]()
    by_input: dict[Any, list[fx.Node]] = {}
    for node in nodes_of(matches):
        batched = batched_linear(node)
        if batched is not None:
            by_input.setdefault(identity(batched[0]), []).append(node)
    yield from (guards.reported_batch(nodes[0]) for nodes in by_input.values() if len(nodes) > 1)
    for node in reversed(additions_behind(p.node for p in products_of(nodes_of(matches)))):
        found = sum_of_products(node) if node not in inside and not was_erased(node) else None
        if found is not None:
            inside.update(found.inner)
            yield SumOfProducts(graph, found)
    for operand in ("a", "b"):
        for group in _sharing(products_of(nodes_of(matches)), operand):
            while len(group) >= 2:
                # What was fused meanwhile may have replaced an operand, or be one of these with padding.
                group = [now for p in group if (now := product(p.node)) is not None]
                if len(group) < 2:
                    break
                candidate = SharedOperand(graph, group[:MOST_PRODUCTS], operand)
                yield candidate
                group = [*candidate.left_over, *group[MOST_PRODUCTS:]]
                if len(group) == 1 and candidate.why is not None:
                    yield Reported(group[0].node, candidate.why, described(group))
