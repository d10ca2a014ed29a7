"""What the numbers of a bias are made of: fills that hide keys, data, masks that the graph is given.

Nothing of this depends on when memory is written to: whatever the graph writes there is part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import Parameter

from ...._inductor import known_true
from ....effects.inplace import arguments, current, readers
from ....effects.writes import storage
from ....graph import torch_ops
from ..aliasing import written
from .proofs import LARGEST_FILL

#: Some of
#:
#: "low", "high"   numbers that hide a key, or raise one above all others
#: "mask"          a tensor that the graph is given: 0 and low numbers, or 0 and 1 that the graph makes low
#: "mask low", "mask high"     the same, and in which direction, where it varies over the keys
#: "data"          numbers that are given, learned or computed of such: rounding changes them
Contents = frozenset[str]

_NOTHING: Contents = frozenset()
_ANYTHING: Contents = frozenset({"low", "high", "mask", "data"})
_OPPOSITE = {"low": "high", "high": "low", "mask low": "mask high", "mask high": "mask low"}
#: Results of these hold what their input does: sizes and indices among their arguments add nothing.
_MOVED = torch_ops.VIEWS | torch_ops.TRANSPOSES | torch_ops.CASTS | torch_ops.COPIES | frozenset(
    "expand expand_as broadcast_to repeat repeat_interleave getitem slice select detach".split()
)  # fmt: skip
#: Results of these are sums of products of activations and weights, or bounded: never a fill.
_DRAWN = frozenset(
    "linear matmul bmm baddbmm einsum embedding layer_norm sigmoid softmax conv2d conv1d normalize".split()
)


def may_hide_rows(node: Any) -> bool:
    """Whether a bias may add a finite number so low that it absorbs the scores (number + score = number).

    Only then can a fully masked row have a finite result: the mean of the values. A learned bias
    or a relative-position table holds no such number; a mask given by the user may.
    """
    return _hides(contents(node))


def may_be_low(node: Any) -> bool:
    """Whether a bias may add low numbers to some keys of a row, so that its negative would raise them."""
    return not contents(node).isdisjoint({"low", "mask low"})


def holds_fills_alone(node: Any) -> bool:
    """Whether a bias is made of zeros and of numbers so low that they hide a key, which bear to be rounded.

    Numbers that the graph is given, or learns, are neither, but where such a low number multiplies them.
    """
    found = contents(node)
    return _hides(found) and "data" not in found


def contents(node: Any) -> Contents:
    """The kinds of numbers that a tensor of the graph, or a number, may hold."""
    node = torch_ops.source(node)
    reached, parts, written = [node], dict[fx.Node, list[Any]](), dict[fx.Node, list[Any]]()
    for each in reached:
        if isinstance(each, fx.Node) and each not in parts:
            parts[each], written[each] = _parts(each), _written_into(each)
            reached += parts[each] + written[each]
    found = dict.fromkeys(sorted(parts), _NOTHING)

    def of(*values: Any) -> Contents:
        return _NOTHING.union(*(found[x] if isinstance(x, fx.Node) else _of_number(x) for x in values))

    while True:  # once, and once more; or until what is written in a circle has come around
        before = dict(found)
        for each in found:
            tensor, into = torch_ops.tensor(each), of(*written[each])
            own = into | _turned(into)
            if tensor is None or tensor.is_floating_point():  # others add nothing by themselves
                own |= _made(each, tensor, of, parts[each])
            if tensor is not None and (tensor.dim() == 0 or known_true(tensor.shape[-1] == 1)):
                own -= {"mask low", "mask high"}  # the same for all keys
            found[each] |= own
        if found == before:
            return of(node)


def _hides(found: Contents) -> bool:
    return not found.isdisjoint({"low", "high", "mask"})


def _turned(found: Contents) -> Contents:
    """The contents of the negative."""
    return frozenset(_OPPOSITE.get(each, each) for each in found)


def _of_number(number: Any) -> Contents:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return _NOTHING
    return frozenset({"low"} if number <= LARGEST_FILL else {"high"} if number >= -LARGEST_FILL else ())


def _made(
    node: fx.Node, tensor: torch.Tensor | None, of: Callable[..., Contents], parts: list[Any]
) -> Contents:
    """The contents of a result or an input of the graph."""
    op = torch_ops.read(node)
    if op is None and tensor is not None and not (tensor.requires_grad or isinstance(tensor, Parameter)):
        return frozenset({"data", "mask", "mask low"})
    if op is None or op.name in _DRAWN:
        return _ANYTHING if tensor is None else frozenset({"data"})
    if op.name in _MOVED and isinstance(op.input, fx.Node):
        return of(op.input)
    first, other, by, plain = op.input, op["other"], op["other"], op["alpha"] is None
    if op.name == "neg":
        return _turned(of(first))
    if op.name == "masked_fill":
        return of(first, op["value"])
    if op.name == "where" or (op.name == "add" and plain):
        return of(first, other)
    if op.name in ("sub", "rsub") and plain:
        first, other = (other, first) if op.name == "rsub" else (first, other)
        return of(first) | _turned(of(other))
    if op.name in ("mul", "div"):
        if op.name == "mul" and isinstance(first, (int, float)):
            first, by = other, first
        if not isinstance(by, (int, float)):
            return of(first, by) | _turned(of(first, by))
        scaled = (of(first) if by >= 0 else _turned(of(first))) | of(by)
        return scaled - {"data"} if op.name == "mul" and by <= LARGEST_FILL else scaled
    whole = of(*parts)
    return whole | {"low", "high"} if _hides(whole) else whole


def _parts(node: fx.Node) -> list[Any]:
    """The nodes and numbers that a node is computed of."""
    op, tensor = torch_ops.read(node), torch_ops.tensor(node)
    if op is None or op.name in _DRAWN or (tensor is not None and not tensor.is_floating_point()):
        return []
    if op.name in _MOVED and isinstance(op.input, fx.Node):
        return [op.input]
    found: list[Any] = []

    def visit(argument: Any) -> None:
        if isinstance(argument, (list, tuple)):
            for item in argument:
                visit(item)
        elif isinstance(argument, (fx.Node, int, float)):
            found.append(argument)

    args, kwargs = arguments(node)
    visit((*args, *kwargs.values()))
    return found


def _written_into(node: fx.Node) -> list[Any]:
    """What the graph writes into the memory of a node, also by way of its views."""
    found: list[Any] = []
    names, memory = [node], storage(node)
    for name in names:
        for user in readers(name):
            if name in [current(each, user) for each in written(user)]:
                found += _parts(user)
            elif memory is not None and storage(user) == memory and user not in names:
                names.append(user)
    return found
