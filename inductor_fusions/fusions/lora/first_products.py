"""The first product of an adapter after autograd: padded, with a mask, or in front of a function."""

from __future__ import annotations

import torch
from torch import fx

from ...graph.concatenation import joined
from ...graph.dims import permutation, selection
from ...graph.products import (
    CASTS,
    RESHAPES,
    Product,
    is_floating,
    is_pointwise,
    product,
    same_sizes,
    through,
    zero_padding,
)
from ...graph.torch_ops import read
from ...operands import value
from .masks import narrow_product

aten = torch.ops.aten

#: The most operations between A and B.
MOST_BETWEEN = 24


def down_projection(node: fx.Node) -> Product | None:
    """The product without a bias that a node is, with its padding or masks."""
    down = first_product(node)
    return down if down is not None and down.bias is None else None


def first_product(node: fx.Node) -> Product | None:
    """The product that a node is, with its padding or masks, and its bias if that is a vector."""
    down = product(node) or _of_padded_columns(node) or narrow_product(node)
    return down if down is not None and (down.bias is None or value(down.bias).dim() == 1) else None


def in_front_of_squares(node: fx.Node, rank: int) -> fx.Node:
    """The node in front of a chain of products with square matrices, as between A and B of LoRA-XS."""
    inside = through(node, RESHAPES | CASTS)
    square = down_projection(inside)
    if square is None or square.inner != rank:
        return node
    return in_front_of_squares(square.a, rank)


def product_in(matrix: fx.Node, size: str) -> Product | None:
    """The only product that a matrix is a function of, element by element, or of some columns of it.

    Args:
        size: how many elements the matrix has.
    """
    down: Product | None = None
    seen, waiting = set[fx.Node](), [(matrix, size, list[int]())]
    while waiting:
        node, size, turned = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        order = _order(node)
        found = first_product(node) if not turned and str(value(node).numel()) == size else None
        if found is not None and down is None:
            down = found
        elif found is not None or len(seen) > MOST_BETWEEN:
            return None
        elif order:  # there and back, where A and B multiply the input from the left
            if turned and not _is_undone(order, turned):
                return None
            waiting.append((node.all_input_nodes[0], size, [] if turned else order))
        elif is_pointwise(node) or (not turned and (node.target in RESHAPES or order is not None)):
            waiting += [(each, size, turned) for each in node.all_input_nodes if is_floating(each)]
        elif not turned and str(value(node).numel()) == size:  # a number of each row is a factor
            waiting += [(each, str(value(each).numel()), []) for each in _beside(node)]
    return down


def _order(node: fx.Node) -> list[int] | None:
    """How a node permutes dims; empty if it moves only those of size 1, as einsum does; None of another."""
    op = read(node)
    order = permutation(op) if op is not None else None
    if op is None or order is None:
        return None
    sizes = value(op.input).shape
    wide = [dim for dim in order if not (isinstance(sizes[dim], int) and sizes[dim] == 1)]
    return [] if wide == sorted(wide) else list(order)


def _is_undone(first: list[int], second: list[int]) -> bool:
    """Whether a permutation puts dims back that another one has permuted."""
    return len(first) == len(second) and [first[dim] for dim in second] == [*range(len(second))]


def put_back(node: fx.Node) -> fx.Node | None:
    """The node whose dims a node permutes, and behind copies permutes back; None of another."""
    order = _order(node)
    if not order:
        return None
    inner = through(node.all_input_nodes[0], {aten.clone.default})
    before = _order(inner)
    return inner.all_input_nodes[0] if before and _is_undone(before, order) else None


def _beside(node: fx.Node) -> list[fx.Node]:
    """What a node has some columns of, or what it puts beside each other: a part of packed ranks (PVeRA)."""
    taken = selection(node)
    if taken is not None and is_floating(taken.source) and taken.dims == [value(taken.source).dim() - 1]:
        return [taken.source] if taken.places[-1] is not None else []
    parts, dim = joined(node)
    return parts if parts and is_floating(node) and dim == value(node).dim() - 1 else []


def _of_padded_columns(node: fx.Node) -> Product | None:
    """The product that a node has the first columns of; the others come from zeros."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or node.kwargs or node.args[1:3] != (1, 0):
        return None
    padded = product(node.args[0])
    found = zero_padding(padded.b) if padded is not None and padded.bias is None else None
    if padded is None or found is None or found[2] != 0:
        return None
    own = same_sizes(value(found[0]).shape[1:], value(node).shape[1:])
    return Product(node, padded.a, found[0], None, padded.scale) if own else None
