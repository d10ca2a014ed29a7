"""Which values of a torch-level graph are overwritten, and when.

Dynamo's graph is not functional: `scores += mask` and `buffer[i] = x` are nodes. If a rewrite reads a value
later than the graph did, nothing may overwrite it in between. And a proof about a value holds only if the
value is still the one that its node computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...effects import writes
from ...effects.writes import may_alias, storage
from ...graph import torch_ops


class Mutations:
    """The mutating nodes of one graph, with the storages that they write to."""

    def __init__(self, graph: fx.Graph) -> None:
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._writes: list[tuple[fx.Node, object]] = []
        self._targets: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            self._targets[node] = written(node)
            for target in self._targets[node]:
                self._writes.append((node, storage(target)))

    def touch(self, node: Any) -> bool:
        """Whether any node of the graph writes to the storage of `node`."""
        if not self._writes:
            return False
        mine = storage(torch_ops.source(node))
        return any(may_alias(mine, other) for _, other in self._writes)

    def last(self, node: Any, before: fx.Node | None) -> fx.Node | None:
        """The last node that writes to the storage of `node`, after it and before another (or the end)."""
        if not self._writes:
            return None
        node = torch_ops.source(node)
        mine, low = storage(node), self._order.get(node, -1)
        high = len(self._order) if before is None else self._order.get(before, len(self._order))
        found = [w for w, other in self._writes if low < self._order[w] < high and may_alias(mine, other)]
        return found[-1] if found else None

    def first_reader(self, node: Any, readers: Collection[fx.Node]) -> fx.Node | None:
        """The first of some nodes that reads the memory of a node, by whatever view of it; or None."""
        waiting, mine = [torch_ops.source(node)], storage(torch_ops.source(node))
        for each in waiting:
            views = [user for user in each.users if user not in readers and storage(user) == mine]
            waiting += [user for user in views if user not in waiting]
        return min((user for each in waiting for user in each.users if user in readers), default=None)

    def targets(self, writer: fx.Node) -> list[fx.Node]:
        """What a node overwrites."""
        return self._targets.get(writer, [])

    def between(self, node: Any, first: fx.Node, last: fx.Node, ignore: Iterable[fx.Node] = ()) -> bool:
        """Whether the storage of `node` is written after it and `first`, and before `last`."""
        if not self._writes:
            return False
        node = torch_ops.source(node)
        skip, mine = set(ignore), storage(node)
        low = max(self._order.get(first, -1), self._order.get(node, -1))
        high = self._order.get(last, len(self._order))
        return any(
            low < self._order[writer] <= high and writer not in skip and may_alias(mine, other)
            for writer, other in self._writes
        )


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node overwrites: with other numbers, where it is known."""
    operation = torch_ops.read(node)
    if operation is not None and operation.inplace and adds_nothing(operation):
        return []
    return writes.written(node)


def adds_nothing(operation: torch_ops.Op) -> bool:
    """Whether an in-place operation leaves integers as they are: `x += 0`."""
    value, other = torch_ops.tensor(operation.node), torch_ops.concrete(operation["other"])
    return (
        operation.name in ("add", "sub")
        and value is not None
        and not value.is_floating_point()
        and isinstance(other, (int, torch.SymInt))
        and known_true(other == 0)
    )
