"""Copies that a cast to a wider dtype and back leaves, as beside float32 adapters: they need not be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from ..._inductor import was_erased
from ...fusion import Candidate
from ...graph.builder import substitute
from ...graph.products import PRODUCTS, RESHAPES, VIEWS, Product, is_pointwise, restored, through


def candidates(products: Sequence[Product]) -> Iterator[Candidate]:
    """The operands of products that are such copies, perhaps viewed."""
    for product in products:
        if was_erased(product.node):
            continue
        for operand in product.node.all_input_nodes:
            node = through(operand, RESHAPES)
            if restored(node) is not None and any(map(_computes, node.users)):
                yield RoundTrip(node)


class RoundTrip(Candidate):
    """A copy, whose readers get what it was made of.

    Only those that compute something of it: what leaves the graph stays a copy, since it may not share memory
    with an input, which the graph or its caller may write to afterwards.
    """

    reported = False

    def __init__(self, copy: fx.Node) -> None:
        self.anchor = copy

    def guard(self) -> None:
        """Accept: `restored` has proved it."""

    def rewrite(self) -> str:
        copy, origin = self.anchor, restored(self.anchor)
        assert origin is not None
        copy.replace_all_uses_with(origin, delete_user_cb=_computes)
        if not copy.users:
            substitute(copy, origin)  # takes it out, with the cast that it was made by
        return "the original"


def _computes(user: fx.Node) -> bool:
    """Whether a reader, or all readers of a view, give results in memory of their own."""
    if user.target in VIEWS:
        return all(map(_computes, user.users))
    return user.target in PRODUCTS or is_pointwise(user)
