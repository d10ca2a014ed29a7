"""Copies that a cast to a wider dtype and back leaves, as beside float32 adapters: they need not be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from ..._inductor import was_erased
from ...fusion import Candidate
from ...graph.products import RESHAPES, Product, restored
from ..block_mm import emit


def candidates(products: Sequence[Product]) -> Iterator[Candidate]:
    """The operands of products that are such copies, perhaps viewed."""
    for product in products:
        if was_erased(product.node):
            continue
        for operand in product.node.all_input_nodes:
            node: Any = operand
            while node.target in RESHAPES:
                node = node.args[0]
            if restored(node) is not None:
                yield RoundTrip(node)


class RoundTrip(Candidate):
    """A copy, whose readers get what it was made of."""

    reported = False

    def __init__(self, copy: fx.Node) -> None:
        self.anchor = copy

    def guard(self) -> None:
        """`restored` has said all."""

    def rewrite(self) -> str:
        origin = restored(self.anchor)
        assert origin is not None
        emit.replace(self.anchor.graph, self.anchor, origin)
        return "the original"
