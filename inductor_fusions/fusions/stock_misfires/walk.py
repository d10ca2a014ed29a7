"""The products around a softmax, and the nodes between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ...effects.inplace import inputs
from ...graph.search import reached
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
    near = (other for each in reached([node], neighbours, REACH) for other in neighbours(each))
    return next((other for other in near if name_of(other) in PRODUCTS), None)


def between(node: fx.Node, product: fx.Node) -> list[fx.Node]:
    """The nodes that lead from a product to `node`, the latter left out."""

    def inside(each: fx.Node) -> list[fx.Node]:
        return [other for other in inputs(each) if other is not product and name_of(other) not in PRODUCTS]

    return list(reached([node], inside, REACH + 1))[1:]
