"""Copies operands that a fused operation saves for its backward, if they may be overwritten.

Autograd raises if a saved tensor was overwritten. Eager saves less than a fused operation. A matrix product
saves an operand only if the other one requires a gradient, and often a copy of it. An addition saves nothing.
So where eager allows it, a later node or the caller may overwrite an operand of a fused operation. An operand
is copied if it is written to later, if it shares memory with an input of the graph, or if the graph returns
it. It is not copied if eager saves it as well: then eager raises, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import fx

from .._inductor import fake_mode_of, hint, suppress_guards
from ..effects.modes import GRADIENT_MODES, TRANSFORMS, name_of
from ..effects.writes import may_alias, storage, written
from ..graph.builder import Builder
from ..operands import repeated_dims, requires_grad, tensor, value
from .copies import OWN
from .leaving import copied, is_transformed, leaves_of

#: Calls that switch gradients or transforms: a copy made before one cannot be used behind it.
_SWITCHES = frozenset((*GRADIENT_MODES, *TRANSFORMS, *TRANSFORMS.values()))


class Keeping:
    """Knows which values of a graph may change after a node.

    Args:
        graph: Dynamo's. Nodes may be added to it afterwards.
        recomputed: the graph is the body of a checkpoint, whose inputs eager saves in any case.
    """

    def __init__(self, graph: fx.Graph, recomputed: bool = False) -> None:
        self.graph = graph
        self.writes = [(node, storage(target)) for node in graph.nodes for target in written(node)]
        self.switches = [node for node in graph.nodes if name_of(node) in _SWITCHES]
        given = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        returned = [node for last in graph.find_nodes(op="output") for node in leaves_of(last.args[0])]
        seen = [] if recomputed else [*given, *(node for node in returned if isinstance(node, fx.Node))]
        self.in_other_hands = {storage(node) for node in seen} - {None}
        #: Memory of expanded inputs that require a gradient: each repetition has a gradient of its own.
        trained = [n for n in given if requires_grad(n)]
        self.repeated = {storage(n) for n in trained if repeated_dims(value(n))} - {None}
        self._copies: list[tuple[fx.Node, fx.Node]] = []

    def kept(
        self, node: fx.Node, before: fx.Node, by_eager: Callable[[], Collection[object]] = frozenset
    ) -> fx.Node:
        """The value to save for an operand: itself, or a copy of it if it may change afterwards.

        Args:
            before: the operation that saves it; a copy goes in front of it.
            by_eager: gives the memory that eager saves; asked only where something may change.
        """
        memory = storage(node)
        if memory is None:
            return node
        others = memory in self.in_other_hands
        if not others and not any(before < writer and may_alias(memory, s) for writer, s in self.writes):
            return node
        if memory in by_eager():
            return node
        path = [node]
        while (parent := _seen_through(path[-1])) is not None:
            path.append(parent)
        # Before it was expanded, say.
        smallest = min(range(len(path)), key=lambda i: _size(path[i]))
        copies = {path[smallest]: self._copy(path[smallest], before, memory, others)}
        for view in reversed(path[:smallest]):
            with self.graph.inserting_before(before):
                copies[view] = self.graph.node_copy(view, lambda n: copies.get(n, n))
        return copies[node]

    def is_same_at(self, node: fx.Node, one: fx.Node, other: fx.Node) -> bool:
        """Whether a copy of a node that is made at the first of two places may be read at the second."""
        return not self._between(min(one, other), max(one, other), storage(node))

    def _copy(self, node: fx.Node, before: fx.Node, memory: object, others: bool) -> fx.Node:
        for source, copy in self._copies:
            if source is node and copy < before and not self._between(copy, before, memory):
                return copy
        with suppress_guards(fake_mode_of(self.graph)):
            kind = OWN if others and not is_transformed(self.graph) else "clone"
            short = node if memory in self.repeated else self._without_repeats(node, before)
            copy = copied(short, before, kind)
            if short is not node:
                copy = Builder(before).call("expand_as", copy, node)
        self._copies.append((node, copy))
        return copy

    def _without_repeats(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """A value with one element of each dim over which it is expanded."""
        for dim in repeated_dims(value(node)):
            node = Builder(before).call("narrow", node, dim, 0, 1)
        return node

    def _between(self, first: fx.Node, last: fx.Node, memory: object) -> bool:
        """Whether memory is written to between two nodes, or what autograd records changes."""
        found = [writer for writer, s in self.writes if may_alias(memory, s)] + self.switches
        return any(first < node and node < last for node in found)


def _seen_through(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a view of, if it is its only one; else None."""
    if node.op not in ("call_function", "call_method"):
        return None
    inputs = [each for each in node.all_input_nodes if tensor(each) is not None]
    before, after = tensor(inputs[0]) if len(inputs) == 1 else None, tensor(node)
    if before is None or after is None or storage(inputs[0]) != storage(node):
        return None
    # Strides that are given are those of the original.
    return inputs[0] if before.dtype == after.dtype and name_of(node) != "as_strided" else None


def _size(node: fx.Node) -> int:
    return hint(value(node).numel())
