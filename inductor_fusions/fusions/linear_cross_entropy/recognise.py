"""Finds the loss behind a linear, in Dynamo's torch-level graph.

    F.cross_entropy(f(F.linear(h, w, bias)).view(-1, V), labels)

and likewise `nll_loss` of a `log_softmax`, and log-probabilities (`log_probabilities`). `logits` reads f:
what lies between the linear and the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph.dims import SELECTS, is_over_last, selection, unbroadcast
from ...graph.torch_ops import CASTS, COPIES, SPLITS, TRANSPOSES, VIEWS, Op, forms, read
from ...operands import holds, same_shape, tensor
from ...reasons import Reason
from . import log_probabilities
from .logits import Logits, is_as_wide, product_of, walk
from .parts import moves_classes, rows_of

#: The operations at which a loss is looked for, beside those that pick log-probabilities.
_LOSSES = ("cross_entropy", "nll_loss")
_REDUCTIONS: dict[Any, str] = {0: "none", 1: "mean", 2: "sum"}
#: The operations of hand-written losses.
_SOFTMAXES = ("log_softmax", "logsumexp")
_BINARY = "the loss is binary, of each class, and not of a softmax"
#: Other losses, whose logits no kernel reads.
_OTHERS = {
    "softmax": "the loss reads probabilities of a softmax, and not its logarithm, a log_softmax",
    "exp": "the loss is written as exponentials and their sum",
    "log_sigmoid": "the loss is binary, of each pair, and not of a softmax",
    "sigmoid": _BINARY, "softplus": _BINARY, "binary_cross_entropy": _BINARY,
    "binary_cross_entropy_with_logits": _BINARY, "multilabel_soft_margin_loss": _BINARY,
}  # fmt: skip
_RETURNED = Reason.LOSS(
    "the graph ends with a softmax or exponentials of the logits and a mask of them, as where masked_select, "
    "which ends it, selects some"
)
#: What makes other things than losses as well: probabilities of routers, gates, decays.
_OF_ROUTERS = ("softmax", "exp", "logsumexp")
_OF_GATES = ("sigmoid", "softplus", "log_sigmoid")
#: What may be between a linear and another loss, with a second operand or without.
_POINTWISE = (
    frozenset("mul div add sub neg sigmoid clamp masked_fill masked_select where max amax detach".split())
    | CASTS
    | VIEWS
    | TRANSPOSES
    | COPIES
)
#: What takes some rows or classes of logits.
PARTS = SELECTS | SPLITS | {"getitem"}
#: What makes probabilities of probabilities, such as those of copied words, or a number of a loss.
_MIXES = (
    _POINTWISE
    | SELECTS
    | frozenset("sum mean pow clamp_min getitem scatter_add index_add pad cat log".split())
)
#: What picks the logits or log-probabilities of labels.
PICKS = ("gather", "take_along_dim")
#: What may stand between logits and a loss.
_PASSED = (
    frozenset("mul div add sub tanh sigmoid stack gather broadcast_tensors".split())
    | VIEWS | COPIES | CASTS | PARTS | TRANSPOSES | {*_SOFTMAXES}
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


def unsupported(node: fx.Node) -> Unsupported | None:
    """Return the site of a loss that no kernel computes, such as a distillation; None of anything else.

    Args:
        node: a softmax of the logits of a linear, or another loss of them.
    """
    op = read(node)
    linear = None if op is None else _linear_before(op.input)
    if op is None or linear is None or not _is_loss(op, linear):
        return None
    losses, ends = behind(linear)
    if losses:
        return None  # those are sites of their own
    if _is_returned(op):
        return Unsupported(node, Rejected(_RETURNED))
    if not ends:
        return None
    if op.name in _OTHERS:
        return Unsupported(node, Reason.LOSS.rejected(_OTHERS[op.name], "F.cross_entropy(logits, labels)"))
    if not is_over_last(op):
        return Unsupported(
            node, Reason.LOSS.rejected(f"{op.name} is over the rows of the logits, not the classes")
        )
    try:
        walk(op.input, [], [])
    except Rejected as why:
        return Unsupported(node, why)
    if (logits := tensor(op.input)) is not None and logits.dim() == 1:
        row = Reason.LOSS.rejected(
            f"the {op.name} is of one row of logits, and only losses of all rows at once are fused",
            "F.log_softmax(logits, -1).gather(-1, labels[:, None])",
        )
        return Unsupported(node, row)
    taken = [name for name in ("diag", "diagonal") if name in ends]
    if taken:
        diagonal = Reason.LOSS.rejected(
            f"the logit of each row's label is read by {taken[0]}, not by the number of the label",
            "F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))",
        )
        return Unsupported(node, diagonal)
    if not ends.keys() - {"getitem", "select"}:
        number = Reason.LOSS.rejected(
            "a class is read by its number, which is not a tensor of labels",
            "logs.gather(-1, torch.full_like(logs[..., :1], number, dtype=torch.long))",
        )
        return Unsupported(node, number)
    own = behind(node)[1]
    read_by = f"the {op.name} of a linear's result is" if own else "the logits of a linear are"
    what = " and ".join(sorted(own or ends)[:4])
    return Unsupported(
        node,
        Reason.LOSS.rejected(
            f"{read_by} read by {what}, and only losses of one label for each row are fused"
        ),
    )


def _is_loss(op: Op, linear: fx.Node) -> bool:
    """Whether an operation on logits makes a loss of them.

    A few classes may be those of a router, unless they are as many as the rows: then pairs are compared.
    """
    found, logits, part = product_of(linear), tensor(linear), tensor(op.input)
    h = None if found is None else tensor(found[0])
    assert h is not None and logits is not None and part is not None
    classes, rows = logits.shape[-1], math.prod(logits.shape[:-1])
    if op.name in _SOFTMAXES and is_over_last(op):  # of a part of the classes
        classes = part.shape[-1]
    if op.name in _OF_ROUTERS and not (known_true(classes >= h.shape[-1]) or known_true(classes == rows)):
        return False
    if op.name in ("softmax", "exp", "sigmoid") and not _reaches(
        op.node, lambda each: each.name in ("log", *PICKS)
    ):
        return _is_returned(op) and known_true(classes == rows)
    return op.name not in _OF_GATES or _reaches(op.node, _is_number)


def _is_returned(op: Op) -> bool:
    """Whether the graph ends with a softmax or exponentials of logits, and with a mask of the logits."""
    logits, last = tensor(op.input), op.node.graph.output_node()
    if op.name not in ("exp", *_SOFTMAXES) or last not in op.node.users or logits is None:
        return False
    returned = [value for value in map(tensor, last.all_input_nodes) if value is not None]
    return any(x.dtype == torch.bool and same_shape(x.shape, logits.shape) for x in returned)


def _linear_before(node: Any, steps: int = 8) -> fx.Node | None:
    """The first linear in front of pointwise operations and parts, whose other operands are no logits."""
    op = read(node)
    if isinstance(node, fx.Node) and product_of(node) is not None:
        return node
    if op is None or op.name not in _POINTWISE | PARTS | {*PICKS} or not steps:
        return None
    found = (_linear_before(each, steps - 1) for each in node.all_input_nodes)
    return next((each for each in found if each is not None), None)


def _is_number(op: Op) -> bool:
    value = tensor(op.node)
    return value is not None and not value.dim()


def _reaches(node: fx.Node, ends: Callable[[Op], bool], steps: int = 8) -> bool:
    """Whether probabilities reach such an operation; they may be mixed with others before."""
    for op in map(read, readers(node)):
        if op is not None and (
            ends(op) or (op.name in _MIXES and steps and _reaches(op.node, ends, steps - 1))
        ):
            return True
    return False


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


def targets_of_others() -> list[Any]:
    """The targets of hand-written and of other losses."""
    return forms(*_SOFTMAXES, *_OTHERS)


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
