"""Runs the passes on Dynamo's graph, and the graph as it is: without Inductor's code generation."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .. import _inductor


class AfterPasses:
    """A backend of `torch.compile`: the pre-grad passes that Inductor would run, then the graph itself.

    Args:
        graphs: where it puts each graph after the passes.
    """

    def __init__(self, graphs: list[fx.GraphModule]) -> None:
        self.graphs = graphs

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with _inductor.passes_over(graph):
            self._transform(graph)
        self.graphs.append(graph)
        values = map(_inductor.value_of, graph.graph.nodes)
        symbolic = any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in values)
        if not symbolic and not _inductor.only_traced_autograd_runs(graph.graph):
            return graph.forward
        # Such graphs run only after AOTAutograd has traced them once more.
        functorch: Any = importlib.import_module("functorch.compile")

        def as_it_is(traced: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            boxed: Callable[..., Any] = functorch.make_boxed_func(traced.forward)
            return boxed

        made: Callable[..., Any] = functorch.aot_module_simplified(
            graph, example_inputs, fw_compiler=as_it_is
        )
        return made

    def _transform(self, graph: fx.GraphModule) -> None:
        """Run the passes on a graph and its nested graphs, which come first, as in Inductor."""
        for name in sorted({str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}):
            body = getattr(graph, name, None)
            if isinstance(body, fx.GraphModule):
                self._transform(body)
        for item in _inductor.get_hook("pre_grad"):
            item(graph.graph)
        graph.graph.lint()
        graph.recompile()
