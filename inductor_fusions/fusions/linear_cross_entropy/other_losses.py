"""Losses of a linear's logits that no kernel computes, and why.

Distillations, losses of pairs, binary losses, log-probabilities of all classes. A softmax that makes
something else than a loss, such as the probabilities of a router, is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph.dims import SELECTS, is_over_last
from ...graph.search import reached
from ...graph.torch_ops import CASTS, COPIES, TRANSPOSES, VIEWS, Op, forms, read, readers_named
from ...operands import same_shape, tensor
from ...reasons import Reason
from .logits import product_of, walk
from .recognise import PARTS, PICKS, SOFTMAXES, Unsupported, behind

_BINARY = "the loss is binary, of each class, and not of a softmax"
#: Other losses, whose logits no kernel reads.
_OTHERS = {
    "softmax": "the loss reads probabilities of a softmax, and not its logarithm, a log_softmax",
    "exp": "the loss is written as exponentials and their sum",
    "log_sigmoid": "the loss is binary, of each pair, and not of a softmax",
    "sigmoid": _BINARY, "softplus": _BINARY, "binary_cross_entropy": _BINARY,
    "binary_cross_entropy_with_logits": _BINARY, "multilabel_soft_margin_loss": _BINARY,
}  # fmt: skip
_SELECTED = Reason.LOSS(
    "the graph ends with a softmax or exponentials of the logits and a mask of them, as where masked_select, "
    "which ends it, selects some"
)
#: What makes other things than losses as well: probabilities of routers, gates, decays.
_OF_ROUTERS = ("softmax", "exp", "logsumexp")
_OF_GATES = ("sigmoid", "softplus", "log_sigmoid")
#: What gives all elements of a value.
_WHOLE = CASTS | VIEWS | TRANSPOSES | COPIES
#: What may be between a linear and another loss, with a second operand or without.
_POINTWISE = (
    frozenset("mul div add sub neg sigmoid clamp masked_fill masked_select where max amax detach".split())
    | _WHOLE
)
#: How many views and casts of a value are looked at.
_MOST_VIEWS = 32
_RETURNED = Reason.LOSS(
    "the graph returns the log_softmax of a linear's result, perhaps at a graph break, and only losses of "
    "one label for each row are fused"
)
#: What makes probabilities of probabilities, such as those of copied words, or a number of a loss.
_MIXES = (
    _POINTWISE
    | SELECTS
    | frozenset("sum mean pow clamp_min getitem scatter_add index_add pad cat log".split())
)


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
        return Unsupported(node, Rejected(_SELECTED))
    returned = not ends and _is_of_head(op, linear) and _leaves(node)
    if not ends and not returned:
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
    if returned:
        hint = "TORCH_LOGS=graph_breaks names the lines of graph breaks"
        return Unsupported(node, Rejected(_RETURNED, hint))
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
    if op.name in SOFTMAXES and is_over_last(op):  # of a part of the classes
        classes = part.shape[-1]
    if op.name in _OF_ROUTERS and not (known_true(classes >= h.shape[-1]) or known_true(classes == rows)):
        return False
    if op.name in ("softmax", "exp", "sigmoid") and not _reaches(
        op.node, lambda each: each.name in ("log", *PICKS)
    ):
        return _is_returned(op) and known_true(classes == rows)
    return op.name not in _OF_GATES or _reaches(op.node, _is_number)


def _is_of_head(op: Op, linear: fx.Node) -> bool:
    """Whether an operation is a log_softmax of at least as many classes as the linear has hidden columns.

    One of a few classes makes what a classifier returns.
    """
    found = product_of(linear)
    h, logits = tensor(found[0] if found else None), tensor(op.node)
    wide = h is not None and logits is not None and known_true(logits.shape[-1] >= h.shape[-1])
    return op.name == "log_softmax" and wide


def _leaves(node: fx.Node) -> bool:
    """Whether the graph returns all of a value, perhaps as a view or a cast."""
    views = reached([node], lambda each: readers_named(each, _WHOLE), _MOST_VIEWS)
    return any(user.op == "output" for each in views for user in readers(each))


def _is_returned(op: Op) -> bool:
    """Whether the graph ends with a softmax or exponentials of logits, and with a mask of the logits."""
    logits, last = tensor(op.input), op.node.graph.output_node()
    if op.name not in ("exp", *SOFTMAXES) or last not in op.node.users or logits is None:
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


def targets() -> list[Any]:
    """The targets of hand-written and of other losses."""
    return forms(*SOFTMAXES, *_OTHERS)
