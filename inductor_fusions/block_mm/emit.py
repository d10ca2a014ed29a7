"""Puts `block_mm` into a graph in place of the products that it computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .._inductor import hint
from ..graph.builder import Builder
from ..graph.placement import Place
from ..graph.products import Product, same_sizes
from ..operands import value
from ..reasons import Reason
from .op import BLOCK_MM


def insert(
    place: Place,
    anchor: fx.Node,
    groups: Sequence[Sequence[Product]],
    activations: Sequence[str] | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
    wide: str = "",
) -> list[fx.Node]:
    """Add the operation and its outputs to a graph, used by nothing yet.

    Args:
        place: where it goes; views are moved as it says.
        anchor: the node whose source line the new nodes get.
        groups: the products of each group. At most one of a group has a bias.
        activations: of each group; none by default.
        dtype: of the outputs; that of the first product by default.

    Returns:
        One node for each output.
    """
    place = place.hoist()
    products = [(index, p) for index, group in enumerate(groups) for p in group]
    biases = [(index, p.bias) for index, p in products if p.bias is not None]
    arguments: tuple[Any, ...] = (
        [p.a for _, p in products],
        [p.b for _, p in products],
        [bias for _, bias in biases],
        [index for index, _ in biases],
        [index for index, _ in products],
        [p.scale for _, p in products],
        ",".join(activations or [""] * len(groups)),
        gated,
        dtype or value(products[0][1].node).dtype,
        wide,
        hint(value(products[0][1].a).shape[0]),
    )
    outputs = Builder(place.before, anchor).parts(BLOCK_MM, *arguments)
    place.sink()
    return outputs


def sizes_of(node: fx.Node, product: fx.Node, inner: Iterable[fx.Node]) -> list[Any]:
    """The sizes of a node, for `reshaped`.

    Args:
        product: one that has the sizes of what comes in its place.
        inner: nodes in front of it, among which there is a reshape to its sizes if these are symbolic, and
            not those of the product.

    Raises:
        Rejected: there is no such reshape.
    """
    sizes = list(value(node).shape)
    if same_sizes(value(product).shape, sizes) or all(isinstance(size, int) for size in sizes):
        return sizes
    for other in inner:
        if other.target in _WITH_SIZES and same_sizes(value(other).shape, sizes):
            named: Any = other.args[1]
            return list(named)
        if other.target in _WITH_SIZES and isinstance(sizes[-1], int):
            if same_sizes(value(other).shape[:-1], sizes[:-1]):  # of what the columns are taken of
                named = other.args[1]
                return [*named[:-1], sizes[-1]]
    raise Reason.SYMBOLIC.rejected("no reshape in the graph provides the symbolic sizes of the result")


_WITH_SIZES = (torch.ops.aten.reshape.default, torch.ops.aten.view.default)


def reshaped(build: Builder, node: fx.Node, sizes: list[Any]) -> fx.Node:
    """`node` with other sizes, if it has others."""
    if same_sizes(value(node).shape, sizes):
        return node
    return build.call(torch.ops.aten.reshape.default, node, sizes)
