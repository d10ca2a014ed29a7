"""Tensors that `cat` joins, and that are taken apart again: in Dynamo's graph or one of aten operations."""

from __future__ import annotations

from typing import Any

from torch import fx

from .._inductor import known_true
from ..operands import tensor, value
from .dims import selection
from .products import same_sizes
from .torch_ops import read


def joined(node: Any) -> tuple[list[fx.Node], int]:
    """The operands of a `cat`, which have its dtype and rank, and the dim; ([], -1) of another node."""
    op, result = read(node), tensor(node)
    if op is None or op.name != "cat" or result is None:
        return [], -1
    parts, dim = op.only("tensors", "dim")
    held = [tensor(part) for part in parts] if isinstance(parts, (list, tuple)) else []
    kinds = {None if t is None else (t.dtype, t.dim()) for t in held}
    dim = 0 if dim is None else dim
    if kinds != {(result.dtype, result.dim())} or type(dim) is not int:
        return [], -1
    return list(parts), dim % result.dim()


def taken_apart(node: Any) -> fx.Node | None:
    """The tensor that `cat` or `stack` has joined with others, and that a node takes out again, whole.

    A stack of aten operations is a `cat` and a view, or of tensors that have a dim of size 1 in addition.
    """
    taken = selection(node)
    if taken is None or len(taken.dims) != 1:
        return None
    (at,) = taken.dims
    part, by, own = taken.index[at], read(taken.source), value(node).shape
    if type(part) is int and by is not None and by.name in ("view", "reshape"):
        parts, dim = joined(by.input)
        alike = dim == at and all(same_sizes(value(each).shape, own) for each in parts)
        stacked = [*own[:at], len(parts), *own[at:]]
        return parts[part] if alike and same_sizes(value(taken.source).shape, stacked) else None
    parts, dim = joined(taken.source)
    span = taken.range(at) if dim == at and not (isinstance(part, slice) and part.step) else None
    begins: Any = 0
    for each in parts if span is not None else ():
        ends = begins + value(each).shape[at]
        if span is not None and known_true(span[0] == begins) and known_true(span[1] == ends):
            return each
        begins = ends
    return None
