"""The walk from a softmax up to the product of queries and keys: its steps, and where it ends.

What the operations in between do to the scores is in `scores`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ...fusion import Rejected
from ...liveness import readers
from . import einsum, torch_ops
from .masks import Affine, Interpreter
from .normal_form import Attention, Stage, Term
from .operands import Operand, same_shape
from .torch_ops import CASTS, COPIES, PRODUCTS, VIEWS, Op, dropout_p, read, reads_metadata, tensor


class Walk:
    """Goes from the scores at the softmax up to the product of q and k.

    A subclass has a method `_name` for each operation that changes the scores. A method asks for the site
    above its operation, by `up`, and adds what the operation does.

    Attributes:
        readers: nodes that read the shape or dtype of the scores, not their values.
        row_maxima: nodes that hold the largest score of each row. They are subtracted, which a softmax does
            not see.
        logsumexp: a node that reads the scores beside the softmax, and takes part in the attention; or None.
        shifts_cancel: whether nothing but a softmax sees what is added to all scores of a row.
    """

    def __init__(self, interpreter: Interpreter, logsumexp: fx.Node | None = None) -> None:
        self.interpreter = interpreter
        self.readers: list[fx.Node] = []
        self.row_maxima: set[fx.Node] = set()
        self.logsumexp = logsumexp
        self.shifts_cancel = logsumexp is None

    def walk(
        self, node: Any, user: fx.Node, factor: float, scalers: list[tuple[str, fx.Node, tuple[Any, ...]]]
    ) -> Attention:
        """The attention whose scores `node` holds, seen by `user`, as far as the softmax's input.

        Args:
            factor: numbers by which the scores are multiplied further down.
            scalers: the same for tensors.
        """
        op, scores = read(node), tensor(node)
        if op is None or scores is None or scores.dim() < 2:
            raise Rejected("no product of queries and keys was found above the softmax")
        for other in readers(node):
            if (other is user and not reads_metadata(other, node)) or other in self.row_maxima:
                continue
            if other is self.logsumexp:
                continue
            if not reads_metadata(other, node):
                raise Rejected(f"the scores are used elsewhere, by {other.name}")
            self.readers.append(other)
        if not scores.is_floating_point():
            raise Rejected("the scores are not floating point")
        lead = tuple(scores.shape[:-2])
        if op.name in PRODUCTS:
            return self._product(op, lead, factor, scalers)
        step = getattr(self, f"_{op.name}", None)
        if step is None and (op.name in CASTS or op.name in COPIES):
            step = self._through
        elif step is None and op.name in VIEWS:
            step = self._view
        if step is None:
            raise Rejected(f"{op.name} stands between the product of q and k and the softmax")
        site: Attention = step(op, lead, factor, scalers)
        site.chain.append(node)
        return site

    def up(self, op: Op, scores: Any, factor: float, scalers: Any) -> Attention:
        """The attention above `op`, whose argument `scores` holds the scores."""
        return self.walk(scores, op.node, factor, scalers)

    def seen(self, op: Op, scores: Any, factor: float) -> Attention:
        """The attention above `op`, to which a score is more than its distance from the others of its row."""
        before, self.shifts_cancel = self.shifts_cancel, False
        try:
            return self.up(op, scores, factor, [])
        finally:
            self.shifts_cancel = before

    def stage(
        self, op: Op, scores: Any, function: str, numbers: tuple[float | None, ...], operand: Term | None,
        factor: float, scalers: Any,
    ) -> Attention:  # fmt: skip
        """The attention above `op`, a function of the scores: what stands before it becomes a `Stage`."""
        if scalers and function in ("where", "where_not"):
            raise Rejected("a tensor scale is applied after a mask")  # whose number it may lower to a fill
        site = self.seen(op, scores, 1.0)
        if site.sink is not None:
            raise Rejected(f"{op.name} is applied to an attention sink")
        stage = Stage(site.scale, site.scalers, site.terms, function, numbers, operand)
        site.stages.append(stage)
        site.scale, site.scalers, site.terms = factor, list(scalers), []
        return site

    def number(self, other: Any) -> float | None:
        """A number, or a tensor that the graph makes from a number."""
        found = torch_ops.concrete(other)
        if isinstance(found, (int, float)) and not isinstance(found, bool):
            return float(found)
        if tensor(other) is None:
            return None
        known = self.interpreter.read(other)
        if isinstance(known, Affine) and known.is_constant and isinstance(known.const, (int, float)):
            return float(known.const)
        return None

    def either(
        self, op: Op, sides: list[tuple[Any, Any]], attempt: Callable[[Any, Any], Attention]
    ) -> Attention:
        """Try each (scores, other) side that has the shape of the result; the first that works.

        Where none does, the reason of the side that holds the longest chain is told.
        """
        result, misses = tensor(op.node), []
        for scores, other in sides:
            value = tensor(scores)
            if value is None or result is None or not same_shape(value.shape, result.shape):
                continue
            try:
                return attempt(scores, other)
            except Rejected as miss:
                misses.append(miss)
        found = [m for m in misses if "no product" not in m.reason]
        raise (found or misses or [Rejected("the scores are broadcast by an operation on them")])[0]

    def _through(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        return self.up(op, op.input, factor, scalers)

    def _view(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        before, after = tensor(op.input), tensor(op.node)
        if (
            before is None
            or after is None
            or before.dim() < 2
            or not same_shape(before.shape[-2:], after.shape[-2:])
        ):
            raise Rejected(f"{op.name} changes the query or key dim of the scores")
        return self.up(op, op.input, factor, scalers)

    def _dropout(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        if dropout_p(op) != 0.0:
            raise Rejected("dropout is applied to the scores, before the softmax")
        return self.up(op, op.input, factor, scalers)

    def _baddbmm(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        beta, alpha = (
            torch_ops.concrete(op[name]) if op[name] is not None else 1 for name in ("beta", "alpha")
        )
        if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
            raise Rejected("baddbmm with a symbolic alpha or beta")
        if scalers and beta != 0:
            raise Rejected("a tensor scale is applied after a bias")
        site = self._operands(op, op["batch1"], op["batch2"], lead, factor * alpha, scalers)
        if beta != 0:
            site.terms.append(Term(op.input, lead, factor=factor * beta))
        return site

    def _product(self, op: Op, lead: Any, factor: float, scalers: Any) -> Attention:
        if op.node.kwargs.get("out") is not None:
            raise Rejected("the product writes to a given tensor (out=)")
        if op.name == "einsum":
            q, k = einsum.queries_and_keys(op)
            site = self._site(op, q, k, lead, factor, scalers)
        else:
            site = self._operands(op, op.input, op["other"], lead, factor, scalers)
        site.chain.append(op.node)
        return site

    def _operands(self, op: Op, left: Any, right: Any, lead: Any, factor: float, scalers: Any) -> Attention:
        q, kt = (Operand.of(n) if isinstance(n, fx.Node) else None for n in (left, right))
        if q is None or kt is None or q.value.dim() < 2 or kt.value.dim() < 2:
            raise Rejected("an operand of the product of q and k is no matrix")
        return self._site(op, q, _transposed(kt), lead, factor, scalers)

    def _site(self, op: Op, q: Operand, k: Operand, lead: Any, factor: float, scalers: Any) -> Attention:
        return Attention(
            q=q, k=k, lead=lead, softmax=op.node, product=op.node, scale=factor, scalers=list(scalers)
        )


def _transposed(operand: Operand) -> Operand:
    """The operand with its last two dims swapped; a transpose of the graph is taken back."""
    op = read(operand.node)
    if op is not None and not operand.steps:
        dims = (
            torch_ops.permutation(op)
            if op.name in torch_ops.TRANSPOSES
            else torch_ops.transposed_attribute(op)
        )
        swap = list(range(operand.value.dim()))
        swap[-1], swap[-2] = swap[-2], swap[-1]
        base = Operand.of(op.input) if dims is not None and isinstance(op.input, fx.Node) else None
        if dims is not None and base is not None:
            return base.permute([dims[d] for d in swap])
    return operand.then("permute", *_swapped(operand.value.dim()))


def _swapped(rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]
