"""Matches sums with adapters that are no grouped GEMM, in a post-grad graph.

There are two kinds. In one, no product is added to the adapters, as with a quantised base, which has an
operation of its own. In the other, masks are between the products of the adapters and the sum, as in the
backward of a dropout in front of each adapter. All terms that are no adapters are the base. What is added
around the adapters and the products stays outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ...graph.additions import additions_behind, summands
from ...graph.products import product
from ...operands import value
from ...reasons import Reason
from .adapters import step
from .reached import NO_PRODUCT, leads_to_adapter
from .recognise import BROADCAST, Linear, Reader, sum_in


def sums(found: Sequence[Linear]) -> list[Linear]:
    """The sums whose adapters pass a mask, or have no product beside them, in the order of the graph.

    Args:
        found: what a graph has of linears with adapters; those that are part of a sum here have a problem
            there, or are added to what passes a mask.
    """
    if not found:
        return []  # there is no adapter at all
    alone = {linear.root for linear in found if linear.problem == NO_PRODUCT}
    result: list[Linear] = []
    taken: set[fx.Node] = set()
    # Of linears without a problem, a factor may be read as a mask.
    ups = [a.up.node for linear in found for a in linear.adapters if a.factor is not None]
    for node in reversed(additions_behind([*ups, *(each.root for each in found if each.problem)])):
        if node in taken:
            continue
        read = innermost(node)
        assert read.top is not None
        if not read.adapters or read.top in taken:
            continue
        has_masks = any(a.kept is not None for a in read.adapters)
        if has_masks or all(a.up.node in alone for a in read.adapters):
            taken.update((read.top, *read.inner))
            result.append(read)
    return result[::-1]


def without(found: Sequence[Linear], taken: Sequence[Linear]) -> list[Linear]:
    """The linears that have no part in a sum of these."""
    ups = {a.up.node for each in taken for a in each.adapters}
    return [
        linear
        for linear in found
        if linear.root not in ups and not any(a.up.node in ups for a in linear.adapters)
    ]


def innermost(top: fx.Node) -> Linear:
    """The smallest sum in a tree of additions that has all of its adapters and of its products."""
    while True:
        read = sum_at(top)
        if read.problem == "" and not read.adapters:
            return read
        arguments = [x for x, _ in summands(top)] or list(top.args[:1])
        inside = [x for x in arguments if leads_to_adapter(x)]
        others = [x for x in arguments if not leads_to_adapter(x)]
        if len(inside) != 1 or len(others) != 1 or _leads_to_product(others[0]):
            return read
        deeper = sum_in(inside[0])
        if deeper is None:
            return read
        top = deeper


def _leads_to_product(node: Any) -> bool:
    """Whether a term is a product, or a sum with one."""
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        if product(node) is not None:
            return True
        if summands(node):
            return any(_leads_to_product(x) for x, _ in summands(node))
        below = step(node)
        if below is None or not below.is_number:
            return False
        node = below.inner
    return False


def sum_at(top: fx.Node) -> Linear:
    """The tree of additions under a node: adapters, perhaps behind masks, and terms."""
    read = Reader(top, alone=True).linear
    read.terms += read.offsets
    if read.adapters and all(term.is_bias for term in read.terms):
        only = "another adapter" if len(read.adapters) > 1 and not read.terms else "a bias"
        read.problem = Reason.NO_BASE(
            f"the adapter is added only to {only}, not to a term of the shape of the result"
        )
    if not read.adapters or read.problem:
        return read
    ups = [a.up.node for a in read.adapters]
    size = str(value(read.root).numel())
    if any(str(value(node).numel()) != size for node in ups):
        read.problem = Reason.SHAPES("the terms of the sum have different shapes")
    elif any(not term.is_bias and str(value(term.node).numel()) != size for term in read.terms):
        read.problem = BROADCAST
    else:
        read.problem = read.check_casts([*ups, *(term.node for term in read.terms)])
    return read
