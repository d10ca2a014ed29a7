"""Walks from a softmax up to the product of queries and keys.

What the operations in between do to the scores is in `scores`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph import torch_ops
from ...graph.dims import permutation
from ...graph.torch_ops import Op, dropout_p, read, reads_metadata
from ...operands import same_shape, tensor
from ...reasons import Reason
from . import einsum
from .arrangement import NOT_OVER_KEYS, Arrangement, Misplaced, is_view, permuted
from .assigned import Reading, condition, region, unread, writes_into
from .masks import Interpreter, is_fill, may_hide_rows
from .no_product import (
    ELEMENTWISE,
    GIVEN,
    NO_PRODUCT,
    OUTSIDE,
    at_the_top,
    between,
    has_product,
    stands_between,
)
from .normal_form import Attention, Below, Stage, Term
from .operands import Operand

#: How many nodes are tried on the way up: where an operation reads the scores twice, both sides are.
MOST_STEPS = 1024


class Walk:
    """Goes from the scores at the softmax up to the product of q and k.

    A subclass has a method `_name` for each operation that changes the scores. A method asks for the site
    above its operation, by `up`, and adds what the operation does.

    Attributes:
        readers: nodes that read the shape or dtype of the scores, not their values.
        held, others: what holds the scores, and what else reads them.
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
        self.interpreter, self.merged, self.number = interpreter, merged, interpreter.number
        self.readers: list[fx.Node] = []
        self.held, self.others = set[fx.Node](), list[fx.Node]()
        self.beside, self.maxima = set[fx.Node](), set[fx.Node]()
        self.logsumexp = logsumexp
        self.shifts_cancel = logsumexp is None
        #: Nodes that write to the scores, and nodes that read them afterwards.
        self.writing: set[fx.Node] = set()
        #: A node that writes to the scores through a view of them; the view is one of `others`.
        self.writes_by_view: fx.Node | None = None
        #: Parts of the scores that are being read.
        self.regions: list[Reading] = []
        #: Whether each token is one query, whose scores are a linear of it.
        self.chooses = False
        #: Whether the product of q and k was found, by the attempt that is made.
        self.found = False
        self._steps = 0

    def walk(self, node: Any, user: fx.Node, below: Below) -> Attention:
        """The attention whose scores `node` holds, seen by `user`, as far as the softmax's input."""
        op, scores = read(node), tensor(node)
        if op is None or scores is None or scores.dim() < 2:
            raise at_the_top(node)
        self.held.add(op.node)
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise Reason.IN_BETWEEN.rejected(
                "too many operations are between the product of q and k and the softmax"
            )
        writer = self.interpreter.mutations.last(node, user)
        if writer is not None and writes_into(writer, node):
            return self._written(writer, node, user, below)
        self.writes_by_view = self.writes_by_view or writer
        for other in readers(node):
            asks = reads_metadata(other, node)
            if (asks or other is not user) and other not in {*self.beside, *self.writing, self.logsumexp}:
                (self.readers if asks else self.others).append(other)
        if not scores.is_floating_point():
            raise Reason.MIXED_DTYPES.rejected(f"the scores are {scores.dtype} at first ({op.name})")
        if op.name in torch_ops.PRODUCTS:
            return self._product(op, below)
        step = getattr(self, f"_{op.name}", None)
        if step is None and (op.name in torch_ops.CASTS or op.name in torch_ops.COPIES):
            step = self._through
        elif step is None and op.name in torch_ops.VIEWS:
            step = self._view
        elif step is None and permutation(op) is not None:
            step = self._permutation
        if step is None:
            raise between(op, scores)
        site: Attention = step(op, below)
        site.chain.append(node)
        return site

    def _written(self, writer: fx.Node, node: fx.Node, user: fx.Node, below: Below) -> Attention:
        """The attention whose scores `node` holds after a node has written to a part of them."""
        self.writing |= {writer, user}
        scores, masked = tensor(node), condition(writer, node)
        assert scores is not None
        at, factor = below.at, below.factor
        if below.scalers:
            raise Reason.SCALE.rejected(
                "the scores are scaled by a tensor after a part of them is overwritten"
            )
        part = region(writer, node) if masked is None else None
        if masked is None and part is None:
            raise unread(writer, node)
        if part is None or part.is_number:
            mask, value = masked or (None, part and part.written)
            number = self._lowest(value, factor)
            op = read(writer)
            views = [v for v in readers(node) if op is not None and v is op.input and readers(v) == [writer]]
            # Of detached scores, those that are masked get a gradient too: it is 0 where their weights are.
            behind = mask and views and scores.requires_grad
            behind = behind and (number != -math.inf or not self.shifts_cancel)
            self.writing.update(views)
            self.others += readers(writer)
            site, lead = self.walk(node, writer, below), at.sizes(scores.shape)
            if behind:
                raise Reason.OVERWRITTEN.rejected(f"{writer.name} overwrites the scores behind autograd")
            everywhere = site.q.then("new_full", (1,) * scores.dim(), 1.0).then("bool")
            term = Term(at.seen(mask or everywhere, scores.shape), lead, fill=number)
            site.terms.append(part.padded(term, at) if part is not None else term)
            site.chain += views
        else:
            self.regions.append(Reading(part, below, self.shifts_cancel))
            self.shifts_cancel = False
            site = self.walk(part.written, writer if part.written is not writer else user, below)
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

    def _getitem(self, op: Op, below: Below) -> Attention:
        """A part of the scores that is read in order to be written."""
        reading = self.regions[-1] if self.regions else None
        if reading is None and is_view(op):
            return self._view(op, below)
        if reading is None or not reading.part.is_of(op.input, op["index"]):
            raise between(op, result_of(op))
        if below.factor != reading.below.factor or below.scalers:
            raise Reason.SCALE.rejected("a part of the scores is scaled")
        if below.at != reading.below.at:
            raise Reason.IN_BETWEEN.rejected("a part of the scores is permuted")
        self.writing.add(op.node)
        self.regions.pop()
        inside, self.shifts_cancel = self.shifts_cancel, reading.shifts_cancel
        site = self.up(op, op.input, below)
        self.shifts_cancel = inside
        if site.stages or site.sink is not None:
            raise Reason.IN_BETWEEN.rejected("a part of the scores is overwritten after a function of them")
        self.regions.append(replace(reading, terms=tuple(site.terms)))
        return site

    def up(self, op: Op, scores: Any, below: Below) -> Attention:
        """The attention above `op`, whose argument `scores` holds the scores."""
        return self.walk(scores, op.node, below)

    def seen(self, op: Op, scores: Any, below: Below) -> Attention:
        """The attention above `op`, to which a score is more than its distance from the others of its row."""
        before, self.shifts_cancel = self.shifts_cancel, False
        try:
            return self.up(op, scores, below)
        finally:
            self.shifts_cancel = before

    def term(self, op: Op, node: Any, at: Arrangement, **how: Any) -> Term:
        """The term of a tensor that `op` applies to the scores."""
        shape = _shape(op)
        return Term(at.seen(node, shape), at.sizes(shape), **how)

    def add(self, site: Attention, op: Op, node: Any, below: Below) -> None:
        """Add a tensor that `op` adds to the scores to the biases of the site.

        A softmax does not change by a term that is equal for all keys, unless the term absorbs the scores. So
        such a term is dropped, and q gets 0 times the term, for the gradient of the term, which is zero.
        """
        term = self.term(op, node, below.at, factor=below.factor)
        added = tensor(term.node)
        constant = added is not None and (added.dim() == 0 or known_true(added.shape[-1] == 1))
        apart = constant and self.shifts_cancel and not self.regions and not site.stages
        if apart and not may_hide_rows(term.node):
            site.scalers.append(("shift", term.node, term.lead))
        else:
            site.terms.append(self._scaled_too(op, term, below))

    def _scaled_too(self, op: Op, term: Term, below: Below) -> Term:
        """What `op` adds, scaled by tensors together with the scores: by numbers of samples and heads.

        A number below 0 would make a mask raise keys, so that gradients are lost.
        """
        operand = Operand.of(term.node)
        for kind, by, lead in below.scalers:
            numbers = tensor(by)
            scale = Operand.of(by) if numbers is not None or operand is None else operand.number(by)
            sizes = [1, 1] if numbers is None else [1, 1, *numbers.shape]
            alike = same_shape(lead, term.lead) or len(sizes) == 2
            if scale is None or operand is None or not alike or not known_true(sizes[-1] * sizes[-2] == 1):
                raise Reason.SCALE.rejected("the scores are scaled by a tensor after a bias")
            if self.interpreter.mutations.touch(by):
                raise Reason.OVERWRITTEN.rejected("the scale of the scores is overwritten")
            if result_of(op).requires_grad and may_hide_rows(term.node):
                raise Reason.SCALE.rejected("the scores are scaled by a tensor after a mask")
            operand = operand.then(torch.div if kind == "div" else torch.mul, scale)
        return replace(term, node=operand) if below.scalers else term

    def stage(
        self, op: Op, scores: Any, function: str, numbers: tuple[float | None, ...], operand: Term | None,
        below: Below,
    ) -> Attention:  # fmt: skip
        """The attention above `op`, a function of the scores: what stands before it becomes a `Stage`."""
        if below.scalers and function in ("where", "where_not"):  # whose number they may lower to a fill
            raise Reason.SCALE.rejected("the scores are scaled by a tensor after a mask")
        site = self.seen(op, scores, Below(below.at))
        if site.sink is not None:
            raise Reason.SINK.rejected(f"{op.name} is applied to an attention sink")
        stage = Stage(site.scale, site.scalers, site.terms, function, op.name, numbers, operand)
        site.stages.append(stage)
        site.scale, site.scalers, site.terms = below.factor, list(below.scalers), []
        return site

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
            before, self.found = self.state(), False
            try:
                return attempt(scores, other)
            except Rejected as miss:
                kept = len(sides) == 1 or self.found or miss.reason in (ELEMENTWISE, OUTSIDE, GIVEN)
                misses.append(miss if kept or has_product(scores, value) else Rejected(NO_PRODUCT))
                self.restore(before)
        last = (ELEMENTWISE, OUTSIDE, NO_PRODUCT, GIVEN)  # beside scores, an input is a mask or a bias
        found = [m for m in misses if m.reason not in last]
        misses.sort(key=lambda m: last.index(m.reason) if m.reason in last else -1)
        if not found and not misses and result is not None and has_product(op.node, result):
            raise Reason.SHAPES.rejected("the scores are broadcast by an operation on them")
        raise (found or misses or [Rejected(NO_PRODUCT)])[0]

    def _through(self, op: Op, below: Below) -> Attention:
        return self.up(op, op.input, below)

    def _permutation(self, op: Op, below: Below) -> Attention:
        dims = permutation(op)
        assert dims is not None
        return self.up(op, op.input, replace(below, at=below.at.above(dims)))

    def _view(self, op: Op, below: Below) -> Attention:
        before, after = tensor(op.input), tensor(op.node)
        if before is None or after is None or before.dim() < 2:
            raise Reason.NO_PRODUCT.rejected(
                f"an operand of {op.name}, which computes the scores, is not a matrix"
            )
        above = below.at.viewed(after.shape, before.shape)
        if above is None:
            if not has_product(op.node, after):
                raise between(op, after)
            raise Misplaced(Reason.IN_BETWEEN(f"{op.name} reshapes the query or key dim of the scores"))
        return self.up(op, op.input, replace(below, at=above))

    def _dropout(self, op: Op, below: Below) -> Attention:
        if dropout_p(op) != 0.0:
            raise Reason.DROPOUT.rejected("dropout is applied to the scores before the softmax")
        return self.up(op, op.input, below)

    def _baddbmm(self, op: Op, below: Below) -> Attention:
        beta, alpha = (
            torch_ops.concrete(op[name]) if op[name] is not None else 1 for name in ("beta", "alpha")
        )
        if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
            raise Reason.NOT_A_TENSOR.rejected(f"alpha or beta of {op.name} is not a constant")
        left, right = (op["batch1"], op["batch2"]) if op.name == "baddbmm" else (op["mat1"], op["other"])
        site = self._operands(op, left, right, below.times(alpha))
        if beta != 0:
            term = self.term(op, op.input, below.at, factor=below.factor * beta)
            site.terms.append(self._scaled_too(op, term, below))
        return site

    _addmm = _baddbmm

    def _product(self, op: Op, below: Below) -> Attention:
        if op.node.kwargs.get("out") is not None:
            raise Reason.OVERWRITTEN.rejected("the product writes to a given tensor (out=)")
        if self.merged:
            below = replace(below, at=below.at.split())
        if op.name in torch_ops.EQUATIONS:
            self.chooses = op.name == "linear" and not below.at.rows
            try:
                q, k = einsum.queries_and_keys(op, below.at)
            except Misplaced:
                if any(has_product(each, result_of(op)) for each in op.node.all_input_nodes):
                    raise Misplaced(stands_between(op)) from None
                raise
            site = self._site(op, q, k, below)
            if op["bias"] is not None:
                self.add(site, op, op["bias"], below)
        else:
            site = self._operands(op, op.input, op["other"], below)
        self.found = True
        site.chain.append(op.node)
        return site

    def _operands(self, op: Op, left: Any, right: Any, below: Below) -> Attention:
        """The attention of a product of matrices: q and k, or k and q where the scores are transposed."""
        first, second = (Operand.of(n) if isinstance(n, fx.Node) else None for n in (left, right))
        leading, at = tuple(range(len(_shape(op)) - 1)), below.at
        if first is not None and second is not None and second.value.dim() == 1:
            if at.rows or len(at.columns) != 1:
                raise Misplaced(NOT_OVER_KEYS)
            query = second.reshape((*[1] * len(leading), 1, *second.shape))
            return self._site(op, query, permuted(first, (*at.lead, *at.columns, len(leading) + 1)), below)
        if first is None or second is None or first.value.dim() < 2 or second.value.dim() < 2:
            raise Reason.NO_PRODUCT.rejected("an operand of the product of q and k is not a matrix")
        shape = _shape(op)
        single, rank = at.single(shape), len(shape)
        both = None if single is None else (single.rows[0], single.columns[0])
        if single is None or both not in ((rank - 2, rank - 1), (rank - 1, rank - 2)):
            if all(known_true(size == 1) for size in shape[-2:]):
                raise Rejected(ELEMENTWISE)
            made = any(has_product(each.node, result_of(op)) for each in (first, second))
            raise Misplaced(stands_between(op) if made else NOT_OVER_KEYS)
        q, k = (
            permuted(first, (*single.lead, rank - 2, rank - 1)),
            permuted(second, (*single.lead, rank - 1, rank - 2)),
        )
        if both[0] == rank - 1:
            q, k = k, q
        return self._site(op, q, k, replace(below, at=single))

    def _site(self, op: Op, q: Operand, k: Operand, below: Below) -> Attention:
        return Attention(
            q=q, k=k, lead=below.at.sizes(_shape(op)), softmax=op.node, product=op.node, scale=below.factor,
            scalers=list(below.scalers),
        )  # fmt: skip


def result_of(op: Op) -> torch.Tensor:
    """The tensor that an operation makes."""
    found = tensor(op.node)
    assert found is not None
    return found


def _shape(op: Op) -> tuple[Any, ...]:
    return tuple(result_of(op).shape)
