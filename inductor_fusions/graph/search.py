"""Searches a graph from some nodes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import fx

from .torch_ops import readers_named


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


def named_behind(
    node: fx.Node, passed: Collection[str], ends: Collection[str], most: int | None = None
) -> list[fx.Node]:
    """The nearest operations of the names `ends` behind a node and others of the names `passed`.

    Args:
        most: as in `reached`.
    """
    inside = reached([node], lambda each: readers_named(each, {*passed} - {*ends}), most)
    return list(dict.fromkeys(user for each in inside for user in readers_named(each, ends)))


def computed_of(node: Any, most: int | None = None) -> Iterator[fx.Node]:
    """A node and all that it is computed of, the nearest first; `most` as in `reached`."""
    return reached([node], lambda each: each.all_input_nodes, most)
