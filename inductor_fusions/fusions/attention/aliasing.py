"""Which values of a torch-level graph are overwritten, and when.

Dynamo's graph is not functional: `scores += mask` and `buffer[i] = x` are nodes. A rewrite that reads a
value later than the graph did must know that nobody overwrites it in between, and a proof about a
value must know that the value is the one that its node made.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from ..._inductor import is_call_of_numpy, known_true, unbatched
from . import torch_ops

_MUTATING_FUNCTIONS = frozenset({"setitem", "__setitem__", "delitem", "set_", "copy_"})
#: `x += y` and the like, as functions.
_AUGMENTED = frozenset(
    getattr(operator, f"i{name}")
    for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul concat".split()
)


class Mutations:
    """The mutating nodes of one graph, with the storages that they write to."""

    def __init__(self, graph: fx.Graph) -> None:
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._writes: list[tuple[fx.Node, object]] = []
        self._targets: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            self._targets[node] = written(node)
            for target in self._targets[node]:
                self._writes.append((node, storage(target)))

    def touch(self, node: fx.Node, ignore: Iterable[fx.Node] = ()) -> bool:
        """Whether any node of the graph, but those ignored, writes to the storage of `node`."""
        if not self._writes:
            return False
        skip, mine = set(ignore), storage(node)
        return any(writer not in skip and _may_alias(mine, other) for writer, other in self._writes)

    def after(self, node: fx.Node) -> bool:
        """Whether the storage of `node` is written after it."""
        return self.last(node, None) is not None

    def last(self, node: fx.Node, before: fx.Node | None) -> fx.Node | None:
        """The last node that writes to the storage of `node`, after it and before another (or the end)."""
        if not self._writes:
            return None
        mine, low = storage(node), self._order.get(node, -1)
        high = len(self._order) if before is None else self._order.get(before, len(self._order))
        found = [w for w, other in self._writes if low < self._order[w] < high and _may_alias(mine, other)]
        return found[-1] if found else None

    def targets(self, writer: fx.Node) -> list[fx.Node]:
        """What a node overwrites."""
        return self._targets.get(writer, [])

    def between(self, node: fx.Node, first: fx.Node, last: fx.Node, ignore: Iterable[fx.Node] = ()) -> bool:
        """Whether the storage of `node` is written after it and `first`, and before `last`."""
        if not self._writes:
            return False
        skip, mine = set(ignore), storage(node)
        low = max(self._order.get(first, -1), self._order.get(node, -1))
        high = self._order.get(last, len(self._order))
        return any(
            low < self._order[writer] <= high and writer not in skip and _may_alias(mine, other)
            for writer, other in self._writes
        )


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node overwrites."""
    if node.op not in ("call_function", "call_method"):
        return []
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target._schema)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name)._schema for name in target.overloads()]
        return list(dict.fromkeys(n for schema in overloads for n in _written_by_schema(node, schema)))
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _written_by_bodies(node)
    if is_call_of_numpy(target):
        return list(node.all_input_nodes)
    found: list[fx.Node] = []
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    operation = torch_ops.read(node)
    if operation is not None and adds_nothing(operation):
        return []
    inplace = (operation is not None and operation.inplace) or torch_ops.told_to_overwrite(node)
    inplace |= target in _AUGMENTED
    if not inplace and (operation is None or operation.name not in torch_ops.SIGNATURES):
        # Any other method or function that ends in one underscore, and setitem.
        inplace = name in _MUTATING_FUNCTIONS or (name.endswith("_") and not name.endswith("__"))
    if inplace and node.args:
        found.extend(_nodes(node.args[0]))
    found.extend(_nodes(node.kwargs.get("out")))
    return found


def _written_by_schema(node: fx.Node, schema: torch.FunctionSchema) -> list[fx.Node]:
    found: list[fx.Node] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.kwargs.get(argument.name, node.args[i] if i < len(node.args) else None)
            found.extend(_nodes(given))
    return found


def _written_by_bodies(node: fx.Node) -> list[fx.Node]:
    """All operands of a higher-order operation, unless it runs graphs of which none overwrites an input."""
    owner = node.graph.owning_module
    bodies = [getattr(owner, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
    graphs = [body.graph for body in bodies if isinstance(body, fx.GraphModule)]
    if graphs and not any(map(_overwrites_an_input, graphs)):
        return []
    return [n for n in node.all_input_nodes if torch_ops.tensor(n) is not None]


def _overwrites_an_input(graph: fx.Graph) -> bool:
    inputs = {storage(node) for node in graph.nodes if node.op == "placeholder"}
    targets = (storage(target) for node in graph.nodes for target in written(node))
    return any(target is None or target in inputs for target in targets)


def adds_nothing(operation: torch_ops.Op) -> bool:
    """Whether an in-place operation leaves integers as they are: `x += 0`."""
    value, other = torch_ops.tensor(operation.node), torch_ops.concrete(operation["other"])
    return (
        operation.name in ("add", "sub")
        and value is not None
        and not value.is_floating_point()
        and isinstance(other, (int, torch.SymInt))
        and known_true(other == 0)
    )


def name_overwritten_values(graph: fx.Graph) -> None:
    """Let every reader of a value after an in-place operation on it read the result of that operation.

    The result is the same tensor: `s.masked_fill_(m, x); softmax(s)` becomes a chain of uses, as
    `s = s.masked_fill_(m, x); softmax(s)` already is.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        op = torch_ops.read(node)
        if op is None or not op.inplace or op.name not in torch_ops.SIGNATURES or op.name == "getitem":
            continue
        source, value = op.input, torch_ops.tensor(node)
        if isinstance(source, fx.Node) and value is not None and source is not node and len(source.users) > 1:
            for user in list(source.users):
                if order[user] > order[node]:
                    user.replace_input_with(source, node)


def _nodes(argument: object) -> list[fx.Node]:
    if isinstance(argument, fx.Node):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [n for item in argument for n in _nodes(item)]
    return []


def storage(node: fx.Node) -> object:
    """Identity of the memory behind a node's value; None where it is not known."""
    tensor = torch_ops.tensor(node)
    if tensor is None:
        return None
    try:
        return unbatched(tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _may_alias(first: object, second: object) -> bool:
    return first is None or second is None or first == second
