"""Faults in a compile, or in the first call of what it gave, where a graph holds fused sites."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import fx

from inductor_fusions.tags import is_ours

compile_fx: Any = importlib.import_module("torch._inductor.compile_fx")


class Injected(Exception):
    """A fault of these tests."""


def is_fused(node: fx.Node) -> bool:
    """Whether a node was made by a fusion."""
    return is_ours(node) or node.name.startswith("inductor_fusions_")


def is_backward(graph: fx.Graph) -> bool:
    return any(node.op == "placeholder" and node.name.startswith("tangents") for node in graph.nodes)


def nothing(*_: Any) -> None:
    pass


def around(
    owner: Any, name: str, before: Callable[..., None] = nothing, after: Callable[..., None] = nothing
) -> AbstractContextManager[Any]:
    """Inside, a function does something before and after it, with its positional arguments."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        found = original(*args, **kwargs)
        after(*args)
        return found

    return mock.patch.object(owner, name, call)


class Fault:
    """Raises at one stage.

    Args:
        stage: "trace", "joint", "post_grad", "lowering", "codegen" or "launch".
        guilty: which node of a fused site spoils a graph.
        backward: whether the graph of the backward is spoiled, not that of the forward.
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

    def _trace(self) -> AbstractContextManager[Any]:
        symbolic: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        return around(symbolic.PropagateUnbackedSymInts, "run_node", before=lambda _, node: self._at(node))

    def _joint(self) -> AbstractContextManager[Any]:
        return around(
            compile_fx, "_recursive_joint_graph_passes", before=lambda graph, *_: self._in(graph.graph)
        )

    def _post_grad(self) -> AbstractContextManager[Any]:
        return around(
            compile_fx, "_recursive_post_grad_passes", after=lambda graph, *_: self._in(graph.graph)
        )

    def _lowering(self) -> AbstractContextManager[Any]:
        def before(_: Any, node: fx.Node) -> None:
            if is_backward(node.graph) == self.backward:
                self._at(node)

        lowering: Any = importlib.import_module("torch._inductor.graph")
        return around(lowering.GraphLowering, "run_node", before)

    def _codegen(self) -> AbstractContextManager[Any]:
        lowering: Any = importlib.import_module("torch._inductor.graph")
        return around(
            lowering.GraphLowering, "compile_to_module", before=lambda graph: self._in(graph.module.graph)
        )

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
