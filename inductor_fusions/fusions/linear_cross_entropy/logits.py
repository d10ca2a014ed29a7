"""From the logits of a loss up to the linear that makes them, in Dynamo's torch-level graph.

In between, the logits may be scaled, bounded by c * tanh(x / c), cast to a wider dtype and viewed. Some of
the rows or classes may be taken, if the classes stay a dim of their own. One linear may have the classes of
several heads: `split`, or a view from which one head is taken, as from a `stack` of linears. The bias may be
an addition by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...fusion import Rejected
from ...graph.dims import permuted_by, selection
from ...graph.einsum import equation_of
from ...graph.search import reached
from ...graph.torch_ops import CASTS, COPIES, Op, linear_of, read, scaled_by, value
from ...operands import holds, same_shape, tensor
from ...reasons import Reason
from .parts import Head, classes_of, moves_classes, one_head, rows_of

#: A larger number that is added to logits rounds their digits away, which a softmax sees.
LARGEST_SHIFT = 1e4
#: Nodes that are looked at in search of the linears in a term of a sum, at most.
MOST_ABOVE = 32
_BIAS_OF_CAST = (
    "a bias is added to cast logits, or one of another dtype, and a linear would round the sum",
    "add a bias of the linear's dtype to its result, and cast behind it",
)
_CONVOLUTIONS = frozenset("conv1d conv2d conv3d conv_transpose1d conv_transpose2d convolution".split())
_TRANSPOSE = "pass logits.transpose(1, 2), or a matrix of logits and a vector of labels"


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
        offset: a number that is added behind that, which a softmax does not see, and a logsumexp does.
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
    offset: float
    head: Head | None

    @property
    def classes(self) -> Any:
        """How many classes the loss reads."""
        return value(self.linear).shape[-1] if self.columns is None else self.columns[1]

    @property
    def overwrites(self) -> bool:
        """Whether something in between writes in place."""
        return any(op is not None and op.inplace for op in map(read, self.path))


def walk(node: fx.Node, path: list[fx.Node], replayed: list[fx.Node], last: bool = True) -> Logits:
    """Walk from logits up to the linear that computes them.

    Args:
        path, replayed: the nodes behind them, the last one first.
        last: whether the classes are their last dim; else they are the second one.

    Raises:
        Rejected: there is none, or something else in between.
    """
    return _Walk(path, replayed, last).to_linear(node)


class _Walk:
    """What is read on the way from logits up to their linear. The last operation is read first.

    Attributes:
        pointwise: ("mul", factor) and ("tanh", 0.0) of each logit.
        bias: a vector that is added, the number of pointwise operations behind it, and its sum's dtype.
        shift: a number that is added in front of a cap, the same number and dtype; None without one.
        last: whether the classes are the last dim of what is read; else they are the second one.
        columns, offset, head: as `Logits` has them.
    """

    def __init__(self, path: list[fx.Node], replayed: list[fx.Node], last: bool) -> None:
        self.path, self.replayed, self.last = path, replayed, last
        self.pointwise: list[tuple[str, float]] = []
        self.bias: tuple[fx.Node, int, torch.dtype] | None = None
        self.shift: tuple[float, int, torch.dtype] | None = None
        self.columns: tuple[int, int] | None = None
        self.offset = 0.0
        self.head: Head | None = None

    def to_linear(self, node: fx.Node) -> Logits:
        """Read up to the linear."""
        while (operands := product_of(node)) is None:
            op = read(node)
            if op is None or tensor(node) is None or (op.inplace and op.name not in ("mul", "div", "add")):
                raise _no_linear(node)
            source = self._source(replace(op, inplace=False))  # what it writes to is read nowhere else
            if not isinstance(source, fx.Node):
                raise _no_linear(node)
            node = source
        if not self.last:
            raise Reason.LOSS.rejected("the class dim is not the last dim of a linear's result", _TRANSPOSE)
        self.path.append(node)
        if (turned := permuted_by(node, [1, 0])) is not None:
            self.path.append(turned)  # the product
        out, (h, w, by_rows, bias) = tensor(node), operands
        if self.bias is not None:
            vector, place, dtype = self.bias
            # What the linear itself could have added.
            if out is not None and out.dtype != dtype:
                raise Reason.LOSS.rejected(*_BIAS_OF_CAST)
            if bias is not None or place != len(self.pointwise) or out is None:
                raise Reason.LOSS.rejected(
                    "a second tensor is added to the logits, or one that is not a bias"
                )
            bias = vector
        held = tensor(bias)
        if held is not None and out is not None and self.columns is not None:
            known = any(known_true(held.shape[0] == count) for count in (out.shape[-1], self.columns[1]))
            if not known:
                raise Reason.LOSS.rejected("a bias is added to more classes than the loss reads")
        shift, *place_and_dtype = self.shift or (0.0, None, None)
        if shift and (out is None or place_and_dtype != [len(self.pointwise), out.dtype]):
            raise Reason.LOSS.rejected(
                "a number is added to scaled or cast logits, in front of a tanh or a sigmoid",
                "add it to the linear's result, and scale and cast behind it",
            )
        bend = _bent(self.pointwise[::-1])
        path, replayed = tuple(reversed(self.path)), tuple(reversed(self.replayed))
        return Logits(
            node, h, w, bias, by_rows, path, replayed, bend, self.columns, shift, self.offset, self.head
        )

    def _source(self, op: Op) -> Any:
        """Note what an operation does to the logits; returns what it reads."""
        if op.name in _CONVOLUTIONS:
            raise Reason.LOSS.rejected("the logits are computed by a convolution, and only linears are fused")
        node, source = op.node, self._pointwise(op)
        if source is None and op.name in CASTS | COPIES | {"detach"}:
            if not is_as_wide(op):
                raise Reason.ROUNDED.rejected(f"{op.name} rounds the logits or moves them to another device")
            source = op.input
        if source is None and not self.last:
            if not moves_classes(op):
                raise Reason.LOSS.rejected(
                    f"{op.said} reads logits whose class dim is not the last one", _TRANSPOSE
                )
            self.last, source = True, op.input
        if source is None:
            source, node = self._part(op)
        self.path.append(node)
        return source

    def _pointwise(self, op: Op) -> Any:
        """Read a scale, a cap, a number or a bias; None if it is none of them."""
        source, dtype = op.input, value(op.node).dtype
        capped = ("tanh", 0.0) in self.pointwise
        if op.name in ("mul", "div"):
            source, factor = _scaled(op)
            self.pointwise.append(("mul", factor))
        elif op.name == "tanh":
            self.pointwise.append(("tanh", 0.0))
        elif op.name == "sigmoid":  # (1 + tanh(x / 2)) / 2
            self.offset += 0.5 * self._factor()
            self.pointwise += [("mul", 0.5), ("tanh", 0.0), ("mul", 0.5)]
        elif op.name == "add" and type(op["other"]) in (int, float):
            source, number = op.only("input", "other")
            if number is None or not abs(number) <= LARGEST_SHIFT or (self.shift and capped):
                raise _no_linear(op.node)
            if capped and number:
                self.shift = number, len(self.pointwise), dtype
            else:
                self.offset += number * self._factor()
        elif op.name == "add" and self.bias is None and self.last:
            source, vector = _biased(op)
            self.bias = vector, len(self.pointwise), dtype
        else:
            return None
        return source

    def _factor(self) -> float:
        """What multiplies a number that is added at this place, behind a cap."""
        return math.prod(factor for name, factor in self.pointwise if name == "mul")

    def _part(self, op: Op) -> tuple[Any, fx.Node]:
        """Read rows, classes or one head; returns what they are taken from, and the node that takes them."""
        if (rows := rows_of(op)) is not None:
            source, steps = rows
            self.replayed += steps
            self.path += steps[:-1]
            return source, steps[-1]
        taken = selection(op.node) if self.columns is None else None
        if taken is not None and (columns := classes_of(taken)) is not None:
            self.columns = columns
            if len(taken.dims) > 1:  # rows as well
                self.replayed.append(op.node)
            self.path += taken.nodes[:-1]
            return taken.source, taken.nodes[-1]
        if self.head is None and (head := one_head(op, self.replayed[::-1])) is not None:
            self.head = head
            self.replayed.append(op.node)
            if op.name == "stack":
                return op["tensors"][head.number], op.node
            classes = value(op.node).shape[-1]
            start, count = self.columns or (0, classes)
            self.columns = head.number * classes + start, count
            return op.input, op.node
        raise _no_linear(op.node)


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
        if known_true(held.shape[0] == before.shape[-1]):
            if before.dtype != held.dtype:
                raise Reason.LOSS.rejected(*_BIAS_OF_CAST)
            return source, vector
    out_shape = value(op.node).shape
    if all((term := tensor(x)) is not None and same_shape(term.shape, out_shape) for x in (first, second)):
        if _linears_in(first) & _linears_in(second):
            raise Reason.LOSS.rejected(
                f"{op.node.name} adds functions of the same logits, as where the label's has a margin"
            )
        raise Reason.LOSS.rejected(
            f"{op.node.name} adds a matrix to the logits, as an adapter of the head does",
            "leave the head out of the adapters, or merge its adapter",
        )
    raise _no_linear(op.node)


def _linears_in(term: Any) -> set[fx.Node]:
    """The nearest linears that a term of a sum is computed of."""

    def above(node: fx.Node) -> list[fx.Node]:
        return [] if product_of(node) is not None else node.all_input_nodes

    return {node for node in reached([term], above, MOST_ABOVE) if product_of(node) is not None}


def _no_linear(node: fx.Node) -> Rejected:
    op = read(node)
    what = node.name if op is None else op.said
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
        Rejected: the other operand is not a number, or the result has another dtype.
    """
    found = scaled_by(op)
    before, after = tensor(found[0] if found is not None else None), tensor(op.node)
    if found is None or before is None or after is None or before.dtype != after.dtype:
        raise _no_linear(op.node)
    return found


def _linear_of_einsum(node: fx.Node) -> tuple[fx.Node, fx.Node, bool, None] | None:
    """The linear in an einsum "bsd,vd->bsv", with any letters."""
    op = read(node)
    found = equation_of(op) if op is not None and op.name == "einsum" else None
    if found is None:
        return None
    for each in (found, found.turned()):
        summed, v = each.first[-1:], each.result[-1:]
        if len(each.second) == 2 and set(each.second) == {summed, v} and each.result[:-1] == each.first[:-1]:
            return (each.left, each.right, each.second[0] == v, None) if summed != v else None
    return None


def _turned(node: fx.Node) -> tuple[fx.Node, fx.Node, bool, None] | None:
    """x and w of `(w @ x.t()).t()`."""
    product = permuted_by(node, [1, 0])
    op = None if product is None else read(product)
    w, other = op.only("input", "other") if op is not None and op.name == "matmul" else (None, None)
    x = permuted_by(other, [1, 0])
    return None if x is None or tensor(w) is None else (x, w, True, None)


def product_of(node: fx.Node) -> tuple[fx.Node, fx.Node, bool, fx.Node | None] | None:
    """(input, weight, whether its rows are the classes, bias) of a product with a matrix."""
    found = linear_of(node) or _linear_of_einsum(node) or _turned(node)
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
