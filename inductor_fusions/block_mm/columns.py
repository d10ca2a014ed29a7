"""Slices of a product's columns, as products with slices of its weight.

Gate and up are often one linear whose result is split again: by `chunk` or `split`, by slices, every second
column, as rows of a view, also permuted, or as parts of an einsum. Other columns may be overwritten before.
The bias may be an addition by itself, also of a linear that is not taken apart.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..graph.builder import Builder
from ..graph.concatenation import before_writes, joined
from ..graph.dims import Selection, selection
from ..graph.products import RESHAPES, SPLITS, VIEWS, Product, product, same_sizes
from ..operands import tensor, value

aten = torch.ops.aten


@dataclass(frozen=True)
class Columns:
    """Columns start, start + step, ... of a product."""

    base: Product
    start: int
    step: int
    count: int

    @property
    def end(self) -> int:
        """The column behind the last one."""
        return self.start + self.step * (self.count - 1) + 1

    def planned(self) -> Product:
        """The product that these columns are, of nodes that are in no graph: to ask for sizes and strides."""
        base, bias = self.base, self.base.bias
        return Product(
            self._part(value(base.node)), base.a, self._part(value(base.b)),
            None if bias is None else self._part(value(bias)), base.scale,
        )  # fmt: skip

    def built(self, build: Builder) -> Product:
        """Add the product of these columns to the graph, with slices of the weight and the bias."""
        base = self.base

        def part(node: fx.Node) -> fx.Node:
            last = value(node).dim() - 1
            return build.call(aten.slice.Tensor, node, last, self.start, self.end, self.step)

        bias = None if base.bias is None else part(base.bias)
        return Product(base.node, base.a, part(base.b), bias, base.scale)

    def _part(self, whole: torch.Tensor) -> fx.Node:
        node = fx.Graph().placeholder("part")
        node.meta["val"] = whole[..., self.start : self.end : self.step]
        return node


def columns(node: Any) -> Columns | None:
    """Read a part of the columns of a product, or a product and a bias that is added to it.

    None of anything else, the whole product as well.
    """
    if not isinstance(node, fx.Node) or product(node) is not None:
        return None
    found = _columns(node, 16)
    return None if found is None or (_is_whole(found) and found.base == product(found.base.node)) else found


def is_apart(node: fx.Node) -> fx.Node | None:
    """The node of a product that a node has some elements of, in any arrangement; or None."""
    source: Any = node
    while isinstance(source, fx.Node) and source.args and product(source) is None:
        if source.target not in VIEWS | SPLITS | {operator.getitem, aten.clone.default}:
            return None
        source = source.args[0]
    return source if isinstance(source, fx.Node) and product(source) is not None else None


def halves(call: fx.Node) -> tuple[Product | Columns, Product | Columns] | None:
    """The two halves that a `glu` over the last dim splits: of one product, or each a product."""
    given: tuple[Any, ...] = call.args
    source, dim = given[0], given[1] if len(given) > 1 else -1
    last = value(source).dim() - 1
    if not isinstance(dim, int) or dim % (last + 1) != last:
        return None
    parts, along = joined(source)
    if len(parts) == 2 and along == last:
        one, other = (_columns(part, 16) for part in parts)
        if one is None or other is None or one.count != other.count:
            return None
        return (one.base if _is_whole(one) else one), (other.base if _is_whole(other) else other)
    whole = _columns(source, 16)
    if whole is None:
        return None
    half = whole.count // 2
    first, second = _taken(whole, range(half)), _taken(whole, range(half, 2 * half))
    return None if first is None or second is None else (first, second)


def _is_whole(part: Columns) -> bool:
    return (part.start, part.step, part.count) == (0, 1, value(part.base.node).shape[1])


def _columns(node: Any, depth: int) -> Columns | None:
    if not isinstance(node, fx.Node) or node.op != "call_function" or tensor(node) is None or depth == 0:
        return None
    base = product(node)
    if base is not None:
        width = value(node).shape[1]
        return Columns(base, 0, 1, width) if isinstance(width, int) else None
    if node.target is aten.add.Tensor:
        return _with_bias(node, depth)
    if (taken := selection(node)) is not None:
        return _selected(taken, depth)
    inside = _columns(node.args[0], depth - 1) if node.target in RESHAPES else None
    if inside is None:
        return None
    return inside if same_sizes(value(node.all_input_nodes[0]).shape[-1:], value(node).shape[-1:]) else None


def _selected(taken: Selection, depth: int) -> Columns | None:
    """Columns that an operation takes, or one row of a view of them as a matrix."""
    last = len(taken.index) - 1
    dim, *others = taken.dims or [last]
    part = taken.index[dim]
    if others:
        return None
    if type(part) is int:
        return _of_rows(taken.source, dim, part, depth)
    source = before_writes(taken)
    inside = _columns(source, depth - 1) if dim == last and isinstance(part, slice) else None
    if inside is None or inside.count != value(source).shape[-1]:  # columns of heads
        return None
    if not all(each is None or type(each) is int for each in (part.start, part.stop, part.step)):
        return None
    return _taken(inside, range(inside.count)[part])


def _with_bias(node: fx.Node, depth: int) -> Columns | None:
    """All columns of a product without a bias, and a vector that is added to each row."""
    if len(node.args) != 2 or node.kwargs:
        return None
    for source, vector in (node.args, node.args[::-1]):
        bias, inside = tensor(vector), _columns(source, depth - 1)
        if bias is None or inside is None or not isinstance(vector, fx.Node) or not _is_whole(inside):
            continue
        dtypes = {each.dtype for each in (bias, value(node), value(inside.base.node))}
        if inside.base.bias is None and same_sizes(bias.shape, (inside.count,)) and len(dtypes) == 1:
            return replace(inside, base=replace(inside.base, bias=vector))
    return None


def _taken(whole: Columns, places: range) -> Columns | None:
    """Some of the columns."""
    if not places:
        return None
    start, step = whole.start + places.start * whole.step, places.step * whole.step
    return Columns(whole.base, start, step, len(places))


def _of_rows(node: fx.Node, place: int, index: int, depth: int) -> Columns | None:
    """One row, or one column, of a view of the columns as a matrix."""
    if (moved := _before_permutation(node, place)) is not None:
        return _of_part(*moved, index, depth)
    if node.target not in RESHAPES or value(node).dim() - place > 2:
        return None
    return _of_part(node, place, index, depth)


def _before_permutation(node: fx.Node, place: int) -> tuple[fx.Node, int] | None:
    """What a permutation moves one dim of, and this dim: `"bnd,cdf->cbnf"`. Others keep their order."""
    parts, step = value(node).shape[place], node
    while place == 0 and step.target in RESHAPES and isinstance(step.args[0], fx.Node):
        step = step.args[0]
        if str(value(step).shape[:1]) != str(value(node).shape[:1]):
            return None
    if step.target is not aten.permute.default or parts == 1:
        return None
    arguments: tuple[Any, ...] = step.args
    viewed, given = arguments
    sizes = value(viewed).shape
    dims = [dim % len(sizes) for dim in given]
    others = [dim for dim in dims if dim != dims[place] and str(sizes[dim]) != "1"]
    return (viewed, dims[place]) if others == sorted(others) else None


def _of_part(node: fx.Node, place: int, index: int, depth: int) -> Columns | None:
    """One part along a dim of a view of the columns: all that is behind the dim, or one of the last dim."""
    *front, parts = value(node).shape[: place + 1]
    behind = value(node).shape[place + 1 :]
    count = math.prod(behind) if behind else front[-1] if front else None
    if not isinstance(parts, int) or not isinstance(count, int):
        return None
    inside = _viewed(node, parts * count, depth)
    start, step = (index % parts * count, 1) if behind else (index % parts, parts)
    return None if inside is None else _taken(inside, range(start, start + step * (count - 1) + 1, step))


def _viewed(node: fx.Node, count: int, depth: int) -> Columns | None:
    """The `count` columns that a node views with other dims; a view keeps the order of the elements."""
    source: Any = node
    while isinstance(source, fx.Node) and source.target in RESHAPES and depth:
        source, depth = source.args[0], depth - 1
        inside = _columns(source, depth)
        if inside is not None and inside.count == count:
            return inside
    return None
