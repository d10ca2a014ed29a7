"""Adds nodes to a torch-level graph, with fake values and with symbolic sizes as nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..._inductor import computing_fakes, expression, is_dense, known_true, symbol_parts
from ...fusion import Rejected
from . import torch_ops
from .operands import Operand

_COMBINE: dict[str, Any] = {
    "add": operator.add,
    "mul": operator.mul,
    "max": torch.sym_max,
    "min": torch.sym_min,
}


class Builder:
    """Adds nodes in front of one node of a graph.

    Args:
        graph: the graph.
        before: where new nodes go.
        fake_mode: the mode of the graph's fake values.
    """

    def __init__(self, graph: fx.Graph, before: fx.Node, fake_mode: Any) -> None:
        self.graph, self.before, self.fake_mode = graph, before, fake_mode

    def call(self, target: str | Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a tensor method (its name) or of a function; sizes may be symbolic."""
        values = fx.node.map_arg((args, kwargs), torch_ops.value)
        args, kwargs = self._with_size_nodes(args), self._with_size_nodes(kwargs)
        with self.graph.inserting_before(self.before):
            if isinstance(target, str):
                node = self.graph.call_method(target, args, kwargs)
            else:
                node = self.graph.call_function(target, args, kwargs)
        if "stack_trace" in self.before.meta:
            node.meta["stack_trace"] = self.before.meta["stack_trace"]
        with torch.no_grad(), computing_fakes(self.fake_mode):
            if isinstance(target, str):
                node.meta["example_value"] = getattr(values[0][0], target)(*values[0][1:], **values[1])
            else:
                node.meta["example_value"] = target(*values[0], **values[1])
        return node

    def value(self, node: fx.Node) -> torch.Tensor:
        """The fake tensor of a node that was built."""
        found = torch_ops.tensor(node)
        assert found is not None
        return found

    def build(self, operand: Operand) -> fx.Node:
        """The node that holds an operand."""
        node = operand.node
        for method, args in operand.steps:
            node = self.call(method, node, *args)
        return node

    def to(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Cast, where it changes something."""
        return node if self.value(node).dtype == dtype else self.call("to", node, dtype)

    def settled(self, node: fx.Node) -> fx.Node:
        """The value in a buffer that has its strides, of numbers that are known, once for all of its readers.

        Inductor inlines pointwise code into each reader, and a kernel that wants strides of its own is one:
        every layer would write a mask. A call of `as_strided` needs the buffer. That buffer is dense, and
        begins with the value: where the value is a part of another one it is copied first, without what is
        repeated in it. A part that begins elsewhere in dense memory is left, since torch 2.11 forgets where.
        """
        value = self.value(node)
        shape, steps = tuple(value.shape), value.stride()
        repeated = [dim for dim, step in enumerate(steps) if known_true(step == 0) and shape[dim] != 1]
        for dim in repeated:
            node = self.call("narrow", node, dim, 0, 1)
        if not is_dense(self.value(node)):
            node = self.call("clone", node, memory_format=torch.contiguous_format)
        value = self.value(node)
        if not known_true(value.storage_offset() == 0):
            return self.call("expand", node, shape) if repeated else node
        node = self.call(torch.as_strided, node, tuple(value.shape), tuple(value.stride()))
        return self.call("expand", node, shape) if repeated else node

    def number(self, size: Any) -> Any:
        """A size as an argument: an int, or a node that holds a symbolic one.

        Raises:
            Rejected: where no value of the graph holds it.
        """
        if not isinstance(size, torch.SymInt):
            return size
        with self.graph.inserting_before(self.before):
            return self._of_expression(expression(size))

    def _with_size_nodes(self, argument: Any) -> Any:
        if isinstance(argument, torch.SymInt):
            return self.number(argument)
        if isinstance(argument, (list, tuple)):
            return type(argument)(self._with_size_nodes(item) for item in argument)
        if isinstance(argument, dict):
            return {key: self._with_size_nodes(item) for key, item in argument.items()}
        return argument

    def _of_expression(self, wanted: Any) -> Any:
        kind, parts = symbol_parts(wanted)
        if kind == "integer":
            return int(wanted)
        if kind == "symbol":
            return self._of_symbol(wanted)
        if kind not in _COMBINE:
            raise Rejected(f"the symbolic size {wanted} is held by no input of the graph")
        combine = _COMBINE[kind]
        total = self._of_expression(parts[0])
        for part in parts[1:]:
            left, right = total, self._of_expression(part)
            value = combine(torch_ops.value(left), torch_ops.value(right))
            total = self.graph.call_function(combine, (left, right))
            total.meta["example_value"] = value
        return total

    def _of_symbol(self, symbol: Any) -> fx.Node:
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        node: fx.Node
        for node in inputs:
            held = torch_ops.value(node)
            if isinstance(held, torch.SymInt) and expression(held) == symbol:
                return node
        for node in inputs:
            tensor = torch_ops.tensor(node)
            for dim, size in enumerate(tensor.shape if tensor is not None else ()):
                if isinstance(size, torch.SymInt) and expression(size) == symbol:
                    found = self.graph.call_method("size", (node, dim))
                    found.meta["example_value"] = size
                    return found
        raise Rejected(f"the symbolic size {symbol} is held by no input of the graph")
