"""Rows, classes and heads that are taken of logits, in Dynamo's torch-level graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true, value_of
from ...graph.torch_ops import VIEWS, Op, permutation, read
from ...operands import tensor
from ...reasons import Reason

#: Take some rows, or one, of a dim.
SELECTS = frozenset({"select", "narrow", "slice", "index_select"})


@dataclass(frozen=True)
class Head:
    """One of several heads, whose number is a dim in front of the classes for some steps.

    Attributes:
        opened: the view, or the stack, that makes the dim.
        taken: the node behind which the dim is gone.
        place: which part of the index of `taken` is the number of the head; None: all of it.
        number: of the head.
    """

    opened: fx.Node
    taken: fx.Node
    place: int | None
    number: int


@dataclass(frozen=True)
class Part:
    """One of the parts that an operation such as `split` takes a tensor apart into.

    Attributes:
        call: the operation, which returns all parts.
        source: what it takes apart.
        dim: along which dim.
        start, count: the first element of the part along the dim, and how many; of `unbind`, one.
        number: of the part.
    """

    call: fx.Node
    source: fx.Node
    dim: int
    start: Any
    count: Any
    number: int


def keeps_classes(op: Op) -> bool:
    """Whether an operation takes and orders rows alone, and would do the same to other classes.

    A view of all leading dims keeps the last one in its place.
    """
    before, after = tensor(op.input), tensor(op.node)
    if before is None or after is None or before.dim() < 1 or after.dim() < 1:
        return False
    if not known_true(before.shape[-1] == after.shape[-1]) or before.dtype != after.dtype:
        return False
    last = before.dim() - 1
    if op.name in VIEWS:
        return True
    if (dims := permutation(op)) is not None:
        return dims[-1] == last
    if op.name in SELECTS:
        return isinstance(op["dim"], int) and op["dim"] % before.dim() != last
    return op.name == "getitem" and indexes_rows(op["index"], last)


def indexes_rows(index: Any, last: int) -> bool:
    """Whether an index leaves the last dim whole: slices and numbers, or a tensor, of leading dims alone."""
    parts = list(index) if isinstance(index, tuple) else [index]
    held = [value for part in parts if (value := tensor(part)) is not None]
    if len(held) == 1 and held[0].dtype in (torch.int64, torch.int32):
        parts = [slice(None, 0) if tensor(part) is not None else part for part in parts]
        if not all(part is Ellipsis or isinstance(part, slice) for part in parts):
            return False
    if not all(part is Ellipsis or isinstance(part, (slice, int)) for part in parts):
        return False
    if any(isinstance(part, bool) for part in parts) or parts.count(Ellipsis) > 1:
        return False
    if Ellipsis in parts:
        behind = parts[parts.index(Ellipsis) + 1 :]
        return not behind or behind[-1] == slice(None)
    return len(parts) <= last or parts[last] == slice(None)


def rows_and_classes(op: Op) -> tuple[Any, Any]:
    """An index without its part for the last dim, of which it takes all; and that part, or None."""
    source, index = tensor(op.input), op["index"]
    parts = list(index) if isinstance(index, tuple) else [index]
    own = sum(part is not None for part in parts)
    named = any(part is Ellipsis for part in parts)
    if source is None or parts[-1] is Ellipsis or not (named or own == source.dim()):
        return index, None
    return (*parts[:-1], slice(None)), parts[-1]


def part_of(op: Op) -> Part | None:
    """The part that an operation takes of `split`, `chunk`, `unbind` and the like; None of others."""
    call, number = op.input, op["index"]
    by = read(call) if op.name == "getitem" and type(number) is int else None
    source: Any = by.node.args[0] if by is not None and by.node.args else None
    before, after, parts = tensor(source), tensor(op.node), None if by is None else value_of(by.node)
    if by is None or before is None or after is None or not isinstance(parts, (list, tuple)):
        return None
    number %= len(parts)
    if by.name == "unbind":
        dim = 0 if by["dim"] is None else by["dim"]
        return Part(call, source, dim % before.dim(), number, 1, number) if type(dim) is int else None
    if "split" not in by.name and by.name != "chunk":
        return None
    sizes = enumerate(zip(before.shape, after.shape, strict=False))
    others = [dim for dim, (whole, own) in sizes if not known_true(whole == own)]
    if len(others) != 1 or before.dim() != after.dim():
        return None
    (dim,) = others
    return Part(call, source, dim, sum(part.shape[dim] for part in parts[:number]), after.shape[dim], number)


def rows_of(op: Op) -> tuple[fx.Node, list[fx.Node]] | None:
    """What an operation takes and orders rows of, and the nodes that do it, the last one first."""
    if op.inplace:
        return None
    if keeps_classes(op):
        return op.input, [op.node]
    part = part_of(op)
    before = None if part is None else tensor(part.source)
    if part is None or before is None or part.dim == before.dim() - 1:
        return None
    return part.source, [op.node, part.call]


def one_head(op: Op, behind: list[fx.Node]) -> Head | None:
    """The head that is taken from what an operation makes: a view of the classes, or a stack of linears.

    Args:
        behind: the nodes behind it that take and order rows, in order.

    Raises:
        Rejected: several heads are read.
    """
    before, after = tensor(op.input), tensor(op.node)
    if after is None or after.dim() < 2:
        return None
    if op.name == "stack":
        parts, given = op.only("tensors", "dim")
        dim = 0 if given is None else given
        if not isinstance(parts, (list, tuple)) or type(dim) is not int:
            return None
        dim %= after.dim()
    else:
        dim = after.dim() - 2
        heads, classes = after.shape[-2:]
        if op.name not in VIEWS or before is None or type(heads) is not int or type(classes) is not int:
            return None
        if not known_true(before.shape[-1] == heads * classes):
            return None
    if dim == after.dim() - 1:
        return None
    count = after.shape[dim]
    for node in behind:
        step = read(node)
        found = None if step is None or type(count) is not int else _at(step, dim)
        if found is None:
            break
        dim, place, number = found
        if number is not None:
            return Head(op.node, node, place, number % count)
    raise Reason.LOSS.rejected(
        f"{op.name} gives the logits of several heads, and the loss reads more than one of them",
        "compute one loss for each head, of logits[:, :, k]",
    )


def _at(op: Op, dim: int) -> tuple[int, int | None, int | None] | None:
    """Where a dim is behind an operation on rows; or which number of it is taken, and its place in an index.

    None: some of the dim is taken, or it is viewed together with others.
    """
    source = tensor(op.input)
    if source is None:  # the call that takes rows apart, or one of its parts
        part = part_of(op)
        if part is None:
            return None
        behind = tensor(op.node)
        whole = tensor(part.source)
        if behind is None or whole is None:
            return None
        if behind.dim() == whole.dim():
            return None if part.dim == dim else (dim, None, None)
        return (dim, None, part.number) if part.dim == dim else (dim - (part.dim < dim), None, None)
    if isinstance(value_of(op.node), (list, tuple)):
        return dim, None, None
    if (dims := permutation(op)) is not None:
        return dims.index(dim), None, None
    if op.name in SELECTS:
        own = op["dim"] % source.dim()
        if op.name != "select":
            return None if own == dim else (dim, None, None)
        number = op["index"]
        if own != dim:
            return dim - (own < dim), None, None
        return (dim, None, number) if type(number) is int else None
    if op.name != "getitem":
        return None
    index = op["index"]
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(tensor(part) is not None for part in parts):
        return None
    spare = source.dim() - len(parts) + (Ellipsis in parts)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        places = [*range(at), *[None] * spare, *range(at + 1, len(parts))]
    else:
        places = [*range(len(parts)), *[None] * spare]
    place = places[dim]
    own = slice(None) if place is None else parts[place]
    if type(own) is int:
        return dim, (place if isinstance(index, tuple) else None), own
    numbers = sum(each is not None and type(parts[each]) is int for each in places[:dim])
    return (dim - numbers, None, None) if own == slice(None) else None


def sliced(op: Op) -> slice | None:
    """What `slice` or `narrow` takes of its dim; None where the end is not known from the arguments alone."""
    if op.name == "slice":
        return slice(op["start"], op["end"], op["step"])
    start, length = op["start"], op["length"]
    if type(start) is not int or (start and type(length) is not int):
        return None
    if start >= 0:
        return slice(start, start + length if start else length)
    return slice(start, start + length or None)


def take_other_rows(first: fx.Node, second: fx.Node) -> bool:
    """Whether two nodes take rows of a tensor that no other of them takes."""
    one, two = read(first), read(second)
    if one is None or two is None or one.input is not two.input:
        return False
    parts = part_of(one), part_of(two)
    if parts[0] is not None and parts[1] is not None:
        return parts[0].number != parts[1].number
    mine, theirs = _ranges(one), _ranges(two)
    for dim in mine.keys() & theirs.keys():
        (a, end), (b, last) = mine[dim], theirs[dim]
        if (end is not None and end == b) or (last is not None and last == a):
            return True
        numbers = [a, end, b, last]
        if all(type(n) is int and n >= 0 for n in numbers) and (end <= b or last <= a):
            return True
    return False


def _ranges(op: Op) -> dict[int, tuple[Any, Any]]:
    """The first element that an operation takes of each dim that is not whole, and the end."""
    value = tensor(op.input)
    if value is None:
        return {}
    if op.name in ("select", "narrow", "slice") and type(op["dim"]) is int:
        dim = op["dim"] % value.dim()
        taken = {dim: op["index"] if op.name == "select" else sliced(op)}
    elif op.name == "getitem":
        given = op["index"]
        parts = list(given) if isinstance(given, tuple) else [given]
        at = parts.index(Ellipsis) if Ellipsis in parts else len(parts)
        taken = {i: part for i, part in enumerate(parts[:at])}
        taken |= {value.dim() - i: part for i, part in enumerate(reversed(parts[at + 1 :]), 1)}
    else:
        return {}
    found = dict[int, tuple[Any, Any]]()
    for dim, part in taken.items():
        size = value.shape[dim]
        if type(part) is int:
            found[dim] = (part, part + 1 if part != -1 else None)
        elif isinstance(part, slice) and part != slice(None):
            first, last = part.start, part.stop
            plain = type(size) is int and all(x is None or type(x) is int for x in (first, last))
            found[dim] = slice(first, last).indices(size)[:2] if plain else (first or 0, last)
    return found
