"""Puts `block_mm` into a graph in place of the products that it computes."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from ..._inductor import fake_mode_of, hint, suppress_guards, was_erased
from ...fusion import Rejected
from ...graph.placement import Place
from ...graph.products import Product, same_sizes, value
from .op import BLOCK_MM


def insert(
    graph: fx.Graph,
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
        graph: the graph.
        place: where it goes; views are moved as it says.
        anchor: the node whose source line the new nodes get.
        groups: the products of each group. At most one of a group has a bias.
        activations: of each group; none by default.
        gated: as in `op`.
        dtype: of the outputs; that of the first product by default.
        wide: as in `op`.

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
    made = call(graph, place.before, anchor, BLOCK_MM, *arguments)
    outputs = [
        call(graph, place.before, anchor, operator.getitem, made, index)
        for index in range(len(made.meta["val"]))
    ]
    place.sink()
    return outputs


def sizes_of(node: fx.Node, product: fx.Node, inner: Iterable[fx.Node]) -> list[Any]:
    """The sizes of a node, for `reshaped`.

    Args:
        node: the node.
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
    raise Rejected("no reshape names the symbolic sizes of the result")


_WITH_SIZES = (torch.ops.aten.reshape.default, torch.ops.aten.view.default)


def reshaped(graph: fx.Graph, before: fx.Node, node: fx.Node, sizes: list[Any], anchor: fx.Node) -> fx.Node:
    """`node` with other sizes, if it has others."""
    if same_sizes(value(node).shape, sizes):
        return node
    return call(graph, before, anchor, torch.ops.aten.reshape.default, node, sizes)


def call(graph: fx.Graph, before: fx.Node, anchor: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Add a call of an operation in front of `before`, with its fake value.

    Raises:
        RuntimeError: an argument is in no graph any more. Nothing is changed yet, so the site stays as it is.
    """
    inputs: list[fx.Node] = []
    fx.node.map_arg(args, inputs.append)
    for node in inputs:
        if was_erased(node):
            raise RuntimeError(f"{node} was replaced by another fusion, and is in no graph")
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    if "stack_trace" in anchor.meta:
        node.meta["stack_trace"] = anchor.meta["stack_trace"]
    if isinstance(target, torch._ops.OpOverload):
        node.meta["original_aten"] = target  # Inductor calls the kernel by it
    mode = fake_mode_of(graph)
    values = fx.node.map_arg(args, lambda n: n.meta["val"])
    with suppress_guards(mode), mode if mode is not None else contextlib.nullcontext():
        node.meta["val"] = target(*values)
    return node


def replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Let every user of `old` use `new`, and remove what nothing uses any more."""
    old.replace_all_uses_with(new)
    # A node with two users is met twice.
    dead = {old: None}
    while dead:
        node, _ = dead.popitem()
        if node.users or node.op != "call_function" or was_erased(node):
            continue
        inputs = node.all_input_nodes
        graph.erase_node(node)
        dead.update(dict.fromkeys(inputs))
