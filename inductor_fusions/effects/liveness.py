"""Readers of a value in Dynamo's graph, without pure operations whose result is unused.

Dynamo's graph has every operation of the user's code, also those whose result is unused. AOTAutograd leaves
these out, so they read nothing in the code that runs.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import fx

from .._inductor import remembered, value_of, was_erased
from . import inplace
from .modes import name_of
from .writes import is_opaque, may_update_statistics, written

#: Functions of Python and methods that compute a value, and have no operation of their name.
_PURE = frozenset(
    "getitem getattr truediv floordiv and_ or_ invert float half bfloat16 double bool int long type "
    "_get_data_attr".split()
)


def readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read the result of a node, by whatever name, in graph order, without dead ones."""
    return [user for user in inplace.readers(node) if not is_dead(user)]


def only_reader(node: fx.Node) -> fx.Node | None:
    """The only node that reads a result; None if there are several, or none.

    A single reader is returned even if it is dead: then the result is dead as well.
    """
    found = inplace.readers(node)
    if len(found) > 1:
        found = [user for user in found if not is_dead(user)]
    return found[0] if len(found) == 1 else None


def are_read_elsewhere(nodes: Iterable[fx.Node], within: Collection[fx.Node]) -> bool:
    """Whether another node than those of `within` reads the result of one of some nodes."""
    return any(user not in within for node in nodes for user in readers(node))


def is_dead(node: fx.Node, depth: int = 32) -> bool:
    """Whether a node and all of its readers only compute values that are unused."""
    return depth > 0 and is_pure(node) and all(is_dead(user, depth - 1) for user in node.users)


def erase_dead_readers(nodes: Iterable[fx.Node]) -> None:
    """Remove the dead operations on values whose nodes are about to be erased."""
    for node in nodes:
        for user in list(node.users):
            if user in node.users and is_dead(user):
                erase_dead_readers([user])
                user.graph.erase_node(user)


def replace(old: fx.Node, new: fx.Node, between: Sequence[fx.Node]) -> None:
    """Put a node in the place of another one, and remove that with its dead readers.

    Args:
        between: nodes that `old` is computed from; those that nothing else reads are removed as well.
    """
    erase_dead_readers([old])
    old.replace_all_uses_with(new)
    nodes = {old, *between}
    erase_dead_readers(between)  # not before `new` is read, which may read some of them
    for node in sorted(nodes, reverse=True):
        if not was_erased(node) and not node.users:
            node.graph.erase_node(node)


@remembered()
def is_pure(node: fx.Node) -> bool:
    """Whether an operation is known to compute tensors, and neither writes nor draws."""
    if node.op not in ("call_function", "call_method") or not _makes_tensors(node):
        return False
    if node.op == "call_function" and (callable(node.target) and is_opaque(node.target)):
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if written(node) or may_update_statistics(node):
        return False
    name = name_of(node)
    return name in _PURE or name.strip("_") in _PURE or _computes(name)


def _makes_tensors(node: fx.Node) -> bool:
    value = value_of(node)
    parts = value if isinstance(value, (tuple, list)) and value else (value,)
    return all(isinstance(part, torch.Tensor) for part in parts)


@functools.lru_cache(maxsize=4096)
def _computes(name: str) -> bool:
    """Whether each operation of aten of this name is a function of what it is given."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name.startswith("_"):
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return not any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)
