"""The products around a softmax, and the nodes between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ...effects.inplace import inputs
from ...graph.torch_ops import read

#: How far from a softmax its two products are looked for.
REACH = 24
#: Matrix products, with the names of their two operands; those of an einsum have none.
PRODUCTS = {
    "matmul": ("input", "other"), "bmm": ("input", "other"), "baddbmm": ("batch1", "batch2"), "einsum": (),
}  # fmt: skip


def name_of(node: Any) -> str:
    """The operation of a call node, in any form, or ""."""
    op = read(node)
    return "" if op is None else op.name


def factors(product: fx.Node) -> tuple[Any, Any]:
    """The two operands of a matrix product."""
    op = read(product)
    assert op is not None
    first, second, *_ = *(op[name] for name in PRODUCTS[op.name]), *op.rest, None, None
    return first, second


def nearest_product(node: fx.Node, neighbours: Callable[[fx.Node], Sequence[fx.Node]]) -> fx.Node | None:
    """The nearest matrix product upwards or downwards of `node`, within `REACH` nodes."""
    seen, edge = {node}, [node]
    while edge and len(seen) < REACH:
        following: list[fx.Node] = []
        for each in edge:
            for other in neighbours(each):
                if name_of(other) in PRODUCTS:
                    return other
                if other not in seen:
                    seen.add(other)
                    following.append(other)
        edge = following
    return None


def between(node: fx.Node, product: fx.Node) -> list[fx.Node]:
    """The nodes that lead from a product to `node`, the latter left out."""
    found: list[fx.Node] = []
    edge = [node]
    while edge and len(found) < REACH:
        for other in inputs(edge.pop()):
            if other is not product and other not in found and name_of(other) not in PRODUCTS:
                found.append(other)
                edge.append(other)
    return found
