"""A candidate that is rewritten to an equivalent form, with helpers for new nodes."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...effects.modes import Modes
from ...fusion import Candidate
from ...graph.builder import Builder
from ...operands import check_unbatched, tensor
from ...reasons import Reason


class EquivalentRewrite(Candidate):
    """An operation that is written in another way."""

    def __init__(self, anchor: fx.Node) -> None:
        self.anchor = anchor

    def guard(self) -> None:
        check_unbatched(tensor(self.anchor))  # what a DTensor becomes is misread as well
        Modes(self.anchor.graph).check_inference(self.anchor)
        if self.anchor.kwargs.get("out") is not None:
            raise Reason.OVERWRITTEN.rejected("the operation writes to a given tensor (out=)")

    def put_views(self, operand: fx.Node | None = None) -> None:
        """Put views, which no pattern has and which cost nothing, between the anchor and its users.

        A factor of the scores stays in front of the softmax, where Inductor makes (x - max) * factor of it
        (`mul_softmax_pattern`). In x * factor - max, a multiply-add leaves out a rounding: the weights are
        inf where all scores of a row are as large as those of a mask.

        Args:
            operand: put them between it and the anchor instead.
        """
        anchor = self.anchor
        node, before = (anchor, anchor.next) if operand is None else (operand, anchor)
        builder = Builder(before, like=anchor, kept=tuple(anchor.meta))
        opened = builder.call("unsqueeze", node, 0)
        closed = builder.call("squeeze", opened, 0)
        users = [user for user in node.users if user is not opened and user.op != "output"]
        for user in users if operand is None else (anchor,):
            user.replace_input_with(node, closed)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node in front of the anchor."""
        return Builder(self.anchor, kept=tuple(self.anchor.meta)).call(target, *args, **kwargs)

    def rewrite(self) -> str:
        raise NotImplementedError
