"""What is known of a whole graph while a fusion works on it: computed once, and kept up to date."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar

from torch import fx

from .._inductor import watching_nodes
from .memory import Memory


class GraphFacts:
    """What is known of one graph. Each fact is computed when it is first asked for.

    Args:
        graph: of aten operations.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._memory: Memory | None = None

    @property
    def memory(self) -> Memory:
        """When its values are in memory."""
        if self._memory is None:
            self._memory = Memory(self.graph)
        return self._memory

    @functools.cached_property
    def writers(self) -> tuple[fx.Node, ...]:
        """What writes in place, by its schema; no rewrite adds any."""
        schemas = ((node, getattr(node.target, "_schema", None)) for node in self.graph.nodes)
        return tuple(node for node, schema in schemas if schema is not None and schema.is_mutable)

    def changes(self, *nodes: fx.Node) -> None:
        """These nodes are new, or get other inputs or users. torch tells of all but single arguments."""
        if self._memory is not None:
            self._memory.touch(*(node for node in nodes if node.graph is self.graph))

    def leaves(self, node: fx.Node) -> None:
        """A node is about to be erased, or to stand elsewhere."""
        if self._memory is not None and node.graph is self.graph:
            self._memory.forget(node)


#: Of the graphs that a fusion works on now, and what ends with that.
_held: ContextVar[tuple[dict[fx.Graph, GraphFacts], contextlib.ExitStack] | None] = ContextVar(
    "inductor_fusions_facts", default=None
)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """What is found out of graphs inside is kept, and kept up to date, until the end."""
    with contextlib.ExitStack() as stack:
        token = _held.set(({}, stack))
        try:
            yield
        finally:
            _held.reset(token)


def facts(graph: fx.Graph) -> GraphFacts:
    """What is known of a graph; found out anew where nothing is held."""
    found = _held.get()
    if found is None or not isinstance(graph.owning_module, fx.GraphModule):
        return GraphFacts(graph)
    known, stack = found
    if graph not in known:
        made = known[graph] = GraphFacts(graph)
        stack.enter_context(watching_nodes(graph.owning_module, made.changes, made.leaves))
    return known[graph]


def move(node: fx.Node, before: fx.Node) -> None:
    """Let a node stand in front of another one."""
    held = _held.get()
    known = held[0].get(node.graph) if held is not None else None
    if known is None:
        before.prepend(node)
        return
    known.leaves(node)
    before.prepend(node)
    known.changes(node)
