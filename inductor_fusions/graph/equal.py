"""Nodes of an aten graph that compute the same values twice, as stock leaves them in inference."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .._inductor import remembered

aten = torch.ops.aten

_REDUCTIONS = frozenset({aten.mean.dim, aten.sum.dim_IntList, aten.var_mean.correction, aten.amax.default})
#: How many operations above a node are compared. A norm has about ten.
_MOST_ABOVE = 16


@remembered(lambda node: True)
def first_equal(node: fx.Node) -> fx.Node:
    """The first node that is known to compute the values of `node` by the same operations; or itself."""
    return _first(node, {}, _MOST_ABOVE)


def _first(node: fx.Node, known: dict[fx.Node, fx.Node], steps: int) -> fx.Node:
    if node in known:
        return known[node]
    known[node] = node
    if not steps or not _is_repeatable(node):
        return node

    def seen(given: Any) -> Any:
        return _first(given, known, steps - 1) if isinstance(given, fx.Node) else given

    of = seen(node.all_input_nodes[0])
    own = [*map(seen, pytree.tree_leaves((node.args, node.kwargs)))]
    for user in sorted(of.users):
        if user is node:
            break
        if user.target is not node.target or user.op != node.op:
            continue
        leaves, shape = pytree.tree_flatten((user.args, user.kwargs))
        alike = shape == pytree.tree_structure((node.args, node.kwargs)) and len(leaves) == len(own)
        if alike and all(type(a) is type(b) and a == b for a, b in zip(map(seen, leaves), own, strict=True)):
            known[node] = user
            break
    return known[node]


def _is_repeatable(node: fx.Node) -> bool:
    """Whether an operation on tensors gives the same values each time: an elementwise one, a sum, a view."""
    target = node.target
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if target is operator.getitem or target in _REDUCTIONS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    tags = target.tags
    return torch.Tag.nondeterministic_seeded not in tags and (torch.Tag.pointwise in tags or target.is_view)
