"""Finds attention in Dynamo's torch-level graph by what it computes.

Every softmax is an anchor, in all of its forms (`torch_ops`), also as exponentials over their sum
(`written_out`). From there the graph is read into the `normal_form`: upwards to the product of queries and
keys (`scores`), and downwards to the product with the values (`output`). An operation in between that is not
part of this form rejects the site, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..._inductor import Match, hint, is_body, known_true
from ...effects.liveness import readers
from ...effects.writes import memory_chain
from ...fusion import Rejected
from ...graph import torch_ops
from ...graph.dims import SELECTS, permutation, reduced
from ...graph.regions import entered, left
from ...graph.torch_ops import ADDING, CASTS, COPIES, PRODUCTS, SPLITS, VIEWS, read
from ...operands import same_shape, tensor
from ...reasons import Reason
from .arrangement import NOT_OVER_KEYS, OWN_VALUES, Arrangement, Misplaced
from .logsumexp_sink import logsumexp_of, read_sink
from .masks import Interpreter
from .no_product import NO_PRODUCT
from .normal_form import Attention, Below, Sink, Term
from .operands import Operand, product
from .output import MERGED, read_epilogue
from .read_elsewhere import read_by_other
from .scores import ScoreReader
from .written_out import SOFTMAXES, Softmax, divided, softmax_at, weights_of

#: Operations through which a softmax may still reach a product; only to tell attention from other softmaxes.
_BETWEEN = CASTS | COPIES | VIEWS | SPLITS | SELECTS | {
    "dropout", "mul", "div", "add", "expand", "where", "masked_fill", "getitem",
    "nan_to_num", "mean", "getattr", "sub", "neg", "conv1d", "conv2d", "conv3d", "cat", "stack", "pad",
    "scatter", "topk", "max", "native_dropout", "repeat", "repeat_interleave", "expand_as",
    "broadcast_to", "tile", "unfold", "sort", "vstack", "hstack", "dstack", "diag_embed", "interpolate",
    "avg_pool1d", "avg_pool2d", "max_pool1d", "max_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "lp_pool1d", "lp_pool2d", "tensor_split", "hsplit",
    "vsplit", "dsplit", "take", "take_along_dim", "gather", "masked_select", "narrow_copy", "as_strided",
    "diagonal", "index_copy", "index_add", "scatter_add", "scatter_reduce", "masked_scatter", "slice_scatter",
    "select_scatter", "diagonal_scatter", "rot90", "block_diag", "kron", "min", "amax", "amin", "kthvalue",
    "median", "diff", "fft_rfft", "fft_irfft", "fft_rfft2", "fft_irfft2", "fft_rfftn", "fft_irfftn",
}  # fmt: skip

#: Operations that take single weights, each of which multiplies a value of its own in a loop.
_PARTS = SPLITS | {"getitem", "select", "topk", "max"}
_LOGARITHMS = frozenset("log log2 log1p log_softmax log_sigmoid".split())

#: Operations that may be between scores and one of two softmaxes that read them.
_OF_SCORES = CASTS | COPIES | VIEWS | torch_ops.TRANSPOSES | {
    "getattr", "mul", "div", "add", "sub", "masked_fill", "where", "clamp", "clamp_min", "clamp_max", "amax",
    "max", "getitem",
}  # fmt: skip
#: How many of them are followed. Layers that add their scores to those of the next one have a few each.
_MOST_BEHIND = 256


def is_in_attention(match: Match) -> bool:
    """Whether the result of a softmax may reach a product: of a region, perhaps outside of it."""
    softmax = read(match.output_node())
    return softmax is not None and not softmax.inplace and _may_reach_product(softmax.node)


def is_written_out(match: Match) -> bool:
    """Whether weights are made of an exponential, which may reach a product or are read behind one."""
    weights = weights_of(match.output_node())
    return weights is not None and _may_reach_product(weights)


def _may_reach_product(weights: fx.Node) -> bool:
    return is_body(weights.graph) or reaches_product(weights)


def reaches_product(
    start: fx.Node, outside: Callable[[fx.Node], Sequence[fx.Node]] = lambda node: ()
) -> bool:
    """Whether weights may reach a product, or are exponentials that are divided behind it.

    Args:
        outside: what holds a result of a region in the graph that runs it.
    """
    made = read(start)
    if made is not None and made.name not in SOFTMAXES and any(map(_is_of_products, _factors(made))):
        return True
    frontier = [start] if made is None else [start, *_written_with(made, start, passes=True)]
    seen, parts = {*frontier}, set[fx.Node]()
    calls: dict[fx.Graph, fx.Node] = {}  # of the regions that the weights enter
    while frontier and len(seen) < 64:
        node = frontier.pop()
        for user in readers(node):
            op = read(user)
            further: Sequence[fx.Node] = entered(user, node)
            calls |= {each.graph: user for each in further}
            if user.op == "output":
                further = left(node, [calls[node.graph]]) if node.graph in calls else outside(node)
            frontier += [each for each in further if each not in seen]
            seen.update(further)
            if op is None or user in seen or (user.graph is start.graph and user < start):
                continue
            if op.name in PRODUCTS | ADDING | torch_ops.UNREAD_PRODUCTS | {"embedding_bag"}:
                return True
            if op.name.startswith("conv") and (op.rest[1:2] == (node,) or _mixes_channels(op, start)):
                return True
            if op.name == "sum" and (_is_wider(node, start) or _is_weighted(op, start)):
                return True
            if op.name in _PARTS or node in parts:
                parts.add(user)
            passes = op.name in _BETWEEN or permutation(op) is not None or _keeps_shape(node, user)
            further = _written_with(op, node, passes)
            frontier += [each for each in further if each not in seen]
            seen.update(further)
            if passes or (op.name == "sum" and node in parts):
                seen.add(user)
                frontier.append(user)
    sums = [op for node in parts if (op := read(node)) is not None and op.name == "add"]
    return any({op.input, op["other"]} <= parts and _is_wider(op.node, start) for op in sums)


def _written_with(op: torch_ops.Op, value: fx.Node, passes: bool) -> list[fx.Node]:
    """What made the memory that an operation copies a value into, such as the band of a matrix.

    Args:
        passes: whether the results of the operation are weights as well, which it may write (`out=`).
    """
    place = {"copy": 1, "setitem": 2}.get(op.name, 0)
    target = op.rest[0] if place and op.rest[place : place + 1] == (value,) else None
    given = [each for each in (target, op["out"] if passes else None) if isinstance(each, fx.Node)]
    return [memory_chain(each)[-1] for each in given]


def _factors(op: torch_ops.Op) -> tuple[Any, ...]:
    """What an operation multiplies or divides."""
    return (op.input, op["other"]) if op.name == "mul" else (op.input,)


def _is_of_products(node: object) -> bool:
    """Whether a node is a product, or a sum with one, such as that of several chunks of keys."""
    op = read(node)
    if op is not None and op.name == "add":
        return any(map(_is_of_products, (op.input, op["other"])))
    return op is not None and op.name in PRODUCTS


def _is_wider(node: fx.Node, weights: fx.Node) -> bool:
    """Whether a node has more elements than weights: they were multiplied with values, element by element."""
    made, before = tensor(node), tensor(weights)
    if made is None or before is None:
        return False
    return made.dim() > before.dim() or not known_true(product(made.shape) <= product(before.shape))


def _is_weighted(op: torch_ops.Op, start: fx.Node) -> bool:
    """Whether a sum over the dim of a softmax is that of elements of as many weights, such as in pooling.

    Not of their logarithms, as in a loss, nor of those that a mask chooses.
    """
    softmax, product = read(start), read(op.input)
    if softmax is None or softmax.name not in SOFTMAXES or product is None or product.name != "mul":
        return False
    own, summed = tensor(start), tensor(op.input)
    if own is None or summed is None or own.dim() < 2 or not same_shape(own.shape, summed.shape):
        return False
    for side in (product.input, product["other"]):
        for _ in range(4):
            by, held = read(side), tensor(side)
            if held is None or not held.is_floating_point() or side is softmax.input:
                return False
            if by is not None and by.name in _LOGARITHMS:
                return False
            if by is None or by.name not in CASTS | {"add", "sub", "mul", "div", "clamp", "clamp_min"}:
                break
            side = by.input
    return reduced(softmax)[0] == reduced(op)[0]


def _mixes_channels(op: torch_ops.Op, start: fx.Node) -> bool:
    """Whether a convolution of size 1 sums over the dim of a softmax over channels, as detectors have it."""
    softmax, kernel = read(start), tensor(op.rest[1]) if len(op.rest) > 1 else None
    if softmax is None or softmax.name not in SOFTMAXES or kernel is None or not op.name.startswith("conv"):
        return False
    return reduced(softmax)[0] == (1,) and all(known_true(size == 1) for size in kernel.shape[2:])


def _keeps_shape(node: fx.Node, user: fx.Node) -> bool:
    """Whether an operation makes something of weights that may be weights as well."""
    before, after = tensor(node), tensor(user)
    if before is None or after is None or not (after.is_floating_point() or after.is_complex()):
        return False
    return same_shape(before.shape, after.shape)


def recognise(softmax: fx.Node, interpreter: Interpreter, beside: Collection[fx.Node] = ()) -> Attention:
    """Read the attention around `softmax`.

    Args:
        beside: other softmaxes on the same scores, which are known to be those of attentions.

    Raises:
        Rejected: with the first thing that is not part of the normal form.
    """
    written = softmax_at(softmax)
    scores, dim = tensor(written.scores), written.dim
    if scores is None:
        raise Reason.SHAPES.rejected(
            "the graph does not say what shapes its values have",
            "compile with torch.compile or torch.export, not a graph of torch.fx.symbolic_trace",
        )
    if not isinstance(dim, int):
        raise Reason.SHAPES.rejected("the dim of the softmax is not a constant")
    if scores.dim() < 2:
        raise Reason.SHAPES.rejected("the scores have only one dim")
    found: list[tuple[Attention, Arrangement]] = []
    misses: list[Rejected] = []
    for at in _arrangements(scores.dim(), dim % scores.dim()):
        try:
            found.append((_read(written, at, interpreter, beside), at))
        except Rejected as miss:
            misses.append(miss)
        if found and not _has_broadcast_keys(found[0][0]):
            break
    if not found and dim % scores.dim() == scores.dim() - 1:
        try:
            return _read(written, at, interpreter, beside, merged=True)
        except Rejected as miss:
            named = any(other.reason == OWN_VALUES for other in misses)
            said = miss.reason == MERGED or miss.code == Reason.USED_ELSEWHERE.code
            misses += [miss] if said and not named else []
    if not found:
        last = (NO_PRODUCT, NOT_OVER_KEYS)
        raise min(misses, key=lambda miss: (isinstance(miss, Misplaced), miss.reason in last))
    return max(found, key=lambda pair: _rank(pair[0], pair[1], scores))[0]


def _arrangements(rank: int, columns: int) -> Iterator[Arrangement]:
    """Arrangements with each dim as that of the queries, the nearest to the keys first; then with none."""
    others = [d for d in range(rank) if d != columns]
    for rows in sorted(others, key=lambda d: (abs(d - columns), d)):
        yield Arrangement.of(rank, rows, columns)
    yield Arrangement(tuple(sorted(others)), (), (columns,))


def _has_broadcast_keys(site: Attention) -> bool:
    """Whether queries share keys, so that another dim could be taken for that of the queries."""
    lead = site.k.padded(len(site.lead) + 2).shape[:-2]
    return any(
        known_true(own == 1) and not known_true(whole == 1)
        for own, whole in zip(lead, site.lead, strict=False)
    )


def _rank(site: Attention, at: Arrangement, scores: torch.Tensor) -> tuple[int, int]:
    """How much an arrangement says: masks vary over queries, and there are many of them."""
    terms = [tensor(term.node) for term in site.terms]
    varying = sum(t is not None and t.dim() > 1 and not known_true(t.shape[-2] == 1) for t in terms)
    return varying, hint(scores.shape[at.rows[0]]) if at.rows else 1


def _read(
    written: Softmax, at: Arrangement, interpreter: Interpreter, beside: Collection[fx.Node],
    merged: bool = False,
) -> Attention:  # fmt: skip
    """The attention around a softmax whose dims are known.

    Args:
        merged: whether a view counts the queries as leading dims, as they are in `at`.
    """
    softmax, weights = written.weights, tensor(written.weights)
    assert weights is not None
    logsumexp = logsumexp_of(written.scores) if at.is_plain and not written.inside else None
    above = ScoreReader(interpreter, logsumexp, merged)
    above.beside.update(written.inside)
    above.shifts_cancel &= written.sink is None
    site = above.walk(written.scores, written.reader, Below(at, written.factor))
    written.check(above.maxima)
    site = replace(site, softmax=softmax, softmax_lead=at.sizes(weights.shape), readers=above.readers)
    site.by_logsumexp = written.by_logsumexp
    if merged:
        _partners(above, softmax, interpreter, beside)  # what reads the scores elsewhere is the first reason
        _take_apart(site)
        if written.sink is not None:
            raise Rejected(MERGED)
    site.chain.append(softmax)
    site.chain.extend(above.beside)
    if site.sink is not None and len(site.terms) > site.below_sink:
        raise Reason.SINK.rejected("a mask or a bias is also added to the attention sink")
    if written.sink is not None:
        if site.sink is not None:
            raise Reason.SINK.rejected("the attention has two sinks")
        column = site.q.then("new_full", (1,) * weights.dim(), written.sink)
        site.sink, site.below_sink = Sink(Term(column, site.softmax_lead), first=False), len(site.terms)
    read_epilogue(
        site, interpreter, at, beside=written.inside, merged=merged, dropped=written.sink is not None
    )
    if above.chooses:
        raise Rejected(OWN_VALUES)
    if written.division is not None:
        divided(site, written.division, written.inside, at)
    if logsumexp is not None:
        read_sink(site, logsumexp)
    site.partners += _partners(above, softmax, interpreter, beside)
    return site


def _partners(
    above: ScoreReader, softmax: fx.Node, interpreter: Interpreter, beside: Collection[fx.Node]
) -> list[fx.Node]:
    """Softmaxes of other attentions that also read the scores.

    Raises:
        Rejected: something else reads them.
    """
    found: list[fx.Node] = []
    elsewhere: dict[fx.Node, Rejected] = {}
    for reader in above.others:
        said = Reason.USED_ELSEWHERE(f"the scores are {read_by_other(reader)}")
        if above.writes_by_view is not None:
            said = Reason.OVERWRITTEN(f"{above.writes_by_view.name} overwrites the scores")
        partners = _softmaxes_behind(reader, above.held)
        if not partners or softmax in partners or above.writes_by_view is not None:
            raise Rejected(said)
        found += [each for each in partners if each not in (*beside, *found)]
        elsewhere |= {each: Rejected(said) for each in partners if each not in elsewhere}
    for partner in found:  # of one, the others are taken to be attentions: all have to be
        try:
            recognise(partner, interpreter, (*beside, softmax, *found))
        except Rejected:
            raise elsewhere[partner] from None
    return found


def _take_apart(site: Attention) -> None:
    """Read what acts on scores of shape (leading * queries, keys) as acting on those of the product."""
    rows = site.q.shape[-2]
    leads = [site.softmax_lead, *(term.lead for term in site.terms)]
    if all(same_shape(each, (*site.lead, rows)) or same_shape(each, site.lead) for each in leads):
        raise Rejected(NOT_OVER_KEYS)  # no view does: there is another reason
    if site.stages or site.scalers or site.sink:
        raise Rejected(MERGED)
    site.softmax_lead = site.lead
    for place, term in enumerate(site.terms):
        operand = Operand.of(term.node)
        if same_shape(term.lead, site.lead):  # of the product itself
            continue
        if operand is None or not known_true(product(term.lead) == product((*site.lead, rows))):
            raise Rejected(MERGED)
        operand = operand.padded(len(term.lead) + 2)
        operand = operand.expand((*term.lead, *operand.shape[-2:]))
        operand = operand.reshape((*site.lead, rows, operand.shape[-1]))
        site.terms[place] = replace(term, node=operand, lead=site.lead)


def _softmaxes_behind(node: fx.Node, held: Collection[fx.Node]) -> list[fx.Node]:
    """The softmaxes that alone read what an operation makes of scores, through others of its kind.

    Args:
        held: what holds the scores. They may be added in place to others, but nothing may be added to them.
    """
    found, waiting = list[fx.Node](), [node]
    for each in waiting:
        op, read_by = read(each), readers(each)
        if op is None or not read_by or len(waiting) > _MOST_BEHIND:
            return []
        into_others = op.name in ("add", "sub") and op.input not in (*held, *waiting)
        if op.inplace and op.name != "masked_fill" and not into_others:
            return []
        if op.name in SOFTMAXES:
            found.append(each)
        elif op.name in _OF_SCORES:
            waiting += [user for user in read_by if user not in waiting]
        else:
            return []
    return found
