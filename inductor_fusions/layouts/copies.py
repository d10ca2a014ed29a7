"""Copies as operations: one stays until it is known what is saved, one gives a gradient strides."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .. import _inductor
from .._inductor import known_true
from ..graph.builder import Builder
from ..lowering import define
from ..operands import tensor


def _own(x: torch.Tensor) -> torch.Tensor:
    """x in memory of its own, contiguous. A clone would be removed before it is known what is saved."""
    return x.clone(memory_format=torch.contiguous_format)


#: Graphs call it until they are partitioned; then `release` replaces most calls by clones.
OWN = define("own", _own, lambda x: x.new_empty(x.shape), backward=lambda ctx, dy: dy)


def _call_clone(x: Any) -> Any:
    """A call of aten's: Inductor might write a copy that it generates over x, and lay it out as it likes."""
    return _inductor.call_eagerly(torch.ops.aten.clone.default, x, memory_format=torch.contiguous_format)


_inductor.register_lowering_when_loaded(OWN, _call_clone)


def _even(x: torch.Tensor) -> torch.Tensor:
    """x, whose gradient has the strides of x."""
    return x.clone()


def _even_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.order = dense_order(inputs[0]) or list(range(inputs[0].dim()))


def _even_gradient(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    back = [ctx.order.index(dim) for dim in range(dy.dim())]
    return dy.permute(ctx.order).contiguous().permute(back)


EVEN = define("even", _even, torch.empty_like, setup=_even_setup, backward=_even_gradient)
_inductor.register_lowering_when_loaded(EVEN, lambda x: x)


def _computes(user: fx.Node) -> bool:
    return user.op != "output" and user.target is not EVEN


def even(branch: fx.Graph) -> None:
    """Give the gradients of a branch's inputs the strides of these: torch compares those of all branches."""
    for node in branch.find_nodes(op="placeholder"):
        value = tensor(node)
        if value is None or not value.requires_grad or any(user.target is EVEN for user in node.users):
            continue
        first = next(each for each in branch.nodes if each.op != "placeholder")
        new = Builder(first, node).given(value, EVEN, node)
        node.replace_all_uses_with(new, delete_user_cb=_computes)


def dense_order(value: torch.Tensor) -> list[int] | None:
    """The dims of a tensor, the outermost in memory first; None if it has gaps, or if that is unknown."""
    left = list(range(value.dim()))
    inner: list[int] = []
    # A contiguous tensor with sizes that may be 0 has the strides of one with ones in their place.
    expected: tuple[Any, Any] = (1, 1)
    while left:
        fits = [d for d in reversed(left) if any(known_true(value.stride(d) == e) for e in expected)]
        ones = [d for d in reversed(left) if known_true(value.shape[d] == 1)]
        found = next((d for d in ones if d in fits), None)
        if found is None and fits:
            found = fits[0]
        if found is None and len(ones) == len(left):
            found = left[-1]
        if found is None:
            return None
        left.remove(found)
        inner.append(found)
        size = value.shape[found]
        at_least = max(size, 1) if isinstance(size, int) else torch.sym_max(size, 1)
        expected = (expected[0] * size, expected[1] * at_least)
    return inner[::-1]
