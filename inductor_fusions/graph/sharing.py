"""Which nodes of an aten graph share memory: views, and the parts of a split."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from .products import kind


def is_view(node: fx.Node) -> bool:
    """Whether a node has no memory of its own: a view, all parts of a split, or one of them."""
    own = kind(node)
    if own.view or own.split or node.target is not operator.getitem:
        return own.view or own.split
    return isinstance(node.args[0], fx.Node) and kind(node.args[0]).split


def owner(node: fx.Node) -> fx.Node:
    """The node in whose memory a node is; itself if it is no view."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads the memory of a node, or a part of it."""
    for user in node.users:
        if is_view(user) and user.args[0] is node:
            yield from readers(user)
        else:
            yield user
