"""Builds the mask of a fused attention, and preserves the values of fully masked rows.

A row is fully masked if its query sees no key: left padding under a causal mask, a padded query of DeBERTa.
With a finite fill all unfused scores of the row become the fill, so its weights are equal and its result is
the mean of the values. A fused kernel computes such a row wrongly. It multiplies scores by log2(e), which
overflows for the lowest number of a dtype. Its backward reads a logsumexp, in which fill + log(kv_len) rounds
to the fill.

So these rows are found (one reduction of the mask, shared by all layers) and given equal scores again:

    inference   the highest entries of the row become -1e30 too: score - 1e30 rounds to -1e30
    training    the highest entries become 0, and the query is zeroed
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx

from ... import config
from ..._inductor import known_true
from ...graph import torch_ops
from ...graph.builder import Builder
from ...operands import repeated_dims
from . import row_bias
from .decode.op import DECODE_TILES, lowest_of
from .masks import may_hide_rows
from .operands import Operand
from .problem import Problem
from .structure import EMPTY_BELOW, MASK_FILL

T = TypeVar("T")

#: The highest bias of a row is subtracted from the row if it is below this: a softmax cancels the shift, and
#: smaller numbers have more digits.
SHIFT_BELOW = -100.0


@dataclass(frozen=True)
class Mask:
    """A mask in the graph.

    Attributes:
        node: what SDPA takes as attn_mask, or None.
        empty: boolean, broadcastable to (batch, heads, q_len, 1): the queries to zero; None for none.
        blocked: whether these rows send no gradient into q and k: where the unfused graph lets none
            through (a fill replaced their scores), and where all queries have one row of the mask, so
            that only a sample that is all padding has such rows.
        cut: where it is not so of all of them, boolean of the shape of `empty`: those of which it is.
    """

    node: fx.Node | None
    empty: fx.Node | None = None
    blocked: bool = False
    cut: fx.Node | None = None


@dataclass
class MaskMemo:
    """What is built in a graph already, so that layers share it.

    Attributes:
        made: of the whole graph, by key.
        region: the modes that hold at the site; what is built is shared where they are the same.
    """

    made: dict[Any, Any] = field(default_factory=dict)
    region: object = None

    def once(self, make: Callable[[], T], *key: Any) -> T:
        """What `make` gives, or gave for an equal key."""
        wanted: Any = (*key, self.region)
        try:
            hash(wanted)
        except TypeError:  # a symbolic size
            wanted = repr(wanted)
        if wanted not in self.made:
            self.made[wanted] = make()
        found: T = self.made[wanted]
        return found


def row_of_biases(build: Builder, problem: Problem, memo: MaskMemo) -> fx.Node:
    """The bias of all queries beside a causal mask, as (batch, heads, 1, kv_len)."""
    assert problem.structure is not None
    biases = tuple((t.node, t.factor, o.steps) for t, o in problem.structure.biases)
    sizes = *problem.q.shape[:3], problem.k.shape[2], problem.dtype
    return memo.once(
        lambda: row_bias.bias(build, problem), "row", problem.structure.visible, biases, sizes
    )  # fmt: skip


def seen_tiles(
    build: Builder, problem: Problem, memo: MaskMemo, mask: fx.Node | None, kv_heads: int, block_n: int
) -> tuple[fx.Node | None, ...]:
    """A mask for `decode_attention`, up to which numbers it hides, and the tiles that it shows."""
    operand = Operand.of(mask)
    if operand is None:
        return None, None, None
    assert mask is not None
    operand = operand.padded(4)
    operand = operand.expand((*operand.shape[:3], problem.k.shape[2]))
    for dim in repeated_dims(operand.value):  # what is repeated is read once
        if dim < 3:
            operand = operand.then("narrow", dim, 0, 1)

    def make() -> tuple[fx.Node | None, ...]:
        built = operand.built(build)
        built = built if built.op == "placeholder" else build.settled(built)
        dtype = operand.value.dtype
        lowest = None if dtype == torch.bool else lowest_of(built, dtype, build.call)
        return built, lowest, build.call(DECODE_TILES, built, lowest, kv_heads, block_n)

    version = problem.version(mask, build.before)
    return memo.once(make, "tiles", mask, version, operand.steps, kv_heads, block_n)


def build_mask(build: Builder, problem: Problem, memo: MaskMemo) -> Mask:
    """The mask of a problem, of its `terms` or `attn_mask`; that of an earlier layer where it is the same."""
    if problem.attn_mask is not None or not problem.terms:
        return Mask(problem.attn_mask)
    # Another layer may read other values where a mask is overwritten.
    versions = tuple(problem.version(t.node, build.before) for t, _ in problem.terms)
    terms = tuple((t, o.steps) for t, o in problem.terms)
    return memo.once(
        lambda: _Terms(build, problem).mask(), "mask", terms, versions, problem.dtype, problem.train
    )  # fmt: skip


class _Terms:
    """Reads the terms of a problem in order, from the product to the softmax."""

    def __init__(self, build: Builder, problem: Problem) -> None:
        self.build, self.problem = build, problem
        # What may not be rounded has no kernel but those that read float32, as flex attention does.
        self.dtype = problem.dtype if problem.rounded_bias is None else torch.float32
        # With a sink, a fully masked row gives all its weight to the sink.
        self.finite = problem.sink is None and (config.empty_rows != "ignore" or problem.zeros is not None)
        self.keep: fx.Node | None = None  # what no fill hides
        self.hiding: fx.Node | None = None  # sum of what may hide a whole row, fills written in
        self.plain: list[tuple[fx.Node, bool]] = []  # other biases, and whether a fill came after
        self.fills: list[float] = []
        self.floored: fx.Node | None = None  # rows whose scores a clamp has made equal

    def mask(self) -> Mask:
        return self._two_valued() or self._general()

    def _general(self) -> Mask:
        """The mask of any terms."""
        self.keep, self.hiding, self.plain, self.fills, self.floored = None, None, [], [], None
        for term, operand in self.problem.terms:
            node = self._built(operand)
            if term.fill is not None:
                self._fill(node, term.fill, term.hides)
            else:
                self._bias(node, term.node, term.factor, term.floor)
        finite = self.finite and any(math.isfinite(f) for f in self.fills)
        if self.hiding is None and not finite:
            if not self.plain:
                return Mask(None if self.keep is None else self._dense(self.keep))
            return Mask(self._sum(self._with_fill(self._plain_sum(), -math.inf)))
        if self.hiding is None:
            self.hiding = self._with_fill(None, self._least(max(self.fills)))
        return self._without_empty_rows()

    def _two_valued(self) -> Mask | None:
        """The mask where all that hides keys is one number, finite and low: the common case.

        Then every fully masked row holds that number alone, and needs no search for its highest entry.
        """
        build, terms = self.build, self.problem.terms
        fills = [t for t, _ in terms if t.fill is not None]
        hiding = [t for t, _ in terms if t.fill is None and may_hide_rows(t.node)]
        numbers = {t.fill for t in fills} | {t.depth for t in hiding}
        if not self.finite or len(numbers) != 1 or len(hiding) > (0 if fills else 1):
            return None
        number = numbers.pop()
        low = number is not None and math.isfinite(number) and (bool(fills) or number <= EMPTY_BELOW)
        if not low or any(t.floor is not None for t, _ in terms) or self.problem.dtype == torch.float16:
            return None
        assert number is not None
        if not fills and not self.problem.train and number > MASK_FILL:
            return None
        for term, operand in terms:
            node = self._built(operand)
            if term.fill is not None:
                self._hide(node, term.hides)
            elif term.factor != 1.0:
                node = build.call(torch.mul, node, term.factor)
            if term in hiding:
                self.hiding = node
            elif term.fill is None:
                self.plain.append((node, False))
        plain = self._plain_sum()
        if self.keep is not None:
            return self._filled(self.keep, plain)
        assert self.hiding is not None
        if not self.problem.train:
            return Mask(self._sum(build.call(torch.clamp, self.hiding, MASK_FILL), plain))
        empty = build.call(torch.le, build.call(torch.amax, self.hiding, -1, True), EMPTY_BELOW)
        opened = build.call(torch.where, empty, 0.0, self.hiding)
        return Mask(self._sum(opened, *self._absorbed(empty)), empty, self._one_row(self.hiding))

    def _filled(self, keep: fx.Node, plain: fx.Node | None) -> Mask:
        """Scores that were replaced by a number; a bias that was added to that number is absorbed."""
        base: Any = 0.0 if plain is None else self.build.to(plain, self.dtype)
        if not self.problem.train:
            least = self.build.call("new_full", self.problem.q.node, (), MASK_FILL, dtype=self.dtype)
            return Mask(self._sum(self.build.call(torch.where, keep, base, least)))
        empty = self.build.call(torch.logical_not, self.build.call(torch.any, keep, -1, True))
        hidden = self.build.call("new_full", self.problem.q.node, (), -math.inf, dtype=self.dtype)
        opened = self.build.call(torch.where, empty, 0.0, hidden)
        filled = self.build.call(torch.where, keep, base, opened)
        after = [bias for bias, filled_after in self.plain if not filled_after]
        if after:  # added to the number: its gradient stays
            return self._general()
        return Mask(self._sum(filled), empty, True)

    def _absorbed(self, empty: fx.Node) -> list[fx.Node]:
        """The plain biases: 0 in fully masked rows, with the gradient of the unfused graph."""
        parts = []
        for bias, filled_after in self.plain:
            if self.problem.train and not filled_after:
                gone = self.build.call("detach", self.build.call(torch.where, empty, bias, 0.0))
                parts.append(self.build.call(torch.sub, bias, gone))
            else:
                parts.append(self.build.call(torch.where, empty, 0.0, bias))
        return parts

    def _one_row(self, hiding: fx.Node) -> bool:
        """Whether all queries have one row of the mask, so that only a sample of padding is empty."""
        return known_true(self.build.value(hiding).shape[-2] == 1) and not known_true(
            self.problem.q.shape[-2] == 1
        )

    def _hide(self, node: fx.Node, hides: bool) -> fx.Node:
        """Keep only what a condition lets through as well; what it lets through."""
        seen = self.build.call(torch.logical_not, node) if hides else node
        self.keep = seen if self.keep is None else self.build.call(torch.logical_and, self.keep, seen)
        self.plain = [(bias, True) for bias, _ in self.plain]
        return seen

    def _fill(self, node: fx.Node, fill: float, hides: bool) -> None:
        seen = self._hide(node, hides)
        self.fills.append(fill)
        # Different numbers must stay apart: keys with the larger one win in a row without any other.
        if self.hiding is not None or (self.finite and len(set(self.fills)) > 1):
            before: Any = self.hiding
            if before is None:
                before = self._with_fill(None, self._least(self.fills[0]))
            self.hiding = self.build.call(torch.where, seen, before, self._least(fill))

    def _bias(self, node: fx.Node, source: fx.Node, factor: float, floor: float | None) -> None:
        if factor != 1.0:
            node = self.build.call(torch.mul, node, factor)
        if self.finite and may_hide_rows(source):
            if self.hiding is None and self.keep is not None:
                self.hiding = self._with_fill(None, self._least(max(self.fills)))
            self.hiding = node if self.hiding is None else self.build.call(torch.add, self.hiding, node)
            if floor is not None:
                highest = self.build.call(torch.amax, self.hiding, -1, True)
                self.floored = self.build.call(torch.le, highest, floor)
                self.hiding = self.build.call(torch.clamp, self.hiding, floor)
                self.fills.append(floor)
        else:
            self.plain.append((node, False))

    def _least(self, fill: float) -> float:
        """A fill that the dtype of the mask can hold."""
        if not math.isfinite(fill):
            return fill
        return max(fill, torch.finfo(self.problem.dtype).min)

    def _with_fill(self, base: fx.Node | None, fill: float) -> fx.Node:
        """`base` (or 0) where a key is kept, `fill` elsewhere."""
        if self.keep is None:
            assert base is not None
            return base
        return self.build.call(torch.where, self.keep, 0.0 if base is None else base, fill)

    def _plain_sum(self) -> fx.Node | None:
        total: fx.Node | None = None
        for node, _ in self.plain:
            total = node if total is None else self.build.call(torch.add, total, node)
        return total

    def _without_empty_rows(self) -> Mask:
        build, hiding, dtype = self.build, self.hiding, self.problem.dtype
        assert hiding is not None
        highest = build.call(torch.amax, hiding, -1, True)
        size = build.call(torch.abs, highest)  # a large positive number absorbs scores as well
        empty = build.call(torch.ge, size, -EMPTY_BELOW)
        half = dtype == torch.float16
        if half or any(f > EMPTY_BELOW for f in self.fills):
            if self.keep is not None:
                # A row that is filled whole has equal scores whatever the number is.
                filled = build.call(torch.logical_not, build.call(torch.any, self.keep, -1, True))
                empty = build.call(torch.logical_or, empty, filled)
        if half and self.floored is not None:
            empty = build.call(torch.logical_or, empty, self.floored)
        far = build.call(torch.gt, size, -SHIFT_BELOW)
        hiding = build.call(torch.sub, hiding, build.call(torch.where, far, highest, 0.0))
        blocked = self.keep is not None or self._one_row(hiding)
        if not self.problem.train and not half:
            beaten = build.call(torch.lt, hiding, SHIFT_BELOW)
            fill = build.call("new_full", hiding, (), MASK_FILL)
            raised = build.call(torch.where, beaten, 2 * MASK_FILL, fill)
            hiding = build.call(torch.where, empty, raised, hiding)
            return Mask(self._sum(hiding, self._plain_sum()))
        cut = None if blocked or self.floored is None else build.call(torch.logical_and, empty, self.floored)
        return Mask(self._sum(hiding, *self._absorbed(empty)), empty, blocked, cut)

    def _built(self, operand: Operand) -> fx.Node:
        """A term; a bias narrower than the scores in their dtype, in which it is scaled and added up."""
        node = operand.built(self.build)
        dtype = self.build.value(node).dtype
        wide = torch.promote_types(dtype, self.problem.dtype) if dtype.is_floating_point else dtype
        return self.build.to(node, wide)

    def _sum(self, *parts: fx.Node | None) -> fx.Node:
        """The sum in the dtype of the kernel, as every backend of SDPA wants it."""
        total: fx.Node | None = None
        for part in parts:
            if part is not None:
                total = part if total is None else self.build.call(torch.add, total, part)
        assert total is not None
        return self._shared(self._dense(self.build.to(total, self.dtype)))

    def _dense(self, mask: fx.Node) -> fx.Node:
        """A mask whose rows hold each key, in order: kernels for CUDA read no other ones."""
        columns, value = self.problem.k.shape[2], self.build.value(mask)
        if known_true(value.shape[-1] == 1) and not known_true(columns == 1):
            mask = self.build.call("expand", mask, (*value.shape[:-1], columns))
            value = self.build.value(mask)
        return mask if known_true(value.stride(-1) == 1) else self.build.call("contiguous", mask)

    def _shared(self, mask: fx.Node) -> fx.Node:
        """Have Inductor compute the mask once for all layers."""
        value = self.build.value(mask)
        sizes = (*value.shape, *value.stride())
        if not all(isinstance(size, int) for size in sizes) or any(n.requires_grad for n in self._sources()):
            return mask
        return self.build.settled(mask)

    def _sources(self) -> list[torch.Tensor]:
        found = [torch_ops.tensor(term.node) for term, _ in self.problem.terms]
        return [tensor for tensor in found if tensor is not None]
