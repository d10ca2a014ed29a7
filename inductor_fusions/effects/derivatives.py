"""Derivatives taken inside a Dynamo graph: forward mode, batched or higher-order.

A fused operation has a first derivative in reverse mode, and no other. A compiled function may need others:
inside transforms of torch.func, if Dynamo traces `torch.autograd.grad`, or in the caller's backward through
the results of these.
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
#: Position of `is_grads_batched` among the arguments of `torch.autograd.grad`.
_BATCHED = 6
FORWARD = ("_jvp_increment_nesting", "_enter_dual_level", "enter_dual_level")
REVERSE = ("_grad_increment_nesting",)


def check_operation(nodes: Iterable[fx.Node], known: Derivatives) -> None:
    """Refuse an operation of this package in place of some nodes if it lacks a derivative that they need.

    Args:
        nodes: the nodes that it replaces, of one graph.
        known: the derivatives of the graph.

    Raises:
        Rejected: a transform of torch.func is around one, or another derivative than the first is taken,
            or the graph enters inference mode behind an operand.
    """
    for node in nodes:
        why = known.refused_operation(node)
        if why:
            raise Reason.TRANSFORM.rejected(why)
        known.modes.check_inference(node)


def takes_gradient(node: fx.Node) -> bool:
    """Whether a node takes gradients of other nodes."""
    return node.op == "call_function" and name_of(node) in _GRADIENTS


class Derivatives:
    """The derivatives that one graph takes of its own values.

    Args:
        outer: why nothing in it may be fused, if a graph around it takes an unsupported derivative; else "".
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
        """Why an operation with only a first derivative cannot replace a node, or ""."""
        if self.outer:
            return self.outer
        if self.modes.at(node).within(*FORWARD):
            return "a forward-mode derivative (torch.func.jvp), which the fused operation does not support"
        return self._reasons.get(node, "")

    def refused_operation(self, node: fx.Node) -> str:
        """Why an operation of this package is refused: it has no rules for torch.func either."""
        if self.modes.at(node).within(*REVERSE):
            return "inside torch.func.grad, which the fused operation does not support"
        return self.refused(node)

    def check(self, nodes: Iterable[fx.Node]) -> None:
        """Refuse where one of these nodes needs another derivative."""
        why = next(filter(None, map(self.refused, nodes)), "")
        if why:
            raise Reason.TRANSFORM.rejected(why)


def _beyond_a_gradient(node: fx.Node) -> str:
    """Which unsupported derivative a node that takes a gradient needs beside a first derivative, or ""."""
    several = node.kwargs.get("is_grads_batched") or node.args[_BATCHED : _BATCHED + 1] == (True,)
    results = value_of(node)
    if several or any(map(is_batched, results if isinstance(results, (tuple, list)) else (results,))):
        return "batched gradients (is_grads_batched), which the fused operation does not support"
    if _is_differentiated(node):
        return "a second derivative, which the fused operation does not support"
    return ""


def _is_differentiated(gradient: fx.Node) -> bool:
    """Whether a value that depends on a gradient may be differentiated, in the graph or by its caller."""
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
    """The nodes that the differentiated value is computed from, also through writes in place."""
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
