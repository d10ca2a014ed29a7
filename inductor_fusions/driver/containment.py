"""Fusions of other packages: their source, validation of their graphs, rollback. The hash of all sources."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .._inductor import computing_fakes, copied_graph, fake_mode_of, suppress_guards, value_of
from ..decisions import machine
from ..effects.writes import nodes_in
from ..fusion import Fusion
from ..sites import error_text

_PACKAGE = __name__.partition(".")[0]


def is_foreign(fusion: Fusion) -> bool:
    """Whether a fusion is not one of this package, or has a part that is not."""
    return any(name.partition(".")[0] != _PACKAGE for name in _modules(fusion))


def _modules(fusion: Fusion) -> set[str]:
    functions = map(inspect.unwrap, fusion.functions())
    return {str(getattr(each, "__module__", None) or type(each).__module__) for each in functions}


def sources(fusion: Fusion) -> list[Path]:
    """Every Python file of the packages of a fusion, or the one file of a module outside a package.

    Empty if one of them cannot be found.
    """
    found: set[Path] = set()
    for name in _modules(fusion):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is None or not Path(file).is_file():
            return []
        top = importlib.util.find_spec(name.partition(".")[0])
        if top is None or not top.origin or Path(top.origin).name != "__init__.py":
            found.add(Path(file))
        else:
            found.update(Path(top.origin).parent.rglob("*.py"))
    return sorted(found)


class Copy:
    """A copy of a graph and of its nested bodies, to check changes against and to restore."""

    def __init__(self, graph: fx.Graph) -> None:
        self.module = graph.owning_module
        self.graphs: list[tuple[fx.GraphModule, fx.Graph]] = []
        self.bodies: list[tuple[fx.GraphModule, set[str]]] = []
        if isinstance(self.module, fx.GraphModule):
            for module in self.module.modules():
                if isinstance(module, fx.GraphModule):
                    self.graphs.append((module, copied_graph(module.graph)))
                    self.bodies.append((module, set(module._modules)))
        self.inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
        self.outputs = _outputs(graph)
        self.known = {node: node.args for node in graph.nodes}
        self.graph = graph

    def problem(self) -> str:
        """Describes what is wrong with the graph now, or ""."""
        for module, _ in self.graphs:
            try:
                module.graph.lint()
            except Exception as error:
                return error_text(error)
        if [node.name for node in self.graph.nodes if node.op == "placeholder"] != self.inputs:
            return "the inputs of the graph changed"
        return self._wrong_value() or ("" if _outputs(self.graph) == self.outputs else "its outputs differ")

    def _wrong_value(self) -> str:
        """Describes the first changed node that raises with fake tensors, or gives another result; or ""."""
        mode = fake_mode_of(self.graph)
        if mode is None:
            return ""
        with suppress_guards(mode), computing_fakes(mode):
            for node in self.graph.nodes:
                before = self.known.get(node)
                if before == node.args or node.op not in ("call_function", "call_method", "output"):
                    continue
                for old, new in zip(nodes_in(before), nodes_in(node.args), strict=False):
                    # A smaller value may broadcast, so that what is computed from it looks right.
                    if None not in (_shape(old), _shape(new)) and _shape(old) != _shape(new):
                        return f"{new.name} has the shape {_shape(new)}, and {old.name} had {_shape(old)}"
                if node.op == "output":
                    continue
                try:
                    value = _compute(node)
                except _Unknown:
                    continue
                except Exception as error:
                    return f"{node.name} raises {error_text(error)}"
                said = value_of(node)
                if said is None:
                    node.meta["example_value"] = value
                elif _kind(said) != _kind(value):
                    return f"{node.name} is {_kind(value)}, and was {_kind(said)}"
        return ""

    def restore(self) -> None:
        """Replace the graphs by copies of the copies, so that this can be repeated."""
        # Dynamo reads the inputs of the graph that it has handed out, once more.
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node in placeholders:
            if node.name not in self.inputs:
                for user in list(node.users):
                    user.replace_input_with(node, placeholders[-1])
                self.graph.erase_node(node)
        for module, graph in self.graphs:
            module.graph = copied_graph(graph)
        for module, known in self.bodies:
            for name in set(module._modules) - known:
                delattr(module, name)


class _Unknown(Exception):
    """An input has no value to compute with."""


def _compute(node: fx.Node) -> Any:
    def value(argument: fx.Node) -> Any:
        for key in ("example_value", "val"):
            if key in argument.meta:
                return argument.meta[key]
        raise _Unknown

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    with torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _shape(node: fx.Node) -> list[Any] | None:
    value = value_of(node)
    return list(value.shape) if isinstance(value, torch.Tensor) else None


def _outputs(graph: fx.Graph) -> Any:
    """Shape, dtype and device of each output."""
    node = next((node for node in graph.nodes if node.op == "output"), None)
    if node is None:
        return None
    return fx.node.map_arg(node.args, lambda n: _kind(value_of(n)))


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}".removeprefix("torch.")
    if isinstance(value, (list, tuple)):
        return [_kind(item) for item in value]
    return type(value).__name__


@functools.lru_cache
def code_digest(others: tuple[Fusion, ...]) -> str | None:
    """Hash of every source file of the package and of fusions of other packages, and of the versions.

    None if the source of one of the others is not found.
    """
    package = Path(__file__).parents[1]
    files = sorted(path for path in package.rglob("*") if path.suffix in (".py", ".jinja"))
    named = [(path.relative_to(package).as_posix(), path) for path in files]
    for fusion in others:
        found = sources(fusion)
        if not found:
            return None
        top = os.path.commonpath([path.parent for path in found])
        named += [(f"{fusion.name}:{path.relative_to(top).as_posix()}", path) for path in found]
    digest = hashlib.sha256()
    for name, path in named:
        content = path.read_bytes()
        digest.update(f"{len(name)} {len(content)} {name}".encode())
        digest.update(content)
    for name in ("inductor_fusions", "triton"):
        digest.update(f"{name}={machine.version(name)}".encode())
    return digest.hexdigest()
