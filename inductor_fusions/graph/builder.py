"""Adds nodes to a graph of Dynamo's or of aten operations, with their fake values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._inductor import (
    expression,
    fake_mode_of,
    is_dense,
    known_true,
    makes_a_package,
    needs_python,
    symbol_parts,
    was_erased,
)
from ..operands import repeated_dims, tensor, value
from ..reasons import Reason
from .facts import facts

_COMBINE: dict[str, Any] = {
    "add": operator.add,
    "mul": operator.mul,
    "max": torch.sym_max,
    "min": torch.sym_min,
    "floordiv": operator.floordiv,
}


#: The bits of a float32 number that are left in a number of these dtypes.
KEPT_BITS = {torch.bfloat16: -(1 << 16), torch.float16: -(1 << 13)}


class Builder:
    """Adds nodes in front of one node of a graph. Symbolic sizes among the arguments become nodes.

    Args:
        before: the node in front of which new nodes are inserted.
        like: the node whose `meta` they get; `before` by default.
        kept: the entries of that `meta` which are copied; by default the source line.
    """

    def __init__(
        self, before: fx.Node, like: fx.Node | None = None, kept: tuple[str, ...] = ("stack_trace",)
    ) -> None:
        self.graph, self.before = before.graph, before
        meta = (before if like is None else like).meta
        self.meta = {name: meta[name] for name in kept if name in meta}
        self.key = "val" if "val" in meta else "example_value"
        self.fake_mode, self.fakes = fake_mode_of(self.graph), facts(self.graph).fakes

    def call(self, target: str | Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of a tensor method (its name) or of a function, with its fake value.

        Raises:
            Rejected: no input of the graph has a symbolic size of the arguments; or the call needs Python,
                and a package is made.
            RuntimeError: an argument was erased from the graph. No call is added.
        """
        values: Any = fx.node.map_arg((args, kwargs), _value)
        if target is operator.getitem and isinstance(values[0][0], (tuple, list)):
            found = operator.getitem(*values[0])
        else:
            function = getattr(torch.Tensor, target) if isinstance(target, str) else target
            found = self.fakes.call(self.fake_mode, function, *values)
        return self.given(found, target, *args, **kwargs)

    def given(self, found: Any, target: str | Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call whose fake value is known.

        Raises:
            Rejected: as `call` does.
        """
        if makes_a_package() and needs_python(target, *fx.node.map_arg(args, _value)):
            raise Reason.PACKAGE.left_to_stock(
                "a package of AOTInductor is to run without Python, and the operation is a Python function",
                "nothing; `torch.compile` fuses the site",
            )
        args, kwargs = self._with_size_nodes(args), self._with_size_nodes(kwargs)
        kind = "call_method" if isinstance(target, str) else "call_function"
        with self.graph.inserting_before(self.before):
            node = self.graph.create_node(kind, target, args, kwargs)
        node.meta = {**self.meta, self.key: found}
        if self.key == "val" and isinstance(target, torch._ops.OpOverload):
            node.meta["original_aten"] = target  # Inductor calls the kernel by it
        return node

    def parts(self, target: Callable[..., Any], *args: Any) -> list[fx.Node]:
        """Call a function that returns several tensors; one `getitem` node for each."""
        made = self.call(target, *args)
        return [self.call(operator.getitem, made, i) for i in range(len(made.meta[self.key]))]

    def value(self, node: fx.Node) -> torch.Tensor:
        """The fake tensor of a node."""
        found = value(node)
        return found

    def to(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The node cast to `dtype`, or itself if it has that dtype."""
        if self.value(node).dtype == dtype:
            return node
        return self.call("to" if self.key == "example_value" else _CONVERT, node, dtype)

    def truncated(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A float32 value truncated to the significand of a 16-bit dtype, in float32.

        By bits: Inductor drops a cast to a 16-bit dtype and back where both are in one loop.
        """
        bits = self.call(torch.ops.aten.view.dtype, node, torch.int32)
        bits = self.call(torch.ops.aten.bitwise_and.Scalar, bits, KEPT_BITS[dtype])
        return self.call(torch.ops.aten.view.dtype, bits, torch.float32)

    def settled(self, node: fx.Node) -> fx.Node:
        """The value materialised once for all of its readers, with its strides.

        Inductor inlines pointwise code into each reader, also into a kernel that requires strides: every
        layer would write the same mask again. `as_strided` requires a buffer, which has to be dense and to
        begin with the value. So a part of another tensor is copied first, without its broadcast dims. A part
        of dense memory with a storage offset is returned as it is, because torch 2.11 drops the offset.
        """
        value = self.value(node)
        shape, repeated = tuple(value.shape), repeated_dims(value)
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
        """A size as an argument of a call: an int, or a node that computes a symbolic size.

        Raises:
            Rejected: no input of the graph has the size.
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
            raise Reason.SYMBOLIC.rejected(f"no input of the graph has the symbolic size {wanted}")
        combine = _COMBINE[kind]
        total = self._of_expression(parts[0])
        for part in parts[1:]:
            left, right = total, self._of_expression(part)
            held = combine(_value(left), _value(right))
            total = self.graph.call_function(combine, (left, right))
            total.meta[self.key] = held
        return total

    def _of_symbol(self, symbol: Any) -> fx.Node:
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        node: fx.Node
        for node in inputs:
            held = _value(node)
            if isinstance(held, torch.SymInt) and expression(held) == symbol:
                return node
        for node in inputs:
            found = tensor(node)
            for dim, size in enumerate(found.shape if found is not None else ()):
                if isinstance(size, torch.SymInt) and expression(size) == symbol:
                    made = self.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                    if self.key == "example_value":
                        made.op, made.target = "call_method", "size"
                    made.meta[self.key] = size
                    return made
        raise Reason.SYMBOLIC.rejected(f"no input of the graph has the symbolic size {symbol}")


_CONVERT: Any = torch.ops.prims.convert_element_type.default


def _value(node: Any) -> Any:
    """The fake value of a node; any other argument as it is."""
    if not isinstance(node, fx.Node):
        return node
    if was_erased(node):
        raise RuntimeError(f"{node} was replaced by another fusion and is no longer in the graph")
    return node.meta.get("example_value", node.meta.get("val"))


def substitute(old: fx.Node, new: fx.Node) -> None:
    """Replace `old` by `new` in all users, and erase the nodes that are left without users."""
    old.replace_all_uses_with(new)
    # A dict, because a node with two users is found twice.
    dead = {old: None}
    while dead:
        node, _ = dead.popitem()
        if node.users or node.op != "call_function" or was_erased(node):
            continue
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        dead.update(dict.fromkeys(inputs))
