"""Sign analysis of tensors that are subtracted from the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...graph import torch_ops
from .masks import is_fill, may_hide_rows

_SAME = (
    torch_ops.VIEWS | torch_ops.TRANSPOSES | torch_ops.CASTS | torch_ops.COPIES
    | frozenset("expand expand_as broadcast_to repeat repeat_interleave getitem slice select detach".split())
)  # fmt: skip


@dataclass(frozen=True)
class Signs:
    """Whether tensors may hold numbers that hide keys, or raise them above all others.

    A mask from outside is taken to hold 0 and low numbers, or to be 0 and 1 where the graph makes it low.
    What is the same for all keys hides none of them.

    Attributes:
        overwritten: whether anything writes to the memory of a node.
    """

    overwritten: Callable[[fx.Node], bool]

    def may_hold(self, node: Any, low: bool, constant: bool = False) -> bool:
        """Whether a tensor of the graph, or a number, may hold low numbers, or high ones (not `low`).

        Args:
            constant: whether it is known that all keys share the value.
        """
        node = torch_ops.source(node)
        if isinstance(node, (int, float)):
            return not isinstance(node, bool) and is_fill(node if low else -node)
        found, op = torch_ops.tensor(node), torch_ops.read(node)
        if found is None or self.overwritten(node):
            return True  # a symbolic number, or anything
        if not found.is_floating_point():
            return False  # integers and conditions hide nothing by themselves
        constant = constant or found.dim() == 0 or known_true(found.shape[-1] == 1)
        if op is None:
            learned = found.requires_grad or isinstance(found, torch.nn.Parameter)
            return low and not constant and not learned
        return may_hide_rows(node) and self._made(op, low, constant)

    def _made(self, op: torch_ops.Op, low: bool, constant: bool) -> bool:
        parts: list[tuple[Any, bool]] = []
        if op.name in _SAME and isinstance(op.input, fx.Node):
            parts = [(op.input, low)]
        elif op.name == "neg":
            parts = [(op.input, not low)]
        elif op.name in ("add", "sub", "rsub") and op["alpha"] is None:
            first, other = {"add": (low, low), "sub": (low, not low), "rsub": (not low, low)}[op.name]
            parts = [(op.input, first), (op["other"], other)]
        elif op.name in ("mul", "div"):
            parts = self._factors(op, low)
        elif op.name == "masked_fill":
            parts = [(op.input, low), (op["value"], low)]
        elif op.name == "where" and op["other"] is not None:
            parts = [(op.input, low), (op["other"], low)]
        return not parts or any(self.may_hold(part, sign, constant) for part, sign in parts)

    def _factors(self, op: torch_ops.Op, low: bool) -> list[tuple[Any, bool]]:
        first, other = op.input, op["other"]
        if isinstance(first, (int, float)) and op.name == "mul":
            first, other = other, first
        if isinstance(other, (int, float)):  # of a mask that is 0 and 1, or low already
            return [(first, low if other >= 0 else not low), (other, low)]
        return [(part, sign) for part in (first, other) for sign in (True, False)]
