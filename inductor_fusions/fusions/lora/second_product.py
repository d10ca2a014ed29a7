"""The second product of an adapter, and nodes around it before autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...graph.builder import Builder
from ...graph.torch_ops import CASTS, linear_of, read
from ...operands import same_shape, tensor
from .adapters import is_low_rank
from .op import LORA_DOWN

#: How far A may be from B, and B from the sum.
MOST_STEPS = 12
#: What may be between A and B.
_POINTWISE = CASTS | frozenset("dropout mul div relu gelu silu tanh sigmoid contiguous".split())


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
    """Whether a narrow matrix is a function of a product with a wide one."""
    for _ in range(MOST_STEPS):
        source = linear_of(node)
        read_before = isinstance(node, fx.Node) and node.target is LORA_DOWN
        x = tensor(source[0] if source is not None else node.args[0] if read_before else None)
        if x is not None:
            return is_low_rank(rank, x.shape[-1])
        op = read(node)
        if op is None or op.name not in _POINTWISE:
            return False
        sides, out = (op.input, op["other"]), tensor(node)
        if out is None:
            return False
        whole = [x for x in sides if (found := tensor(x)) is not None and same_shape(found.shape, out.shape)]
        node = whole[0] if len(whole) == 1 else None
    return False


def made(make: Builder, target: str | Callable[..., Any], *args: Any) -> fx.Node:
    """A new call, which takes a gradient where an argument does."""
    node = make.call(target, *args)
    if any((found := tensor(each)) is not None and found.requires_grad for each in args):
        make.value(node).requires_grad_()
    return node


def cast(make: Builder, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if make.value(node).dtype == dtype else made(make, "to", node, dtype)
