"""A candidate that is written in another way, with the nodes and values that this takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..._inductor import computing_fakes, fake_mode_of, is_batched, suppress_guards
from ...fusion import Candidate, Rejected
from ...operands import tensor


class Respelled(Candidate):
    """An operation that is written in another way.

    Args:
        anchor: the node.
        source: its input.
    """

    def __init__(self, anchor: fx.Node, source: Any) -> None:
        self.anchor, self.source = anchor, source

    def guard(self) -> None:
        if is_batched(tensor(self.anchor)):
            raise Rejected("inside torch.vmap, whose values have a hidden dim")
        if self.anchor.kwargs.get("out") is not None:
            raise Rejected("writes to a given tensor (out=)")

    def replace(self, result: fx.Node) -> None:
        """Put `result`, which is the same tensor, in the place of the anchor."""
        if result is not self.source:
            result.meta = dict(self.anchor.meta)
        self.anchor.replace_all_uses_with(result)
        self.anchor.graph.erase_node(self.anchor)

    def dtype_option(self) -> dict[str, Any]:
        """`dtype=` where the result has another dtype than the input."""
        before, after = tensor(self.source), tensor(self.anchor)
        assert before is not None and after is not None
        return {} if before.dtype == after.dtype else {"dtype": after.dtype}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node at the insertion point, with its value."""
        node = self.anchor.graph.create_node(
            "call_method" if isinstance(target, str) else "call_function", target, args, kwargs
        )
        mode = fake_mode_of(self.anchor.graph)
        given = fx.map_arg((args, kwargs), lambda n: n.meta.get("example_value", n.meta.get("val")))
        with suppress_guards(mode), torch.no_grad(), computing_fakes(mode):
            function = getattr(torch.Tensor, target) if isinstance(target, str) else target
            result = function(*given[0], **given[1])
        key = "val" if "val" in self.anchor.meta else "example_value"
        node.meta = {**self.anchor.meta, key: result}
        return node

    def rewrite(self) -> str:
        raise NotImplementedError
