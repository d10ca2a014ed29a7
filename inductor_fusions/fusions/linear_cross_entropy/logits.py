"""From the logits of a loss up to the linear that makes them, in Dynamo's torch-level graph.

In between, the logits may be scaled, bounded by c * tanh(x / c), cast to a wider dtype and viewed, and some
of the rows or classes may be taken, as long as the classes stay a dim of their own. One linear may have the
classes of several heads: `split`, or a view from which one head is taken, as from a `stack` of linears. The
bias may be an addition by itself.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true, value_of
from ...fusion import Rejected
from ...graph.einsum import equation
from ...graph.torch_ops import CASTS, COPIES, VIEWS, Op, linear_of, permutation, read
from ...operands import holds, tensor
from ...reasons import Reason

#: Take some rows, or one, of a dim.
SELECTS = frozenset({"select", "narrow", "slice", "index_select"})
#: A larger number that is added to logits rounds their digits away, which a softmax sees.
LARGEST_SHIFT = 1e4


@dataclass(frozen=True)
class Bend:
    """f of a logit x: scale * x, or cap * tanh(scale * x) where cap is not 0."""

    scale: float = 1.0
    cap: float = 0.0

    def times(self, factor: float) -> Bend:
        """factor * f(x)."""
        return Bend(self.scale, self.cap * factor) if self.cap else Bend(self.scale * factor)


@dataclass(frozen=True)
class Logits:
    """The logits of a linear, as a loss reads them.

    Attributes:
        linear: the node of the linear.
        h, w, bias: what it reads; h (..., H).
        by_rows: whether w is (V, H) rather than its transpose.
        path: the nodes from the linear to what the loss reads, in order.
        replayed: those of them that say which rows there are, and in which order.
        bend: what is done to each logit.
        columns: the first class that the loss reads and how many; None: all.
        shift: a number that is added to each logit in front of a cap.
        head: where the logits are those of one of several heads.
    """

    linear: fx.Node
    h: fx.Node
    w: fx.Node
    bias: fx.Node | None
    by_rows: bool
    path: tuple[fx.Node, ...]
    replayed: tuple[fx.Node, ...]
    bend: Bend
    columns: tuple[int, int] | None
    shift: float
    head: Head | None

    @property
    def overwrites(self) -> bool:
        """Whether something in between writes in place."""
        return any(op is not None and op.inplace for op in map(read, self.path))


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


def walk(node: fx.Node, path: list[fx.Node], replayed: list[fx.Node]) -> Logits:
    """From logits, whose last dim are the classes, up to the linear that makes them.

    Args:
        path, replayed: the nodes behind them, the last one first.

    Raises:
        Rejected: there is none, or something else in between.
    """
    pointwise: list[tuple[str, float]] = []
    added: tuple[fx.Node, int, torch.dtype] | None = None
    columns: tuple[int, int] | None = None
    head: Head | None = None
    shift, shifted, narrow = 0.0, 0, None
    while (operands := _linear(node)) is None:
        op = read(node)
        source = op.input if op is not None else None
        value = tensor(node)
        if op is None or value is None or (op.inplace and op.name not in ("mul", "div")):
            raise _no_linear(node)
        if op.name in ("mul", "div"):
            source, factor = _scaled(op)
            pointwise.append(("mul", factor))
        elif op.name == "tanh":
            pointwise.append(("tanh", 0.0))
        elif op.name == "sigmoid":  # (1 + tanh(x / 2)) / 2, where a softmax does not see the number
            pointwise += [("mul", 0.5), ("tanh", 0.0), ("mul", 0.5)]
        elif op.name == "add" and type(op["other"]) in (int, float):
            source, number = op.only("input", "other")
            if number is None or not abs(number) <= LARGEST_SHIFT or (shift and ("tanh", 0.0) in pointwise):
                raise _no_linear(node)
            if ("tanh", 0.0) in pointwise:
                shift, shifted, narrow = number, len(pointwise), value.dtype
        elif op.name == "add" and added is None:
            source, vector = _biased(op)
            added = vector, len(pointwise), value.dtype
        elif op.name in CASTS | COPIES:
            if not is_as_wide(op):
                raise Reason.ROUNDED.rejected(f"{op.name} rounds the logits or moves them to another device")
        elif (rows := rows_of(op)) is not None:
            source, taken = rows
            replayed += taken
            path += taken[:-1]
            node = taken[-1]
        elif columns is None and (part := part_of(op)) is not None and part.dim == value.dim() - 1:
            source, columns = part.source, (part.start, part.count)
            path.append(node)
            node = part.call
        elif columns is None and (columns := _some_classes(op)) is not None:
            pass
        elif head is None and (head := _one_head(op, replayed[::-1])) is not None:
            replayed.append(node)
            if op.name == "stack":
                source = op["tensors"][head.number]
            else:
                start, count = columns or (0, value.shape[-1])
                columns = head.number * value.shape[-1] + start, count
        else:
            raise _no_linear(node)
        path.append(node)
        if not isinstance(source, fx.Node):
            raise _no_linear(node)
        node = source
    path.append(node)
    out, (h, w, by_rows, bias) = tensor(node), operands
    if added is not None:
        vector, steps, dtype = added
        # What the linear itself could have added.
        if bias is not None or steps != len(pointwise) or out is None or out.dtype != dtype:
            raise Reason.LOSS.rejected("a second tensor is added to the logits, or one that is not a bias")
        bias = vector
    held = tensor(bias)
    if held is not None and out is not None and columns is not None:
        known = any(known_true(held.shape[0] == count) for count in (out.shape[-1], columns[1]))
        if not known:
            raise Reason.LOSS.rejected("a bias is added to more classes than the loss reads")
    if shift and (shifted != len(pointwise) or out is None or narrow != out.dtype):
        raise Reason.LOSS.rejected(
            "a number is added to scaled or cast logits, in front of a tanh or a sigmoid"
        )
    bend = _bent(pointwise[::-1])
    steps_between, steps_of_rows = tuple(reversed(path)), tuple(reversed(replayed))
    return Logits(node, h, w, bias, by_rows, steps_between, steps_of_rows, bend, columns, shift, head)


def _biased(op: Op) -> tuple[fx.Node, fx.Node]:
    """Logits and the vector that is added to each row of them.

    Raises:
        Rejected: something else is added.
    """
    first, second = op.only("input", "other")
    out = tensor(op.node)
    for source, vector in ((first, second), (second, first)):
        before, held = tensor(source), tensor(vector)
        if before is None or held is None or out is None or held.dim() != 1 or before.dim() < 2:
            continue
        if before.dtype == held.dtype and known_true(held.shape[0] == before.shape[-1]):
            return source, vector
    raise _no_linear(op.node)


def _some_classes(op: Op) -> tuple[int, int] | None:
    """Which classes an operation takes of all rows: the first one, and how many."""
    before, after = tensor(op.input), tensor(op.node)
    if before is None or after is None or op.inplace or before.dim() != after.dim():
        return None
    classes, last = before.shape[-1], before.dim() - 1
    part: Any = None
    if op.name == "getitem":
        index = op["index"]
        parts = list(index) if isinstance(index, tuple) else [index]
        *others, part = parts
        if not all(each in (Ellipsis, slice(None)) for each in others if not isinstance(each, fx.Node)):
            return None
        if any(isinstance(each, fx.Node) for each in parts) or (
            Ellipsis not in others and len(others) != last
        ):
            return None
    elif op.name in ("narrow", "slice") and isinstance(op["dim"], int) and op["dim"] % before.dim() == last:
        start = op["start"]
        part = slice(start, start + op["length"] if op.name == "narrow" else op["end"], op["step"])
    if not isinstance(part, slice) or not isinstance(classes, int) or part.step not in (None, 1):
        return None
    if not all(each is None or type(each) is int for each in (part.start, part.stop)):
        return None
    start, stop, _ = part.indices(classes)
    return (start, stop - start) if stop > start else None


def _no_linear(node: fx.Node) -> Rejected:
    op = read(node)
    what = node.name if op is None else op.name
    return Reason.LOSS.rejected(
        f"{what} is between the logits and a linear, or no linear computes them",
        "compute the linear in the same graph, and only scale, softcap, cast, slice or view its result",
    )


def _bent(pointwise: list[tuple[str, float]]) -> Bend:
    bend = Bend()
    for name, factor in pointwise:
        if name == "mul":
            bend = bend.times(factor)
        elif bend.cap:
            raise Reason.LOSS.rejected("there are two tanh or sigmoid between the linear and the loss")
        else:
            bend = Bend(bend.scale, 1.0)
    if not (math.isfinite(bend.scale) and math.isfinite(bend.cap)) or not bend.scale:
        raise Reason.RANGE.rejected("the logits are scaled by 0, inf or NaN")
    return bend


def _scaled(op: Op) -> tuple[Any, float]:
    """The operand that a number multiplies or divides, and the factor.

    Raises:
        Rejected: the other operand is not a number.
    """
    first, second = dataclasses.replace(op, inplace=False).only("input", "other")
    if op.name == "mul" and isinstance(first, (int, float)):
        first, second = second, first
    before, after = tensor(first), tensor(op.node)
    if before is None or after is None or type(second) not in (int, float) or before.dtype != after.dtype:
        raise _no_linear(op.node)
    if op.name == "div" and not second:
        raise Reason.RANGE.rejected("the logits are divided by 0")
    return first, float(second if op.name == "mul" else 1 / second)


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
    return op.name == "getitem" and _indexes_rows(op["index"], last)


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


def _one_head(op: Op, behind: list[fx.Node]) -> Head | None:
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


def _indexes_rows(index: Any, last: int) -> bool:
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


def _of_einsum(node: fx.Node) -> tuple[fx.Node, fx.Node, bool, None] | None:
    """The linear in an einsum "bsd,vd->bsv", with any letters."""
    op = read(node)
    if op is None or op.name != "einsum":
        return None
    try:
        found = equation(op)
    except Rejected:
        return None
    for each in (found, found.turned()):
        summed, v = each.first[-1:], each.result[-1:]
        if len(each.second) == 2 and set(each.second) == {summed, v} and each.result[:-1] == each.first[:-1]:
            return (each.left, each.right, each.second[0] == v, None) if summed != v else None
    return None


def _linear(node: fx.Node) -> tuple[fx.Node, fx.Node, bool, fx.Node | None] | None:
    """(input, weight, whether its rows are the classes, bias) of a product with a matrix."""
    found = linear_of(node) or _of_einsum(node)
    if found is None:
        return None
    x, w, by_rows, bias = found
    value, weight, held = tensor(x), tensor(w), tensor(bias)
    assert value is not None and weight is not None
    if value.dim() < 2:
        return None
    classes = weight.shape[0 if by_rows else 1]
    if bias is not None and (held is None or held.dim() != 1 or not known_true(held.shape[0] == classes)):
        return None
    return x, w, by_rows, bias


def is_as_wide(op: Op) -> bool:
    before, after = tensor(op.input), tensor(op.node)
    if before is None or after is None or before.device != after.device or op.inplace:
        return False
    return holds(after.dtype, before.dtype)
