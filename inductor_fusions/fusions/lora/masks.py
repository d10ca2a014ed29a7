"""Masks of dropouts, and products of what they keep, in a post-grad graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...graph.additions import has_size_of
from ...graph.products import (
    CASTS,
    RESHAPES,
    Product,
    is_factor,
    is_floating,
    multiplied,
    same_sizes,
    scaled,
)
from ...operands import tensor, value
from .op import NARROW_MM

#: What a mask is drawn by, and what its seed comes from.
_RANDOM = "prims.inductor_random.default"
_DRAWN = ("aten.gt.Scalar", _RANDOM)
_SEEDS = ("prims.inductor_lookup_seed.default",)


@dataclass(frozen=True)
class Masked(Product):
    """`scale * (kept * a) @ b`, one result of a skinny GEMM.

    Attributes:
        kept: the mask, a bool matrix of the shape of a; or None.
    """

    kept: fx.Node | None = None


def narrow_product(node: fx.Node) -> Masked | None:
    """Read one result of a skinny GEMM, in its plain form."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    call, index = node.args[0], node.args[1]
    if call.target is not NARROW_MM or not isinstance(index, int):
        return None
    arguments: tuple[Any, ...] = call.args
    x, b, scales, _, transposed, kept = arguments
    if transposed or index >= len(b) or value(b[index]).dim() != 2:
        return None
    return Masked(node, x, b[index], None, float(scales[index]), kept[index] if kept else None)


def mask_of(p: Product) -> fx.Node | None:
    """The mask of a product's left operand, or None."""
    return p.kept if isinstance(p, Masked) else None


def drawing(kept: fx.Node) -> list[fx.Node]:
    """The nodes that draw a mask from a seed: they give the same wherever they are. None for another mask."""
    found: list[fx.Node] = []
    node = kept
    while node.op == "call_function":
        found.append(node)
        if str(node.target) in _SEEDS:
            return found
        if str(node.target) not in _DRAWN and node.target not in (*RESHAPES, *CASTS):
            return []
        inner: Any = node.args[1 if str(node.target) == _RANDOM else 0]
        node = inner
    return []


def masks_of(products: Sequence[Product]) -> list[fx.Node]:
    """The masks of products, all or none of which have one."""
    return [kept for kept in map(mask_of, products) if kept is not None]


def masked(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """The value that a node multiplies by a mask, the mask, and a factor.

    The mask is a bool tensor with as many elements as the node. `where` is not such a mask: it removes NaN,
    and 0 * NaN is NaN.
    """
    for x, by in multiplied(node) if is_floating(node) else ():
        mask = mask_in(by) if has_size_of(x, node) else None
        if mask is not None and same_sizes(value(by).shape, value(node).shape):
            return x, *mask
    return None


def mask_in(node: Any) -> tuple[fx.Node, float] | None:
    """The bool tensor that a node casts and multiplies by a number, and the number."""
    scale = 1.0
    while (found := tensor(node)) is not None:
        if found.dtype == torch.bool:
            return node, scale
        if node.op != "call_function" or not node.args:
            return None
        step = scaled(node) or _scaled_bool(node)
        if step is None and node.target not in RESHAPES and node.target not in CASTS:
            return None
        by: Any = step[1] if step is not None else 1.0
        inner: Any = step[0] if step is not None else node.args[0]
        node, scale = inner, scale * by
    return None


def _scaled_bool(node: fx.Node) -> tuple[fx.Node, float] | None:
    """The bool tensor that a node multiplies by a number, and that number."""
    for x, by in multiplied(node):
        found = tensor(x)
        if found is not None and found.dtype == torch.bool and is_factor(by):
            return x, float(by)
    return None
