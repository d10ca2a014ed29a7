"""Reads what an operation does to the dims of a tensor, in Dynamo's graph or in one of aten operations.

It may put them into another order (`permutation`), reduce some of them (`reduced`, `reduction_at`), or take
some of their elements (`selection`): `select`, `narrow`, slices, indices, and the parts of `split`, `chunk`
and `unbind` take all of a dim, a range, or one number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._inductor import known_true, value_of
from ..operands import tensor
from .torch_ops import SPLITS, TRANSPOSES, Op, concrete, read

_MOVES = frozenset({"movedim", "moveaxis"})
#: Operations that take some elements, or one, of a dim.
SELECTS = frozenset({"select", "narrow", "slice", "index_select"})
WHOLE = slice(None)


def permutation(op: Op) -> list[int] | None:
    """The permutation of a transpose, permute, `movedim`, `x.T` or `x.mT`; None for other operations.

    Dim i of the result is dim `permutation[i]` of the input. None also if the dims are not constants.
    """
    source = tensor(op.input)
    if source is None or op.name not in TRANSPOSES | _MOVES | {"getattr"}:
        return None
    rank = source.dim()
    dims = list(range(rank))
    if not rank:
        return None if op.name == "getattr" else []
    if op.name == "permute":
        given = op["dims"] if op["dims"] is not None else (op.rest or op["dim"])
        if given and isinstance(given[0], (list, tuple)):
            given = given[0]
        if not given or not all(isinstance(d, int) for d in given):
            return None
        return [d % rank for d in given]
    if op.name in _MOVES:
        ends = [x if isinstance(x, (list, tuple)) else (x,) for x in (op["source"], op["destination"])]
        if not all(isinstance(d, int) for each in ends for d in each):
            return None
        moved = {to % rank: start % rank for start, to in zip(*ends, strict=True)}
        rest = iter([d for d in dims if d not in moved.values()])
        return [moved[d] if d in moved else next(rest) for d in dims]
    if op.name == "t" or (op.name == "getattr" and op["name"] == "T"):
        return dims[::-1]
    if op.name == "getattr":
        return [*dims[:-2], dims[-1], dims[-2]] if op["name"] in ("mT", "mH") else None
    first, second = op["dim0"], op["dim1"]
    first = op.args.get("axis0", first)
    second = op.args.get("axis1", second)
    if not isinstance(first, int) or not isinstance(second, int):
        return None
    dims[first % rank], dims[second % rank] = dims[second % rank], dims[first % rank]
    return dims


def permuted_by(node: Any, dims: list[int]) -> fx.Node | None:
    """The input of a permutation by these dims; None for other nodes."""
    op = read(node)
    if op is None or op.inplace or permutation(op) != dims:
        return None
    return op.input if isinstance(op.input, fx.Node) else None


def is_transposed(node: Any) -> bool:
    """Whether a node is a matrix, or a batch of them, whose last two dims are swapped."""
    op = read(node)
    dims = None if op is None else permutation(op)
    return dims is not None and len(dims) > 1 and dims[-1] == len(dims) - 2


def reduced(op: Op) -> tuple[tuple[int, ...] | None, bool]:
    """The dims of a softmax or of a reduction, counted from the front, and whether they are kept.

    None for a reduction over all dims; none of those that are not known.
    """
    value, dim, keeps = tensor(op.input), op["dim"], op["keepdim"]
    if op.name == "max" and dim is None:  # x.max(-1, True)
        dim, keeps = op["other"], op.rest[0] if op.rest else keeps
    if dim is None and op.name in ("softmax", "log_softmax", "softmin") and value is not None:
        dim = 0 if value.dim() in (0, 1, 3) else 1  # the implicit dim of functional calls, deprecated
    if dim is None:
        return None, bool(keeps)
    given = dim if isinstance(dim, (list, tuple)) else (dim,)
    if value is None or not value.dim() or not all(type(each) is int for each in given):
        return (), bool(keeps)
    return tuple(sorted(each % value.dim() for each in given)), bool(keeps)


def is_over_last(op: Op) -> bool:
    """Whether a softmax or a reduction is over the last dim alone."""
    value = tensor(op.input)
    return value is not None and reduced(op)[0] == (value.dim() - 1,)


@dataclass(frozen=True)
class Reduction:
    """A reduction that a node holds.

    Attributes:
        op: the reduction.
        dims: over which, as `reduced` has them.
        keeps: whether a dim of size 1 is in the place of what is reduced: it is kept, or appended again.
        nodes: from the node that holds it to the reduction.
        overwrites: whether one of them overwrites what it reads.
    """

    op: Op
    dims: tuple[int, ...] | None
    keeps: bool
    nodes: tuple[fx.Node, ...]
    overwrites: bool

    @property
    def dim(self) -> int | None:
        """The dim, if it is over one."""
        return self.dims[0] if self.dims and len(self.dims) == 1 else None

    def of(self, source: Any) -> tuple[fx.Node, ...]:
        """The nodes that reduce a tensor, a `detach` of it among them; none if another one is reduced."""
        by = read(self.op.input)
        if by is not None and by.name == "detach" and by.input is source:
            return (*self.nodes, by.node)
        return self.nodes if self.op.input is source else ()


def reduction_at(node: Any, names: Collection[str], step: Callable[[Op, bool], Any]) -> Reduction | None:
    """The reduction that a node holds, perhaps with a dim of size 1 that is appended to it.

    Args:
        names: of the reductions.
        step: from an operation in between, and whether a dim was appended behind it, the node that is looked
            at next; None if the operation changes the values.
    """
    nodes: list[fx.Node] = []
    appended = overwrites = False
    while (op := read(node)) is not None:
        nodes.append(op.node)
        overwrites |= op.inplace
        if op.name in names:
            dims, kept = reduced(op)
            keeps = kept is not appended and (not appended or is_over_last(op))
            return Reduction(op, dims, keeps, tuple(nodes), overwrites)
        if not appended and appends_dim(op):
            appended, node = True, op.input
        else:
            node = step(op, appended)
    return None


def picked(op: Op) -> Any:
    """What `detach` is of, and `.values` or `[0]`, as of the result of `max` over a dim; None of others."""
    values = op.name == "getattr" and op["name"] == "values"
    values |= op.name == "getitem" and op["index"] == 0
    return op.input if values or op.name == "detach" else None


@dataclass(frozen=True)
class Selection:
    """Elements that an operation takes of a tensor.

    Attributes:
        source: the tensor.
        index: what is taken of each dim of it: `WHOLE`, a slice with both bounds counted from the front, a
            number (the dim is gone), or a node (of indices, or of a range that is not known).
        places: which dim of the result each dim of it is; None where it is gone. They are those of slices
            and numbers: a tensor of indices counts as one dim.
        nodes: the operation; for a part of `split` and the like, behind it the call that gives all parts.
        part: the number of that part, or None.
    """

    source: fx.Node
    index: tuple[Any, ...]
    places: tuple[int | None, ...]
    nodes: tuple[fx.Node, ...]
    part: int | None = None

    @property
    def dims(self) -> list[int]:
        """The dims that are not taken whole."""
        return [dim for dim, part in enumerate(self.index) if part is not WHOLE]

    def number(self, dim: int) -> int | None:
        """The number that is taken of a dim, where all others are whole; else None."""
        part = self.index[dim] if self.dims == [dim] else None
        return part if type(part) is int else None

    def range(self, dim: int) -> tuple[Any, Any] | None:
        """The first element that is taken of a dim, and the one behind the last; None if not known."""
        part = self.index[dim]
        if isinstance(part, (int, torch.SymInt)):
            return part, part + 1
        return (part.start, part.stop) if isinstance(part, slice) and part is not WHOLE else None

    def is_apart_from(self, other: Selection) -> bool:
        """Whether another selection is known to take other elements of the same tensor."""
        if self.source is not other.source:
            return False
        if self.part is not None and self.nodes[1:] == other.nodes[1:]:
            return self.part != other.part
        for dim in range(len(self.index)):
            mine, theirs = self.range(dim), other.range(dim)
            if mine and theirs and (_ends_before(mine[1], theirs[0]) or _ends_before(theirs[1], mine[0])):
                return True
        return False


def selection(node: Any, adds: bool = False) -> Selection | None:
    """What a node takes of a tensor; None of other nodes, and of indices that `per_dim` does not read.

    Args:
        adds: whether an index may add dims.
    """
    op = read(node)
    if op is None or op.inplace or not isinstance(op.input, fx.Node):
        return None
    if isinstance(value_of(op.input), (list, tuple)):
        return _part(op)
    before = tensor(op.input)
    if before is None:
        return None
    if op.name == "getitem":
        index = per_dim(op["index"], before.dim())
    elif op.name in SELECTS and type(dim := op["dim"] or 0) is int:
        index = [WHOLE] * before.dim()
        index[dim] = _of_one_dim(op)
    else:
        return None
    if index is None or (None in index and not adds):
        return None
    parts = zip((part for part in index if part is not None), before.shape, strict=True)
    taken = iter([_counted(part, size, op.node) for part, size in parts])
    return _selected(op.input, [part if part is None else next(taken) for part in index], (op.node,))


def _selected(
    source: fx.Node, index: list[Any], nodes: tuple[fx.Node, ...], part: int | None = None
) -> Selection:
    """The selection of an index with None where it adds a dim."""
    own = [i for i, each in enumerate(index) if each is not None]
    gone = [isinstance(each, (int, torch.SymInt)) for each in index]
    places = tuple(None if gone[i] else i - sum(gone[:i]) for i in own)
    return Selection(source, tuple(index[i] for i in own), places, nodes, part)


def unbroadcast(node: Any) -> tuple[fx.Node, tuple[fx.Node, ...]] | None:
    """The tensor that a node equals, where it was broadcast and cut to its size again, or did not grow.

        torch.broadcast_tensors(x, y)[0][..., :1]        where x has one column

    Returns:
        The tensor, and the nodes behind it, the last one first; None of other nodes.
    """
    taken = selection(node)
    whole, nodes = (node, ()) if taken is None else (taken.source, taken.nodes)
    op = read(whole)
    call = read(op.input) if op is not None and op.name == "getitem" else None
    if op is None or call is None or call.name != "broadcast_tensors" or type(op["index"]) is not int:
        return None
    source = (call["tensors"] or call.rest)[op["index"]]
    before, after = tensor(source), tensor(node)
    if before is None or after is None or before.dim() != after.dim():
        return None
    cut = () if taken is None else taken.dims
    ones = all(known_true(before.shape[dim] == 1) for dim in cut)
    same = all(known_true(old == new) for old, new in zip(before.shape, after.shape, strict=True))
    return (source, (*nodes, whole, call.node)) if ones and same else None


def appends_dim(op: Op) -> bool:
    """Whether an operation is `x.unsqueeze(-1)` or `x[..., None]`."""
    after = tensor(op.node)
    if after is None:
        return False
    if op.name == "unsqueeze":
        return isinstance(op["dim"], int) and op["dim"] % after.dim() == after.dim() - 1
    taken = selection(op.node, adds=True)
    return taken is not None and not taken.dims and taken.places == tuple(range(after.dim() - 1))


def per_dim(index: Any, rank: int) -> list[Any] | None:
    """An index as one part for each dim, a slice, a number or a tensor of indices; and None for each new dim.

    None if it has a mask, or a tensor beside a number or another tensor.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    places = [i for i, part in enumerate(given) if part is Ellipsis]
    at = places[0] if places else len(given)
    missing = rank - sum(part is not None and part is not Ellipsis for part in given)
    others = [part for part in given if not (part is None or part is Ellipsis or isinstance(part, slice))]
    held = tensor(others[0]) if len(others) == 1 else None
    indices = held is not None and held.dtype in (torch.int64, torch.int32)
    numbers = all(type(number) in (int, torch.SymInt) for number in map(concrete, others))
    if len(places) > 1 or missing < 0 or not (indices or numbers):
        return None
    return [*given[:at], *[WHOLE] * missing, *given[at + 1 :]]


def bounds(part: slice, size: Any) -> tuple[Any, Any]:
    """Where a slice of a dim begins and ends, counted from the front, if the sign of its bounds is known."""
    if all(at is None or type(at) is int for at in (part.start, part.stop, size)):
        return slice(part.start, part.stop).indices(size)[:2]
    start, stop = 0 if part.start is None else part.start, size if part.stop is None else part.stop
    start, stop = (at + size if known_true(at < 0) else at for at in (start, stop))
    return start, size if known_true(stop > size) else stop


def _of_one_dim(op: Op) -> Any:
    """What is taken of the dim of an operation of `SELECTS`."""
    if op.name == "slice":
        return slice(op["start"], op["end"], op["step"])
    if op.name != "narrow":
        return op["index"]
    start, length = concrete(op["start"]), concrete(op["length"])
    if isinstance(start, fx.Node) or isinstance(length, fx.Node):
        return op.node
    # A start of -2 with two elements ends at the end.
    return slice(start, None if known_true(start + length == 0) and known_true(start < 0) else start + length)


def _counted(part: Any, size: Any, node: fx.Node) -> Any:
    """Part of an index, counted from the front; `node` where that is not known."""
    if part == WHOLE:
        return WHOLE
    part = concrete(part)
    if isinstance(part, (int, torch.SymInt)):
        return part if known_true(part >= 0) else part + size if known_true(part < 0) else node
    if not isinstance(part, slice):
        return part
    if any(isinstance(at, fx.Node) for at in (part.start, part.stop, part.step)):
        return node
    step = None if part.step is None or known_true(part.step == 1) else part.step
    return slice(*bounds(part, size), step)


def _part(op: Op) -> Selection | None:
    """One of the parts of `split`, `chunk` or `unbind`."""
    call, number = read(op.input), op["index"]
    before, after = tensor(call.input if call is not None else None), tensor(op.node)
    if call is None or before is None or after is None or op.name != "getitem" or type(number) is not int:
        return None
    parts = value_of(call.node)
    number %= len(parts)
    index: list[Any] = [WHOLE] * before.dim()
    if call.name == "unbind":
        dim = 0 if call["dim"] is None else call["dim"]
        if type(dim) is not int:
            return None
        index[dim] = number
    elif call.name in SPLITS:
        sizes = enumerate(zip(before.shape, after.shape, strict=True))
        others = [dim for dim, (whole, own) in sizes if not known_true(whole == own)]
        if len(others) != 1 and len(parts) != 1:
            return None
        for dim in others:  # none if there is one part, which is the whole
            start = sum(part.shape[dim] for part in parts[:number])
            index[dim] = slice(start, start + after.shape[dim])
    else:
        return None
    return _selected(call.input, index, (op.node, call.node), number)


def _ends_before(end: Any, start: Any) -> bool:
    """Whether a range that ends at `end` is in front of one that begins at `start`.

    Bounds that are equal are, whatever their sign; of others, the sign must be known.
    """
    return known_true(end == start) or (known_true(end >= 0) and known_true(end <= start))
