"""Finds what else is computed of each row of the logits that a loss reads, in Dynamo's torch-level graph.

    F.cross_entropy(logits, labels) + 1e-4 * logits.logsumexp(-1).square().mean()
    log_probabilities(logits, labels), entropy(logits)

The operation for losses of each row gives the logsumexp and the entropy beside the loss, with gradients of
their own; or the entropy alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..._inductor import is_body, known_true
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph.dims import is_over_last
from ...graph.torch_ops import CASTS, COPIES, VIEWS, Op, read
from ...operands import requires_grad, tensor, value
from . import entropies, recognise
from .entropies import Entropy
from .logits import Logits, walk
from .recognise import LossSite, behind

#: What may stand between a linear and a result of each row.
_PASSED = (
    VIEWS | COPIES | CASTS | recognise.PARTS
    | frozenset("mul div tanh sigmoid add detach log_softmax softmax exp sub neg clamp".split())
)  # fmt: skip
#: Classes of a language model, where the linear that makes them is not seen: policies have fewer.
_MANY = 1024
#: What picks the logits of labels.
PICKS = (*recognise.PICKS, "getitem")
#: The operations that are looked at behind one.
_READ = _PASSED | {"sum", "logsumexp", *PICKS}


@dataclass(frozen=True)
class Statistic:
    """The logsumexp, or the entropy, of each row of logits, or of some of the rows.

    Attributes:
        node: the node that is replaced.
        path: the nodes from the linear to it.
        offset: a number that is added to the logits, and that the operation leaves out.
        base: the node whose rows are those of the operation.
        rest: the nodes behind it that take and order rows, in order.
        entropy: what is read of it; None: it is a logsumexp.
    """

    node: fx.Node
    path: tuple[fx.Node, ...]
    offset: float
    base: fx.Node
    rest: tuple[fx.Node, ...]
    entropy: Entropy | None


def of(site: LossSite) -> list[Statistic]:
    """The statistics of the logits of a loss: a logsumexp only if others than these read it."""
    results = (_of_result(site, *each) for each in _results(site.path))
    found = [each for each in results if each is not None]
    clamped = {each.entropy.clamped for each in found if each.entropy}
    own = {*site.path, site.loss}
    for each in found:
        if each.entropy and len(clamped) == 1:
            own |= {*each.path, each.node}
    return [
        each for each in found
        if (len(clamped) == 1 if each.entropy else not own.issuperset(readers(each.node)))
    ]  # fmt: skip


def alone(op: Op) -> LossSite | None:
    """The entropies of logits that no loss reads, where an operation gives the first of them."""
    found = entropies.of(op) if op.name in ("sum", "sub") else None
    logits = None if found is None else _walked(found.logits)
    if found is None or logits is None or not _is_head(logits) or not _is_first(found, logits.linear):
        return None
    if behind(logits.linear)[0] or _is_picked_from(logits.linear):
        return None  # those report it
    path, replayed = logits.path, logits.replayed
    others = [each for _, _, each in _results([logits.linear]) if each is not None]
    walks = [each for each in (_walked(other.logits) for other in others) if each is not None]
    if len(walks) > 1:
        # All rows at once, if the parts are as many.
        paths = zip(*(each.path for each in walks), strict=False)
        shared = [nodes[0] for nodes in itertools.takewhile(lambda nodes: len({*nodes}) == 1, paths)]
        while tensor(shared[-1]) is None:  # a `split`
            shared.pop()
        if known_true(_rows(shared[-1]) <= sum(_rows(each.logits) for each in others)):
            path, replayed = tuple(shared), tuple(node for node in replayed if node in shared)
    whole = replace(logits, path=path, replayed=replayed)
    return LossSite(**vars(whole), loss=op.node, labels=None, weights=None, gathers=True)


def of_an_operand(op: Op) -> bool:
    """Whether an operation gives the entropies of many classes, whose logits a nested graph is given."""
    found = entropies.of(op) if op.name in ("sum", "sub") and is_body(op.node.graph) else None
    held = None if found is None or found.logits.op != "placeholder" else tensor(found.logits)
    return held is not None and known_true(held.shape[-1] >= _MANY)


def picked(op: Op) -> LossSite | None:
    """The logits of labels, less the logsumexp of each row, which is made of a few rows at a time."""
    site = recognise.logits_of_labels(op) if op.name in PICKS else None
    if site is None or not _is_in_difference(op.node) or not _is_head(site) or behind(site.linear)[0]:
        return None
    rows = (math.prod(value(each.node).shape) for each in of(site) if each.entropy is None)
    return site if known_true(sum(rows) >= math.prod(value(op.node).shape)) else None


def _is_in_difference(node: fx.Node) -> bool:
    """Whether only differences read a result: by itself it may have more digits than a logsumexp leaves."""
    found = [read(user) for user in readers(node)]
    return all(
        op is not None and (op.name == "sub" or (op.name in VIEWS | CASTS and _is_in_difference(op.node)))
        for op in found
    )


def _is_picked_from(linear: fx.Node) -> bool:
    return any(picked(op) is not None for op in _operations([linear]) if op.name in PICKS)


def is_reported(node: fx.Node) -> bool:
    """Return whether the result of a node is reported at another site.

    That is so if `picked` reads it, or if an entropy that is computed of it is a site of `alone`.
    """
    op = read(node)
    summed = _walked(op.input) if op is not None and op.name == "logsumexp" else None
    if summed is not None and _is_picked_from(summed.linear):
        return True
    found = (each for _, _, each in _results([node]) if each is not None)
    logits = (_walked(each.logits) for each in found)
    return any(each is not None and _is_head(each) for each in logits)


def _results(matrices: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node, Entropy | None]]:
    """The results behind some nodes, and their logits, depth first."""
    for op in _operations(matrices):
        if op.name == "logsumexp" and is_over_last(op):
            yield op.node, op.input, None
        if op.name in ("sum", "sub"):
            entropy = entropies.of(op)
            if entropy is not None:
                yield op.node, entropy.logits, entropy


def _operations(matrices: Iterable[fx.Node]) -> Iterator[Op]:
    """The operations behind some nodes, depth first, up to those that give results."""
    waiting = [user for node in matrices for user in readers(node)][::-1]
    seen = set[fx.Node]()
    while waiting:
        node = waiting.pop()
        op = None if node in seen else read(node)
        seen.add(node)
        if op is None or op.name not in _READ or (op.inplace and op.name not in ("mul", "div")):
            continue
        yield op
        if op.name not in ("logsumexp", *recognise.PICKS):
            waiting += reversed(readers(node))


def _of_result(site: LossSite, node: fx.Node, logits: fx.Node, entropy: Entropy | None) -> Statistic | None:
    """A result of the logits that the loss reads, but for an offset; None of other logits."""
    if requires_grad(node) and not requires_grad(site.loss):
        return None
    found = _walked(logits)
    if found is None or any(getattr(found, name) != getattr(site, name) for name in _SAME):
        return None
    whole = _takers(site.replayed)
    ends = [i for i in range(len(found.replayed) + 1) if _takers(found.replayed[:i]) == whole]
    rest = found.replayed[ends[0] :] if ends else ()
    rest = rest if _takers(rest) else ()
    if not ends or (rest and site.head is not None):
        return None
    base = found.replayed[ends[0] - 1] if ends[0] else found.linear
    path = found.path if entropy is None else (*found.path, *entropy.path)
    return Statistic(node, path, found.offset, base, rest, entropy)


#: What two readers of the same logits agree in.
_SAME = ("linear", "bias", "bend", "columns", "shift", "head")


def _takers(replayed: Iterable[fx.Node]) -> list[fx.Node]:
    """What takes and orders rows, without views, which keep their order."""
    return [node for node in replayed if (op := read(node)) is None or op.name not in VIEWS]


def _walked(logits: fx.Node) -> Logits | None:
    try:
        return walk(logits, [], [])
    except Rejected:
        return None


def _is_first(entropy: Entropy, linear: fx.Node) -> bool:
    first = next((each for _, _, each in _results([linear]) if each is not None), None)
    return first is not None and first.node is entropy.node


def _is_head(logits: Logits) -> bool:
    """Whether there are as many classes as hidden columns: routers and policies have a few."""
    return known_true(logits.classes >= value(logits.h).shape[-1])


def _rows(node: fx.Node) -> Any:
    return math.prod(value(node).shape[:-1])
