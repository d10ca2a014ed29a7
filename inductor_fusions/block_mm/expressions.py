"""Canonical pointwise expressions over the products of a graph."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..graph.concatenation import taken_apart
from ..graph.products import CASTS, MUL, RESHAPES, SPLITS, product
from ..graph.search import reached
from ..operands import holds, tensor, value
from .columns import columns
from .op import ACTIVATIONS, QUICK

aten = torch.ops.aten

_ADD, _DIV = (aten.add.Tensor, aten.add.Scalar), aten.div.Tensor
_UNARY = {
    aten.relu.default: "relu", aten.erf.default: "erf", aten.tanh.default: "tanh", aten.exp.default: "exp",
}  # fmt: skip
#: What an expression is made of; each activation has one of `NONLINEAR`.
NONLINEAR = frozenset(_UNARY) | {aten.sigmoid.default}
_PARTS = NONLINEAR | RESHAPES | CASTS | {
    *MUL, *_ADD, _DIV, aten.neg.default, aten.reciprocal.default, aten.pow.Tensor_Scalar,
    aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default,
}  # fmt: skip
#: How deep it may be, and of how many operands: what reads a value twice has it twice.
_DEPTH, _MOST = 24, 128


class Expressions:
    """The expressions of a graph.

    An expression is a number, the node of a product or of columns of one, or a tuple ("mul" | "add", sorted
    operands) or ("recip" | "relu" | "erf" | "tanh" | "exp", operand). Products and sums are flat. Reshapes
    fall away, a `cat` or a write whose operands are taken out again, and casts to the dtype of the products,
    to that of the expression, or to one that holds either: what they round is kept exact. There is no
    expression of other casts, such as to float8 and back.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Node, torch.dtype], Any] = {}

    def of(self, node: Any) -> Any:
        """The expression of a node; None if it is no pointwise function of products."""
        found = tensor(node)
        return None if found is None else self._of(node, found.dtype, _DEPTH)

    def _of(self, node: Any, result: torch.dtype, depth: int) -> Any:
        """The expression of `node` as a part of one whose dtype is `result`."""
        if isinstance(node, (int, float)) and not isinstance(node, bool):
            return float(node)
        if not isinstance(node, fx.Node) or depth == 0 or tensor(node) is None:
            return None
        key = node, result
        if key not in self._known:
            self._known[key] = self._read(node, result, depth - 1)
        return self._known[key]

    def _read(self, node: fx.Node, result: torch.dtype, depth: int) -> Any:
        if product(node) is not None:
            return node
        if node.op != "call_function":
            return None
        if node.target in RESHAPES:
            return self._of(node.args[0], result, depth)
        if columns(node) is not None:
            return node
        if (part := taken_apart(node)) is not None:
            return self._of(part, result, depth)
        if node.target in CASTS:
            inner = self._of(node.args[0], result, depth)
            dtypes = [value(leaf).dtype for leaf in leaves(inner)]
            return inner if holds(value(node).dtype, result, *dtypes) else None
        if node.kwargs:
            return None
        operands = [self._of(argument, result, depth) for argument in node.args]
        size = sum(_size(operand) for operand in operands)
        if not operands or size > _MOST or any(operand is None for operand in operands):
            return None
        return _combine(node.target, operands)


def _size(expression: Any) -> int:
    """How many numbers and products an expression has."""
    return sum(map(_size, expression[1:])) if isinstance(expression, tuple) else 1


def _combine(target: Any, operands: list[Any]) -> Any:
    if target in MUL and len(operands) == 2:
        return mul(*operands)
    if target in _ADD and len(operands) == 2:
        return _flat("add", *operands)
    if target is _DIV and len(operands) == 2:
        return mul(operands[0], recip(operands[1]))
    if len(operands) == 1:
        if target is aten.neg.default:
            return mul(-1.0, operands[0])
        if target is aten.sigmoid.default:
            return sigmoid(operands[0])
        if target is aten.reciprocal.default:
            return recip(operands[0])
        if target in _UNARY:
            return (_UNARY[target], operands[0])
    if target is aten.pow.Tensor_Scalar and operands[1] in (2.0, 3.0):
        return mul(*[operands[0]] * int(operands[1]))
    return None


def same(first: Any, second: Any) -> bool:
    """Whether two expressions are equal, but for the last digits of their numbers: sqrt(2 / pi) is
    written with more of them or with fewer."""
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-5)
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(same(x, y) for x, y in zip(first, second, strict=True))
    return bool(first == second)


def _form(expression: Any) -> str:
    """An expression without its numbers, to sort by."""
    if isinstance(expression, tuple):
        return f"{expression[0]}({','.join(_form(part) for part in expression[1:])})"
    return "#" if isinstance(expression, float) else repr(expression)


def _flat(name: str, *operands: Any) -> Any:
    parts: list[Any] = []
    for operand in operands:
        parts += operand[1:] if isinstance(operand, tuple) and operand[0] == name else [operand]
    numbers = [part for part in parts if isinstance(part, float)]
    rest = [part for part in parts if not isinstance(part, float)]
    neutral = 1.0 if name == "mul" else 0.0
    total = neutral
    for number in numbers:
        total = total * number if name == "mul" else total + number
    if not math.isclose(total, neutral, rel_tol=1e-9) or not rest:
        rest.append(total)
    return rest[0] if len(rest) == 1 else (name, *sorted(rest, key=_form))


def mul(*operands: Any) -> Any:
    """The product of expressions."""
    return _flat("mul", *operands)


def recip(x: Any) -> Any:
    """1 / x."""
    return 1 / x if isinstance(x, float) and x else ("recip", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return recip(_flat("add", 1.0, ("exp", mul(-1.0, x))))


def activation(name: str, x: Any) -> Any:
    """The expression of an activation of `op.ACTIVATIONS`."""
    if name == "relu":
        return ("relu", x)
    if name == "sigmoid":
        return sigmoid(x)
    if name == "silu":
        return mul(x, sigmoid(x))
    if name == "gelu_quick":
        return mul(x, sigmoid(mul(QUICK, x)))
    if name == "relu_squared":
        return mul(("relu", x), ("relu", x))
    if name == "gelu":
        return mul(0.5, x, _flat("add", 1.0, ("erf", mul(0.5**0.5, x))))
    if name == "gelu_tanh":
        cubic = _flat("add", x, mul(0.044715, x, x, x))
        return mul(0.5, x, _flat("add", 1.0, ("tanh", mul(math.sqrt(2 / math.pi), cubic))))
    return x


def named(expression: Any, leaf: fx.Node) -> str | None:
    """The name of the activation of a leaf that an expression is."""
    return next((name for name in ACTIVATIONS if name and same(activation(name, leaf), expression)), None)


def leaves(expression: Any) -> set[fx.Node]:
    """The products in an expression, and the parts of products."""
    if isinstance(expression, fx.Node):
        return {expression}
    if isinstance(expression, tuple):
        return {leaf for part in expression[1:] for leaf in leaves(part)}
    return set()


def between(root: fx.Node, ends: set[fx.Node]) -> set[fx.Node]:
    """The tensors from some nodes to one that is computed of them, both included."""

    def inside(node: fx.Node) -> list[fx.Node]:
        inputs = [] if node in ends else node.all_input_nodes
        return [x for x in inputs if tensor(x) is not None or x.target in SPLITS]

    return set(reached([root], inside))


def behind(start: fx.Node, alone: bool = False) -> list[fx.Node]:
    """The nodes, in graph order, of whose expression a node may be a part.

    Args:
        alone: leave out what reads another tensor as well.
    """
    found, edge = {start: None}, [start]
    for _ in range(_DEPTH):
        following: list[fx.Node] = []
        for user in (user for node in edge for user in node.users):
            if user in found or user.op != "call_function" or user.target not in _PARTS:
                continue
            if not alone or all(each in found for each in user.all_input_nodes if tensor(each) is not None):
                found[user] = None
                following.append(user)
        edge = following
    return sorted(found)
