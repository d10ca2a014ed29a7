"""Guards against graph changes outside a rewrite, and rollback of unfinished changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import fx

from .. import config
from .._inductor import was_erased
from ..effects.writes import is_in_place
from ..fusion import Fusion
from ..graph.facts import Journal, change


@contextlib.contextmanager
def reading(fusion: Fusion, graph: fx.Graph) -> Iterator[None]:
    """Check, with `config.strict`, that the code inside leaves the graph unchanged."""
    before = _whole(graph) if config.strict else None
    yield
    if before is not None and _whole(graph) != before:
        raise RuntimeError(f"{fusion.name} changed the graph outside its rewrite")


def _whole(graph: fx.Graph) -> list[tuple[Any, ...]]:
    return [(node, node.target, node.args, node.kwargs) for node in graph.nodes]


def remove_marks(mark: Any, graph: fx.Graph) -> None:
    """Replace each mark by its operand."""
    for node in graph.find_nodes(op="call_function", target=mark):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def put_back(graph: fx.Graph, journal: Journal) -> bool:
    """Undo a rewrite that was begun.

    Returns:
        Whether the graph computes what it did before. It may not if an erased node wrote in place, or was
        read by a node that is still there.
    """
    lost = any(map(is_in_place, journal.gone))
    for node, was in list(journal.before.items()):
        if node in journal.gone or node in journal.made:
            continue
        read: list[fx.Node] = []
        fx.node.map_arg(was[1:], read.append)
        if not journal.gone.keys().isdisjoint(read):
            lost = True
        else:
            change(node, *was)
    made = journal.added()
    for node in reversed(made):
        if not node.users:
            graph.erase_node(node)
    return not lost and all(map(was_erased, made))
