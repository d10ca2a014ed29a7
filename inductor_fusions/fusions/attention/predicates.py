"""Writes predicates of the mask algebra as operations: whole, for one (query, key), or for blocks of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any, Protocol

import torch
from torch import fx

from ...graph.builder import Builder
from .masks import Affine, And, Bool, Element, NonNegative, Not, Or, dims
from .structure import KEY, QUERY


class Calls(Protocol):
    """What adds nodes: `Builder` for the graph of the attention, `Body` for that of a mod."""

    def call(self, target: Any, *args: Any) -> fx.Node: ...

    def number(self, size: Any) -> Any: ...


class Writer:
    """Writes values for given indices.

    Args:
        index: for each dim the node (or number) that holds the index.
        load: gives the element of a tensor at indices that are written already.
    """

    def __init__(
        self, calls: Calls, index: Mapping[int, Any], load: Callable[[fx.Node, list[Any]], Any]
    ) -> None:
        self.calls, self.index, self.load = calls, index, load

    def number(self, value: Affine) -> Any:
        """A node, or a number where the value is constant."""
        return self._sum([(atom, c) for atom, c in value.coeffs], value.const)

    def condition(self, part: Bool) -> Any:
        """A boolean node, or True or False."""
        if isinstance(part, bool):
            return part
        if isinstance(part, NonNegative):
            left, right = map(self.number, _sides(part.value))
            return self.calls.call(operator.ge, left, right)
        if isinstance(part, Element):
            return self.element(part)
        if isinstance(part, Not):
            return self.calls.call(torch.logical_not, self.condition(part.operand))
        assert isinstance(part, (And, Or))
        join = operator.and_ if isinstance(part, And) else operator.or_
        return fold(lambda x, y: self.calls.call(join, x, y), map(self.condition, part.operands))

    def element(self, element: Element) -> Any:
        return self.load(element.node, [self.number(index) for index in element.index])

    def _sum(self, terms: Sequence[tuple[Any, Any]], const: Any) -> Any:
        total: Any = None
        for atom, c in terms:
            value = self.element(atom) if isinstance(atom, Element) else self.index[atom]
            if not _is(c, 1):
                value = self.calls.call(operator.mul, value, self.calls.number(c))
            total = value if total is None else self.calls.call(operator.add, total, value)
        if total is None:
            return self.calls.number(const)
        return total if _is(const, 0) else self.calls.call(operator.add, total, self.calls.number(const))


def _sides(value: Affine) -> tuple[Affine, Affine]:
    """Two sums of positive terms of which the first is at least the second where `value` is not negative.

    They are compared: a difference of large elements might wrap around.
    """
    negative = isinstance(value.const, (int, float)) and value.const < 0
    plus = tuple((atom, c) for atom, c in value.coeffs if c > 0)
    minus = tuple((atom, -c) for atom, c in value.coeffs if c < 0)
    return Affine(0 if negative else value.const, plus), Affine(-value.const if negative else 0, minus)


def _is(number: Any, wanted: int) -> bool:
    return isinstance(number, (int, float)) and number == wanted


def whole(build: Builder, part: Bool, shape: Sequence[Any], device: torch.device) -> fx.Node:
    """A condition as a boolean tensor, broadcastable to `shape`; it has the dims that it depends on."""
    found = Writer(build, _indices(build, shape, device), _loader(build)).condition(part)
    if isinstance(found, bool):
        return build.call(torch.full, (1,) * len(shape), found, dtype=torch.bool, device=device)
    node: fx.Node = found
    return node


def _indices(build: Builder, shape: Sequence[Any], device: torch.device) -> dict[int, fx.Node]:
    """The index of each dim, along that dim."""
    index = {}
    for dim in range(-len(shape), 0):
        sizes = [1] * len(shape)
        sizes[dim] = shape[dim]
        index[dim] = build.call("view", build.call(torch.arange, shape[dim], device=device), *sizes)
    return index


def _loader(build: Builder) -> Callable[[fx.Node, list[Any]], Any]:
    def load(node: fx.Node, index: list[Any]) -> Any:
        return build.call(operator.getitem, node, tuple(index)) if index else node

    return load


# -- blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """Facts of each block of queries and keys, as boolean tensors (batch or 1, 1, q_blocks, kv_blocks).

    Attributes:
        some: whether any pair may be visible; False is certain.
        all: whether every pair is visible; True is certain.
    """

    some: Any
    all: Any


class BlockWriter:
    """Bounds of a predicate over blocks, by interval arithmetic: no (query, key) matrix is computed.

    The least and the greatest value of an affine form over a block follow from those of its atoms. An
    element that runs along the queries alone, or along the keys alone, gets its bounds from one reduction
    over the tensor; any other element has no bounds, and the block counts as partly visible.

    Args:
        shape: (batch, heads, q_len, kv_len).
        size: length of a block.
    """

    def __init__(self, build: Builder, shape: Sequence[Any], size: int, device: torch.device) -> None:
        self.build, self.shape, self.size, self.device = build, shape, size, device
        self._bounds: dict[int, tuple[fx.Node, fx.Node]] = {}
        for dim in (QUERY, KEY):
            first = build.call(torch.arange, 0, shape[dim], self.size, device=device)
            last = build.call(
                torch.clamp, build.call(operator.add, first, self.size - 1), max=self._last(dim)
            )
            place = (1, 1, -1, 1) if dim == QUERY else (1, 1, 1, -1)
            self._bounds[dim] = (build.call("view", first, *place), build.call("view", last, *place))

    def _last(self, dim: int) -> Any:
        size = self.shape[dim]
        return size - 1 if isinstance(size, int) else self.build.number(size - 1)

    def whole_blocks(self) -> fx.Node:
        """Whether a block has its full size: the last ones may not."""
        build, parts = self.build, []
        for first, last in self._bounds.values():
            length = build.call(operator.sub, last, first)
            parts.append(build.call(operator.eq, length, self.size - 1))
        return build.call(operator.and_, *parts)

    def blocks(self, part: Bool) -> Blocks:
        build = self.build
        if isinstance(part, bool):
            return Blocks(part, part)
        if isinstance(part, NonNegative):
            left, right = map(self._affine, _sides(part.value))
            if left is None or right is None:
                return Blocks(True, False)
            return Blocks(
                build.call(operator.ge, left[1], right[0]), build.call(operator.ge, left[0], right[1])
            )
        if isinstance(part, Element):
            found = self._element(part)
            return Blocks(True, False) if found is None else Blocks(found[1], found[0])
        if isinstance(part, Not):
            inner = self.blocks(part.operand)
            return Blocks(self._not(inner.all), self._not(inner.some))
        assert isinstance(part, (And, Or))
        inner_blocks = [self.blocks(operand) for operand in part.operands]
        join = self._and if isinstance(part, And) else self._or
        return Blocks(fold(join, (b.some for b in inner_blocks)), fold(join, (b.all for b in inner_blocks)))

    def _not(self, value: Any) -> Any:
        return not value if isinstance(value, bool) else self.build.call(torch.logical_not, value)

    def _and(self, left: Any, right: Any) -> Any:
        if isinstance(left, bool) or isinstance(right, bool):
            constant, other = (left, right) if isinstance(left, bool) else (right, left)
            return other if constant else False
        return self.build.call(operator.and_, left, right)

    def _or(self, left: Any, right: Any) -> Any:
        return self._not(self._and(self._not(left), self._not(right)))

    def _affine(self, value: Affine) -> tuple[Any, Any] | None:
        """Least and greatest value over each block."""
        low: Any = self.build.number(value.const)
        high = low
        for atom, c in value.coeffs:
            bounds = self._bounds.get(atom) if isinstance(atom, int) else self._element(atom)
            if bounds is None:
                return None
            least, most = bounds if c > 0 else bounds[::-1]
            low, high = self._plus(low, least, c), self._plus(high, most, c)
        return low, high

    def _plus(self, total: Any, value: Any, factor: Any) -> Any:
        if not _is(factor, 1):
            value = self.build.call(operator.mul, value, self.build.number(factor))
        return value if _is(total, 0) else self.build.call(operator.add, total, value)

    def _element(self, element: Element) -> tuple[Any, Any] | None:
        """Least and greatest value of an element over each block (False < True)."""
        build = self.build
        along = [dim for dim in (QUERY, KEY) if dim in dims(element)]
        if len(along) > 1:
            return None
        values = whole_element(build, element, self.shape, self.device)
        condition = build.value(values).dtype == torch.bool
        if not along:
            return values, values
        dim = along[0]
        if dim == QUERY:
            values = build.call("transpose", values, -1, -2)
        if condition:
            values = build.call("to", values, torch.int32)
        grouped = build.call(operator.getitem, values, (Ellipsis, self._members(dim)))
        bounds = []
        for reduction in (torch.amin, torch.amax):
            bound = build.call(reduction, grouped, -1)
            if dim == QUERY:
                bound = build.call("transpose", bound, -1, -2)
            bounds.append(build.call("to", bound, torch.bool) if condition else bound)
        return bounds[0], bounds[1]

    def _members(self, dim: int) -> fx.Node:
        """Indices of each block, as (blocks, size); the last one of a short block is repeated."""
        build = self.build
        first = build.call("view", self._bounds[dim][0], -1, 1)
        inside = build.call(torch.arange, self.size, device=self.device)
        return build.call(torch.clamp, build.call(operator.add, first, inside), max=self._last(dim))


def whole_element(build: Builder, element: Element, shape: Sequence[Any], device: torch.device) -> fx.Node:
    """An element as a tensor of four dims, of size 1 where it does not depend on the dim."""
    node: fx.Node = Writer(build, _indices(build, shape, device), _loader(build)).element(element)
    own = build.value(node).shape
    return node if len(own) == 4 else build.call("reshape", node, (*([1] * (4 - len(own))), *own))
