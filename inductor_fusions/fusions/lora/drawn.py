"""`inductor_fusions::lora_drawn_mm`: narrow products behind dropouts, which draw the masks themselves.

The mask of a dropout is a comparison of random numbers, each of the seed and of its own position alone
(Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). So whoever has an element of the
input can draw for it: what Inductor's loop would store for the product to read is made where it is read, and
stored for the backward. The numbers are those of Inductor's loop.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import register_flop_formula

from ..._inductor import draw, draws_four_at_a_time, rounds_inside_of_loops
from ...fusion import Candidate
from ...graph.builder import Builder
from ...graph.facts import change
from ...graph.products import CASTS, value
from .masks import drawing
from .op import NARROW_MM, composite
from .op import flops as narrow_flops

aten = torch.ops.aten


@torch.library.custom_op("inductor_fusions::lora_drawn_mm", mutates_args=())
def _drawn_mm(
    x: Tensor,
    b: list[Tensor],
    scales: list[float],
    further: list[float],
    seeds: Tensor,
    indices: list[int],
    chances: list[float],
) -> list[Tensor]:
    """As `op.composite`, with the masks behind its outputs.

    Args:
        x, b, scales, further: as there.
        seeds: of Inductor's random numbers, int64, shape (count,).
        indices: which of them the mask of each product is drawn from.
        chances: the probability with which each drops.
    """
    kept = [draw(x.shape, seeds[index]) > chance for index, chance in zip(indices, chances, strict=True)]
    return composite(x, b, scales, further, False, kept) + kept


#: What graphs call.
DRAWN_MM: Any = torch.ops.inductor_fusions.lora_drawn_mm.default


@_drawn_mm.register_fake
def _fake(
    x: Tensor,
    b: list[Tensor],
    scales: list[float],
    further: list[float],
    seeds: Tensor,
    indices: list[int],
    chances: list[float],
) -> list[Tensor]:
    kept = [x.new_empty(x.shape, dtype=torch.bool) for _ in indices]
    found: list[Tensor] = NARROW_MM(x, b, scales, further, False, kept)
    return found + kept


@register_flop_formula(torch.ops.inductor_fusions.lora_drawn_mm)
def flops(x_shape: Any, b_shapes: Any, *args: Any, **kwargs: Any) -> int:
    """Those of the products."""
    return narrow_flops(x_shape, b_shapes)


# -- the graph --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """A mask that is drawn for one narrow product, and kept.

    Attributes:
        views: what the product reads, and what that is a view of, up to where it is a mask first.
        numbers: what draws the numbers that are compared there, up to the seed.
        seeds, index: what the seed is.
        chance: the probability with which it drops.
    """

    views: list[fx.Node]
    numbers: list[fx.Node]
    seeds: fx.Node
    index: int
    chance: float


def candidates(graph: fx.Graph) -> Iterator[Candidate]:
    """Narrow products whose masks only they read."""
    for call in graph.find_nodes(op="call_function", target=NARROW_MM):
        masks = _masks(call)
        if masks:
            yield Drawn(call, masks)


class Drawn(Candidate):
    """A narrow product that may draw its masks."""

    reported = False

    def __init__(self, call: fx.Node, masks: list[Mask]) -> None:
        self.anchor, self.masks = call, masks

    def guard(self) -> None:
        """Its lowering decides whether it draws them: until then nothing is lost."""

    def rewrite(self) -> str:
        _rewrite(self.anchor.graph, self.anchor, self.masks)
        return f"{len(self.masks)} masks drawn in the product"


def _masks(call: fx.Node) -> list[Mask]:
    """The masks of a narrow product; none where it cannot draw all of them."""
    arguments: tuple[Any, ...] = call.args
    x, _, _, _, transposed, kept = arguments
    found = value(x)
    if transposed or not kept or not all(isinstance(n, int) for n in found.shape) or found.stride(1) != 1:
        return []
    rows, inner = found.shape
    # Inductor's loop counts positions by int32. Where it draws four numbers at a time, so do rows of a tile.
    if rows * inner >= 2**31 or (draws_four_at_a_time() and inner % 4):
        return []
    masks = [_mask(each, call) for each in dict.fromkeys(kept)]
    drawn = [mask for mask in masks if mask is not None]
    return drawn if len(drawn) == len(kept) and len({mask.seeds for mask in drawn}) == 1 else []


def _mask(kept: fx.Node, call: fx.Node) -> Mask | None:
    nodes = drawing(kept)
    compared = [i for i, node in enumerate(nodes) if node.target is aten.gt.Scalar]
    if len(compared) != 1:
        return None
    views, numbers = nodes[: compared[0] + 1], nodes[compared[0] + 1 :]
    chance: Any = views[-1].args[1]
    seeds, index = numbers[-1].args
    if not isinstance(chance, float) or not isinstance(seeds, fx.Node) or not isinstance(index, int):
        return None
    # What draws is read for this mask alone; the mask itself may be kept for the backward.
    if any(set(node.users) != {user} for user, node in zip(nodes[compared[0] :], numbers, strict=False)):
        return None
    if any(user < call for view in views for user in view.users if user not in views):
        return None
    if rounds_inside_of_loops() and any(node.target in CASTS for node in numbers):
        return None
    return Mask(views, numbers, seeds, index, chance)


def _rewrite(graph: fx.Graph, call: fx.Node, masks: list[Mask]) -> None:
    emitted = Builder(call).call
    made = emitted(
        DRAWN_MM, *call.args[:4], masks[0].seeds,
        [mask.index for mask in masks], [mask.chance for mask in masks],
    )  # fmt: skip
    count = len(made.meta["val"]) - len(masks)
    found = [emitted(operator.getitem, made, count + i) for i in range(len(masks))]
    for output in list(call.users):
        change(output, args=(made, *output.args[1:]))
    shaped = {
        view: emitted(aten.reshape.default, kept, list(value(view).shape))
        for mask, kept in zip(masks, found, strict=True)
        for view in mask.views
    }
    graph.erase_node(call)
    for mask in masks:
        for view in mask.views:
            view.replace_all_uses_with(shaped[view])
            graph.erase_node(view)
        for node in mask.numbers:
            graph.erase_node(node)
    for view in shaped.values():
        if not view.users:
            graph.erase_node(view)
