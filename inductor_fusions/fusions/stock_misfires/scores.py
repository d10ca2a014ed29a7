"""Additions with alpha, and divisions, of scores."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from ...fusion import Candidate
from ...graph.facts import change
from ...graph.torch_ops import read
from ...operands import tensor, value
from ...reasons import Reason
from .equivalent import EquivalentRewrite
from .walk import between, factors, name_of


class Alpha(EquivalentRewrite):
    """An addition with a factor for its second operand."""

    def guard(self) -> None:
        super().guard()
        if tensor(self.anchor) is None or None in self._operands():
            raise Reason.NOT_A_TENSOR.rejected("the operands of the addition are not known")

    def _operands(self) -> tuple[Any, Any]:
        op = read(self.anchor)
        assert op is not None
        return op.input, op["other"]

    def rewrite(self) -> str:
        node = self.anchor
        first, other = self._operands()
        alpha: Any = node.kwargs["alpha"]
        added, result = tensor(other), value(node)
        if added is not None and added.dtype != result.dtype:  # add casts first
            other = self.call("to", other, result.dtype)
        scaled = self.call(operator.mul, other, alpha) if isinstance(other, fx.Node) else other * alpha
        left = {k: v for k, v in node.kwargs.items() if k not in ("alpha", "input", "other")}
        change(node, args=(first, scaled), kwargs=left)
        return "alpha as a multiplication"


class Divisor(EquivalentRewrite):
    """A division of the scores, or of q, that a pattern would take for one by sqrt(head_dim).

    Args:
        of_scores: views go in front of it, in place of behind it: it stays in front of the softmax.
    """

    def __init__(self, anchor: fx.Node, of_scores: bool) -> None:
        super().__init__(anchor)
        self.of_scores = of_scores

    def guard(self) -> None:
        super().guard()
        op = read(self.anchor)
        assert op is not None
        if not isinstance(op.input, fx.Node) or op["other"] is None:
            raise Reason.NOT_A_TENSOR.rejected("the operands of the division are not known")
        if self.anchor.kwargs.get("rounding_mode") is not None:
            raise Reason.NOT_A_TENSOR.rejected("the division rounds its result, which no stock pattern does")

    def rewrite(self) -> str:
        op = read(self.anchor)
        assert op is not None
        self.put_views(op.input if self.of_scores else None)
        return f"views {'in front of' if self.of_scores else 'behind'} a division"


def divided(softmax: fx.Node, product: fx.Node, ignored: bool) -> Iterator[Candidate]:
    """Divisions of the scores, and of q, by something else than sqrt(head_dim).

    Args:
        ignored: whether patterns ignore the divisor. Those that read it take a tensor for a number, and
            raise (pytorch#191203): there it is divisions by tensors alone.
    """
    q, _ = factors(product)
    operand = tensor(q)
    size = operand.shape[-1] if operand is not None else None
    for node in (*between(softmax, product), q):
        op, of_scores = read(node), node is not q
        if op is None or op.name != "div":
            continue
        by = op["other"]
        if isinstance(by, fx.Node) and tensor(by) is None:
            continue  # a symbolic number, which no pattern has
        if not ignored:
            if isinstance(by, fx.Node):
                yield Divisor(node, of_scores)
            continue
        number = constant(by)
        if number is None or not isinstance(size, int) or not math.isclose(number, size**0.5, rel_tol=1e-6):
            yield Divisor(node, of_scores)


def constant(number: Any) -> float | None:
    """A number, also where it is wrapped in a tensor, and the square root of one."""
    if isinstance(number, (int, float)):
        return float(number)
    if name_of(number) == "full" and len(number.args) > 1:
        return constant(number.args[1])
    if name_of(number) in ("tensor", "scalar_tensor", "to", "sqrt") and number.args:
        inner = constant(number.args[0])
        root = name_of(number) == "sqrt"
        return inner if not root else None if inner is None or inner < 0 else math.sqrt(inner)
    return None
