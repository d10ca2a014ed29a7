"""Finds the logsumexp of the logits that a loss reads, as of a z-loss, in Dynamo's torch-level graph.

    F.cross_entropy(logits, labels) + 1e-4 * logits.logsumexp(-1).square().mean()

The operation for losses of each row gives it beside the loss, with a gradient of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph.dims import is_over_last
from ...graph.torch_ops import CASTS, COPIES, VIEWS, read
from ...operands import tensor
from .logits import Logits, walk
from .recognise import LossSite

#: What may stand between the logits of a loss and the logsumexp, beside scales and caps.
_PASSED = VIEWS | COPIES | CASTS | {"mul", "div", "tanh", "sigmoid", "add"}


@dataclass(frozen=True)
class Norm:
    """The logsumexp of each row of logits.

    Attributes:
        node: the node that is replaced.
        path: the nodes from the linear to it, in order.
        offset: a number that is added to the logits, and that the operation leaves out.
    """

    node: fx.Node
    path: tuple[fx.Node, ...]
    offset: float


def of(site: LossSite) -> list[Norm]:
    """The logsumexps of the logits of a loss that more reads than the loss."""
    if site.overwrites:
        return []
    own, found = {*site.path, site.loss}, dict[fx.Node, Norm]()
    waiting, seen = list(site.path), set(site.path)
    for node in waiting:
        op = read(node)
        if op is not None and op.name == "logsumexp" and not op.inplace and is_over_last(op):
            logits = _same(op.input, site) if _takes_gradient(node) == _takes_gradient(site.loss) else None
            if logits is not None and not own.issuperset(readers(node)):
                found[node] = Norm(node, logits.path, logits.offset)
            continue
        new = [user for user in readers(node) if user not in seen and _leads_on(user)]
        seen.update(new)
        waiting += new
    return list(found.values())


def _takes_gradient(node: fx.Node) -> bool:
    found = tensor(node)
    return found is not None and found.requires_grad


def _leads_on(node: fx.Node) -> bool:
    op = read(node)
    return op is not None and not op.inplace and (op.name in _PASSED or op.name == "logsumexp")


def _same(node: fx.Node, site: LossSite) -> Logits | None:
    """The operand of a logsumexp, if that is what the loss reads but for an offset."""
    try:
        found = walk(node, [], [])
    except Rejected:
        return None
    same = all(getattr(found, name) == getattr(site, name) for name in _SAME)
    return found if same and _rows_of(found) == _rows_of(site) else None


#: What two readers of the same logits agree in.
_SAME = ("linear", "bias", "bend", "columns", "shift", "head")


def _rows_of(logits: Logits) -> list[fx.Node]:
    """What takes and orders rows, without views, which keep their order."""
    return [node for node in logits.replayed if (op := read(node)) is None or op.name not in VIEWS]
