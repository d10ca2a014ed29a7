"""Partial in-place writes to scores: `scores[mask] = number`, `scores[..., 1:, 1:] += bias`.

`scores.data.masked_fill_(mask, number)` is one too, which autograd does not see.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import fx

from ..._inductor import known_true
from ...effects.inplace import arguments
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph.dims import bounds, per_dim
from ...graph.torch_ops import VIEWS, concrete, read
from ...operands import same_shape, tensor
from ...reasons import Reason
from .arrangement import Arrangement
from .normal_form import Below, Term
from .operands import Operand

#: Tensors of one number.
_NEW = frozenset("zeros zeros_like new_zeros empty empty_like new_empty full full_like new_full".split())


@dataclass(frozen=True)
class Region:
    """A part of the scores.

    Attributes:
        scores: the node that is written to.
        index: of the part.
        written: what holds what is there afterwards: a tensor of its shape, or one number.
        places: (start, stop) in each dim.
    """

    scores: fx.Node
    index: Any
    written: Any
    places: tuple[tuple[Any, Any], ...]

    def is_of(self, node: Any, index: Any) -> bool:
        """Whether `node[index]` is this part."""
        return node is self.scores and repr(index) == repr(self.index)

    @property
    def is_number(self) -> bool:
        """Whether one number is there afterwards."""
        value = tensor(self.written)
        return value is None or value.dim() == 0

    def padded(self, term: Term, at: Arrangement) -> Term:
        """Extend a term that acts on the part to all scores, so that it leaves the others as they are.

        Args:
            term: seen from the part, as (*lead, queries, keys).
            at: what the dims of the scores are.

        Raises:
            Rejected: it is not a sum, or a fill where its condition holds.
        """
        scores, operand = tensor(self.scores), Operand.of(term.node)
        assert scores is not None
        single = at.single(scores.shape)
        if operand is None or single is None or term.floor is not None or not term.hides:
            raise Reason.OVERWRITTEN.rejected(
                "a part of the scores is overwritten by something other than a sum or a masked fill"
            )
        operand = operand.padded(len(self.places))
        sizes, pads = list(operand.shape), []
        for place, dim in enumerate(single.order):
            (start, stop), size = self.places[dim], scores.shape[dim]
            whole = known_true(start == 0) and known_true(stop == size)
            if not whole:
                sizes[place] = stop - start
            pads.append((0, 0) if whole else (start, size - stop))
        flat = [pad for pair in reversed(pads) for pad in pair]
        if not all(isinstance(pad, int) for pad in flat):
            raise Reason.SYMBOLIC.rejected("the place of a part of the scores depends on a symbolic size")
        operand = operand.expand(sizes).then(F.pad, tuple(flat))
        return Term(operand, single.sizes(scores.shape), factor=term.factor, fill=term.fill)


@dataclass(frozen=True)
class Reading:
    """A part of the scores on the way up from what is written into it.

    Attributes:
        part: which.
        below: what is done to all scores.
        shifts_cancel: as in `Walk`, for what all scores have in common.
        terms: what acts on the scores before the part is read.
    """

    part: Region
    below: Below
    shifts_cancel: bool
    terms: tuple[Term, ...] = ()


def condition(writer: fx.Node, scores: fx.Node) -> tuple[Operand, Any] | None:
    """(mask, value) of `scores[mask] = value` or `scores.data.masked_fill_(mask, value)`; None of others."""
    op, rank = read(writer), 0
    data = read(op.input) if op is not None and op.inplace and op.name == "masked_fill" else None
    if op is not None and data is not None and data.name == "detach" and data.input is scores:
        index, value = op["mask"], op["value"]
    elif writer.target is operator.setitem and arguments(writer)[0][0] is scores:
        _, index, value = arguments(writer)[0]
        rank = 0 if (whole := tensor(scores)) is None else whole.dim()
    else:
        return None
    mask, operand = tensor(index), Operand.of(index)
    if mask is None or operand is None or str(mask.dtype) != "torch.bool":
        return None
    missing = rank - mask.dim()  # an index names the first dims of the scores
    return (operand.reshape((*mask.shape, *[1] * missing)) if missing > 0 else operand), value


def tests_nan(node: fx.Node, values: fx.Node) -> bool:
    """Whether a node says which values are NaN: `isnan(values)`, `values != values`."""
    op = read(node)
    if op is None or op.input is not values:
        return False
    return op.name == "isnan" or (op.name == "ne" and op["other"] is values)


def region(writer: fx.Node, scores: fx.Node) -> Region | None:
    """The part of the scores that a node writes to; None where that is not a box."""
    written: Any = writer
    args, _ = arguments(writer)
    if writer.target is operator.setitem and args[0] is scores:
        _, index, written = args
    else:
        op = read(writer)
        part = read(op.input) if op is not None and op.inplace else None
        if part is None or part.name != "getitem" or part.input is not scores:
            return None
        index = part["index"]
        written = op["value"] if op is not None and op.name == "fill" else writer
    whole = tensor(scores)
    places = None if whole is None else _places(concrete(index), whole.shape)
    if places is None:
        return None
    found, value = Region(scores, index, written, places), tensor(written)
    if value is not None and not same_shape(value.shape, [stop - start for start, stop in places]):
        return found if found.is_number else None
    return found


def _places(index: Any, shape: Sequence[Any]) -> tuple[tuple[Any, Any], ...] | None:
    """(start, stop) in each dim of what an index takes; None where it takes more than a box."""
    parts = per_dim(index, len(shape))
    if parts is None or not all(isinstance(part, slice) and part.step in (None, 1) for part in parts):
        return None
    places = tuple(bounds(part, size) for part, size in zip(parts, shape, strict=True))
    for (start, stop), size in zip(places, shape, strict=True):
        if not known_true(start >= 0) or not known_true(start < stop) or not known_true(stop <= size):
            return None
    return places


def unread(writer: fx.Node, scores: fx.Node) -> Rejected:
    """Why a node that writes to scores cannot be read, where it is no condition and no box."""
    op = read(scores)
    while op is not None and op.name in VIEWS:
        op = read(op.input)
    if op is None or op.name not in _NEW:
        return Reason.OVERWRITTEN.rejected(f"{writer.name} overwrites the scores")
    return Reason.IN_BETWEEN.rejected(
        f"{writer.name} writes scores into a new tensor, as where the chunks of a sliding window are put "
        "together (Longformer)",
        "a mask of the window on the scores of all pairs",
    )


def writes_into(writer: fx.Node, node: fx.Node) -> bool:
    """Whether a node writes to another one, or to a view of it."""
    op = read(writer)
    view = op.input if op is not None else None
    read_by = readers(node)
    return writer in read_by or (isinstance(view, fx.Node) and view in read_by)
