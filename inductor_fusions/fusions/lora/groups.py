"""Groups of linears on one input: which linears, and their shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ...block_mm import guards
from ...decisions.problems import FEW_ROWS
from ...graph.products import RESHAPES, Product, identity, product, through
from ...operands import tokens_of, value
from . import narrow, profit
from .adapters import Adapter, source, unrounded
from .masks import mask_of
from .recognise import Linear

aten = torch.ops.aten


def adapters_of(group: Iterable[Linear]) -> list[Adapter]:
    """The adapters of linears, in order."""
    return [adapter for linear in group for adapter in linear.adapters]


def bases_of(group: Iterable[Linear]) -> list[Product]:
    """The products of linears that are no adapters, in order."""
    return [base for linear in group for base in linear.bases]


def grouped(products: Sequence[Product], found: Sequence[Linear]) -> Iterator[list[Linear]]:
    """Linears with one base on the same input, and plain linears on that input; others by themselves."""
    plain: dict[Any, list[Linear]] = {}
    taken = bases_of(found)
    for a in adapters_of(found):
        taken += [a.up, a.down]
    inside = {node for p in taken for node in _sliced(p.node)}
    for p in products:
        if p.node not in inside and p.scale == 1:
            plain.setdefault(identity(p.a), []).append(Linear(p.node, [p]))
    groups: dict[Any, list[Linear]] = {}
    for linear in found:
        alone = linear.problem or len(linear.bases) != 1 or linear.rest is not None
        groups.setdefault(linear.root if alone else identity(linear.bases[0].a), []).append(linear)
    for key, group in groups.items():
        yield [*group, *(plain.get(key, []) if isinstance(key, tuple) else [])]


def _sliced(node: fx.Node) -> Iterator[fx.Node]:
    """A product, and those that it is a slice of: Inductor may have padded its rows and its columns."""
    while node.target is aten.slice.Tensor:
        yield node
        node = node.all_input_nodes[0]
    yield node


def text_of(adapters: Iterable[Adapter]) -> str:
    """The matrices of adapters, for reports."""
    return ", ".join(f"{guards.text(a.down.b)} x {guards.text(a.up.b)}" for a in adapters)


def result_dtypes(group: Sequence[Linear]) -> tuple[torch.dtype, str]:
    """The dtype of the results, and the numbers of those that are float32 beside 16-bit ones.

    Inductor takes out the cast to bfloat16 that another one to float32 follows, as in front of an activation.
    """
    found = [value(linear.root).dtype for linear in group]
    dtype = min(found, key=lambda each: each.itemsize)
    return dtype, ",".join(str(g) for g, each in enumerate(found) if each != dtype)


def is_whole(group: Sequence[Linear]) -> bool:
    """Whether linears are one operation for few rows: nothing but the results is used elsewhere."""
    x, adapters = value(group[0].bases[0].a), adapters_of(group)
    rows = x.shape[0]
    if not isinstance(rows, int) or rows > FEW_ROWS or x.stride(1) != 1:
        return False
    ups = {a.up.node for a in adapters}
    for linear in group:
        (base, *more) = linear.bases
        if more or linear.rest is not None or base.scale != 1:
            return False
        if base.bias is not None and value(base.bias).dim() != 1:
            return False
        origin = unrounded(base.a)
        for a in linear.adapters:
            reading = source(a.down.a)
            views = (*reading.views, *origin.views)
            if reading.base is not through(origin.base, RESHAPES):
                return False
            if any(view.target not in RESHAPES for view in views):
                return False
            if a.factor is not None or not a.is_plain or mask_of(a.down) is not None:
                return False
            # The kernel has one factor, behind B: in float16 what A gives may overflow without its own.
            if value(a.down.b).dtype == torch.float16 and reading.scale * a.down.scale != 1:
                return False
            if not set(_ends(a.down.node)) <= ups:
                return False
    if len({value(a.up.b).dtype for a in adapters}) > 1:
        return False
    columns = sum(narrow.padded(int(value(a.up.a).shape[1])) for a in adapters)
    return columns <= narrow.MOST_TOGETHER


def _ends(node: fx.Node) -> Iterator[fx.Node]:
    """Who reads a down-projection, behind casts, reshapes and factors."""
    for user in node.users:
        if user.op == "call_function" and product(user) is None:
            yield from _ends(user)
        else:
            yield user


def by_width(members: list[Product]) -> Iterator[list[Product]]:
    """The members in parts whose columns one kernel can compute."""
    part: list[Product] = []
    for p in members:
        columns = sum(narrow.padded(int(value(q.b).shape[1])) for q in (*part, p))
        if part and columns > narrow.MOST_TOGETHER:
            yield part
            part = []
        part.append(p)
    yield part


def shape_of(group: Sequence[Linear]) -> profit.Shape:
    """The shape of a group of linears for tables."""
    first = group[0].bases[0]
    return profit.Shape(
        tokens=tokens_of(value(first.a).shape[0]),
        inner=tuple(int(value(p.a).shape[1]) for p in group[0].bases),
        outer=tuple(int(value(linear.bases[0].b).shape[1]) for linear in group),
        ranks=tuple(tuple(int(value(a.up.a).shape[1]) for a in linear.adapters) for linear in group),
        dtype=value(first.a).dtype,
        adapters=value(adapters_of(group)[0].up.b).dtype,
        layout="n" if value(first.b).stride(1) == 1 else "t",
    )
