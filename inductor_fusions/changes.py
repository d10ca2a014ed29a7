"""What may change a graph, and how a change that was begun is undone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx

from . import config
from ._inductor import was_erased
from .fusion import Fusion
from .writes import is_in_place

#: Nodes with what they call and their arguments; None where these cannot have changed.
Known = dict[fx.Node, tuple[Any, Any, Any] | None]


def known(graph: fx.Graph) -> Known:
    """The nodes of a graph as they are now."""
    return {node: (node.target, node.args, node.kwargs) for node in graph.nodes}


@contextlib.contextmanager
def reading(fusion: Fusion, graph: fx.Graph) -> Iterator[None]:
    """Inside, the graph stays as it is: with `config.strict`, a change is an error."""
    before = list(known(graph).items()) if config.strict else None
    yield
    if before is not None and list(known(graph).items()) != before:
        raise RuntimeError(f"{fusion.name} changes the graph outside of a rewrite")


def take_out(mark: Any, graph: fx.Graph) -> None:
    """Let the operand of each mark stand for it."""
    for node in graph.find_nodes(op="call_function", target=mark):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def put_back(graph: fx.Graph, before: Known) -> bool:
    """Undo a change that was begun; whether the graph computes what it did.

    Args:
        graph: the graph.
        before: its nodes as they were. Those that are gone may be read by such alone, and write nothing.
    """
    gone = {node for node in before if was_erased(node)}
    lost = any(map(is_in_place, gone))
    for node, was in before.items():
        if was is None or node in gone:
            continue
        target, args, kwargs = was
        read: list[fx.Node] = []
        fx.node.map_arg((args, kwargs), read.append)
        if not gone.isdisjoint(read):
            lost = True
        elif node.target is not target or node.args is not args or node.kwargs is not kwargs:
            node.target, node.args, node.kwargs = target, args, kwargs
    for node in reversed(list(graph.nodes)):
        if node not in before and not node.users:
            graph.erase_node(node)
    return not lost and all(node in before for node in graph.nodes)
