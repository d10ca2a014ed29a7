"""The effect of each operation between the product of queries and keys and the softmax."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

import torch

from ..._inductor import known_true
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph import torch_ops
from ...graph.dims import reduced
from ...graph.torch_ops import Op
from ...operands import tensor
from ...reasons import Reason
from .arrangement import Arrangement
from .bounds import broadcast_reduction, is_at_most, nodes_of
from .masks import is_fill, is_one_or_zero
from .no_product import NO_PRODUCT, between, has_product
from .normal_form import Attention, Below, Sink, Term
from .operands import Operand
from .structure import narrowed, predicate
from .walk import Walk, result_of

#: Reductions of scores that may be subtracted from them.
_OF_ROWS = ("amax", "max", "amin", "min", "mean", "logsumexp")
#: Reductions that a masked score makes so low that, subtracted, they absorb the other scores.
_LOW = frozenset({"amin", "min", "mean"})
#: A backward computes weights anew from the logsumexp, which must not lose the digits of the scores.
LARGEST_SCORE = 1e3


class ScoreReader(Walk):
    """Reads the scores from the softmax up to the product of q and k."""

    def _neg(self, op: Op, below: Below) -> Attention:
        return self.up(op, op.input, below.times(-1.0))

    def _mul(self, op: Op, below: Below) -> Attention:
        return self._scaled(op, [(op.input, op["other"]), (op["other"], op.input)], below)

    def _div(self, op: Op, below: Below) -> Attention:
        if op["rounding_mode"] is not None:
            raise Reason.SCALE.rejected("the scores are divided with rounding")
        return self._scaled(op, [(op.input, op["other"])], below)

    def _scaled(self, op: Op, sides: Any, below: Below) -> Attention:
        def try_side(scores: Any, other: Any) -> Attention:
            number = self.number(other)
            if number is not None:
                if op.name == "div" and number == 0:
                    raise Reason.RANGE.rejected("the scores are divided by zero")
                factor = below.factor / number if op.name == "div" else below.factor * number
                if not math.isfinite(factor):
                    raise Reason.RANGE.rejected("the scores are multiplied by a number that is not finite")
                return self.up(op, scores, replace(below, factor=factor))
            if isinstance(torch_ops.value(other), (torch.SymFloat, torch.SymInt)):
                return self.up(op, scores, below.scaled(op.name, self.term(op, other, below.at)))
            scale = tensor(other)
            if scale is None:
                raise Reason.NOT_A_TENSOR.rejected("the scale is neither a number nor a tensor")
            varying = narrowed(self.term(op, other, below.at), self.interpreter)
            of_keys, of_queries = self._varies(varying)
            integer = not scale.is_floating_point() and scale.dim() > 0
            if of_keys and (of_queries or integer):
                return self.stage(op, scores, op.name, (), varying, below)
            if integer:
                raise Reason.MIXED_DTYPES.rejected("the scores are scaled by an integer tensor")
            scaled = below.scaled(op.name, varying)
            if not of_queries and not of_keys:
                return self.up(op, scores, scaled)
            before, cancel = self.state(), self.shifts_cancel
            with contextlib.suppress(Rejected):  # q or k cannot be scaled where something was added before
                self.shifts_cancel &= not of_keys  # nor does a number of each row cancel then
                site = self.up(op, scores, scaled)
                self.shifts_cancel = cancel
                if not of_keys or not site.stages:
                    return site
            self.restore(before)
            return self.stage(op, scores, op.name, (), varying, below)

        return self.either(op, sides, try_side)

    @staticmethod
    def _varies(term: Term) -> tuple[bool, bool]:
        """Whether a tensor is not known to be the same for all keys, and for all queries."""
        own = tensor(term.node)
        sizes = [1, 1, *(() if own is None else own.shape)]
        return not known_true(sizes[-1] == 1), not known_true(sizes[-2] == 1)

    def _add(self, op: Op, below: Below) -> Attention:
        return self._biased(op, 1.0, below)

    def _sub(self, op: Op, below: Below) -> Attention:
        return self._biased(op, -1.0, below)

    def _biased(self, op: Op, sign: float, below: Below) -> Attention:
        alpha = torch_ops.concrete(op["alpha"]) if op["alpha"] is not None else 1
        if not isinstance(alpha, (int, float)):
            raise Reason.NOT_A_TENSOR.rejected("the bias is added with an alpha that is not a constant")

        def try_side(scores: Any, other: Any) -> Attention:
            # add(x, y, alpha) is x + alpha * y: with the scores second, alpha scales them.
            of_scores, of_other = (1.0, sign * alpha) if scores is op.input else (sign * alpha, 1.0)
            of_rows = self.shifts_cancel and of_other * of_scores == -1
            reduction = self._of_rows(other, scores, below.at) if of_rows else ""
            site = self.up(op, scores, below.times(of_scores))
            if reduction in _LOW and (site.terms or any(stage.terms for stage in site.stages)):
                raise Reason.RANGE.rejected(
                    f"the {reduction} of scores that may be masked is subtracted: it rounds their digits away"
                )
            if reduction:
                return _shifted(site)
            added, number = below.times(of_other), torch_ops.concrete(other)
            if isinstance(number, (int, float)):
                if self.regions:
                    raise Reason.MASK.rejected("a constant is added to a part of the scores")
                if not self.shifts_cancel:
                    raise Reason.IN_BETWEEN.rejected(
                        "a constant is added to the scores before a function, a factor of keys or a sink"
                    )
                if not abs(number * added.factor) <= LARGEST_SCORE:
                    raise Reason.RANGE.rejected(
                        f"{number:g} is added to the scores, which rounds their digits away"
                    )
                return site  # the softmax does not see what is added everywhere
            if tensor(other) is None:
                raise Reason.NOT_A_TENSOR.rejected(
                    "something that is neither a number nor a tensor is added to the scores"
                )
            self.add(site, op, other, added)
            self._read_as_fill(site)
            return site

        return self.either(op, [(op.input, op["other"]), (op["other"], op.input)], try_side)

    def _log_softmax(self, op: Op, below: Below) -> Attention:
        """The logsumexp of each row is subtracted, as by hand."""
        if not self.shifts_cancel or reduced(op)[0] != below.at.columns or op["dtype"] is not None:
            raise between(op, result_of(op))
        return _shifted(self.up(op, op.input, below))

    def _read_as_fill(self, site: Attention) -> None:
        """Read `x * b + n * (1 - b)`, where b is proved to be 1 or 0, as x with a fill of n where b is 0."""
        stage = site.stages[-1] if site.stages else None
        by = stage.operand if stage is not None and stage.function == "mul" else None
        operand = None if by is None else Operand.of(by.node)
        if stage is None or operand is None or site.scale != 1 or site.scalers or len(site.terms) != 1:
            return
        seen, numbers = self.interpreter.boolean(operand), self.interpreter.read(operand)
        mask = predicate(site.terms[0], self.interpreter, self.shifts_cancel)
        if by is None or mask is None or mask[0] != seen or not is_one_or_zero(numbers):
            return
        fill = Term(operand.then("bool"), by.lead, fill=mask[1], hides=False)
        del site.stages[-1]
        site.scale, site.scalers, site.terms = stage.scale, stage.scalers, [*stage.terms, fill]

    def _of_rows(self, node: Any, scores: Any, at: Arrangement) -> str:
        """The reduction, such as the largest score of each row, that a node holds and serves for; or "".

        What is the same for more than one row is the same for each of them; the logsumexp of several rows is
        none that the weights are divided by.
        """
        found = broadcast_reduction(node, _OF_ROWS)
        own = () if found is None or tensor(scores) is None else nodes_of(found, scores)
        if found is None or len(at.columns) != 1 or any(len(readers(each)) != 1 for each in own):
            return ""
        name, dims = found.op.name, found.dims
        over_keys = dims == at.columns
        over_rows = name != "logsumexp" and dims is not None and {*at.columns} < {*dims}
        over_all = name != "logsumexp" and dims is None and tensor(found.op.node) is not None
        if not own or not (over_all or (found.keeps and (over_keys or over_rows))):
            return ""
        self.beside.update(own)
        self.maxima.update(own if over_keys and name in ("amax", "max") else ())
        return name

    def _function(self, op: Op, below: Below) -> Attention:
        """A function of one score, such as the tanh of a softcap."""
        arguments = [op["exponent"]] if op.name == "pow" else []
        numbers = tuple(self.number(argument) for argument in arguments)
        if None in numbers or op.input is op["exponent"]:
            raise between(op, result_of(op))
        return self.stage(op, op.input, op.name, numbers, None, below)

    _tanh = _sigmoid = _relu = _abs = _pow = _function

    def _cat(self, op: Op, below: Below) -> Attention:
        parts, dim = op["tensors"], torch_ops.concrete(op["dim"] or 0)
        result = tensor(op.node)
        if not isinstance(parts, (list, tuple)) or len(parts) != 2 or result is None:
            raise _no_sink(parts, "with more than one tensor")
        if not isinstance(dim, int) or below.at.columns != (dim % result.dim(),) or below.scalers:
            raise _no_sink(parts, "along a dim other than the keys")
        first, second = (tensor(part) for part in parts)
        if first is None or second is None:
            raise Reason.NOT_A_TENSOR.rejected(
                "the scores are concatenated with something that is not a tensor"
            )
        before = known_true(first.shape[dim] == 1) and not known_true(second.shape[dim] == 1)
        scores, sink = (parts[1], parts[0]) if before else (parts[0], parts[1])
        column = tensor(sink)
        if column is None or not known_true(column.shape[dim] == 1) or column.dim() < 2:
            raise _no_sink(parts, "with more than one column")
        site = self.seen(op, scores, below)
        if site.sink is not None:
            raise Reason.SINK.rejected("the attention has two sinks")
        site.sink = Sink(self.term(op, sink, below.at, factor=below.factor), before)
        site.below_sink = len(site.terms)
        return site

    def _pad(self, op: Op, below: Below) -> Attention:
        """A sink that is a number, such as the zero of a softmax with 1 in its denominator."""
        pads, number = op["pad"], self.number(0.0 if op["value"] is None else op["value"])
        rank = result_of(op).dim()
        columns = below.at.columns == (rank - 1,) and isinstance(pads, (list, tuple)) and not any(pads[2:])
        if not columns or tuple(pads[:2]) not in ((1, 0), (0, 1)) or op["mode"] not in (None, "constant"):
            raise between(op, result_of(op))
        if number is None or below.scalers or not abs(number * below.factor) <= LARGEST_SCORE:
            raise Reason.SINK.rejected(
                "the scores are padded with a value that is not known to be a finite score"
            )
        site = self.seen(op, op.input, below)
        if site.sink is not None:
            raise Reason.SINK.rejected("the attention has two sinks")
        column = site.q.then("new_full", (1,) * rank, number)
        site.sink = Sink(self.term(op, column, below.at, factor=below.factor), pads[0] == 1)
        site.below_sink = len(site.terms)
        return site

    def _where(self, op: Op, below: Below) -> Attention:
        if op["other"] is None:
            raise Reason.NOT_A_TENSOR.rejected("where is called with one argument")

        def try_side(scores: Any, other: Any) -> Attention:
            hides = scores is op["other"]
            return self._filled(op, scores, op["condition"], other, hides, below)

        sides = [(op.input, op["other"]), (op["other"], op.input)]
        return self.either(op, [pair for pair in sides if self.number(pair[0]) is None], try_side)

    def _masked_fill(self, op: Op, below: Below) -> Attention:
        return self._filled(op, op.input, op["mask"], op["value"], True, below)

    def _filled(self, op: Op, scores: Any, condition: Any, fill: Any, hides: bool, below: Below) -> Attention:
        number = self.number(fill)
        if number is None:
            raise Reason.MASK.rejected("masked scores are replaced by a tensor whose value is not known")
        mask = tensor(condition)
        if mask is None or mask.dtype != torch.bool:
            raise Reason.NOT_A_TENSOR.rejected("the condition of a mask is not a boolean tensor")
        low = number * below.factor
        if not is_fill(low) and not abs(low) <= LARGEST_SCORE:
            what = "a large positive number" if low > 0 else "a number above -10000"
            what = "NaN" if math.isnan(low) else f"{low:g}, {what}"
            raise Reason.RANGE.rejected(f"masked scores are replaced by {what}")
        if not is_fill(low):
            function = "where" if hides else "where_not"
            where = self.term(op, condition, below.at)
            return self.stage(op, scores, function, (number,), where, below)
        if below.scalers:
            raise Reason.SCALE.rejected("the scores are scaled by a tensor after a mask")
        site = self.up(op, scores, below)
        site.terms.append(self.term(op, condition, below.at, fill=low, hides=hides))
        return site

    def _clamp(self, op: Op, below: Below) -> Attention:
        floor, ceiling = (None if op[name] is None else self.number(op[name]) for name in ("min", "max"))
        if (floor is None) != (op["min"] is None) or (ceiling is None) != (op["max"] is None):
            raise Reason.MASK.rejected("the bounds of a clamp of the scores are tensors")
        if (
            ceiling is not None
            and (floor is None or floor <= ceiling)  # else all scores are the ceiling
            and is_at_most(op.input, ceiling, op.node, self.interpreter.mutations)
        ):
            ceiling = None
            if floor is None:
                return self.up(op, op.input, below)
        if ceiling is not None or floor is None or not is_fill(floor * below.factor):
            return self.stage(op, op.input, "clamp", (floor, ceiling), None, below)
        return self._floored(op, op.input, floor, below)

    def _hardtanh(self, op: Op, below: Below) -> Attention:
        bounds = ((op["min_val"], -1.0), (op["max_val"], 1.0))
        numbers = tuple(self.number(default if given is None else given) for given, default in bounds)
        if None in numbers:
            raise Reason.MASK.rejected("the bounds of a clamp of the scores are tensors")
        return self.stage(op, op.input, "clamp", numbers, None, below)

    def _maximum(self, op: Op, below: Below) -> Attention:
        floor = self.number(op["other"])
        if floor is None:
            raise Reason.MASK.rejected("the bound of a clamp of the scores is a tensor")
        if not is_fill(floor * below.factor):
            return self.stage(op, op.input, "clamp", (floor, None), None, below)
        return self._floored(op, op.input, floor, below)

    def _floored(self, op: Op, scores: Any, floor: float, below: Below) -> Attention:
        """max(scores, a number so low that only hidden scores are below it)."""
        site = self.up(op, scores, below)
        low = floor * below.factor
        site.terms = [
            replace(t, fill=max(t.fill, low)) if t.fill is not None else replace(t, floor=low)
            for t in site.terms
        ]
        return site

    _max = _maximum
    _clamp_min = _clamp_max = _clamp


def _shifted(site: Attention) -> Attention:
    """An attention from whose scores, as far as they are read, a number of each row is subtracted."""
    site.below_shift = len(site.terms)
    return site


def _no_sink(parts: Any, how: str) -> Rejected:
    """Why tensors that are concatenated are no scores with a sink: also keys of a linear attention may be."""
    values = {part: tensor(part) for part in parts} if isinstance(parts, (list, tuple)) else {}
    if any(value is not None and has_product(part, value) for part, value in values.items()):
        return Reason.SINK.rejected(f"the scores are concatenated {how}")
    return Rejected(NO_PRODUCT)
