"""Sums in a graph of aten operations: their terms, and the sums behind matrix products."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ..operands import tensor, value
from .products import (
    PRODUCTS,
    VIEWS,
    Product,
    is_factor,
    is_floating,
    is_pointwise,
    product,
    same_sizes,
    scaled,
)

aten = torch.ops.aten

#: Operations between a term and its sum, beside pointwise ones: Inductor pads the bias of an addmm.
_PASSED = VIEWS | {*PRODUCTS, aten.constant_pad_nd.default, aten.cat.default}


def additions_behind(ups: Iterable[fx.Node]) -> list[fx.Node]:
    """The additions, in the order of the graph, that may sum some of these products."""
    found, seen = set[fx.Node](), set[fx.Node]()
    for node in ups:
        while node not in seen and node.op == "call_function":
            seen.add(node)
            if is_sum(node):
                found.add(node)
            if len(node.users) != 1:
                break
            before, (node,) = node, node.users
            # What a product multiplies is no term of a sum behind it.
            if node.target in PRODUCTS and before in node.args[-2:]:
                break
            if not (is_pointwise(node) or node.target in _PASSED):
                break
    return sorted(found)


def summands(node: fx.Node) -> list[tuple[Any, float]]:
    """The terms of an addition or a subtraction, but of 0, with the factor of each; empty for other nodes."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or not is_floating(node):
        return []
    alpha = node.kwargs.get("alpha", 1)
    if not is_factor(alpha) or scaled(node) is not None:
        return []
    sign = 1.0 if node.target is aten.add.Tensor else -1.0
    return [(node.args[0], 1.0), (node.args[1], sign * float(alpha))]


def added_matrix(found: Product | None) -> fx.Node | None:
    """The matrix that an addmm adds to its product."""
    bias = found.bias if found is not None else None
    return bias if bias is not None and value(bias).dim() == 2 else None


def is_sum(node: fx.Node) -> bool:
    return bool(summands(node)) or added_matrix(product(node)) is not None


def has_size_of(argument: Any, node: fx.Node) -> bool:
    """Whether an operand is floating-point and has the shape of a result, so that it is not broadcast."""
    found = tensor(argument)
    return found is not None and found.is_floating_point() and same_sizes(found.shape, value(node).shape)
