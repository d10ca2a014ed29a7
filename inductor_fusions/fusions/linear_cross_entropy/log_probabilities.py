"""Finds log-probabilities of one label for each row, in Dynamo's torch-level graph.

    log_softmax(logits, -1).gather(-1, labels[..., None])
    logits.gather(-1, labels[..., None]).squeeze(-1) - logits.logsumexp(-1)    # or the negative of that

Trainers take the rows apart to need less memory: `torch.stack` puts together the first of each `logits[i]`,
or the logsumexp of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...effects.writes import storage
from ...graph.dims import is_over_last, selection, unbroadcast
from ...graph.search import named_behind
from ...graph.torch_ops import VIEWS, Op, read
from ...operands import same_shape, tensor
from ...reasons import Reason

#: The operations by which the probabilities of labels are picked.
ANCHORS = ("gather", "take_along_dim", "getitem", "sub", "stack")
#: Dtypes of labels; those of gathers may be int32.
_LABELS = (torch.int64, torch.int32)
#: Views that may add and remove dims of size 1.
_VIEWS = frozenset({"squeeze", "unsqueeze", "view", "reshape", "flatten"})


@dataclass(frozen=True)
class Picked:
    """One value for each row of a matrix.

    Attributes:
        logits: the matrix, or its log_softmax.
        of_softmax: whether it is the log_softmax.
        labels: which column of each row, in the order of the rows.
        path: the nodes behind the matrix, without the result.
        wraps: which labels count from the last class: "" none; "negative" those of -V and more, as in an
            index; "all" those that are none of the classes, modulo V, as in `take_along_dim`.
        negates: whether the value is the negative of the log-probability.
    """

    logits: fx.Node
    of_softmax: bool
    labels: fx.Node
    path: tuple[fx.Node, ...]
    wraps: str = ""
    negates: bool = False


def of(op: Op) -> Picked | None:
    """The log-probabilities that an operation gives; the matrix is not read yet."""
    if op.inplace:
        return None
    if op.name == "sub":
        return _difference(op)
    return _stacked(op) if op.name == "stack" else _gathered(op)


def is_in_stack(node: fx.Node) -> bool:
    """Whether the log-probabilities of a row are a part of those of a stack."""
    stacks = map(read, named_behind(node, _VIEWS, {"stack"}))
    return any(op is not None and _stacked(op) is not None for op in stacks)


def _gathered(op: Op) -> Picked | None:
    if op.name == "getitem":
        return _indexed(op)
    if op.name == "gather":
        source, dim, index = op.only("input", "dim", "index")
    elif op.name == "take_along_dim":
        source, index, dim = op.only("input", "indices", "dim")
    else:
        return None
    value, labels = tensor(source), tensor(index)
    if value is None or labels is None or not isinstance(dim, int) or value.dim() != labels.dim():
        return None
    last = value.dim() - 1
    if not last or dim % value.dim() != last or not known_true(labels.shape[-1] == 1):
        return None
    if not same_shape(labels.shape[:-1], value.shape[:-1]):  # some rows alone are gathered from
        return None
    return Picked(source, True, index, (), wraps="all" if op.name == "take_along_dim" else "")


def _indexed(op: Op) -> Picked | None:
    """`x[torch.arange(len(x)), labels]`."""
    value, index = tensor(op.input), op["index"]
    if value is None or value.dim() != 2 or not isinstance(index, tuple) or len(index) != 2:
        return None
    rows, labels = index
    by, held, count = read(rows), tensor(labels), tensor(rows)
    if by is None or by.name != "arange" or held is None or count is None or held.dim() != 1:
        return None
    starts_at_0 = len(by.rest) == 1 or (len(by.rest) == 2 and by.rest[0] == 0)
    if not starts_at_0 or not same_shape((*count.shape, *held.shape), value.shape[:1] * 2):
        return None
    return Picked(op.input, True, labels, (), wraps="negative")


def _difference(op: Op) -> Picked | None:
    """Logits that are gathered, minus their logsumexp; or their logsumexp minus those."""
    first, second = op.only("input", "other")
    shapes = [value.shape for node in (first, second, op.node) if (value := tensor(node)) is not None]
    if len(shapes) != 3 or not all(same_shape(shape, shapes[0]) for shape in shapes):
        return None
    for one, other in ((first, second), (second, first)):
        (taken, views), (summed, others) = viewed(one), viewed(other)
        gathered = read(taken)
        found = None if gathered is None or gathered.inplace else _gathered(gathered)
        logits, rows = summed_rows(summed)
        if found is not None and found.logits is logits:
            path = (*views, taken, *others, summed, *rows)
            return Picked(logits, False, found.labels, path, found.wraps, negates=one is second)
    return None


def summed_rows(node: Any) -> tuple[Any, list[fx.Node]]:
    """The operand of a logsumexp, or of a stack of the logsumexp of each row; and the nodes of the rows."""
    op = read(node)
    if op is None or op.inplace:
        return None, []
    if op.name == "logsumexp":
        return (op.input if is_over_last(op) else None), []
    if op.name != "stack":
        return None, []
    path: list[fx.Node] = []

    def row(part: fx.Node) -> fx.Node | None:
        by = read(part)
        path.append(part)
        return by.input if by is not None and by.name == "logsumexp" and is_over_last(by) else None

    whole = _by_rows(op, row, path)
    return whole, path


def normalised(op: Op) -> tuple[Any, list[fx.Node]]:
    """The logits x of `x - x.logsumexp(-1, keepdim=True)`, a log_softmax, and the nodes of the logsumexp."""
    x, subtracted = op.only("input", "other") if op.name == "sub" else (None, None)
    (summed, views), value, held = viewed(subtracted), tensor(x), tensor(subtracted)
    whole, rows = summed_rows(summed)
    if whole is not x or value is None or held is None or not same_shape(held.shape, (*value.shape[:-1], 1)):
        return None, []
    return x, [*views, summed, *rows]


def _stacked(op: Op) -> Picked | None:
    """A stack of elements gathered from the log_softmax of each row."""
    path: list[fx.Node] = []
    labels: list[Any] = []

    def row(part: fx.Node) -> fx.Node | None:
        node, views = viewed(part)
        gathered = read(node)
        found = None if gathered is None or gathered.inplace else _gathered(gathered)
        softmax = read(found.logits) if found is not None else None
        if found is None or softmax is None or softmax.name != "log_softmax" or not is_over_last(softmax):
            return None
        if softmax.only("input", "dim")[0] is None or found.wraps:
            return None  # of another dtype
        path.extend((*views, node, softmax.node))
        labels.append(viewed(found.labels)[0])
        source: fx.Node | None = softmax.input
        return source

    whole = _by_rows(op, row, path)
    if whole is None or not labels:
        return None
    first = _of_rows(labels, [])
    held, value = tensor(first), tensor(whole)
    if held is None or value is None or first is None:
        return None
    if _large(held.shape) != _large(value.shape[:-1]):
        return None
    return Picked(whole, False, first, tuple(path))


def _by_rows(op: Op, row: Callable[[fx.Node], fx.Node | None], path: list[fx.Node]) -> fx.Node | None:
    """The tensor of which each part of a stack reads one row, in order; its rows are added to the path."""
    parts, dim = op.only("tensors", "dim")
    if not isinstance(parts, (list, tuple)) or dim not in (None, 0) or not parts:
        return None
    whole = _of_rows((row(part) if isinstance(part, fx.Node) else None for part in parts), path)
    value = tensor(whole)
    return whole if value is not None and known_true(value.shape[0] == len(parts)) else None


def _of_rows(rows: Iterable[fx.Node | None], path: list[fx.Node]) -> fx.Node | None:
    """The tensor of which each node takes one row, in order; the nodes are added to the path."""
    whole: fx.Node | None = None
    for number, node in enumerate(rows):
        taken = selection(node)
        if taken is None or taken.number(0) != number or taken.source is not (whole or taken.source):
            return None
        whole = taken.source
        path += [each for each in taken.nodes if each not in path]
    return whole


def viewed(node: Any) -> tuple[Any, list[fx.Node]]:
    """The value behind views that only add or remove dims of size 1, and the views, the last one first."""
    views: list[fx.Node] = []
    value = tensor(node)
    while value is not None and (op := read(node)) is not None and not op.inplace:
        if (equal := unbroadcast(node)) is not None:
            node, behind = equal
            views += behind
            continue
        inner = tensor(op.input)
        if inner is None or _large(inner.shape) != _large(value.shape):
            break
        if op.name not in _VIEWS and not _is_plain_index(op):
            break
        views.append(node)
        node, value = op.input, inner
    return node, views


def in_front_of_views(labels: fx.Node) -> fx.Node:
    """Labels in the same order and memory, which may be there before what reads a penalty or an entropy.

    Raises:
        Rejected: they are probabilities.
    """
    value = tensor(labels)
    if value is None or value.dtype not in _LABELS:
        raise Reason.LOSS.rejected(
            "the labels are not class indices", "pass class indices instead of probabilities"
        )
    while (op := read(labels)) is not None and op.name in VIEWS and not op.inplace:
        if storage(labels) is None or storage(labels) != storage(op.input):
            break
        labels = op.input
    return labels


def _is_plain_index(op: Op) -> bool:
    """Whether an operation takes elements by numbers and slices, and in their order."""
    index = op["index"]
    parts = index if isinstance(index, tuple) else (index,)
    plain = all(part is None or part is Ellipsis or isinstance(part, (int, slice)) for part in parts)
    return op.name in ("getitem", "select") and plain


def _large(shape: Any) -> list[str]:
    return [str(size) for size in shape if str(size) != "1"]
