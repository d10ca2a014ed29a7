"""Values that enter and leave the graphs that a node runs: a checkpoint, branches of a `cond`, a function.

These are higher-order operations: a call gets the graphs as attributes, and values for their placeholders.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from .._inductor import is_backward_of_function, is_forward_of_function, results_of
from ..effects.writes import graph_of, nodes_in


def graphs(call: fx.Node) -> list[fx.Graph]:
    """The graphs that compute the results of a call; not the backward of an `autograd.Function`."""
    found = [graph_of(each) for each in call.all_input_nodes if each.op == "get_attr"]
    return [graph for graph in found if graph is not None and not is_backward_of_function(graph)]


def entered(call: fx.Node, value: fx.Node) -> list[fx.Node]:
    """The placeholders that stand for a value in the graphs that a call runs."""
    found: list[fx.Node] = []
    for graph in graphs(call):
        # The operands come last, behind the graphs and perhaps a condition.
        operands = reversed(nodes_in(call.args))
        inside = reversed(graph.find_nodes(op="placeholder"))
        found += [each for each, operand in zip(inside, operands, strict=False) if operand is value]
    return found


def left(result: fx.Node, calls: Iterable[fx.Node]) -> list[fx.Node]:
    """What holds a result of a graph behind the calls that run it."""
    results = results_of(result.graph, is_forward_of_function(result.graph))
    places = [at for at, each in enumerate(results) if each is result]
    users = [user for call in calls for user in call.users if user.target is operator.getitem]
    return [user for user in users if user.args[1] in places]


def computed(node: fx.Node) -> list[fx.Node]:
    """The results of graphs that a node takes from the call that runs them."""
    call = node.args[0] if node.target is operator.getitem else None
    if not isinstance(call, fx.Node):
        return []
    results = [results_of(graph, is_forward_of_function(graph)) for graph in graphs(call)]
    found = [each[at] for each in results if isinstance(at := node.args[1], int) and at < len(each)]
    return [each for each in found if isinstance(each, fx.Node)]
