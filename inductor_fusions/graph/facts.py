"""Facts about a whole graph, computed once in a pass and kept up to date."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import fx

from .._inductor import Fakes, changes, remembering, was_erased, watching_nodes
from .memory import Memory


class GraphFacts:
    """Facts of one graph, each computed at its first use.

    Args:
        graph: a functional graph of aten operations.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        #: Fake values of new nodes.
        self.fakes = Fakes()
        self._memory: Memory | None = None

    @property
    def memory(self) -> Memory:
        """The lifetimes of its values."""
        if self._memory is None:
            self._memory = Memory(self.graph)
        return self._memory

    @functools.cached_property
    def writers(self) -> tuple[fx.Node, ...]:
        """The nodes whose schema writes in place. No rewrite adds one, so they are found once."""
        schemas = ((node, getattr(node.target, "_schema", None)) for node in self.graph.nodes)
        return tuple(node for node, schema in schemas if schema is not None and schema.is_mutable)

    def changes(self, *nodes: fx.Node) -> None:
        """Update the facts: these nodes are new, or have other inputs or users.

        torch calls this for every change except that of a single argument.
        """
        if self._memory is not None:
            self._memory.touch(*(node for node in nodes if node.graph is self.graph))

    def leaves(self, node: fx.Node) -> None:
        """Update the facts: a node is about to be erased or moved."""
        if self._memory is not None and node.graph is self.graph:
            self._memory.forget(node)


#: The facts of the graphs inside `held`, and what is undone at its end.
_held: ContextVar[tuple[dict[fx.Graph, GraphFacts], contextlib.ExitStack] | None] = ContextVar(
    "inductor_fusions_facts", default=None
)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Inside, facts of graphs are kept and updated. Nested calls share those of the outermost one."""
    if _held.get() is not None:
        yield
        return
    with remembering(), contextlib.ExitStack() as stack:
        token = _held.set(({}, stack))
        try:
            yield
        finally:
            _held.reset(token)


def facts(graph: fx.Graph) -> GraphFacts:
    """The facts of a graph: the kept ones inside `held`, otherwise new ones."""
    found = _held.get()
    if found is None:
        return GraphFacts(graph)
    known, stack = found
    if graph not in known:
        made = known[graph] = GraphFacts(graph)
        stack.enter_context(watching_nodes(graph.owning_module, made.changes, made.leaves, made.changes))
    return known[graph]


class Journal:
    """The changes of a graph since the journal began.

    Attributes:
        made: new nodes, also those that were erased again.
        gone: erased nodes that are not new.
        before: node -> (target, args, kwargs) before the first change of these.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.clear()

    def clear(self) -> None:
        """Begin now: forget the changes so far."""
        self.made: dict[fx.Node, None] = {}
        self.gone: dict[fx.Node, None] = {}
        self.before: dict[fx.Node, tuple[Any, Any, Any]] = {}

    def added(self) -> list[fx.Node]:
        """The new nodes that are in the graph, in its order."""
        return sorted(node for node in self.made if not was_erased(node))

    def removed(self) -> list[fx.Node]:
        """The erased nodes, in the order that they had."""
        return sorted(self.gone)

    def creates(self, node: fx.Node) -> None:
        """A node is new."""
        if node.graph is self.graph:
            self.made[node] = None

    def erases(self, node: fx.Node) -> None:
        """A node is about to be erased."""
        if node.graph is self.graph and node not in self.made:
            self.gone[node] = None

    def changes(self, node: fx.Node) -> None:
        """Note a node whose target or arguments are about to change."""
        if node.graph is self.graph and node not in self.made:
            self.before.setdefault(node, (node.target, node.args, node.kwargs))


_journals: ContextVar[tuple[Journal, ...]] = ContextVar("inductor_fusions_journals", default=())


@contextlib.contextmanager
def recording(graph: fx.Graph) -> Iterator[Journal]:
    """Record the changes of a graph inside. Arguments of nodes must be changed by `change`."""
    journal = Journal(graph)

    def replaced(old: fx.Node, user: fx.Node) -> None:
        journal.changes(user)

    token = _journals.set((*_journals.get(), journal))
    try:
        with watching_nodes(graph.owning_module, journal.creates, journal.erases, replaced):
            yield journal
    finally:
        _journals.reset(token)


def change(node: fx.Node, target: Any = None, args: Any = None, kwargs: Any = None) -> None:
    """Change the target, args or kwargs of a node; None leaves one as it is."""
    for journal in _journals.get():
        journal.changes(node)
    before = node.all_input_nodes
    node.target = node.target if target is None else target
    node.args = node.args if args is None else args
    node.kwargs = node.kwargs if kwargs is None else kwargs
    changes(node)
    held = _held.get()
    known = held[0].get(node.graph) if held is not None else None
    if known is not None:
        known.changes(node, *before)


def forget(graph: fx.Graph) -> None:
    """Forget the lifetimes of a graph, because nodes were reordered."""
    held = _held.get()
    if held is not None and graph in held[0]:
        held[0][graph]._memory = None


def move(node: fx.Node, before: fx.Node) -> None:
    """Move a node in front of another one."""
    held = _held.get()
    known = held[0].get(node.graph) if held is not None else None
    if known is None:
        before.prepend(node)
        return
    known.leaves(node)
    before.prepend(node)
    known.changes(node)
