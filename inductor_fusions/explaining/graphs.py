"""Snapshots of a graph before and after the fusions, as lines of text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._dtype_abbrs import dtype_abbrs

from .._inductor import is_backward, module_path, source_line, value_of
from ..driver.watching import Watcher
from ..sites import Site, place

#: At most so many characters of the arguments of an operation are kept.
_LONG = 160


@dataclass
class Line:
    """One node of a graph.

    Attributes:
        operation: what it calls; "input" or "output".
        arguments: as text, with the names of other nodes.
        shape: dtype and shape of its value, such as "f32[2, 8, 16]", or "".
        module: path of the module that it belongs to.
        source: the user's line, as "file:line in function".
        depth: 0, or more in the body of a nested region.
        site: index of the site in `Pair.sites` that the node belongs to, or None.
        dead: nobody reads it any more; Inductor takes it away after the pass.
    """

    name: str
    operation: str
    arguments: str
    uses: tuple[str, ...]
    shape: str
    module: str
    source: str
    depth: int = 0
    site: int | None = None
    dead: bool = False


@dataclass
class Pair:
    """One graph before and after a pass.

    Attributes:
        stage: "pre_grad" or "post_grad".
        backward: whether it is the graph of a backward.
        sites: the candidates that the pass met.
    """

    stage: str
    backward: bool = False
    before: list[Line] = field(default_factory=list)
    after: list[Line] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)

    @property
    def title(self) -> str:
        """A title for people."""
        if self.stage == "pre_grad":
            return "Dynamo's graph, before autograd"
        return "aten graph of the backward" if self.backward else "aten graph of the forward"


class Recorder(Watcher):
    """Keeps every graph that a pass reads, before and after."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self._lines: dict[fx.Node, Line] = {}
        self._fused: list[tuple[Site, list[str], list[fx.Node]]] = []

    def mark(self) -> int:
        return len(self.pairs)

    def take_back(self, mark: int) -> list[Pair]:
        told, self.pairs[mark:] = self.pairs[mark:], []
        return told

    def put_back(self, told: list[Pair]) -> None:
        self.pairs += told

    def begins(self, stage: str, graph: fx.Graph) -> None:
        self._lines = dict(_lines(graph))
        self._fused = []
        self.pairs.append(Pair(stage, is_backward(graph), list(self._lines.values())))

    def fused(self, site: Site, removed: Sequence[fx.Node], added: Sequence[fx.Node]) -> None:
        self._fused.append((site, [node.name for node in removed if node in self._lines], list(added)))
        for node in removed:
            if node in self._lines:
                self._lines[node].site = len(self._fused) - 1

    def ends(self, stage: str, graph: fx.Graph, sites: Sequence[Site]) -> None:
        pair = self.pairs[-1]
        pair.sites = list(sites)
        if not sites:
            pair.before.clear()
            return
        # In `fused` sites are numbered as they were fused, and here as they were met.
        index = {number: _position(site, sites) for number, (site, _, _) in enumerate(self._fused)}
        for line in pair.before:
            line.site = index[line.site] if line.site is not None else None
        after = dict(_lines(graph))
        for number, (site, _, added) in enumerate(self._fused):
            for node in added:
                if node in after:
                    after[node].site, after[node].module = index[number], site.module
        for node in _dead(graph):
            if node in after:
                after[node].dead = True
        pair.after = list(after.values())
        missed = {site.node: i for i, site in enumerate(sites) if site.verdict != "fused"}
        for line in (*pair.before, *pair.after):
            if line.site is None:
                line.site = missed.get(line.name)


def _position(site: Site, sites: Sequence[Site]) -> int | None:
    return next((i for i, other in enumerate(sites) if other is site), None)


def _lines(graph: fx.Graph, depth: int = 0) -> Iterator[tuple[fx.Node, Line]]:
    """The nodes with their lines; the lines of a nested body follow the first node that refers to it."""
    for node in graph.nodes:
        if node.op == "get_attr":
            body = _attribute(graph, str(node.target))
            if isinstance(body, fx.GraphModule):
                yield node, _line(node, depth)
                yield from _lines(body.graph, depth + 1)
                continue
        yield node, _line(node, depth)


def _attribute(graph: fx.Graph, path: str) -> Any:
    found: Any = graph.owning_module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _line(node: fx.Node, depth: int) -> Line:
    operations = {"placeholder": "input", "output": "output", "get_attr": "attribute"}
    operation = operations.get(node.op) or _operation(node)
    arguments = "" if node.op == "placeholder" else short(_arguments(node))
    return Line(
        name=node.name,
        operation=operation,
        arguments=arguments if len(arguments) <= _LONG else arguments[: _LONG - 1] + "…",
        uses=tuple(n.name for n in node.all_input_nodes),
        shape=_shape(value_of(node)),
        module=module_path(node),
        source=place(source_line(node)),
        depth=depth,
    )


def _operation(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return f".{target}"
    if hasattr(target, "_overloadpacket"):
        return str(target)
    return str(getattr(target, "__name__", target))


def _arguments(node: fx.Node) -> str:
    parts = [_argument(a) for a in node.args]
    parts += [f"{name}={_argument(a)}" for name, a in node.kwargs.items()]
    return ", ".join(parts)


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_argument(v) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_argument(v)}" for k, v in value.items()) + "}"
    return str(value) if isinstance(value, (torch.dtype, torch.device)) else repr(value)


def short(text: str) -> str:
    """Names of parameters as the module has them: "encoder.layer.0.query.weight"."""

    def path(found: re.Match[str]) -> str:
        return re.sub(r"_(?:modules|parameters|buffers)_", ".", f"_{found[1]}").strip("._")

    return re.sub(r"\bl_[A-Za-z]*?_?((?:modules|parameters|buffers)_\w+)", path, text)


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{dtype_abbrs[value.dtype]}[{', '.join(map(str, value.shape))}]"


def _dead(graph: fx.Graph) -> list[fx.Node]:
    """Nodes that only dead nodes read, and that change nothing."""
    dead: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        writes = name.endswith("_") or name in _WRITES or "mode" in name or "autocast" in name
        pure = node.op in ("call_function", "call_method") and not node.is_impure() and not writes
        if pure and all(user in dead for user in node.users):
            dead.add(node)
    return list(dead)


_WRITES = frozenset("iadd isub imul itruediv setitem _set_grad_enabled".split())
