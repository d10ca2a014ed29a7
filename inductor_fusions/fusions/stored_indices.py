"""Indices that many gathers read, computed once.

The relative positions of DeBERTa are buckets of a logarithm: some twenty operations on each (query, key). The
model computes them once. But Inductor recomputes values that look cheap in each of their readers: every
layer, head and sample computes the logarithm again, which is most of the time of its biases. If an index is
smaller than what is gathered with it, it is materialised here, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import _inductor
from .._inductor import Match, hint
from ..fusion import Candidate, Fusion, Scope, nodes_of
from ..graph.builder import Builder
from ..graph.products import CASTS, VIEWS, is_pointwise
from ..graph.search import reached
from ..lowering import define
from ..operands import tensor, text, value
from ..reasons import Reason

aten = torch.ops.aten

#: Operations that read a tensor at an index: position of the index, or of a list of them.
_READERS: dict[Any, int] = {
    aten.gather.default: 2,
    aten.index.Tensor: 1,
    aten.embedding.default: 1,
    aten.scatter_add.default: 2,
}
#: What takes many instructions.
_COSTLY = frozenset(
    {aten.log.default, aten.log2.default, aten.exp.default, aten.pow.Tensor_Scalar, aten.sqrt.default}
)
#: So many elements must be gathered for each element of the index: it is then read from the cache.
REUSE = 8


def _stored(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


#: A copy that Inductor puts into memory instead of computing it again for each reader.
STORED = define("stored", _stored, torch.empty_like)


def _lower(x: Any) -> Any:
    copy = _inductor.call_lowering(aten.clone.default, x)
    copy.realize()
    return copy


_inductor.register_lowering_when_loaded(STORED, _lower)


def _sources(index: fx.Node) -> set[fx.Node]:
    """Casts from floating point to integers that an index is made of, behind costly operations."""
    return {
        node
        for node in _chain(index)
        if node.target in CASTS
        and not value(node).is_floating_point()
        and value(node.all_input_nodes[0]).is_floating_point()
        and any(each.target in _COSTLY for each in _chain(node))
    }


def _chain(node: fx.Node) -> list[fx.Node]:
    """A node and those that are computed into it, element by element."""

    def inside(each: fx.Node) -> list[fx.Node]:
        passed = is_pointwise(each) or (each.op == "call_function" and each.target in VIEWS)
        return [other for other in each.all_input_nodes if passed and tensor(other) is not None]

    return list(reached([node], inside))


class StoredIndices(Candidate):
    """An index and what reads with it."""

    def __init__(self, graph: fx.Graph, source: fx.Node, readers: list[fx.Node]) -> None:
        self.graph, self.anchor, self.readers = graph, source, readers

    def describe(self) -> dict[str, str]:
        return {"index": text(value(self.anchor)), "read by": f"{len(self.readers)}"}

    def guard(self) -> None:
        own = hint(value(self.anchor).numel())
        gathered = sum(hint(value(reader).numel()) for reader in self.readers)
        if gathered < REUSE * own:
            raise Reason.GATHERED.left_to_stock(
                f"the index is read for only {gathered // max(own, 1)} elements for each of its own"
            )

    def savings(self) -> dict[str, int]:
        own = hint(value(self.anchor).numel())
        steps = sum(is_pointwise(node) for node in _chain(self.anchor))
        return {"flops": steps * (sum(hint(value(reader).numel()) for reader in self.readers) - own)}

    def rewrite(self) -> str:
        copy = Builder(self.anchor.next, self.anchor).call(STORED, self.anchor)
        self.anchor.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
        return f"computed once for {len(self.readers)} operations"


FUSION = Fusion(
    name="stored_indices",
    stage="post_grad",
    summary="an index that many gathers read is computed once",
    exact=True,
)


@FUSION.group(lambda: _READERS)
def read(scope: Scope, matches: Sequence[Match]) -> Iterator[Candidate]:
    """Every integer tensor that costly operations lead to, and that several operations are indexed with."""
    readers: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in nodes_of(matches):
        given = node.args[_READERS[node.target]]
        for index in given if isinstance(given, (list, tuple)) else [given]:
            for source in _sources(index) if isinstance(index, fx.Node) else ():
                readers.setdefault(source, {})[node] = None
    for source, found in readers.items():
        if len(found) > 1:
            yield StoredIndices(scope.graph, source, list(found))
