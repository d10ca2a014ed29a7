"""Finds the loss behind a linear, in Dynamo's torch-level graph.

    F.cross_entropy(f(F.linear(h, w, bias)).view(-1, V), labels)

and likewise `nll_loss` of a `log_softmax`, and log-probabilities (`log_probabilities`). `logits` reads f:
what lies between the linear and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..._inductor import known_true
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph.dims import SELECTS, selection, unbroadcast
from ...graph.torch_ops import CASTS, COPIES, SPLITS, TRANSPOSES, VIEWS, Op, forms, read
from ...operands import holds, tensor
from ...reasons import Reason
from . import log_probabilities
from .logits import Logits, is_as_wide, walk
from .parts import moves_classes, rows_of

#: The operations at which a loss is looked for, beside those that pick log-probabilities.
_LOSSES = ("cross_entropy", "nll_loss")
_REDUCTIONS: dict[Any, str] = {0: "none", 1: "mean", 2: "sum"}
#: The operations of hand-written losses.
SOFTMAXES = ("log_softmax", "logsumexp")
#: What takes some rows or classes of logits.
PARTS = SELECTS | SPLITS | {"getitem"}
#: What picks the logits or log-probabilities of labels.
PICKS = ("gather", "take_along_dim")
#: What may stand between logits and a loss.
_PASSED = (
    frozenset("mul div add sub tanh sigmoid stack gather broadcast_tensors".split())
    | VIEWS | COPIES | CASTS | PARTS | TRANSPOSES | {*SOFTMAXES}
)  # fmt: skip


@dataclass(frozen=True)
class LossSite(Logits):
    """A loss, and the linear that makes its logits.

    Attributes:
        loss: the node that is replaced.
        labels: what stands at each row; None: the loss is an entropy, which has none.
        weights: of the classes, or None.
        gathers: whether the loss is log-probabilities.
        wraps: which labels count from the last class, as in `log_probabilities.Picked`.
        negates: whether the loss is the negative of log-probabilities.
        raw: whether the loss is the labels' logits, of which others subtract a logsumexp.
    """

    loss: fx.Node
    labels: fx.Node | None
    weights: fx.Node | None
    gathers: bool = False
    ignore_index: int = -1
    smoothing: float = 0.0
    reduction: str = "none"
    wraps: str = ""
    negates: bool = False
    raw: bool = False


@dataclass(frozen=True)
class Unsupported:
    """A loss of logits that are not read, and why."""

    loss: fx.Node
    why: Rejected


def site(node: fx.Node) -> LossSite | Unsupported | None:
    """The loss behind a linear that a node is; why a loss is none; None of what is no loss."""
    op = read(node)
    if op is None:
        return None
    try:
        if op.name in _LOSSES:
            return _loss(op)
        picked = log_probabilities.of(op)
        return None if picked is None or log_probabilities.is_in_stack(node) else _picked(op, picked)
    except Rejected as why:
        # Gathers are everywhere: one is a loss where it reads a softmax of a linear.
        return Unsupported(node, why) if op.name in _LOSSES else None


def behind(logits: fx.Node) -> tuple[list[LossSite | Unsupported], dict[str, None]]:
    """The losses that read some logits, and the names of the operations that do something else with them."""
    found = list[LossSite | Unsupported]()
    seen, waiting, ends, picks = {logits}, [logits], dict[str, None](), dict[str, None]()
    while waiting:
        node = waiting.pop()
        loss = site(node)
        if loss is not None:
            found.append(loss)
            continue
        op = read(node)
        if node is not logits and (op is None or op.name not in _PASSED):
            ends[node.name if op is None else op.name] = None
            continue
        if op is not None and (op.name in PICKS or _takes_one_class(op, logits)):
            picks[op.name] = None
        new = [user for user in readers(node) if user not in seen and read(user) is not None]
        seen.update(new)
        waiting += new
    return found, ends if found or ends else picks


def _takes_one_class(op: Op, logits: fx.Node) -> bool:
    """Whether an operation takes a class by its number."""
    taken, whole = selection(op.node), tensor(logits)
    before = None if taken is None else tensor(taken.source)
    if taken is None or before is None or whole is None or type(taken.index[-1]) is not int:
        return False
    return known_true(before.shape[-1] == whole.shape[-1])


def are_apart(first: LossSite, second: LossSite) -> bool:
    """Whether two losses read no logit of one linear both."""
    if first.path[0] is not second.path[0]:  # their products
        return True
    if first.columns is not None and second.columns is not None:
        (a, count), (b, other) = first.columns, second.columns
        if a + count <= b or b + other <= a:
            return True
    for one, two in zip((*first.path, first.loss), (*second.path, second.loss), strict=False):
        if one is not two:
            taken, others = selection(one), selection(two)
            return taken is not None and others is not None and taken.is_apart_from(others)
    return False


def targets() -> list[Any]:
    """The targets of losses."""
    return forms(*_LOSSES, *log_probabilities.ANCHORS)


def _loss(op: Op) -> LossSite:
    known = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = op.only(*known, "label_smoothing")
    logits, labels, weights, average, ignored, reduce, reduction, smoothing = given
    if not isinstance(logits, fx.Node) or not isinstance(labels, fx.Node):
        raise Reason.NOT_A_TENSOR.rejected("an argument of the loss is not a tensor")
    if average is not None or reduce is not None:
        raise Reason.LOSS.rejected("the loss has the deprecated arguments size_average or reduce")
    ignored, smoothing = -100 if ignored is None else ignored, smoothing or 0.0
    # Operators of aten have its number.
    reduction = "mean" if reduction is None else _REDUCTIONS.get(reduction, reduction)
    if type(ignored) is not int or not isinstance(smoothing, (int, float)):
        raise Reason.NOT_A_TENSOR.rejected("ignore_index or label_smoothing is not a constant")
    if not 0.0 <= smoothing <= 1.0 or reduction not in ("none", "mean", "sum"):
        raise Reason.LOSS.rejected("label_smoothing or reduction is invalid")
    value = tensor(logits)
    if value is None or value.dim() < 2:
        raise Reason.SHAPES.rejected("the logits are not a matrix")
    path: list[fx.Node] = []
    replayed: list[fx.Node] = []
    last = value.dim() == 2
    if op.name == "nll_loss":
        logits, last = _log_softmax(logits, last, path, replayed)
    found = walk(logits, path, replayed, last)
    labels = log_probabilities.in_front_of_views(labels)
    return LossSite(
        **vars(found), loss=op.node, labels=labels, weights=weights, ignore_index=ignored,
        smoothing=float(smoothing), reduction=reduction,
    )  # fmt: skip


def logits_of_labels(op: Op) -> LossSite | None:
    """The logits of one label for each row."""
    found = log_probabilities.of(op)
    if found is None or not found.of_softmax:
        return None
    try:
        return replace(_picked(op, replace(found, of_softmax=False)), raw=True)
    except Rejected:
        return None


def _picked(op: Op, picked: log_probabilities.Picked) -> LossSite:
    """Log-probabilities of one label for each row."""
    path: list[fx.Node] = list(picked.path)
    replayed: list[fx.Node] = []
    logits = picked.logits
    if picked.of_softmax:
        logits, _ = _log_softmax(logits, True, path, replayed)
    found = walk(logits, path, replayed)
    labels, views = log_probabilities.viewed(picked.labels)
    shared = [i for i, view in enumerate(views) if view in found.path]  # they are broadcast with the logits
    nodes = {*found.path, *views[: max(shared, default=0)]}
    ordered = replace(found, path=tuple(sorted(nodes)))
    labels = log_probabilities.in_front_of_views(labels)
    return LossSite(
        **vars(ordered), loss=op.node, labels=labels, weights=None, gathers=True, wraps=picked.wraps,
        negates=picked.negates,
    )  # fmt: skip


def _log_softmax(
    node: fx.Node, last: bool, path: list[fx.Node], replayed: list[fx.Node]
) -> tuple[fx.Node, bool]:
    """The operand of the log_softmax that a node is, or takes rows of; it may be logits less their logsumexp.

    Args:
        last: whether the classes are the last dim of the node; else they are the second one.

    Returns:
        The operand, and whether the classes are its last dim.

    Raises:
        Rejected: it is none.
    """
    while (op := read(node)) is not None and op.name != "log_softmax" and isinstance(op.input, fx.Node):
        logits, summed = log_probabilities.normalised(op) if last else (None, [])
        if logits is not None:
            path += [node, *summed]
            return logits, last
        if (equal := unbroadcast(node)) is not None:
            node, behind = equal
            path += behind
            continue
        if not last and moves_classes(op):
            path.append(node)
            node, last = op.input, True
            continue
        rows = rows_of(op) if last else None
        if rows is None:
            if op.name not in COPIES | CASTS or not is_as_wide(op):
                break
            rows = op.input, []
        node, taken = rows
        replayed += taken
        path += taken or [op.node]
    if op is None or op.name != "log_softmax":
        raise Reason.LOSS.rejected("the input of the loss is not a log_softmax")
    logits, dim, dtype = op.only("input", "dim", "dtype")
    before = tensor(logits)
    wanted = before.dim() - 1 if before is not None and last else 1
    if before is None or not isinstance(dim, int) or dim % before.dim() != wanted:
        raise Reason.LOSS.rejected("the log_softmax is not over the class dim")
    if dtype is not None and not holds(dtype, before.dtype):
        raise Reason.ROUNDED.rejected("the logits are rounded before the loss")
    path.append(node)
    assert isinstance(logits, fx.Node)
    return logits, last
