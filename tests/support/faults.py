"""Faults in a compile, or in the first call of what it gave, where a graph holds fused sites."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch import fx

from inductor_fusions import reporting

compile_fx: Any = importlib.import_module("torch._inductor.compile_fx")


class Injected(Exception):
    """A fault of these tests."""


def number(node: fx.Node) -> int | None:
    """Number of the fused site of the pre-grad graph that a node belongs to."""
    found: int | None = node.meta.get("custom", {}).get(reporting.TAG)
    return found


def is_fused(node: fx.Node) -> bool:
    """Whether a node was made by a fusion."""
    return number(node) is not None or node.name.startswith("inductor_fusions_")


def is_backward(graph: fx.Graph) -> bool:
    return any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)


class Fault:
    """Raises at one stage.

    Args:
        stage: "trace", "joint", "post_grad", "lowering", "codegen" or "launch".
        guilty: which node of a fused site spoils a graph.
        backward: whether the graph of the backward is spoiled, not that of the forward.
        make: makes what is raised.
    """

    def __init__(
        self,
        stage: str,
        guilty: Callable[[fx.Node], bool] = is_fused,
        backward: bool = False,
        make: Callable[[str], BaseException] = Injected,
    ) -> None:
        self.stage, self.guilty, self.backward, self.make = stage, guilty, backward, make
        self.raised = 0
        self._spoiled: set[str] = set()

    def _at(self, node: fx.Node) -> None:
        if self.guilty(node):
            self.raised += 1
            raise self.make(f"injected: {self.stage}")

    def _in(self, graph: fx.Graph) -> None:
        if self.stage not in ("trace", "joint") and is_backward(graph) != self.backward:
            return
        for node in graph.nodes:
            self._at(node)

    @contextlib.contextmanager
    def inject(self) -> Iterator[Fault]:
        """Raise inside."""
        with getattr(self, f"_{self.stage}")():
            yield self

    @contextlib.contextmanager
    def _trace(self) -> Iterator[None]:
        symbolic: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        original = symbolic.PropagateUnbackedSymInts.run_node

        def run_node(interpreter: Any, node: fx.Node) -> Any:
            self._at(node)
            return original(interpreter, node)

        with mock.patch.object(symbolic.PropagateUnbackedSymInts, "run_node", run_node):
            yield

    @contextlib.contextmanager
    def _joint(self) -> Iterator[None]:
        original = compile_fx._recursive_joint_graph_passes

        def passes(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            self._in(graph.graph)
            return original(graph, *args, **kwargs)

        with mock.patch.object(compile_fx, "_recursive_joint_graph_passes", passes):
            yield

    @contextlib.contextmanager
    def _post_grad(self) -> Iterator[None]:
        original = compile_fx._recursive_post_grad_passes

        def passes(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            original(graph, *args, **kwargs)
            self._in(graph.graph)

        with mock.patch.object(compile_fx, "_recursive_post_grad_passes", passes):
            yield

    @contextlib.contextmanager
    def _lowering(self) -> Iterator[None]:
        lowering: Any = importlib.import_module("torch._inductor.graph")
        original = lowering.GraphLowering.run_node

        def run_node(graph: Any, node: fx.Node) -> Any:
            if is_backward(node.graph) == self.backward:
                self._at(node)
            return original(graph, node)

        with mock.patch.object(lowering.GraphLowering, "run_node", run_node):
            yield

    @contextlib.contextmanager
    def _codegen(self) -> Iterator[None]:
        lowering: Any = importlib.import_module("torch._inductor.graph")
        original = lowering.GraphLowering.compile_to_module

        def compile_to_module(graph: Any) -> Any:
            self._in(graph.module.graph)
            return original(graph)

        with mock.patch.object(lowering.GraphLowering, "compile_to_module", compile_to_module):
            yield

    @contextlib.contextmanager
    def _launch(self) -> Iterator[None]:
        output: Any = importlib.import_module("torch._inductor.output_code")
        lowering: Any = importlib.import_module("torch._inductor.graph")
        make, original = lowering.GraphLowering.compile_to_module, output.CompiledFxGraph.post_compile

        def compile_to_module(graph: Any) -> Any:
            module = make(graph)
            nodes = graph.module.graph.nodes
            if is_backward(graph.module.graph) == self.backward and any(map(self.guilty, nodes)):
                self._spoiled.add(Path(module.__file__).stem)
            return module

        def refuse(inputs: Any) -> Any:
            self.raised += 1
            inputs.clear()
            raise self.make("injected: launch")

        def post_compile(compiled: Any, *args: Any, **kwargs: Any) -> None:
            original(compiled, *args, **kwargs)
            if compiled.cache_key in self._spoiled:
                compiled.current_callable = refuse

        with (
            mock.patch.object(lowering.GraphLowering, "compile_to_module", compile_to_module),
            mock.patch.object(output.CompiledFxGraph, "post_compile", post_compile),
        ):
            yield
