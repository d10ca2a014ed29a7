"""Graphs of the mods of flex attention."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...graph.builder import Builder
from .structure import BATCH, HEAD, KEY, QUERY


class Body:
    """The graph of a mod: a function of one score, or of one (batch, head, query, key).

    Args:
        outer: adds nodes to the graph around it.
        scored: whether the first argument is the score.
    """

    def __init__(self, outer: Builder, scored: bool, device: torch.device) -> None:
        self.outer, self.graph, self.device = outer, fx.Graph(), device
        self.score = self.graph.placeholder("score") if scored else None
        names = {BATCH: "b", HEAD: "h", QUERY: "q_idx", KEY: "kv_idx"}
        self.index: dict[int, fx.Node] = {dim: self.graph.placeholder(name) for dim, name in names.items()}
        self.captured: list[fx.Node] = []
        self._held: dict[fx.Node, fx.Node] = {}
        self._numbers: dict[fx.Node, fx.Node] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if isinstance(target, str):
            return self.graph.call_method(target, args, kwargs)
        return self.graph.call_function(target, args, kwargs)

    def number(self, size: Any) -> Any:
        """A number; a symbolic one is captured, as a tensor: not every lowering takes a number."""
        found = self.outer.number(size)
        if not isinstance(found, fx.Node):
            return found
        if found not in self._numbers:
            # A product, because AOTAutograd keeps symbolic numbers in these.
            one = self.outer.call(torch.ones, (), dtype=torch.int64, device=self.device)
            self._numbers[found] = self.outer.call(torch.mul, one, found)
        return self.capture(self._numbers[found])

    def capture(self, node: fx.Node) -> fx.Node:
        """A value of the outer graph, as an argument of the mod."""
        if node not in self._held:
            last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
            with self.graph.inserting_after(last):
                self._held[node] = self.graph.placeholder(f"captured_{len(self.captured)}")
            self.captured.append(node)
        return self._held[node]

    def load(self, node: fx.Node, index: list[Any]) -> Any:
        """The element of an outer tensor. Mods index with tensors alone: other dims are dropped."""
        shape = self.outer.value(node).shape
        for dim in reversed(range(len(shape))):
            if not isinstance(index[dim], fx.Node) and not known_true(shape[dim] == 1):
                node = self.outer.call("select", node, dim, index[dim])
                index = [*index[:dim], *index[dim + 1 :]]
        shape = self.outer.value(node).shape
        kept = [d for d, size in enumerate(shape) if not known_true(size == 1)]
        if len(kept) < len(shape):
            node = self.outer.call("reshape", node, tuple(shape[d] for d in kept))
        if not kept:
            return self.capture(node)
        return self.call(operator.getitem, self.capture(node), tuple(index[d] for d in kept))

    def load_score(self, node: fx.Node) -> Any:
        """The element of a tensor on (batch, heads, queries, keys) for this score."""
        return self.load(node, [self.index[dim] for dim in (BATCH, HEAD, QUERY, KEY)])

    def finish(self, result: Any, name: str) -> tuple[fx.Node, tuple[fx.Node, ...]]:
        """The body as an attribute of the outer graph, and what it captures."""
        self.graph.output(result)
        owner = self.outer.graph.owning_module
        assert owner is not None
        count = 0
        while hasattr(owner, f"{name}_{count}"):
            count += 1
        name = f"{name}_{count}"
        setattr(owner, name, fx.GraphModule({}, self.graph))
        with self.outer.graph.inserting_before(self.outer.before):
            node = self.outer.graph.get_attr(name)
        return node, tuple(self.captured)
