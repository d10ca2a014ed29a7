"""Derivatives taken inside a Dynamo graph: forward mode, batched or higher-order.

A fused kernel has a gradient, which is an operation without one, and no tangent. Both may be asked for
inside of a compiled function: by the transforms of torch.func, by `torch.autograd.grad` where Dynamo traces
it, and by the caller's backward through what these gave.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from .._inductor import is_batched, records_gradients, value_of
from ..reasons import Reason
from .modes import Modes, name_of
from .writes import nodes_in, storage, written

#: Calls that take a gradient of their first argument.
_GRADIENTS = frozenset({"_autograd_grad", "grad"})
#: Where `torch.autograd.grad` is told that it is given several at once.
_BATCHED = 6
FORWARD = ("_jvp_increment_nesting", "_enter_dual_level", "enter_dual_level")
REVERSE = ("_grad_increment_nesting",)


def check_operation(nodes: Iterable[fx.Node], known: Derivatives | None = None) -> None:
    """Refuse an operation of this package in place of some nodes, where it lacks what is asked of them.

    Args:
        nodes: that it stands for, of one graph.
        known: the derivatives of the graph, where they are known.

    Raises:
        Rejected: a transform of torch.func is around one, or another derivative than the first is taken.
    """
    for node in nodes:
        known = known or Derivatives(node.graph, Modes(node.graph))
        why = known.refused_operation(node)
        if why:
            raise Reason.TRANSFORM.rejected(why)


def takes_gradient(node: fx.Node) -> bool:
    """Whether a node takes gradients of other nodes."""
    return node.op == "call_function" and name_of(node) in _GRADIENTS


class Derivatives:
    """What is known of the derivatives of one graph.

    Args:
        graph: of Dynamo.
        modes: its modes.
        outer: why nothing in it may be fused, where a graph around it takes such a derivative.
    """

    def __init__(self, graph: fx.Graph, modes: Modes, outer: str = "") -> None:
        self.modes, self.outer = modes, outer
        self._reasons: dict[fx.Node, str] = {}
        nodes = list(graph.nodes)
        for at, node in enumerate(nodes):
            why = _beyond_a_gradient(node) if takes_gradient(node) else ""
            if why:
                self._reasons.update(dict.fromkeys(_sources(nodes[:at], node), why))

    def refused(self, node: fx.Node) -> str:
        """Why an operation with a first derivative alone cannot stand where a node is; "" where it can."""
        if self.outer:
            return self.outer
        if self.modes.at(node).within(*FORWARD):
            return "a forward-mode derivative (torch.func.jvp), which the fused operation does not support"
        return self._reasons.get(node, "")

    def refused_operation(self, node: fx.Node) -> str:
        """The same for an operation of this package, for which torch.func has no rule either."""
        if self.modes.at(node).within(*REVERSE):
            return "inside torch.func.grad, which the fused operation does not support"
        return self.refused(node)

    def check(self, nodes: Iterable[fx.Node]) -> None:
        """Refuse where one of these nodes needs another derivative.

        Raises:
            Rejected: one does.
        """
        why = next(filter(None, map(self.refused, nodes)), "")
        if why:
            raise Reason.TRANSFORM.rejected(why)


def _beyond_a_gradient(node: fx.Node) -> str:
    """What a node that takes a gradient asks beside it, of what it is taken of."""
    several = node.kwargs.get("is_grads_batched") or node.args[_BATCHED : _BATCHED + 1] == (True,)
    results = value_of(node)
    if several or any(map(is_batched, results if isinstance(results, (tuple, list)) else (results,))):
        return "batched gradients (is_grads_batched), which the fused operation does not support"
    if _is_differentiated(node):
        return "a second derivative, which the fused operation does not support"
    return ""


def _is_differentiated(gradient: fx.Node) -> bool:
    """Whether what a gradient becomes part of may be differentiated: behind the graph, or in it."""
    waiting, seen = [gradient], {gradient}
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user in seen:
                continue
            if takes_gradient(user) and node in nodes_in(user.args[0] if user.args else user.kwargs):
                return True
            if user.op == "output":
                return True
            if records_gradients(value_of(user)):
                if written(user):
                    return True  # what reads the memory later on is no user
                seen.add(user)
                waiting.append(user)
    return False


def _sources(before: list[fx.Node], gradient: fx.Node) -> set[fx.Node]:
    """The nodes in front of a gradient that what it is taken of is made of, through memory as well."""
    found = set(nodes_in(gradient.args[0] if gradient.args else gradient.kwargs))
    memory = {storage(node) for node in found}
    for node in reversed(before):
        if node not in found:
            targets = written(node)
            if not any(storage(target) in memory or storage(target) is None for target in targets):
                continue
            found.add(node)
        found.update(node.all_input_nodes)
        memory.update(held for each in node.all_input_nodes if (held := storage(each)) is not None)
    return found
