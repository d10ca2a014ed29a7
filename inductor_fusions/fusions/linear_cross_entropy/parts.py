"""Rows, classes and heads that are taken of logits, in Dynamo's torch-level graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ..._inductor import known_true, value_of
from ...graph.dims import WHOLE, Selection, permutation, selection
from ...graph.torch_ops import VIEWS, Op, read
from ...operands import tensor
from ...reasons import Reason


@dataclass(frozen=True)
class Head:
    """One of several heads, whose number is a dim in front of the classes for some steps.

    Attributes:
        opened: the view, or the stack, that makes the dim.
        taken: the node behind which the dim is gone.
        dim: where the dim is in front of `taken`.
        number: of the head.
    """

    opened: fx.Node
    taken: fx.Node
    dim: int
    number: int


def rows_of(op: Op) -> tuple[fx.Node, list[fx.Node]] | None:
    """What an operation takes and orders rows of, and the nodes that do it, the last one first.

    They would do the same to other classes: a view of all leading dims keeps the last one in its place.
    """
    taken = selection(op.node)
    source, nodes = (op.input, [op.node]) if taken is None else (taken.source, list(taken.nodes))
    before, after = tensor(source), tensor(op.node)
    if op.inplace or before is None or after is None or before.dim() < 1 or after.dim() < 1:
        return None
    if not known_true(before.shape[-1] == after.shape[-1]) or before.dtype != after.dtype:
        return None
    last, dims = before.dim() - 1, permutation(op)
    keeps = op.name in VIEWS or (dims is not None and dims[-1] == last)
    return (source, nodes) if keeps or (taken is not None and last not in taken.dims) else None


def moves_classes(op: Op) -> bool:
    """Whether an operation makes (N, C, d1, ...) of (N, d1, ..., C), whose rows are in the same order."""
    value = tensor(op.node)
    wanted = [0, value.dim() - 1, *range(1, value.dim() - 1)] if value is not None else []
    return not op.inplace and permutation(op) == wanted


def classes_of(taken: Selection | None) -> tuple[int, int] | None:
    """Which classes are taken of all rows, or of some: the first one, and how many."""
    if taken is None or len(taken.index) - 1 not in taken.dims:
        return None
    part = taken.index[-1]
    if not isinstance(part, slice) or part.step or {type(part.start), type(part.stop)} != {int}:
        return None
    return (part.start, part.stop - part.start) if part.stop > part.start else None


def one_head(op: Op, behind: list[fx.Node]) -> Head | None:
    """The head that is taken from what an operation makes: a view of the classes, or a stack of linears.

    Args:
        behind: the nodes behind it that take and order rows, in order.

    Raises:
        Rejected: several heads are read.
    """
    before, after = tensor(op.input), tensor(op.node)
    if after is None or after.dim() < 2:
        return None
    if op.name == "stack":
        parts, given = op.only("tensors", "dim")
        dim = 0 if given is None else given
        if not isinstance(parts, (list, tuple)) or type(dim) is not int:
            return None
        dim %= after.dim()
    else:
        dim = after.dim() - 2
        heads, classes = after.shape[-2:]
        if op.name not in VIEWS or before is None or type(heads) is not int or type(classes) is not int:
            return None
        if not known_true(before.shape[-1] == heads * classes):
            return None
    if dim == after.dim() - 1:
        return None
    count = after.shape[dim]
    for node in behind:
        found = _at(node, dim) if type(count) is int else None
        if found is None:
            break
        dim, number = found
        if number is not None:
            return Head(op.node, node, dim, number)
    raise Reason.LOSS.rejected(
        f"{op.name} gives the logits of several heads, and the loss reads more than one of them",
        "compute one loss for each head, of logits[:, :, k]",
    )


def _at(node: fx.Node, dim: int) -> tuple[Any, Any] | None:
    """Where a dim is behind a node that takes rows, and which number of it is taken, if one is.

    None: some of the dim is taken, or it is viewed together with others.
    """
    op, taken = read(node), selection(node)
    if isinstance(value_of(node), (list, tuple)):  # of which the next node is a part
        return dim, None
    if op is not None and (dims := permutation(op)) is not None:
        return dims.index(dim), None
    if taken is None or any(isinstance(part, fx.Node) for part in taken.index):
        return None
    part = taken.index[dim]
    if part is not WHOLE:
        return (dim, part) if type(part) is int else None
    return taken.places[dim], None
