"""Operands of an attention as tensors of the graph seen through views.

A recogniser reads `k` off a transposed, permuted or repeated tensor long before it is known whether the
site will be fused. An `Operand` remembers the views to take and what they give, and adds nodes to the
graph only when it is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..._inductor import hint, known_true
from ...graph import torch_ops
from ...graph.builder import Builder
from ...graph.dims import permutation
from ...operands import Seen, check_given, check_kind, same_shape

#: The name of a method of tensors, or a function, and its arguments after the tensor.
Step = tuple[str | Callable[..., torch.Tensor], tuple[Any, ...]]


@dataclass(frozen=True)
class Operand(Seen):
    """A node and the operations to apply to it.

    Attributes:
        node: the tensor in the graph.
        value: its fake tensor after `steps`; requires a gradient where that of the node does.
    """

    node: fx.Node
    value: torch.Tensor = field(compare=False)
    steps: tuple[Step, ...] = ()

    @classmethod
    def of(cls, node: Any) -> Operand | None:
        """The operand that is the value of `node`, or None where that is no tensor.

        Raises:
            Rejected: inside of vmap; the scores may be outside.
            LeftToStock: the tensor is one around tensors, or an input of a subclass of Tensor.
        """
        if isinstance(node, Operand):
            return node
        value = torch_ops.tensor(node)
        check_kind(value)
        check_given(node)
        return None if value is None else cls(node, value.detach().requires_grad_(value.requires_grad))

    def number(self, node: fx.Node) -> Operand | None:
        """A symbolic number of the graph, as an argument of `then`; None where `node` is none."""
        is_number = isinstance(torch_ops.value(node), (torch.SymInt, torch.SymFloat))
        return Operand(node, self.value.new_empty(())) if is_number else None

    def then(self, method: str | Callable[..., torch.Tensor], *args: Any) -> Operand:
        """The operand after one more operation, which may take others."""
        value, given = self.value, [arg.value if isinstance(arg, Operand) else arg for arg in args]
        with torch.no_grad():
            changed = (
                getattr(value, method)(*given)
                if isinstance(method, str)
                else method(*_arguments(method, value, given))
            )
        trained = value.requires_grad or any(isinstance(a, Operand) and a.value.requires_grad for a in args)
        changed = changed.detach().requires_grad_(trained and changed.is_floating_point())
        return Operand(self.node, changed, (*self.steps, (method, args)))

    def built(self, build: Builder) -> fx.Node:
        """The node that holds it, added to the graph."""
        node = self.node
        for method, args in self.steps:
            given = [arg.built(build) if isinstance(arg, Operand) else arg for arg in args]
            node = build.call(method, *_arguments(method, node, given))
        return node

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def numel(self) -> int:
        """How many elements there are, a symbolic size counted as in the first call."""
        return math.prod(hint(size) for size in self.shape)

    def beside(self, others: Sequence[Operand]) -> Operand:
        """This and others beside each other in the last dim, leading dims of size 1 expanded as needed.

        Kernels for a GPU take a last dim that is a multiple of 8: zeros behind them make it one.
        """
        rank = max(each.value.dim() for each in (self, *others))
        first, *rest = (each.padded(rank) for each in (self, *others))
        lead = torch.broadcast_shapes(*(each.shape[:-1] for each in (first, *rest)))
        first, *rest = (each.expand((*lead, each.shape[-1])) for each in (first, *rest))
        joined = first.then(torch.cat, *rest)
        width = joined.shape[-1]
        extra = -width % 8 if isinstance(width, int) else 0
        return joined.then(torch.nn.functional.pad, (0, extra)) if extra else joined

    def permute(self, dims: Sequence[int]) -> Operand:
        return self if list(dims) == list(range(len(dims))) else self.then("permute", *dims)

    def reshape(self, shape: Sequence[Any]) -> Operand:
        return self if same_shape(self.shape, shape) else self.then("reshape", tuple(shape))

    def expand(self, shape: Sequence[Any]) -> Operand:
        return self if same_shape(self.shape, shape) else self.then("expand", tuple(shape))

    def to(self, dtype: torch.dtype) -> Operand:
        return self if self.value.dtype == dtype else self.then("to", dtype)

    def padded(self, rank: int) -> Operand:
        """The operand with dims of size 1 in front, up to `rank` dims."""
        missing = rank - self.value.dim()
        return self if missing <= 0 else self.then("reshape", (*([1] * missing), *self.shape))


def _arguments(method: Any, first: Any, others: list[Any]) -> list[Any]:
    """The arguments of a step: `torch.cat` takes its tensors in a list, and is along the last dim here."""
    return [[first, *others], -1] if method is torch.cat else [first, *others]


def product(sizes: Sequence[Any]) -> Any:
    """Product of (symbolic) sizes."""
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


def alignment(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[range, range]] | None:
    """Runs of dims of two shapes that hold the same elements in row-major order.

    Returns pairs (dims of `first`, dims of `second`) whose products are equal, as short as possible;
    None where the sizes are not known to agree.
    """
    if not first and not second:
        return []
    for i in range(1, len(first) + 1):
        for j in range(1, len(second) + 1):
            if known_true(product(first[:i]) == product(second[:j])):
                rest = alignment(first[i:], second[j:])
                if rest is not None:
                    shifted = [
                        (range(a.start + i, a.stop + i), range(b.start + j, b.stop + j)) for a, b in rest
                    ]
                    return [(range(i), range(j)), *shifted]
    return None


def regroup(operand: Operand, lead: Sequence[Any], target: Sequence[Any]) -> Operand | None:
    """Move an operand from leading dims `lead` to leading dims `target` (the last two dims stay).

    Args:
        operand: broadcastable to (*lead, rows, columns).
        lead: leading dims of the stage that it was used at.
        target: leading dims with the same elements, merged or split.

    Returns:
        An operand broadcastable to (*target, rows, columns), dims that were broadcast stay 1 where a
        whole run of merged dims was; None where the dims do not line up.
    """
    operand = operand.padded(len(lead) + 2)
    if operand.value.dim() != len(lead) + 2:
        return None
    if same_shape(lead, target):
        return operand
    pairs = alignment(lead, target)
    if pairs is None:
        return None
    own, expanded, final = operand.shape[:-2], [], []
    for sources, targets in pairs:
        if all(known_true(own[d] == 1) for d in sources):
            expanded += [own[d] for d in sources]
            final += [1 for _ in targets]
        else:
            expanded += [lead[d] for d in sources]
            final += [target[d] for d in targets]
    tail = operand.shape[-2:]
    return operand.expand((*expanded, *tail)).reshape((*final, *tail))


def unrepeated(operand: Operand) -> tuple[Operand, int] | None:
    """Look through repeated key/value heads.

    Args:
        operand: keys or values on (batch, heads, length, dim).

    Returns:
        (operand with heads / n heads, n) where head i of `operand` is head i // n of the result: the
        order of `repeat_interleave` and of expand + reshape, which is that of `enable_gqa`. None where
        no such repetition is found (`repeat`, whose order differs, is none).
    """
    position = operand.value.dim() - 3
    for method, args in reversed(operand.steps):
        if method != "permute":
            return None
        position = args[position]
    found = _unrepeated(operand.node, position)
    if found is None:
        return None
    base, count = found
    for method, args in operand.steps:
        base = base.then(method, *args)
    return base, count


def _unrepeated(node: fx.Node, dim: int) -> tuple[Operand, int] | None:
    op = torch_ops.read(node)
    whole = torch_ops.tensor(node)
    if op is None or whole is None or op.inplace:
        return None
    if op.name in torch_ops.COPIES or (op.name in torch_ops.CASTS and torch_ops.same_dtype_device(op)):
        return _unrepeated(op.input, dim)
    if op.name in torch_ops.TRANSPOSES:
        dims = permutation(op)
        if dims is None:
            return None
        found = _unrepeated(op.input, dims[dim])
        return None if found is None else (found[0].permute(dims), found[1])
    if op.name == "repeat_interleave":
        base = Operand.of(op.input)
        given = op["dim"]
        if base is None or not isinstance(given, int) or given % base.value.dim() != dim:
            return None
        return (base, op["repeats"]) if isinstance(op["repeats"], int) and op["repeats"] > 1 else None
    if op.name in torch_ops.VIEWS:
        return _merged_expand(op, whole, dim)
    return None


def _merged_expand(op: torch_ops.Op, whole: torch.Tensor, dim: int) -> tuple[Operand, int] | None:
    """x[..., h, 1, ...].expand(..., h, n, ...).reshape(..., h * n, ...)."""
    inner = torch_ops.read(op.input)
    while inner is not None and inner.name in torch_ops.COPIES:
        inner = torch_ops.read(inner.input)
    if inner is None or inner.name not in ("expand", "expand_as", "broadcast_to"):
        return None
    wide, base = torch_ops.tensor(inner.node), Operand.of(inner.input)
    if wide is None or base is None or wide.dim() != whole.dim() + 1 or base.value.dim() != wide.dim():
        return None
    count = wide.shape[dim + 1]
    merged = [*wide.shape[:dim], wide.shape[dim] * count, *wide.shape[dim + 2 :]]
    unit = [*wide.shape[: dim + 1], 1, *wide.shape[dim + 2 :]]
    if not isinstance(count, int) or count < 2:
        return None
    if not same_shape(merged, whole.shape) or not same_shape(unit, base.shape):
        return None
    return base.then("squeeze", dim + 1), count
