"""Finds the loss behind a linear, in Dynamo's torch-level graph.

    F.cross_entropy(f(F.linear(h, w, bias)).view(-1, V), labels)

and likewise `nll_loss` of a `log_softmax`, and a `gather` of one, where f may scale the logits, bound them by
c * tanh(x / c), cast them to a wider dtype, take some of the rows, or view them otherwise, as long as the
classes stay a dim of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...fusion import Rejected
from ...graph.torch_ops import (
    CASTS,
    COPIES,
    VIEWS,
    Op,
    linear_of,
    permutation,
    read,
    spellings,
)
from ...operands import holds, tensor
from ...reasons import Reason

#: Take some rows, or one, of a dim.
_SELECTS = frozenset({"select", "narrow", "slice"})
#: What a loss is looked for by.
LOSSES = ("cross_entropy", "nll_loss", "gather")


@dataclass(frozen=True)
class Bend:
    """f of a logit x: scale * x, or cap * tanh(scale * x) where cap is not 0."""

    scale: float = 1.0
    cap: float = 0.0

    def times(self, factor: float) -> Bend:
        """factor * f(x)."""
        return Bend(self.scale, self.cap * factor) if self.cap else Bend(self.scale * factor)


@dataclass(frozen=True)
class Site:
    """A loss, and the linear that makes its logits.

    Attributes:
        loss: the node that is replaced.
        linear: makes the logits.
        h, w, bias: what it reads; h (..., H).
        by_rows: whether w is (V, H) rather than its transpose.
        path: the nodes from the linear to what the loss reads, in order.
        replayed: those of them that say which rows there are, and in which order.
        bend: what is done to each logit.
        labels: what stands at each row.
        weights: of the classes, or None.
        gathers: whether the loss is a `gather`: log-probabilities.
        ignore_index, smoothing, reduction: of the loss.
    """

    loss: fx.Node
    linear: fx.Node
    h: fx.Node
    w: fx.Node
    bias: fx.Node | None
    by_rows: bool
    path: tuple[fx.Node, ...]
    replayed: tuple[fx.Node, ...]
    bend: Bend
    labels: fx.Node
    weights: fx.Node | None = None
    gathers: bool = False
    ignore_index: int = -100
    smoothing: float = 0.0
    reduction: str = "mean"


@dataclass(frozen=True)
class Unread:
    """A loss of logits that are not read, and why."""

    loss: fx.Node
    why: Rejected


def site(node: fx.Node) -> Site | Unread | None:
    """The loss behind a linear that a node is; why a loss is none; None of what is no loss."""
    op = read(node)
    if op is None or op.name not in LOSSES:
        return None
    try:
        return _gather(op) if op.name == "gather" else _loss(op)
    except Rejected as why:
        # Gathers are everywhere: one is a loss where it reads a softmax of a linear.
        return None if op.name == "gather" else Unread(node, why)


def spelled() -> list[Any]:
    """What losses are called by."""
    return spellings(*LOSSES)


def _loss(op: Op) -> Site:
    known = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = op.only(*known, "label_smoothing")
    logits, labels, weights, average, ignored, reduce, reduction, smoothing = given
    if not isinstance(logits, fx.Node) or not isinstance(labels, fx.Node):
        raise Rejected(Reason.NOT_A_TENSOR("an argument of the loss is not a tensor"))
    if average is not None or reduce is not None:
        raise Rejected(Reason.LOSS("the loss has the deprecated arguments size_average or reduce"))
    ignored, smoothing = -100 if ignored is None else ignored, smoothing or 0.0
    reduction = "mean" if reduction is None else reduction
    if type(ignored) is not int or not isinstance(smoothing, (int, float)):
        raise Rejected(Reason.NOT_A_TENSOR("ignore_index or label_smoothing is not a constant"))
    if not 0.0 <= smoothing <= 1.0 or reduction not in ("none", "mean", "sum"):
        raise Rejected(Reason.LOSS("label_smoothing or reduction is invalid"))
    value = tensor(logits)
    if value is None or value.dim() < 2:
        raise Rejected(Reason.SHAPES("the logits are not a matrix"))
    path: list[fx.Node] = []
    replayed: list[fx.Node] = []
    if op.name == "nll_loss":
        logits = _log_softmax(logits, value.dim() == 2, path, replayed)
    if value.dim() > 2:
        logits = _classes_last(logits, path)
    found = _walk(logits, path, replayed)
    return _site(op, found, labels, weights, False, ignored, float(smoothing), reduction)


def _gather(op: Op) -> Site | None:
    source, dim, index = op.only("input", "dim", "index")
    value, labels = tensor(source), tensor(index)
    if value is None or labels is None or not isinstance(source, fx.Node) or not isinstance(dim, int):
        return None
    last = value.dim() - 1
    if not last or dim % value.dim() != last or not known_true(labels.shape[-1] == 1):
        return None
    path: list[fx.Node] = []
    replayed: list[fx.Node] = []
    found = _walk(_log_softmax(source, True, path, replayed), path, replayed)
    same = zip(labels.shape[:-1], value.shape[:-1], strict=True)
    if not all(known_true(a == b) for a, b in same):  # some rows alone are gathered from
        raise Rejected(Reason.SHAPES("the index and the log-probabilities have different numbers of rows"))
    return _site(op, found, index, None, True)


@dataclass(frozen=True)
class _Logits:
    linear: fx.Node
    operands: tuple[fx.Node, fx.Node, bool, fx.Node | None]
    path: tuple[fx.Node, ...]
    replayed: tuple[fx.Node, ...]
    bend: Bend


def _site(
    op: Op, found: _Logits, labels: fx.Node, weights: Any, gathers: bool, ignored: int = -1,
    smoothing: float = 0.0, reduction: str = "none",
) -> Site:  # fmt: skip
    h, w, by_rows, bias = found.operands
    value = tensor(labels)
    if value is None or value.dtype != torch.int64:
        raise Rejected(
            Reason.LOSS("the labels are not int64 class indices"),
            "pass class indices instead of probabilities",
        )
    return Site(
        op.node, found.linear, h, w, bias, by_rows, found.path, found.replayed, found.bend, labels, weights,
        gathers, ignored, smoothing, reduction,
    )  # fmt: skip


def _log_softmax(node: fx.Node, last: bool, path: list[fx.Node], replayed: list[fx.Node]) -> fx.Node:
    """What the logarithm of a softmax is of that a node is, or takes rows of.

    Args:
        node: what a loss reads.
        last: whether the classes are its last dim; else they are the second one.
        path, replayed: are added to.

    Raises:
        Rejected: it is none.
    """
    while (op := read(node)) is not None and op.name != "log_softmax" and isinstance(op.input, fx.Node):
        if last and not op.inplace and _keeps_classes(op):
            replayed.append(node)
        elif op.name not in COPIES | CASTS or not _is_as_wide(op):
            break
        path.append(node)
        node = op.input
    if op is None or op.name != "log_softmax":
        raise Rejected(Reason.LOSS("the input of the loss is not a log_softmax"))
    logits, dim, dtype = op.only("input", "dim", "dtype")
    before = tensor(logits)
    wanted = before.dim() - 1 if before is not None and last else 1
    if before is None or not isinstance(dim, int) or dim % before.dim() != wanted:
        raise Rejected(Reason.LOSS("the log_softmax is not over the class dim"))
    if dtype is not None and not holds(dtype, before.dtype):
        raise Rejected(Reason.ROUNDED("the logits are rounded before the loss"))
    path.append(node)
    assert isinstance(logits, fx.Node)
    return logits


def _is_as_wide(op: Op) -> bool:
    before, after = tensor(op.input), tensor(op.node)
    if before is None or after is None or before.device != after.device or op.inplace:
        return False
    return holds(after.dtype, before.dtype)


def _classes_last(node: fx.Node, path: list[fx.Node]) -> fx.Node:
    """What (N, C, d1, ...) has been made of by a transpose of (N, d1, ..., C)."""
    op = read(node)
    while op is not None and op.name in COPIES and not op.inplace:
        path.append(node)
        node = op.input
        op = read(node)
    value = tensor(node)
    wanted = [0, value.dim() - 1, *range(1, value.dim() - 1)] if value is not None else []
    dims = None if op is None or op.inplace else permutation(op)
    if op is None or dims != wanted:
        raise Rejected(
            Reason.LOSS("the class dim is not the last dim of a linear's result"),
            "pass logits.transpose(1, 2), or a matrix of logits and a vector of labels",
        )
    path.append(node)
    assert isinstance(op.input, fx.Node)
    return op.input


def _walk(node: fx.Node, path: list[fx.Node], replayed: list[fx.Node]) -> _Logits:
    """From logits, whose last dim are the classes, up to the linear that makes them.

    Args:
        node: the logits.
        path, replayed: the nodes behind them, the last one first.

    Raises:
        Rejected: there is none, or something else in between.
    """
    pointwise: list[tuple[str, float]] = []
    while (operands := _linear(node)) is None:
        op = read(node)
        source = op.input if op is not None else None
        if op is None or op.inplace or tensor(node) is None:
            raise _no_linear(node)
        if op.name in ("mul", "div"):
            source, factor = _scaled(op)
            pointwise.append(("mul", factor))
        elif op.name == "tanh":
            pointwise.append(("tanh", 0.0))
        elif op.name in CASTS | COPIES:
            if not _is_as_wide(op):
                raise Rejected(
                    Reason.ROUNDED(f"{node.name} rounds the logits or moves them to another device")
                )
        elif _keeps_classes(op):
            replayed.append(node)
        else:
            raise _no_linear(node)
        path.append(node)
        if not isinstance(source, fx.Node):
            raise _no_linear(node)
        node = source
    path.append(node)
    return _Logits(node, operands, tuple(reversed(path)), tuple(reversed(replayed)), _bent(pointwise[::-1]))


def _no_linear(node: fx.Node) -> Rejected:
    return Rejected(
        Reason.LOSS(f"{node.name} is between the logits and a linear, or no linear computes them"),
        "compute the linear in the same graph, and only scale, softcap, cast, slice or view its result",
    )


def _bent(pointwise: list[tuple[str, float]]) -> Bend:
    bend = Bend()
    for name, factor in pointwise:
        if name == "mul":
            bend = bend.times(factor)
        elif bend.cap:
            raise Rejected(Reason.LOSS("there are two tanh between the linear and the loss"))
        else:
            bend = Bend(bend.scale, 1.0)
    if not (math.isfinite(bend.scale) and math.isfinite(bend.cap)) or not bend.scale:
        raise Rejected(Reason.RANGE("the logits are scaled by 0, inf or NaN"))
    return bend


def _scaled(op: Op) -> tuple[Any, float]:
    """What is multiplied by a number, or divided by one, and the factor.

    Raises:
        Rejected: it is none.
    """
    first, second = op.only("input", "other")
    if op.name == "mul" and isinstance(first, (int, float)):
        first, second = second, first
    before, after = tensor(first), tensor(op.node)
    if before is None or after is None or type(second) not in (int, float) or before.dtype != after.dtype:
        raise _no_linear(op.node)
    if op.name == "div" and not second:
        raise Rejected(Reason.RANGE("the logits are divided by 0"))
    return first, float(second if op.name == "mul" else 1 / second)


def _keeps_classes(op: Op) -> bool:
    """Whether an operation takes and orders rows alone, and would do the same to other classes.

    A view of all leading dims keeps the last one in its place.
    """
    before, after = tensor(op.input), tensor(op.node)
    if before is None or after is None or before.dim() < 1 or after.dim() < 1:
        return False
    if not known_true(before.shape[-1] == after.shape[-1]) or before.dtype != after.dtype:
        return False
    last = before.dim() - 1
    if op.name in VIEWS:
        return True
    if (dims := permutation(op)) is not None:
        return dims[-1] == last
    if op.name in _SELECTS:
        return isinstance(op["dim"], int) and op["dim"] % before.dim() != last
    return op.name == "getitem" and _indexes_rows(op["index"], last)


def _indexes_rows(index: Any, last: int) -> bool:
    """Whether an index leaves the last dim whole: slices and numbers of leading dims alone."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(part is Ellipsis or isinstance(part, (slice, int)) for part in parts):
        return False
    if any(isinstance(part, bool) for part in parts) or parts.count(Ellipsis) > 1:
        return False
    if Ellipsis in parts:
        behind = parts[parts.index(Ellipsis) + 1 :]
        return not behind or behind[-1] == slice(None)
    return len(parts) <= last or parts[last] == slice(None)


def _linear(node: fx.Node) -> tuple[fx.Node, fx.Node, bool, fx.Node | None] | None:
    """(input, weight, whether its rows are the classes, bias) of a product with a matrix."""
    found = linear_of(node)
    if found is None:
        return None
    x, w, by_rows, bias = found
    value, weight, held = tensor(x), tensor(w), tensor(bias)
    assert value is not None and weight is not None
    if value.dim() < 2:
        return None
    classes = weight.shape[0 if by_rows else 1]
    if bias is not None and (held is None or held.dim() != 1 or not known_true(held.shape[0] == classes)):
        return None
    return x, w, by_rows, bias
