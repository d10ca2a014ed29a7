"""Emits skinny GEMMs and split matrices into a graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...block_mm import guards
from ...graph.builder import Builder
from ...graph.products import same_sizes, transpose_of
from ...operands import value
from . import gather
from .adapters import Source
from .recognise import Linear, Term
from .split import LORA_SPLIT

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)


class Emitter(Builder):
    """Adds what the operations of adapters read."""

    def replay(self, origin: Source) -> fx.Node:
        """A matrix without its casts and factors."""
        node = origin.base
        for view in origin.views:
            # What could be viewed after a cast need not be in front of it.
            target = aten.reshape.default if view.target in _VIEWS else view.target
            node = self.call(target, node, *view.args[1:])
        return node

    def weighted(
        self, left: fx.Node, right: fx.Node, vector: fx.Node, over: Sequence[Any]
    ) -> tuple[fx.Node, fx.Node]:
        """Both operands of an up-projection, with a factor for each row or each column."""
        if value(vector).shape[-1] != 1:
            return left, self.times(right, self.call(aten.reshape.default, vector, [1, -1]))
        whole = same_sizes(value(vector).shape, [*over, 1])  # else symbolic sizes become nodes
        rows = vector if whole else self.call(aten.expand.default, vector, [*over, 1])
        return self.times(left, self.call(aten.reshape.default, rows, [-1, 1])), right

    def times(self, left: fx.Node, factor: fx.Node) -> fx.Node:
        """A small matrix times a tensor of one element, a row or a column, in the dtype of the matrix."""
        return self.to(self.call(aten.mul.Tensor, left, factor), value(left).dtype)

    def bias(self, linear: Linear) -> fx.Node | None:
        """The bias of a linear together with those of its adapters, in float32 if it must be computed.

        With a matrix as its bias, a linear has no others.
        """
        biases = [p.bias for p in linear.bases if p.bias is not None]
        if not linear.offsets:
            return biases[0] if biases else None
        total: fx.Node | None = None
        offsets = [*(Term(bias) for bias in biases), *linear.offsets]
        if offsets == [Term(offsets[0].node)]:
            return offsets[0].node
        for offset in offsets:
            total = self.plus(total, self.to(offset.node, torch.float32), offset)
        return total

    def plus(self, total: fx.Node | None, node: fx.Node, term: Term) -> fx.Node:
        """A sum, if there is one yet, and a node with the scale and the factor of a term."""
        if term.scale != 1:
            node = self.call(aten.mul.Tensor, node, term.scale)
        if term.factor is not None:
            node = self.call(aten.mul.Tensor, node, term.factor)
        return node if total is None else self.call(aten.add.Tensor, total, node)

    def padded(
        self, right: fx.Node, columns: tuple[int, int] = (0, 0), rows: tuple[int, int] = (0, 0)
    ) -> fx.Node:
        """(r, n) with zeros before and behind it, lying in memory as before."""
        if columns == (0, 0) and rows == (0, 0):
            return right
        stored, turned = self._as_stored(right)
        inner, outer = (rows, columns) if turned else (columns, rows)
        padding = [*inner] if outer == (0, 0) else [*inner, *outer]
        made = self.call(aten.constant_pad_nd.default, stored, padding)
        return self.call(aten.permute.default, made, [1, 0]) if turned else made

    def left_halves(self, left: fx.Node, dtype: torch.dtype) -> fx.Node:
        """(M, r) of float32 as (high | high | low), (M, 3r)."""
        high, low = self._halves(left, dtype)
        return self.call(aten.cat.default, [high, high, low], 1)

    def right_halves(self, right: fx.Node, dtype: torch.dtype) -> fx.Node:
        """(r, N) of float32 as (high; low; high), (3r, N), lying in memory as before.

        Where `gather` may make it with others, it has the zeros of `aligned` already.
        """
        stored, turned = self._as_stored(right)
        if gather.takes(stored):
            rows = 3 * int(value(right).shape[0])
            size = rows + _missing(rows, dtype)
            parts = self.call(LORA_SPLIT, [stored], [0], [int(turned)], [size], dtype)
            made = self.call(operator.getitem, parts, 0)
        else:
            high, low = self._halves(stored, dtype)
            made = self.call(aten.cat.default, [high, low, high], int(turned))
        return self.call(aten.permute.default, made, [1, 0]) if turned else made

    def aligned(self, left: fx.Node, right: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The operands of an up-projection, with zeros up to a rank that vector loads can read."""
        rank = int(value(left).shape[1])
        missing = _missing(rank, value(left).dtype)
        if not missing:
            return left, right
        left = self.call(aten.constant_pad_nd.default, left, [0, missing])
        if int(value(right).shape[0]) == rank:
            right = self.padded(right, rows=(0, missing))
        return left, right

    def _as_stored(self, matrix: fx.Node) -> tuple[fx.Node, bool]:
        """A matrix as it lies in memory, and whether that is transposed."""
        turned = value(matrix).stride(1) != 1
        return (self.transposed(matrix) if turned else matrix), turned

    def transposed(self, matrix: fx.Node) -> fx.Node:
        """The transpose of a matrix: what it is a transpose of, or a new view."""
        return transpose_of(matrix) or self.call(aten.permute.default, matrix, [1, 0])

    def _halves(self, matrix: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
        """A float32 matrix truncated to bfloat16, and the rest; both in bfloat16."""
        high = self.truncated(matrix, torch.bfloat16)
        low = self.call(aten.sub.Tensor, matrix, high)
        return self.to(high, dtype), self.to(low, dtype)


def _missing(rank: int, dtype: torch.dtype) -> int:
    """How many zeros make a rank one that vector loads can read."""
    return -rank % (guards.ALIGNMENT // dtype.itemsize)
