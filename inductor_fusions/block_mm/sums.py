"""Sums of products, read from the tree of additions that computes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..graph.additions import has_size_of
from ..graph.products import CASTS, MUL, RESHAPES, Product, is_factor, is_floating, product, widens
from ..operands import value

aten = torch.ops.aten


@dataclass(frozen=True)
class Sum:
    """A sum of products, and at most one more term.

    Attributes:
        root: the node that holds it.
        terms: products with the factor of each in `scale`, the longest K first; none is used elsewhere, and
            one at most has a bias, a vector: where nothing else is added.
        rest: what else is added, of the shape of `root`; or None.
        inner: the nodes between the products and the root.
    """

    root: fx.Node
    terms: tuple[Product, ...]
    rest: fx.Node | None
    inner: tuple[fx.Node, ...]


def sum_of_products(root: fx.Node) -> Sum | None:
    """Read a tree of additions whose leaves are products, but for one at most."""
    if root.target is not aten.add.Tensor or root.kwargs or not is_floating(root):
        return None
    terms: list[Product] = []
    rest: list[fx.Node] = []
    inner: list[fx.Node] = []

    def visit(node: fx.Node, scale: float) -> None:
        if len(node.users) != 1 and node is not root:
            rest.append(node if scale == 1 else root)
            return
        found = product(node)
        if found is not None and found.scale == 1:
            if found.bias is None or (scale == 1 and value(found.bias).dim() == 1):
                terms.append(replace(found, scale=scale))
                return
        operands: tuple[Any, ...] = node.args
        if node.op == "call_function" and is_floating(node):
            if node.target is aten.add.Tensor and not node.kwargs and scale == 1:
                if all(has_size_of(operand, node) for operand in operands):
                    inner.append(node)
                    for operand in operands:
                        visit(operand, scale)
                    return
            if node.target in RESHAPES or (node.target in CASTS and widens(node)):
                inner.append(node)
                visit(operands[0], scale)
                return
            if node.target in MUL and is_factor(operands[1]):
                inner.append(node)
                visit(operands[0], scale * float(operands[1]))
                return
        rest.append(node if scale == 1 else root)

    visit(root, 1.0)
    # The operation adds one thing to its products, a vector or a matrix.
    added = [*rest, *(p.bias for p in terms if p.bias is not None)]
    if root in rest or len(added) > 1 or len(terms) < 2:
        return None
    if len({p.node for p in terms}) < len(terms):
        return None  # one product, of which stock adds the result twice
    # One order for all sums of the same products: tables know them by it.
    terms.sort(key=lambda p: p.inner, reverse=True)
    return Sum(root, tuple(terms), rest[0] if rest else None, tuple(n for n in inner if n is not root))
