"""In-place writes in Dynamo's torch-level graph, which is not functional.

Whether a node writes is known from its name, its schema, an argument such as `out`, or the graphs that it
runs. If none of these tells, it may write to all of its inputs.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .._inductor import remembered, value_of, with_memory
from ..operands import tensor
from ..reasons import Reason
from .modes import Modes, name_of

#: `operator.iadd` and the like, and their names as methods.
_IN_PLACE = frozenset(
    {operator.setitem, operator.delitem, operator.iadd, operator.iand, operator.iconcat, operator.ifloordiv,
     operator.ilshift, operator.imatmul, operator.imod, operator.imul, operator.ior, operator.ipow,
     operator.irshift, operator.isub, operator.itruediv, operator.ixor}
)  # fmt: skip
_METHODS_IN_PLACE = frozenset(f"__{function.__name__}__" for function in _IN_PLACE) | {"__idiv__"}
#: Functions whose names end in an underscore because they would be keywords of Python otherwise.
_KEYWORDS = frozenset({operator.and_, operator.is_, operator.not_, operator.or_})
#: Packages whose functions say by name or argument that they write; a call of any other may do anything.
_KNOWN_PACKAGES = frozenset(
    {"torch", "operator", "_operator", "builtins", "math", "einops", "inductor_fusions"}
)
#: Functions of Dynamo's own that only read, by name; others of its own run NumPy, or what the user wrote.
_READ_BY_DYNAMO = frozenset(
    {"numpy_attr_wrapper", "untyped_storage_size", "_register_hook_trampoline", "prim_to_local",
     "prim_redistribute", "prim from_local"}
)  # fmt: skip


# -- what a node writes to ---------------------------------------------------------------------------------


def written(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node may write to; all of its inputs if that is unknown.

    Running statistics of normalisations are left out: see `may_update_statistics`.
    """
    # Not remembered, because rewrites change bodies as well.
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _written_by_bodies(node)
    return list(_written(node))


@remembered()
def _written(node: fx.Node) -> list[fx.Node]:
    target: Any = node.target
    if node.op == "call_module":
        return _tensors(node.all_input_nodes)
    if node.op not in ("call_function", "call_method"):
        return []
    found = _first(node) if is_in_place(node) else []
    operation = _operation(target)
    if operation is not None:
        found += _written_by_schema(node, operation)
    if operation is not target:
        found += nodes_in(_given(node, "out"))
        if node.op == "call_function" and (is_opaque(target) or _given(node, "max_norm")):
            found += _tensors(node.all_input_nodes)
    return list(dict.fromkeys(found))


def is_in_place(node: fx.Node) -> bool:
    """Whether a call says by its name or by `inplace=True` that it writes over its first argument."""
    if node.op == "call_method":
        return _writes_by_name(str(node.target))
    if node.op != "call_function":
        return False
    return _is_in_place(node.target) or is_told_to_overwrite(node)


@functools.lru_cache(maxsize=4096)
def _is_in_place(function: Any) -> bool:
    """Whether a function says so by its name."""
    name = getattr(function, "__name__", "").partition(".")[0]
    return function in _IN_PLACE or (function not in _KEYWORDS and _writes_by_name(name))


def may_update_statistics(node: fx.Node) -> bool:
    """Whether a normalisation has more than one input: perhaps statistics, which it updates."""
    return "norm" in name_of(node) and len(node.all_input_nodes) > 1


def is_told_to_overwrite(node: fx.Node) -> bool:
    """Whether a function such as `F.relu` is told `inplace=True`, by name or by position."""
    return node.op == "call_function" and bool(_given(node, "inplace"))


@functools.lru_cache(maxsize=4096)
def _writes_by_name(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _METHODS_IN_PLACE


def _operation(target: Any) -> Any:
    """The operation of torch that is called, itself or by the function in C of its name; None of others."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return target
    module = getattr(target, "__module__", None)
    if isinstance(target, types.BuiltinFunctionType) and str(module).partition(".")[0] == "torch":
        return _of_aten(target.__name__)
    return None


@functools.lru_cache(maxsize=4096)
def _of_aten(name: str) -> Any:
    return getattr(torch.ops.aten, name, None)


@functools.lru_cache(maxsize=4096)
def _declared(operation: Any) -> tuple[tuple[int | None, torch.Argument], ...]:
    """The arguments that an operation, or any of its overloads, is declared to write to, with positions."""
    packet = isinstance(operation, torch._ops.OpOverloadPacket)
    overloads = [getattr(operation, name) for name in operation.overloads()] if packet else [operation]
    return tuple(
        (None if argument.kwarg_only else i, argument)
        for overload in overloads
        for i, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written_by_schema(node: fx.Node, operation: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    for i, argument in _declared(operation):
        given = node.kwargs.get(argument.name, node.args[i] if i is not None and i < len(node.args) else None)
        # Overloads for lists, such as those of `sort`, are not meant where a tensor is given.
        if not (isinstance(argument.type, torch.ListType) and tensor(given) is not None):
            found += nodes_in(given)
    return found


def _written_by_bodies(node: fx.Node) -> list[fx.Node]:
    """All operands of a higher-order operation, unless it runs graphs of which none overwrites an input."""
    bodies = [graph_of(x) for x in node.all_input_nodes if x.op == "get_attr"]
    graphs = [body for body in bodies if body is not None]
    if graphs and not any(map(_overwrites_an_input, graphs)):
        return []
    return _tensors(node.all_input_nodes)


def graph_of(attribute: fx.Node) -> fx.Graph | None:
    """The graph that an attribute holds, as a higher-order operation is given it; None if it holds none."""
    found: Any = attribute.graph.owning_module
    for name in str(attribute.target).split("."):
        found = getattr(found, name, None)
    return found.graph if isinstance(found, fx.GraphModule) else None


def _overwrites_an_input(graph: fx.Graph) -> bool:
    inputs = [storage(node) for node in _tensors(node for node in graph.nodes if node.op == "placeholder")]
    targets = [storage(target) for node in graph.nodes for target in written(node)]
    return any(may_alias(target, mine) for target in targets for mine in inputs)


def is_opaque(function: Callable[..., Any]) -> bool:
    """Whether a function may do anything: one of another package, or one of Dynamo that runs user code."""
    module = getattr(function, "__module__", None) or "torch"
    if module.startswith("torch._dynamo."):
        return getattr(function, "__name__", "") not in _READ_BY_DYNAMO
    return module.partition(".")[0] not in _KNOWN_PACKAGES


def _first(call: fx.Node) -> list[fx.Node]:
    """The nodes in the first argument, or in all where they are given by their names."""
    return nodes_in(call.args[0] if call.args else call.all_input_nodes)


def _given(call: fx.Node, name: str) -> Any:
    """An argument of a call of a function by its name, given by position or keyword; else None."""
    if name in call.kwargs:
        return call.kwargs[name]
    position = _position(call.target, name)
    return call.args[position] if position is not None and position < len(call.args) else None


@functools.lru_cache(maxsize=4096)
def _position(function: Any, name: str) -> int | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    return names.index(name) if name in names else None


def nodes_in(argument: Any) -> list[fx.Node]:
    """The nodes in an argument of a call, nested or not."""
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return found


def _tensors(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes that may be or hold tensors: neither numbers nor the graphs of an operation."""

    def may_be(node: fx.Node) -> bool:
        value = value_of(node)
        if value is None:
            return node.op != "get_attr" or graph_of(node) is None
        return isinstance(value, (torch.Tensor, tuple, list, dict))

    return [node for node in nodes if may_be(node)]


# -- memory ------------------------------------------------------------------------------------------------


def storage(node: fx.Node) -> object:
    """Identity of the memory of a node's value; None if it is unknown."""
    value = tensor(node)
    return None if value is None else memory(value)


def memory(value: torch.Tensor) -> object:
    """Identity of the memory of a fake value; None if it is unknown."""
    held = with_memory(value)
    if held is None:
        return None
    try:
        return held.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def memory_chain(node: fx.Node) -> list[fx.Node]:
    """A node, what it is a view of, and so on up to what made the memory."""
    chain, own = [node], storage(node)
    while own is not None:
        viewed = [each for each in chain[-1].all_input_nodes if storage(each) == own]
        if not viewed:
            break
        chain.append(viewed[0])
    return chain


def may_alias(first: object, second: object) -> bool:
    """Whether two values may share memory, given their identities from `storage`."""
    return first is None or second is None or first == second


# -- checks for an operation that replaces several nodes ---------------------------------------------------


def effects(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that do more than compute a value, in order: those that the checks below read.

    They stay valid until such a node is added.
    """
    return [node for node in graph.nodes if may_update_statistics(node) or written(node)]


def check_between(
    nodes: Collection[fx.Node],
    last: fx.Node,
    where: str,
    modes: Modes,
    known: Sequence[fx.Node],
    read: Collection[fx.Node] | None = None,
) -> None:  # fmt: skip
    """Refuse if something happens between the nodes that an operation replaces, in Dynamo's graph.

    That is a write in place after the first of `nodes`, or another gradient mode at one of them than at
    `last`. A mode that is entered and left in between does not count; nor does the mode at a node that
    computes indices, which have no gradient.

    Args:
        nodes: the replaced nodes; nothing may happen after the first of them.
        last: the last replaced node, where the operation reads its operands.
        where: between what and what this is, for the reason.
        known: the `effects` of the graph.
        read: what the operation reads later than the nodes did: only writes to this memory count. None: every
            write counts.
    """
    end = modes.at(last)
    for node in nodes:
        value, state = tensor(node), modes.at(node)
        differs = (state.gradients, state.inference) != (end.gradients, end.inference)
        if differs and value is not None and value.is_floating_point():
            raise Reason.MODE.rejected(f"grad mode changes between {where}")
    check_writes(nodes, last, where, known, read)


def check_writes(
    nodes: Collection[fx.Node],
    last: fx.Node,
    where: str,
    known: Sequence[fx.Node],
    read: Collection[fx.Node] | None = None,
) -> None:
    """As `check_between`, of writes alone."""
    first = min(nodes)
    held = None if read is None else [storage(node) for node in read]
    for node in known:
        if not node < last:
            return
        if node < first:
            continue
        targets = [storage(target) for target in written(node)]
        if held is not None:
            targets = [target for target in targets if any(may_alias(target, each) for each in held)]
        if targets or _writes_statistics(node, {*nodes, last}):
            raise Reason.OVERWRITTEN.rejected(f"{node.name} writes in place between {where}")


def check_kept(operands: Collection[fx.Node], last: fx.Node, known: Sequence[fx.Node]) -> None:
    """Refuse if an operand is overwritten later in Dynamo's graph.

    For an operation that saves its operands for the backward: the nodes that it replaces need not save them.

    Args:
        last: the last node that is replaced.
        known: the `effects` of the graph.
    """
    kept = [storage(node) for node in operands]
    for node in known:
        if last < node and any(may_alias(storage(other), each) for other in written(node) for each in kept):
            raise Reason.OVERWRITTEN.rejected(
                f"{node.name} overwrites an operand that is saved for the backward"
            )


def _writes_statistics(call: fx.Node, reads: Collection[fx.Node]) -> bool:
    """Whether a normalisation updates statistics that are in the memory of what others read."""
    if not may_update_statistics(call):
        return False
    updated = {storage(node) for node in call.all_input_nodes if node not in call.args[:1]} - {None}
    return any(storage(x) in updated for node in reads for x in (node, *node.all_input_nodes))
