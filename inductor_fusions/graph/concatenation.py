"""Tensors that `cat` joins, or that are written into others, and that are taken out again.

`cat` is read in Dynamo's graph and in one of aten operations, a write in one of aten operations: there it is
`slice_scatter`, and nothing overwrites what it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._inductor import known_true
from ..operands import tensor, value
from .dims import WHOLE, Selection, bounds, selection
from .products import RESHAPES, same_sizes, through
from .torch_ops import read

#: How many writes beside what is taken are looked through.
_MOST_WRITES = 8


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


def before_writes(taken: Selection) -> fx.Node:
    """The tensor that elements are taken of, before others of its elements were overwritten.

    Functionalisation makes this of an in-place operation on one of two halves.
    """
    source = taken.source
    for _ in range(_MOST_WRITES):
        write = _write(source, taken)
        if write is None or not taken.is_apart_from(write.place):
            break
        source = write.before
    return source


@dataclass(frozen=True)
class _Write:
    """A `slice_scatter`.

    Attributes:
        before: the tensor of which a slice is overwritten.
        slice: by what.
        place: where: as a selection of the same tensor as another one.
    """

    before: fx.Node
    slice: fx.Node
    place: Selection


def _write(node: fx.Node, taken: Selection) -> _Write | None:
    """The write along the dim of a selection that a node is the result of, perhaps viewed there and back."""
    inner = through(node, RESHAPES)
    if inner.target is not torch.ops.aten.slice_scatter.default or len(taken.dims) != 1:
        return None
    op = read(inner)
    before, part, whole = inner.args[0], inner.args[1], value(inner)
    if op is None or not isinstance(before, fx.Node) or not isinstance(part, fx.Node):
        return None
    dim, step = (op["dim"] or 0) % whole.dim(), op["step"]
    given = op["start"], op["end"]
    numbers = all(at is None or type(at) is int for at in given) and step in (None, 1)
    alike = same_sizes(whole.shape, value(node).shape) and value(part).dtype == whole.dtype
    if not numbers or not alike or taken.dims != [dim]:
        return None
    index: list[Any] = [WHOLE] * whole.dim()
    index[dim] = slice(*bounds(slice(*given), whole.shape[dim]))
    return _Write(before, part, Selection(taken.source, tuple(index), taken.places, ()))


def taken_apart(node: Any) -> fx.Node | None:
    """The tensor that was joined with others, or written into another, and that a node takes out, whole.

    A stack of aten operations is a `cat` and a view, or of tensors that have a dim of size 1 in addition.
    """
    taken = selection(node)
    if taken is None or len(taken.dims) != 1:
        return None
    (at,) = taken.dims
    source = before_writes(taken)
    part, by, own = taken.index[at], read(source), value(node).shape
    if type(part) is int and by is not None and by.name in ("view", "reshape"):
        parts, dim = joined(by.input)
        alike = dim == at and all(same_sizes(value(each).shape, own) for each in parts)
        stacked = [*own[:at], len(parts), *own[at:]]
        return parts[part] if alike and same_sizes(value(source).shape, stacked) else None
    span = None if isinstance(part, slice) and part.step else taken.range(at)
    write = _write(source, taken)
    if write is not None:
        place = write.place.range(at)
        same = span is not None and place is not None and known_true(span[0] == place[0])
        return write.slice if same and same_sizes(value(write.slice).shape, own) else None
    parts, dim = joined(source)
    span = span if dim == at else None
    begins: Any = 0
    for each in parts if span is not None else ():
        ends = begins + value(each).shape[at]
        if span is not None and known_true(span[0] == begins) and known_true(span[1] == ends):
            return each
        begins = ends
    return None
