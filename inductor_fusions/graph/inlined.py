"""Inlines a function into an aten graph in place of a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._inductor import fake_mode_of, trace_decomposed
from ..operands import value
from ..reasons import Reason


def put_in_place(
    node: fx.Node, compute: Callable[..., tuple[torch.Tensor, ...]], arguments: tuple[Any, ...]
) -> None:
    """Replace a node with several results by the aten operations of a function.

    Args:
        node: its users are `getitem` nodes. It stays for results that `compute` does not return.
        compute: takes `arguments` and returns the first results of `node`.
        arguments: nodes of the graph, which are tensors, and other values; also in tuples and dictionaries.

    Raises:
        Rejected: the function holds a constant tensor.
    """
    graph = node.graph
    inputs: list[fx.Node] = []
    fx.node.map_arg(arguments, inputs.append)

    def computed(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left = iter(values)
        given: Any = fx.node.map_arg(arguments, lambda _: next(left))
        return compute(*given)

    traced = trace_decomposed(computed, [value(each) for each in inputs], fake_mode_of(graph))
    places: dict[fx.Node, Any] = {}
    left, outputs = iter(inputs), []
    for each in traced.graph.nodes:
        if each.op == "placeholder":
            places[each] = next(left)
        elif each.op == "output":
            outputs = [places[one] for one in each.args[0]]
        elif each.op == "get_attr":
            raise Reason.IN_BETWEEN.rejected(
                "the operations in its place hold a constant tensor, such as one of a score_mod"
            )
        else:
            with graph.inserting_before(node):
                places[each] = graph.node_copy(each, places.__getitem__)
            places[each].meta["stack_trace"] = node.meta.get("stack_trace", "")
    for user in list(node.users):
        position: Any = user.args[1]
        if position < len(outputs):
            user.replace_all_uses_with(outputs[position])
            graph.erase_node(user)
    if not node.users:
        graph.erase_node(node)
