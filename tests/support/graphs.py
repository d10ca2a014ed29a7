"""The graphs that Inductor has before and after its passes, to be compared node by node."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from inductor_fusions import config, reporting
from inductor_fusions._inductor import fresh_compile, passes_only, trace_decomposed
from inductor_fusions.checking.runs import run
from inductor_fusions.driver import watching

#: A graph: for each node what it is, what it calls, its arguments, its users in order, and its value.
Told = list[tuple[Any, ...]]


def told(graph: fx.Graph) -> Told:
    """A graph, and those of the bodies in it, as plain data."""
    found: Told = []
    for node in graph.nodes:
        value = node.meta.get("val", node.meta.get("example_value"))
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: _Name(n.name))
        users = [user.name for user in node.users]
        found.append((node.op, node.name, str(node.target), str(arguments), users, _kind(value)))
        body = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            found.append((node.name, told(body.graph)))
    return found


class _Name(str):
    __repr__ = str.__str__


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout == torch.strided else None
        return str((value.dtype, value.device, tuple(value.shape), strides))
    return [_kind(each) for each in value] if isinstance(value, (list, tuple)) else str(value)


class Seen(watching.Watcher):
    """The graphs of each stage as passes find them and as they leave them."""

    def __init__(self) -> None:
        self.before: list[tuple[str, Told]] = []
        self.after: list[tuple[str, Told]] = []

    def begins(self, stage: str, graph: fx.Graph) -> None:
        self.before.append((stage, told(graph)))

    def ends(self, stage: str, graph: fx.Graph, sites: Sequence[Any]) -> None:
        self.after.append((stage, told(graph)))


def after_autograd(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], train: bool, **toggles: Any
) -> tuple[list[Told], list[Any]]:
    """The aten graphs of a function after Inductor's last pass, forward and backward, and the sites met.

    Args:
        fn: a function or a module.
        args, kwargs: its arguments.
        train: whether it is differentiated as well.
    """
    graphs: list[Told] = []
    stock: Any = importlib.import_module("torch._inductor.compile_fx")
    passes = stock._recursive_post_grad_passes

    def kept(graph: fx.GraphModule, *rest: Any, **options: Any) -> Any:
        result = passes(graph, *rest, **options)
        graphs.append(told(graph.graph))
        return result

    stock._recursive_post_grad_passes = kept
    try:
        with fresh_compile(), config.patch(**toggles), reporting.isolated() as sites:
            run(torch.compile(fn, backend=passes_only()), fn, args, kwargs, train)
    finally:
        stock._recursive_post_grad_passes = passes
    return graphs, list(sites)


def traced(fn: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """A function as a graph after autograd, of fake tensors."""
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    module = trace_decomposed(lambda *args: (fn(*args),), [mode.from_tensor(x) for x in inputs], mode)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    module.recompile()
    return module
