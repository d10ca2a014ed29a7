"""Walks from a softmax up to the product of queries and keys.

What the operations in between do to the scores is in `scores`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from ..._inductor import hint, is_body_of_dynamo, known_true
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph import torch_ops
from ...graph.dims import permutation
from ...graph.torch_ops import (
    ADDING,
    CASTS,
    COPIES,
    EQUATIONS,
    PRODUCTS,
    VIEWS,
    Op,
    dropout_p,
    read,
    reads_metadata,
    tensor,
)
from ...operands import same_shape
from ...reasons import Reason
from . import einsum
from .arrangement import NOT_OVER_KEYS, Arrangement, Misplaced, is_view, permuted
from .assigned import Region, condition, region
from .masks import Interpreter, is_fill, may_hide_rows
from .normal_form import Attention, Stage, Term
from .operands import Operand

NO_PRODUCT = Reason.NO_PRODUCT("no product of queries and keys precedes the softmax")
ELEMENTWISE = Reason.NO_PRODUCT("the scores are sums of elementwise products, not a matrix product")
OUTSIDE = Reason.NO_PRODUCT(
    "the scores are computed outside of the region (a checkpoint, say) of the softmax"
)
#: How far it is looked for, in nodes.
REACH = 64
#: How many nodes are tried on the way up: where an operation reads the scores twice, both sides are.
MOST_STEPS = 1024
#: Scores are not looked for beyond these: what is made of weights or tokens is none.
_ENDS = frozenset("softmax _softmax scaled_dot_product_attention layer_norm rms_norm group_norm".split())

#: ("mul" or "div", by what, leading sizes of the scores there).
Scalers = list[tuple[str, Any, tuple[Any, ...]]]


@dataclass(frozen=True)
class Reading:
    """A part of the scores on the way up from what is written into it.

    Attributes:
        part: which.
        at: what the dims of the scores are.
        factor: numbers by which all scores are multiplied further down.
        shifts_cancel: as in `Walk`, for what all scores have in common.
        terms: what acts on the scores before the part is read.
    """

    part: Region
    at: Arrangement
    factor: float
    shifts_cancel: bool
    terms: tuple[Term, ...] = ()


class Walk:
    """Goes from the scores at the softmax up to the product of q and k.

    A subclass has a method `_name` for each operation that changes the scores. A method asks for the site
    above its operation, by `up`, and adds what the operation does.

    Attributes:
        readers: nodes that read the shape or dtype of the scores, not their values.
        others: what else reads the scores.
        beside: nodes that read the scores and are part of the softmax, or hold a number for each row, such as
            the largest score, that is subtracted: a softmax does not see that.
        maxima: those that hold the largest score of each row.
        merged: whether a view counts queries as leading dims: the last of those is theirs at the product.
        logsumexp: a node that reads the scores beside the softmax, and takes part in the attention; or None.
        shifts_cancel: whether nothing but a softmax sees what is added to all scores of a row.
    """

    def __init__(
        self, interpreter: Interpreter, logsumexp: fx.Node | None = None, merged: bool = False
    ) -> None:
        self.interpreter, self.merged = interpreter, merged
        self.readers: list[fx.Node] = []
        self.others: list[fx.Node] = []
        self.beside: set[fx.Node] = set()
        self.maxima: set[fx.Node] = set()
        self.logsumexp = logsumexp
        self.shifts_cancel = logsumexp is None
        #: What writes to the scores, and what reads them afterwards.
        self.writing: set[fx.Node] = set()
        #: What writes to the scores by a view of them, which is one of `others`.
        self.writes_by_view: fx.Node | None = None
        #: Parts of the scores that are being read.
        self.regions: list[Reading] = []
        #: Whether each token is one query, whose scores are a linear of it.
        self.chooses = False
        self._steps = 0

    def walk(self, node: Any, user: fx.Node, factor: float, scalers: Scalers, at: Arrangement) -> Attention:
        """The attention whose scores `node` holds, seen by `user`, as far as the softmax's input.

        Args:
            factor: numbers by which the scores are multiplied further down.
            scalers: the same for tensors.
            at: what the dims of `node` are.
        """
        op, scores = read(node), tensor(node)
        if op is None or scores is None or scores.dim() < 2:
            is_input = isinstance(node, fx.Node) and node.op == "placeholder"
            raise Rejected(OUTSIDE if is_input and is_body_of_dynamo(node.graph) else NO_PRODUCT)
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise Reason.IN_BETWEEN.rejected(
                "too many operations are between the product of q and k and the softmax"
            )
        writer = self.interpreter.mutations.last(node, user)
        if writer is not None and _writes_into(writer, node):
            return self._written(writer, node, user, factor, scalers, at)
        self.writes_by_view = self.writes_by_view or writer
        for other in readers(node):
            asks = reads_metadata(other, node)
            if (asks or other is not user) and other not in {*self.beside, *self.writing, self.logsumexp}:
                (self.readers if asks else self.others).append(other)
        if not scores.is_floating_point():
            raise Reason.MIXED_DTYPES.rejected("the scores are not floating point")
        if op.name in PRODUCTS:
            return self._product(op, at, factor, scalers)
        step = getattr(self, f"_{op.name}", None)
        if step is None and (op.name in CASTS or op.name in COPIES):
            step = self._through
        elif step is None and op.name in VIEWS:
            step = self._view
        elif step is None and permutation(op) is not None:
            step = self._permutation
        if step is None:
            raise between(op, scores)
        site: Attention = step(op, at, factor, scalers)
        site.chain.append(node)
        return site

    def _written(
        self, writer: fx.Node, node: fx.Node, user: fx.Node, factor: float, scalers: Scalers, at: Arrangement
    ) -> Attention:
        """The attention whose scores `node` holds after a node has written to a part of them."""
        self.writing |= {writer, user}
        scores, masked = tensor(node), condition(writer, node)
        assert scores is not None
        if scalers:
            raise Reason.SCALE.rejected(
                "the scores are scaled by a tensor after a part of them is overwritten"
            )
        part = region(writer, node) if masked is None else None
        if masked is None and part is None:
            raise Reason.OVERWRITTEN.rejected(f"{writer.name} overwrites the scores")
        if part is None or part.is_number:
            mask, value = masked or (None, part and part.written)
            number = self._lowest(value, factor)
            op = read(writer)
            views = [v for v in readers(node) if op is not None and v is op.input and readers(v) == [writer]]
            # Of detached scores, those that are masked get a gradient too: it is 0 where their weights are.
            if mask and views and scores.requires_grad and (number != -math.inf or not self.shifts_cancel):
                raise Reason.OVERWRITTEN.rejected(f"{writer.name} overwrites the scores behind autograd")
            self.writing.update(views)
            self.others += readers(writer)
            site, lead = self.walk(node, writer, factor, scalers, at), at.sizes(scores.shape)
            everywhere = site.q.then("new_full", (1,) * scores.dim(), 1.0).then("bool")
            term = Term(at.seen(mask or everywhere, scores.shape), lead, fill=number)
            site.terms.append(part.padded(term, at) if part is not None else term)
            site.chain += views
        else:
            self.regions.append(Reading(part, at, factor, self.shifts_cancel))
            self.shifts_cancel = False
            site = self.walk(part.written, writer if part.written is not writer else user, factor, [], at)
            reading = self.regions.pop()
            self.shifts_cancel = reading.shifts_cancel
            count = len(reading.terms)
            if site.stages or site.sink is not None or tuple(site.terms[:count]) != reading.terms:
                raise Reason.OVERWRITTEN.rejected(
                    "a part of the scores is overwritten by something other than a sum or a masked fill"
                )
            site.terms[count:] = [part.padded(term, at) for term in site.terms[count:]]
        site.chain.append(writer)
        return site

    def _lowest(self, value: Any, factor: float) -> float:
        """The number that masked scores are replaced by."""
        number = self.number(value)
        if number is None or not is_fill(number * factor):
            raise Reason.MASK.rejected(
                "masked scores are replaced by a value that is not known to be a large negative number"
            )
        return number * factor

    def _getitem(self, op: Op, at: Arrangement, factor: float, scalers: Any) -> Attention:
        """A part of the scores that is read in order to be written."""
        reading = self.regions[-1] if self.regions else None
        if reading is None and is_view(op):
            return self._view(op, at, factor, scalers)
        if reading is None or not reading.part.is_of(op.input, op["index"]):
            raise between(op, result_of(op))
        if factor != reading.factor or scalers:
            raise Reason.SCALE.rejected("a part of the scores is scaled")
        if at != reading.at:
            raise Reason.IN_BETWEEN.rejected("a part of the scores is permuted")
        self.writing.add(op.node)
        self.regions.pop()
        inside, self.shifts_cancel = self.shifts_cancel, reading.shifts_cancel
        site = self.up(op, op.input, factor, scalers, at)
        self.shifts_cancel = inside
        if site.stages or site.sink is not None:
            raise Reason.IN_BETWEEN.rejected("a part of the scores is overwritten after a function of them")
        self.regions.append(replace(reading, terms=tuple(site.terms)))
        return site

    def up(self, op: Op, scores: Any, factor: float, scalers: Any, at: Arrangement) -> Attention:
        """The attention above `op`, whose argument `scores` holds the scores."""
        return self.walk(scores, op.node, factor, scalers, at)

    def seen(self, op: Op, scores: Any, factor: float, at: Arrangement) -> Attention:
        """The attention above `op`, to which a score is more than its distance from the others of its row."""
        before, self.shifts_cancel = self.shifts_cancel, False
        try:
            return self.up(op, scores, factor, [], at)
        finally:
            self.shifts_cancel = before

    def term(self, op: Op, node: Any, at: Arrangement, **how: Any) -> Term:
        """The term of a tensor that `op` applies to the scores."""
        shape = _shape(op)
        return Term(at.seen(node, shape), at.sizes(shape), **how)

    def add(self, site: Attention, op: Op, node: Any, at: Arrangement, factor: float, scalers: Any) -> None:
        """Add a tensor that `op` adds to the scores to the biases of the site.

        A softmax does not change by a term that is equal for all keys, unless the term absorbs the scores. So
        such a term is dropped, and q gets 0 times the term, for the gradient of the term, which is zero.
        """
        term = self.term(op, node, at, factor=factor)
        added = tensor(term.node)
        constant = added is not None and (added.dim() == 0 or known_true(added.shape[-1] == 1))
        apart = constant and self.shifts_cancel and not self.regions and not site.stages
        if apart and not may_hide_rows(term.node):
            site.scalers.append(("shift", term.node, term.lead))
        else:
            site.terms.append(self._scaled_too(op, term, scalers))

    def _scaled_too(self, op: Op, term: Term, scalers: Scalers) -> Term:
        """What `op` adds, scaled by tensors together with the scores: by numbers of samples and heads.

        A number below 0 would make a mask raise keys, so that gradients are lost.
        """
        operand = Operand.of(term.node)
        for kind, by, lead in scalers:
            scale, numbers = Operand.of(by), tensor(by)
            sizes = [1, 1] if numbers is None else [1, 1, *numbers.shape]
            alike = same_shape(lead, term.lead) or len(sizes) == 2
            if scale is None or operand is None or not alike or not known_true(sizes[-1] * sizes[-2] == 1):
                raise Reason.SCALE.rejected("the scores are scaled by a tensor after a bias")
            if self.interpreter.mutations.touch(torch_ops.source(by)):
                raise Reason.OVERWRITTEN.rejected("the scale of the scores is overwritten")
            if result_of(op).requires_grad and may_hide_rows(term.node):
                raise Reason.SCALE.rejected("the scores are scaled by a tensor after a mask")
            operand = operand.then(torch.div if kind == "div" else torch.mul, scale)
        return replace(term, node=operand) if scalers else term

    def scaler(self, op: Op, node: Any, at: Arrangement) -> tuple[str, Any, tuple[Any, ...]]:
        """What `op` multiplies or divides the scores by."""
        shape = _shape(op)
        return op.name, at.seen(node, shape), at.sizes(shape)

    def stage(
        self, op: Op, scores: Any, function: str, numbers: tuple[float | None, ...], operand: Term | None,
        factor: float, scalers: Any, at: Arrangement,
    ) -> Attention:  # fmt: skip
        """The attention above `op`, a function of the scores: what stands before it becomes a `Stage`."""
        if scalers and function in ("where", "where_not"):
            raise Reason.SCALE.rejected(
                "the scores are scaled by a tensor after a mask"
            )  # whose number it may lower to a fill
        site = self.seen(op, scores, 1.0, at)
        if site.sink is not None:
            raise Reason.SINK.rejected(f"{op.name} is applied to an attention sink")
        stage = Stage(site.scale, site.scalers, site.terms, function, numbers, operand)
        site.stages.append(stage)
        site.scale, site.scalers, site.terms = factor, list(scalers), []
        return site

    def number(self, other: Any) -> float | None:
        """A number, or a tensor that the graph makes from a number; None for anything else."""
        return self.interpreter.number(other)

    def state(self) -> tuple[Any, ...]:
        """What has been read, to `restore` after an attempt that failed."""
        lists = list(self.regions), list(self.readers), list(self.others)
        return *lists, set(self.writing), self.shifts_cancel

    def restore(self, state: tuple[Any, ...]) -> None:
        self.regions, self.readers, self.others, self.writing, self.shifts_cancel = state

    def either(
        self, op: Op, sides: list[tuple[Any, Any]], attempt: Callable[[Any, Any], Attention]
    ) -> Attention:
        """Try each (scores, other) side that has the shape of the result; the first that works.

        Where none does, the reason of the side that holds the longest chain is told.
        """
        result, misses = tensor(op.node), list[Rejected]()
        for scores, other in sides:
            value = tensor(scores)
            if value is None or result is None or not same_shape(value.shape, result.shape):
                continue
            before = self.state()
            try:
                return attempt(scores, other)
            except Rejected as miss:
                kept = _has_product(scores, value) or miss.reason in (ELEMENTWISE, OUTSIDE)
                misses.append(miss if kept else Rejected(NO_PRODUCT))
                self.restore(before)
        found = [m for m in misses if m.reason not in (NO_PRODUCT, ELEMENTWISE, OUTSIDE)]
        misses.sort(key=lambda m: m.reason == NO_PRODUCT)
        if not found and not misses and result is not None and _has_product(op.node, result):
            raise Reason.SHAPES.rejected("the scores are broadcast by an operation on them")
        raise (found or misses or [Rejected(NO_PRODUCT)])[0]

    def _through(self, op: Op, at: Arrangement, factor: float, scalers: Any) -> Attention:
        return self.up(op, op.input, factor, scalers, at)

    def _permutation(self, op: Op, at: Arrangement, factor: float, scalers: Any) -> Attention:
        dims = permutation(op)
        assert dims is not None
        return self.up(op, op.input, factor, scalers, at.above(dims))

    def _view(self, op: Op, at: Arrangement, factor: float, scalers: Any) -> Attention:
        before, after = tensor(op.input), tensor(op.node)
        if before is None or after is None or before.dim() < 2:
            raise Reason.NO_PRODUCT.rejected(
                f"an operand of {op.name}, which computes the scores, is not a matrix"
            )
        above = at.viewed(after.shape, before.shape)
        if above is None:
            if not _has_product(op.node, after):
                raise Rejected(NO_PRODUCT)
            raise Misplaced(Reason.IN_BETWEEN(f"{op.name} reshapes the query or key dim of the scores"))
        return self.up(op, op.input, factor, scalers, above)

    def _dropout(self, op: Op, at: Arrangement, factor: float, scalers: Any) -> Attention:
        if dropout_p(op) != 0.0:
            raise Reason.DROPOUT.rejected("dropout is applied to the scores before the softmax")
        return self.up(op, op.input, factor, scalers, at)

    def _baddbmm(self, op: Op, at: Arrangement, factor: float, scalers: Any) -> Attention:
        beta, alpha = (
            torch_ops.concrete(op[name]) if op[name] is not None else 1 for name in ("beta", "alpha")
        )
        if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
            raise Reason.NOT_A_TENSOR.rejected(f"alpha or beta of {op.name} is not a constant")
        left, right = (op["batch1"], op["batch2"]) if op.name == "baddbmm" else (op["mat1"], op["other"])
        site = self._operands(op, left, right, at, factor * alpha, scalers)
        if beta != 0:
            term = self.term(op, op.input, at, factor=factor * beta)
            site.terms.append(self._scaled_too(op, term, scalers))
        return site

    _addmm = _baddbmm

    def _product(self, op: Op, at: Arrangement, factor: float, scalers: Any) -> Attention:
        if op.node.kwargs.get("out") is not None:
            raise Reason.OVERWRITTEN.rejected("the product writes to a given tensor (out=)")
        if self.merged:
            at = at.split()
        if op.name in EQUATIONS:
            self.chooses = op.name == "linear" and not at.rows
            try:
                q, k = einsum.queries_and_keys(op, at)
            except Misplaced:
                if any(_has_product(each, result_of(op)) for each in op.node.all_input_nodes):
                    raise Misplaced(_stands_between(op)) from None
                raise
            site = self._site(op, q, k, at, factor, scalers)
            if op["bias"] is not None:
                self.add(site, op, op["bias"], at, factor, scalers)
        else:
            site = self._operands(op, op.input, op["other"], at, factor, scalers)
        site.chain.append(op.node)
        return site

    def _operands(
        self, op: Op, left: Any, right: Any, at: Arrangement, factor: float, scalers: Any
    ) -> Attention:
        """The attention of a product of matrices: q and k, or k and q where the scores are transposed."""
        first, second = (Operand.of(n) if isinstance(n, fx.Node) else None for n in (left, right))
        leading = tuple(range(len(_shape(op)) - 1))
        if first is not None and second is not None and second.value.dim() == 1:
            if (at.lead, at.rows, at.columns) != (leading, (), (len(leading),)):
                raise Misplaced(NOT_OVER_KEYS)
            query = second.reshape((*[1] * len(leading), 1, *second.shape))
            return self._site(op, query, first, at, factor, scalers)
        if first is None or second is None or first.value.dim() < 2 or second.value.dim() < 2:
            raise Reason.NO_PRODUCT.rejected("an operand of the product of q and k is not a matrix")
        shape = _shape(op)
        single, rank = at.single(shape), len(shape)
        both = None if single is None else (single.rows[0], single.columns[0])
        if single is None or both not in ((rank - 2, rank - 1), (rank - 1, rank - 2)):
            if all(known_true(size == 1) for size in shape[-2:]):
                raise Rejected(ELEMENTWISE)
            made = any(_has_product(each.node, result_of(op)) for each in (first, second))
            raise Misplaced(_stands_between(op) if made else NOT_OVER_KEYS)
        q, k = (
            permuted(first, (*single.lead, rank - 2, rank - 1)),
            permuted(second, (*single.lead, rank - 1, rank - 2)),
        )
        if both[0] == rank - 1:
            q, k = k, q
        return self._site(op, q, k, single, factor, scalers)

    def _site(
        self, op: Op, q: Operand, k: Operand, at: Arrangement, factor: float, scalers: Any
    ) -> Attention:
        return Attention(
            q=q, k=k, lead=at.sizes(_shape(op)), softmax=op.node, product=op.node, scale=factor,
            scalers=list(scalers),
        )  # fmt: skip


def between(op: Op, scores: torch.Tensor) -> Rejected:
    """Why what holds `scores`, the result of `op`, cannot be read further up."""
    source = read(op.input) if op.name == "sum" else None
    if source is not None and source.name == "mul":
        return Rejected(ELEMENTWISE)
    made = _norms_scores(op) or _has_product(op.node, scores)
    return Rejected(_stands_between(op) if made else NO_PRODUCT)


def _norms_scores(op: Op) -> bool:
    """Whether an operation normalises a product of matrices, none of which holds weights."""
    current: Op | None = op if op.name in _ENDS else None
    for _ in range(3):
        made_of = [] if current is None else current.node.all_input_nodes
        current = read(made_of[0]) if made_of else None
        if current is None or current.name in _ENDS:
            return False
        if current.name in PRODUCTS - {"linear"}:
            sides = map(read, current.node.all_input_nodes)
            return not any(side is not None and side.name in (*_ENDS, "dropout") for side in sides)
        if current.name not in {"mul", "div", "add"} | CASTS | VIEWS:
            return False
    return False


def _stands_between(op: Op) -> str:
    return Reason.IN_BETWEEN(f"{op.name} is between the product of q and k and the softmax")


def _has_product(node: fx.Node, scores: torch.Tensor) -> bool:
    """Whether a product that may be that of queries and keys is near above `scores`.

    It has their dims of queries and keys, or both in one.
    """
    sizes = _sizes(scores)
    frontier, seen = [node], {node}
    while frontier and len(seen) < REACH:
        current = frontier.pop(0)
        op, value = read(current), tensor(current)
        # The matrix of a linear is seldom one of keys.
        if op is not None and value is not None and op.name in (PRODUCTS | ADDING) - {"linear"}:
            if {hint(size) for size in value.shape[-2:]} <= sizes:
                return True
            continue
        if op is not None and op.name in _ENDS:
            continue
        taken = op is not None and op.name in ("getitem", "narrow", "topk", "gather")
        whole = tensor(op.input) if op is not None and taken else None
        sizes |= set() if whole is None else _sizes(whole)
        found = [n for n in current.all_input_nodes if n not in seen]
        seen.update(found)
        frontier += found
    return False


def _sizes(scores: torch.Tensor) -> set[int]:
    """The sizes of single dims, and of two adjacent dims as one."""
    sizes = [hint(size) for size in scores.shape]
    return {*sizes, *(a * b for a, b in pairwise(sizes))}


def result_of(op: Op) -> torch.Tensor:
    """The tensor that an operation makes."""
    found = tensor(op.node)
    assert found is not None
    return found


def _writes_into(writer: fx.Node, node: fx.Node) -> bool:
    """Whether a node writes to another one, or to a view of it."""
    op = read(writer)
    view = op.input if op is not None else None
    read_by = readers(node)
    return writer in read_by or (isinstance(view, fx.Node) and view in read_by)


def _shape(op: Op) -> tuple[Any, ...]:
    return tuple(result_of(op).shape)
