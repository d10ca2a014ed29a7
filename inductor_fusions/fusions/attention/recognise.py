"""Finds attention in Dynamo's torch-level graph by what it means.

Every softmax is an anchor. From it the graph is read upwards to the product of queries and keys (`scores`),
and downwards to the product with the values (`output`), into the normal form (`normal_form`). Whatever stands
on the way and is not part of that form rejects the site, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from ...fusion import Rejected
from ...liveness import readers
from . import torch_ops
from .masks import Interpreter
from .normal_form import Attention
from .output import downwards
from .rescaled import logsumexp_of, read_sink
from .scores import Upwards
from .torch_ops import CASTS, COPIES, PRODUCTS, VIEWS, read, tensor

_SOFTMAXES = frozenset({"softmax", "_softmax"})
#: Operations through which a softmax may still reach a product; only to tell attention from other softmaxes.
_BETWEEN = CASTS | COPIES | VIEWS | torch_ops.TRANSPOSES | {
    "dropout", "mul", "div", "add", "expand", "where", "masked_fill", "getitem", "slice", "narrow",
    "nan_to_num", "split", "split_with_sizes",
}  # fmt: skip


def softmaxes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Every softmax whose result reaches a product: the candidates for attention."""
    for node in graph.nodes:
        op = read(node)
        if op is not None and op.name in _SOFTMAXES and not op.inplace and _reaches_product(node):
            yield node


def _reaches_product(start: fx.Node, limit: int = 64) -> bool:
    frontier, seen = [start], {start}
    while frontier and len(seen) < limit:
        node = frontier.pop()
        for user in readers(node):
            op = read(user)
            if op is None or user in seen:
                continue
            if op.name in PRODUCTS:
                return True
            if op.name in _BETWEEN:
                seen.add(user)
                frontier.append(user)
    return False


def recognise(softmax: fx.Node, interpreter: Interpreter) -> Attention:
    """Read the attention around `softmax`.

    Raises:
        Rejected: with the first thing that is not part of the normal form.
    """
    op = read(softmax)
    assert op is not None
    scores = tensor(op.input)
    dim = op["dim"]
    if scores is None or not isinstance(dim, int):
        raise Rejected("the softmax has no fixed dim")
    if dim % scores.dim() != scores.dim() - 1:
        raise Rejected(f"the softmax is over dim {dim} of {scores.dim()}, not over the keys")
    if scores.dim() < 2:
        raise Rejected("the scores have one dim")
    logsumexp = logsumexp_of(op.input)
    upwards = Upwards(interpreter, logsumexp)
    site = upwards.walk(op.input, softmax, 1.0, [])
    site = replace(site, softmax=softmax, softmax_lead=tuple(scores.shape[:-2]), readers=upwards.readers)
    site.chain.append(softmax)
    site.chain.extend(upwards.row_maxima)
    if site.sink is not None and len(site.terms) > site.below_sink:
        raise Rejected("a mask or a bias is added to an attention sink as well")
    downwards(site, upwards.number)
    if logsumexp is not None:
        read_sink(site, logsumexp)
    own = {*site.chain, site.output}
    for reader in site.readers:
        if reader not in own and not own.issuperset(readers(reader)):
            raise Rejected(f"the scores are used elsewhere, by {reader.name}")
    return site
