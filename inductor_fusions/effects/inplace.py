"""Maps a node to the one that holds its current value after in-place writes.

Dynamo's graph is not functional: after `s.masked_fill_(m, x)`, later nodes read `s` and get the result,
because it is the same tensor. The functions here answer as if each reader named the last operation before it
that wrote over the value, as in `softmax(s.masked_fill_(m, x))`. They do not change the graph, except
`rename`.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from .._inductor import remembered
from ..operands import tensor
from .writes import is_in_place, storage


@remembered()
def overwritten(node: fx.Node) -> fx.Node | None:
    """The value that a node overwrites and returns, `x` of `x.add_(y)`; None for any other node."""
    if not is_in_place(node):
        return None
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    if not isinstance(first, fx.Node) or tensor(first) is None or tensor(node) is None:
        return None
    before, after = storage(first), storage(node)
    return first if before == after or before is None or after is None else None


def _names(value: fx.Node) -> list[fx.Node]:
    """The nodes that return one tensor: the node that made it and those that overwrote it, in graph order."""
    root = value
    while (before := overwritten(root)) is not None:
        root = before
    found = [root]
    for name in found:
        found += [user for user in name.users if overwritten(user) is name]
    return sorted(found)


def current(value: fx.Node, reader: fx.Node) -> fx.Node:
    """The node whose result `reader` gets if it names `value`."""
    return [value, *(name for name in _names(value) if name < reader)][-1]


def readers(value: fx.Node) -> list[fx.Node]:
    """The nodes that read the result of a node, by whatever name."""
    names = _names(value)
    if len(names) == 1:
        return list(value.users)
    behind = names[names.index(value) + 1 :]
    last = behind[0] if behind else None
    users = {user for name in names for user in name.users if value < user}
    return sorted(user for user in users if last is None or not last < user)


def inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes whose results a node reads."""
    return list(dict.fromkeys(current(each, node) for each in node.all_input_nodes))


def arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of a node, with the nodes whose results it reads."""
    names = {each: current(each, node) for each in node.all_input_nodes}
    if all(name is now for name, now in names.items()):
        return node.args, node.kwargs
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
    return args, kwargs


def rename(graph: fx.Graph) -> None:
    """Replace each name of an overwritten value by the node that a reader gets; results do not change."""
    for node in graph.nodes:
        source = overwritten(node)
        if source is None or len(source.users) == 1:
            continue
        for user in list(source.users):
            if node < user:
                user.replace_input_with(source, node)
