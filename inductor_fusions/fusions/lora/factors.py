"""A factor behind an adapter moves in front of B, or to B, before autograd, which saves nothing wide then.

    (g * h) B    of `g * (h B)`: g is one number, or one for each row, such as the gates of a router
    h (B v)      of `v * (h B)`: v has one number for each column, as in VeRA

As a product between A and B, or as B, the graph after autograd has a linear with an adapter as any other.
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx

from ..._inductor import Match, known_true
from ...effects.liveness import only_reader, replace
from ...fusion import Candidate
from ...graph.builder import Builder
from ...graph.torch_ops import CASTS, linear_of, read, scaled_by
from ...operands import check_device, check_kind, requires_grad, same_shape, tensor, value
from ...reasons import Reason
from .inputs import Inputs
from .norms import normalised
from .second_product import MOST_STEPS, is_up, made


def vectors(scope: Inputs, match: Match) -> Candidate | None:
    """An adapter that a vector multiplies in front of a sum."""
    up = match.output_node()
    if not is_up(up):
        return None
    return normalised(up, scope) or _moved(up, scope)


def _moved(up: fx.Node, scope: Inputs) -> Candidate | None:
    """A trained tensor that multiplies an adapter in front of a sum, or any that divides it."""
    node, between, scale = up, [up], 1.0
    while True:
        op = read(only_reader(node))
        if op is None or op.inplace:
            return None
        between.append(op.node)
        step = scaled_by(op)
        if step is None or step[0] is not node:
            break
        node, scale = op.node, scale * step[1]
    if op.name not in ("mul", "div") or op.rest or set(op.args) != {"input", "other"}:
        return None
    first, second = op.input, op["other"]
    by = second if first is node else first if op.name == "mul" else None
    factor = tensor(by)
    if not isinstance(by, fx.Node) or factor is None or not factor.is_floating_point():
        return None
    if not _is_added(op.node):
        return None
    # Without a gradient nothing is saved for it, and factors are read after autograd, but for quotients.
    if op.name == "mul" and not (factor.requires_grad and requires_grad(op.node)):
        return None
    return Moved(up, between, by, scale, op.name, scope)


def _is_added(node: fx.Node) -> bool:
    """Whether a value is part of a sum, perhaps times numbers."""
    for _ in range(MOST_STEPS):
        op = read(only_reader(node))
        if op is None:
            return False
        if op.name in ("add", "sub"):
            return True
        if scaled_by(op) is None and op.name not in CASTS:
            return False
        node = op.node
    return False


class Moved(Candidate):
    """An adapter times a tensor, which moves in front of B, or to B.

    Args:
        between: the nodes from it to the one that multiplies it, which is the last.
        scale: the factor of the numbers in between.
        how: "mul" or "div".
    """

    reported = False

    def __init__(
        self, up: fx.Node, between: list[fx.Node], by: fx.Node, scale: float, how: str, scope: Inputs
    ) -> None:
        self.up, self.between, self.by, self.scale, self.scope = up, between, by, scale, scope
        self.anchor = between[-1]
        self.how = operator.mul if how == "mul" else operator.truediv

    def guard(self) -> None:
        values = [value(each) for each in (*self.between, *self.up.all_input_nodes)]
        out, factor = values[0], value(self.by)
        check_kind(*values, factor)
        if any(each.dtype != out.dtype for each in (*values, factor)):
            raise Reason.MIXED_DTYPES.rejected("the adapter and its factor have different dtypes")
        if out.dtype == torch.float16:
            raise Reason.RANGE.rejected("x @ A may overflow in float16 where the result does not")
        if not all(same_shape(value(each).shape, out.shape) for each in self.between):
            raise Reason.SHAPES.rejected("the adapter is broadcast")
        if not (self._is_of_rows(factor) or self._is_of_columns(factor)):
            raise Reason.BEHIND_ADAPTER.rejected("the factor has another number for each element")
        saved = [*self.up.all_input_nodes, self.by]
        self.scope.check_replaced(self.between, self.anchor, "the adapter and its factor", saved)
        check_device(out)

    def _is_of_rows(self, factor: torch.Tensor) -> bool:
        return known_true(factor.numel() == 1) or known_true(factor.shape[-1] == 1)

    def _is_of_columns(self, factor: torch.Tensor) -> bool:
        columns = factor.shape[-1]
        return known_true(factor.numel() == columns) and known_true(value(self.up).shape[-1] == columns)

    def rewrite(self) -> str:
        make, found = Builder(self.anchor), linear_of(self.up)
        assert found is not None
        h, b, rows, _ = found
        factor = make.value(self.by)
        if self._is_of_rows(factor):
            h = made(make, self.how, h, self.by)
        else:
            by = made(make, "reshape", self.by, *((-1, 1) if rows else (1, -1)))
            b = made(make, self.how, b, by)
        out = made(make, F.linear if rows else torch.matmul, h, b)
        out = out if self.scale == 1 else made(make, operator.mul, out, self.scale)
        replace(self.anchor, out, self.between)
        return "a factor between both products"
