"""The second product of an adapter, and nodes around it before autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...graph.builder import Builder
from ...graph.dims import selection
from ...graph.search import reached
from ...graph.torch_ops import CASTS, linear_of, read
from ...operands import requires_grad, same_shape, tensor, value
from .adapters import is_low_rank
from .op import LORA_DOWN

#: How far A may be from B, and B from the sum.
MOST_STEPS = 12
#: What may be between A and B.
_POINTWISE = CASTS | frozenset("dropout mul div add exp relu gelu silu tanh sigmoid contiguous".split())


def is_up(node: fx.Node) -> bool:
    """Whether a node is the second product of an adapter."""
    found = linear_of(node)
    if found is None or found[3] is not None:
        return False
    narrow, wide = tensor(found[0]), tensor(node)
    if narrow is None or wide is None or not wide.is_floating_point():
        return False
    rank = narrow.shape[-1]
    return is_low_rank(rank, wide.shape[-1]) and _has_down(found[0], rank)


def _has_down(node: Any, rank: int) -> bool:
    """Whether a narrow matrix is a function of a product with a wide one, or of some columns of one."""

    def before(each: fx.Node) -> list[Any]:
        op, taken, out = read(each), selection(each), tensor(each)
        if taken is not None and taken.dims == [len(taken.index) - 1]:
            return [taken.source]
        sides = [op.input, op["other"]] if op is not None and op.name in _POINTWISE else []
        return [
            x
            for x in sides
            if out is not None and (t := tensor(x)) is not None and same_shape(t.shape, out.shape)
        ]

    for each in reached([node], before, MOST_STEPS):
        # The input's own size may be a symbol, also where the weight has made it known.
        source = linear_of(each)
        if source is not None:
            return is_low_rank(rank, value(source[1]).shape[1 if source[2] else 0])
        if each.target is LORA_DOWN:
            return is_low_rank(rank, value(each.args[1]).shape[1])
    return False


def made(make: Builder, target: str | Callable[..., Any], *args: Any) -> fx.Node:
    """A new call, which takes a gradient where an argument does."""
    node = make.call(target, *args)
    if any(map(requires_grad, args)):
        make.value(node).requires_grad_()
    return node


def cast(make: Builder, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if make.value(node).dtype == dtype else made(make, "to", node, dtype)
