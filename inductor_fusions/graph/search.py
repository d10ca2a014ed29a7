"""Searches a graph from some nodes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx


def reached(
    starts: Iterable[Any], onwards: Callable[[fx.Node], Iterable[Any]], most: int | None = None
) -> Iterator[fx.Node]:
    """Some nodes and what is reached from them, each once, the nearest first.

    Args:
        onwards: where to go from a node, asked after the node was yielded. What is no node is passed over.
        most: how many nodes are looked at; None: all.
    """
    waiting, seen = deque(starts), set[fx.Node]()
    while waiting and (most is None or len(seen) < most):
        node = waiting.popleft()
        if isinstance(node, fx.Node) and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(onwards(node))


def computed_of(node: Any, most: int | None = None) -> Iterator[fx.Node]:
    """A node and all that it is computed of, the nearest first; `most` as in `reached`."""
    return reached([node], lambda each: each.all_input_nodes, most)
