"""Permutations that only move dims of size 1, behind products written as an einsum: they become reshapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import fx

from .. import operands
from ..fusion import Candidate
from ..graph.builder import Builder, substitute
from ..graph.products import RESHAPES, aten, is_pointwise, products, users_behind
from ..operands import value


def candidates(graph: fx.Graph) -> Iterator[Candidate]:
    """Every permutation of dims of size 1 between a product and a reshape or a pointwise operation.

    Readers of a product look through reshapes. Each einsum that is a product has one of these behind it.
    """
    for found in products(graph):
        for node in list(users_behind(found.node, RESHAPES)):
            sizes = _sizes(node)
            if sizes is not None:
                yield Reshaped(node, sizes)


def _sizes(node: fx.Node) -> list[Any] | None:
    """The sizes of a permutation that keeps the order of the elements, if no reader sees its strides."""
    if node.target is not aten.permute.default or not all(
        user.target in RESHAPES or is_pointwise(user) for user in node.users
    ):
        return None
    inner, dims = cast(tuple[fx.Node, list[int]], node.args)
    shape: list[Any] = list(value(inner).shape)
    large = [d for d in dims if str(shape[d]) != "1"]
    if large != sorted(large):
        return None
    if not all(isinstance(size, int) for size in shape):
        named: Any = inner.args[1:]
        if inner.target not in (aten.view.default, aten.reshape.default) or len(named[0]) != len(shape):
            return None
        shape = list(named[0])
    return [shape[d] for d in dims]


class Reshaped(Candidate):
    """A permutation that becomes a reshape."""

    reported = False

    def __init__(self, node: fx.Node, sizes: list[Any]) -> None:
        self.anchor, self.sizes = node, sizes

    def guard(self) -> None:
        operands.check_device(value(self.anchor))

    def rewrite(self) -> str:
        node = self.anchor
        substitute(node, Builder(node).call(aten.reshape.default, node.args[0], self.sizes))
        return "a reshape"
