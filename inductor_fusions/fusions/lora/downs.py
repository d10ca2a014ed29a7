"""Down-projections of adapters as skinny GEMMs, one for each input."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..._inductor import was_erased
from ...fusion import Rejected
from ...graph.builder import Builder, substitute
from ...graph.placement import Place, find
from ...graph.products import Product
from ...operands import value
from .adapters import Adapter, Source, source
from .emitter import Emitter
from .groups import by_width
from .masks import drawing, mask_of, masks_of
from .op import NARROW_MM


@dataclass(frozen=True)
class Down:
    """One skinny GEMM to emit.

    Attributes:
        members: the down-projections of one input: all of them of what a mask keeps of it, or none.
    """

    members: list[Product]
    origin: Source
    place: Place


@dataclass(frozen=True)
class Made:
    """The results of one down-projection.

    Attributes:
        output: shape (M, r), in the dtype of A; with the bias of the down-projection.
        form: the further form, or None where none was asked for.
        further: the factor of the further form.
    """

    output: fx.Node
    form: fx.Node | None
    further: float


def narrow_products(downs: Iterable[Product]) -> list[Down]:
    """The skinny GEMMs of down-projections: one for each input, as far as one place does for several.

    Raises:
        Rejected: there is no place for one.
    """
    by_input: dict[Any, list[Product]] = {}
    for down in {down.node: down for down in downs}.values():
        origin = source(down.a)
        views = tuple(str(view.args[1:]) for view in origin.views)
        key = (origin.base, views, origin.scale, value(down.b).dtype, mask_of(down) is None)
        by_input.setdefault(key, []).append(down)
    found = []
    for members in by_input.values():
        for some in by_width(members):
            try:
                found.append(_down(some))
            except Rejected:
                found += [_down([one]) for one in some]
    return found


def _down(members: list[Product]) -> Down:
    origin = source(members[0].a)
    # The place of what is read: the views in between are made anew, and biases are added later.
    reading = [replace(p, a=origin.base, bias=None) for p in members]
    masks = masks_of(members)
    drawn = {node for kept in masks for node in drawing(kept)}
    return Down(members, origin, find(reading, [*origin.sizes, *masks], movable=drawn))


def marked(graph: fx.Graph, place: Place) -> Place:
    """The place, named by a node of its own: the views that name places move on the way."""
    with graph.inserting_before(place.before):
        return replace(place, before=graph.call_function(operator.pos, (0,)))


def insert(
    down: Down, moved: set[fx.Node], further: Callable[[Product, fx.Node], float]
) -> dict[fx.Node, Made]:
    """Add one skinny GEMM to the graph: its results by down-projection.

    Args:
        moved: views that other places have moved; those of this one are added.
        further: the factor of the further form of a down-projection of a matrix, or 0.
    """
    views = {*down.place.hoisted, *down.place.sunk}
    place = down.place.without(moved).hoist()
    make = Emitter(place.before, down.members[0].node)
    right = [p.b for p in down.members]
    x = make.replay(down.origin)
    factors = [further(p, x) for p in down.members]
    scales = [down.origin.scale * p.scale for p in down.members]
    outputs = make.parts(NARROW_MM, x, right, scales, factors, False, masks_of(down.members))
    place.sink()
    moved.update(views)
    forms = iter(outputs[len(right) :])
    found = {}
    for p, output, factor in zip(down.members, outputs, factors, strict=False):
        whole = output if p.bias is None else Builder(p.node).call(torch.ops.aten.add.Tensor, output, p.bias)
        found[p.node] = Made(whole, next(forms) if factor else None, factor)
    return found


def operands(make: Emitter, a: Adapter, made: Made, dtype: torch.dtype) -> tuple[fx.Node, fx.Node, float]:
    """Both operands of an up-projection in the dtype of a kernel, and the factor that is left.

    Args:
        made: the down-projection of the adapter.
        dtype: float32 operands become halves of another one.
    """
    left, form, right, scale = made.output, made.form, a.up.b, a.scale
    if a.middle is not None:
        left, form = a.middle, None
    if a.factor is not None and a.over:
        left, right = make.weighted(left, right, a.factor, a.over)
        form = None
    elif a.factor is not None:
        left, form = make.times(left, a.factor), None
    right = make.padded(right, a.pad)
    if form is not None:
        left, scale = form, a.scale / made.further
    elif value(right).dtype != dtype:
        left = make.left_halves(left, dtype)
    if value(right).dtype != dtype:
        right = make.right_halves(right, dtype)
    return left, right, scale


def replace_all(made: Mapping[fx.Node, Made]) -> None:
    """Replace down-projections that other nodes read as well by the results of skinny GEMMs."""
    for old, new in made.items():
        if not was_erased(old):
            substitute(old, new.output)
