"""Fake values of nodes that another pass has added to a graph without them."""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

from .._inductor import fake_mode_of, fake_result, value_of
from ..effects.modes import Modes
from ..effects.writes import is_in_place
from . import torch_ops


def complete(graph: fx.Graph) -> None:
    """Give the nodes of a graph that have no fake value theirs.

    Inductor compiles such a graph, because it computes the values again or needs none there, but every
    reader of a graph asks for them. A node stays without a value if an input has none, if it writes to one,
    or if its sizes depend on data.
    """
    missing = [node for node in graph.nodes if _is_missing(node)]
    if not missing:
        return
    mode, modes = fake_mode_of(graph), Modes(graph)
    key = "val" if any("val" in node.meta for node in graph.nodes) else "example_value"
    for node in missing:
        values = {each: value_of(each) for each in node.all_input_nodes}
        if any(value is None for value in values.values()):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        # A method of something else than a tensor is None here, and calling it gives no value.
        function: Any = getattr(torch.Tensor, node.target, None) if node.op == "call_method" else node.target
        found = fake_result(mode, function, args, kwargs)
        if found is None:
            continue
        inputs = [value for value in values.values() if isinstance(value, torch.Tensor)]
        if isinstance(found, torch.Tensor) and found.is_floating_point() and modes.at(node).gradients:
            found.requires_grad_(any(value.requires_grad for value in inputs))
        node.meta[key] = found


def _is_missing(node: fx.Node) -> bool:
    if node.meta.keys() & {"val", "example_value"} or is_in_place(node):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.returns) and not node.target._schema.is_mutable
    # A function in Python that is not known may do anything.
    op, built_in = torch_ops.read(node), isinstance(node.target, BuiltinFunctionType)
    return op is not None and bool(op.args or (built_in and node.all_input_nodes))
