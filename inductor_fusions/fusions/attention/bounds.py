"""Upper bounds of scores: nothing is left above zero where their largest one was subtracted."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from ...graph.dims import Reduction, permutation, picked, reduction_at
from ...graph.torch_ops import CASTS, COPIES, TRANSPOSES, VIEWS, Op, concrete, read
from ...operands import same_shape, tensor
from .aliasing import Mutations

_MOST_STEPS = 16
_SAME_VALUES = CASTS | COPIES | TRANSPOSES | VIEWS | {"getattr", "detach"}


def broadcast_reduction(node: Any, names: Collection[str]) -> Reduction | None:
    """The reduction of scores that a node holds, perhaps broadcast to their shape again."""

    def step(op: Op, appended: bool) -> Any:
        expands = op.name in ("expand", "expand_as", "broadcast_to") and not appended
        return op.input if expands else picked(op)

    return reduction_at(node, names, step)


def nodes_of(found: Reduction, scores: Any) -> tuple[fx.Node, ...]:
    """The nodes that reduce scores, or the same transpose of what they are one of; none if they do not."""
    own = found.of(scores)
    first, second = read(scores), read(found.op.input)
    if own or first is None or second is None or first.input is not second.input:
        return own
    dims = permutation(first)
    return (*found.nodes, second.node) if dims is not None and dims == permutation(second) else ()


def is_at_most(node: Any, bound: float, user: fx.Node, mutations: Mutations) -> bool:
    """Whether no score that a node holds is above a number, as `user` reads it, but for NaN."""
    for _ in range(_MOST_STEPS):
        op = read(node)
        if op is None or op.inplace or mutations.last(node, user) is not None:
            return False
        if op.name == "sub":
            written = isinstance(op.input, fx.Node) and mutations.last(op.input, op.node) is not None
            return bound >= 0 and not written and _subtracts_largest(op)
        if op.name in ("clamp", "clamp_min", "clamp_max"):
            floor, ceiling = concrete(op["min"]), concrete(op["max"])
            if isinstance(ceiling, (int, float)) and ceiling <= bound:
                return True
            if floor is not None and not (isinstance(floor, (int, float)) and floor <= bound):
                return False
        elif op.name not in _SAME_VALUES:
            return False
        node, user = op.input, op.node
    return False


def _subtracts_largest(op: Op) -> bool:
    """Whether the largest of all scores, or of each row, is subtracted from them."""
    scores, other = op.only("input", "other")
    found = broadcast_reduction(other, ("amax", "max"))
    before, after = tensor(scores), tensor(op.node)
    if found is None or before is None or after is None or not same_shape(before.shape, after.shape):
        return False
    over_all = found.dims is None and tensor(found.op.node) is not None
    return bool(nodes_of(found, scores)) and (over_all or (bool(found.dims) and found.keeps))
