"""Reads the subgraph that computes a mask into a value of the algebra."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...._inductor import is_batched, known_true
from .. import torch_ops
from ..aliasing import Mutations, adds_nothing
from .proofs import reduce
from .values import (
    BOOL,
    Affine,
    Bool,
    Choice,
    Element,
    NonNegative,
    Unknown,
    Value,
    affine,
    as_bool,
    as_number,
    branches,
    choose,
    combine,
    compare,
    conjunction,
    disjunction,
    identity,
    is_integral,
    is_unit,
    map_parts,
    negation_of,
    substitute,
)


class Interpreter:
    """Reads nodes of one graph into `Value`s, each once.

    A value is that which its node made. An operation reads an operand as it is when the operation runs: what
    was overwritten in between is known where the operation in between is (`x *= y`, `x[:] = y`), else opaque.

    Args:
        mutations: which values of the graph are overwritten, and when.
        bindings: for the body of a higher-order operation, what its placeholders stand for outside,
            as (interpreter of the outer graph, node there).
    """

    def __init__(
        self, mutations: Mutations, bindings: Mapping[fx.Node, tuple[Interpreter, Any]] | None = None
    ) -> None:
        self.mutations = mutations
        self._bindings = bindings or {}
        self._memo: dict[fx.Node, Value] = {}
        #: The operation that is read now, and how many are read inside each other.
        self._reader: fx.Node | None = None
        self._depth = 0

    def read(self, node: Any) -> Value:
        """The value of a node or of a number; None where it is unknown, or overwritten after it was made.

        In a rule, and inside `reading`: the value that the operation reads.
        """
        if isinstance(node, bool):
            return node
        if isinstance(node, (int, float, torch.SymInt, torch.SymFloat)):
            return Affine(node)
        if not isinstance(node, fx.Node):
            return None
        writer = self.mutations.last(node, self._reader)
        if writer is None:
            return self._made(node)
        return self._overwritten(node, writer) if self._reader is not None else None

    @contextlib.contextmanager
    def reading(self, at: fx.Node | None) -> Iterator[None]:
        """Inside, values are those that a node of the graph would read; without one, those that stay."""
        before, self._reader = self._reader, at
        try:
            yield
        finally:
            self._reader = before

    def _overwritten(self, node: fx.Node, writer: fx.Node) -> Value:
        """The value of a node right after the last node that wrote to its memory, if that wrote all of it."""
        if self.mutations.targets(writer) != [node] or self._depth > DEEPEST:
            return None
        operation = torch_ops.read(writer)
        if operation is None:
            return None
        self._depth += 1
        try:
            with self.reading(writer):
                if operation.name == "setitem":
                    return self._assigned(node, writer)
                return self._made(writer) if operation.inplace and operation.input is node else None
        finally:
            self._depth -= 1

    def _assigned(self, node: fx.Node, writer: fx.Node) -> Value:
        """The value of `node` after `node[:, :] = value`, where that is all of it."""
        target = torch_ops.tensor(node)
        if target is None or is_batched(target) or len(writer.args) != 3:
            return None
        index, given = torch_ops.concrete(writer.args[1]), writer.args[2]
        if not _covers(index if isinstance(index, tuple) else (index,), target.shape):
            return None
        source = torch_ops.tensor(given)
        if source is not None:
            same = source.dtype == target.dtype and source.dim() <= target.dim() and not is_batched(source)
            return self.read(given) if same else None
        number = torch_ops.concrete(given)
        if not isinstance(number, (bool, int, float)):
            return None
        return _of_dtype(number, target.dtype)

    def _made(self, node: fx.Node) -> Value:
        """The value that a node has made.

        Long chains of nodes are read from their start, so that Python's stack does not grow with them.
        """
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._memo:
                stack.pop()
                continue
            pending = [n for n in self._operands(top) if n not in self._memo]
            if pending:
                stack.extend(pending)
                continue
            self._memo[top] = self._evaluate(top)
            stack.pop()
        return self._memo[node]

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        operation = torch_ops.read(node)
        if operation is None or operation.name not in RULES:
            return []
        return [n for n in node.all_input_nodes if isinstance(torch_ops.value(n), torch.Tensor)]

    def _evaluate(self, node: fx.Node) -> Value:
        if node in self._bindings:
            outer, operand = self._bindings[node]
            with outer.reading(None):
                return outer.read(operand)
        known = torch_ops.value(node)
        if isinstance(known, (int, float, torch.SymInt, torch.SymFloat)):
            return Affine(known)
        operation = torch_ops.read(node)
        if operation is None or not isinstance(known, torch.Tensor) or "out" in node.kwargs:
            return self._unknown(node)
        rule = RULES.get(operation.name)
        if rule is None or (
            operation.inplace and operation.name not in IN_PLACE and not adds_nothing(operation)
        ):
            return self._unknown(node)
        with self.reading(node):
            found = _in_dtype(rule(self, operation), known.dtype)
        # An index of a dim of size 1 is 0, whatever the dim is expanded to later.
        if any(known_true(size == 1) for size in known.shape):
            found = substitute(found, lambda dim: Affine(0) if is_unit(known, dim) else identity(dim))
        if isinstance(found, BOOL):
            found = reduce(found, known.shape)
        return self._unknown(node) if found is None else found

    def _unknown(self, node: fx.Node) -> Value:
        """A node as data: a condition, or an integer (a narrow one may wrap, a float is rounded)."""
        tensor = torch_ops.tensor(node)
        if is_batched(tensor):
            return None
        if tensor is None or tensor.dtype not in (torch.bool, torch.int32, torch.int64):
            return None
        if self.mutations.touch(node):
            return Unknown(node) if tensor.dtype == torch.bool else None
        element = Element.of(node, tensor)
        return element if tensor.dtype == torch.bool else affine(0, {element: 1})

    def boolean(self, node: Any) -> Bool | None:
        """A value as a condition: numbers are true where they are not zero."""
        return as_bool(self.read(node))


#: Operations whose result, written over their first operand, is what they give otherwise.
IN_PLACE = frozenset({"add", "sub", "mul", "masked_fill", "bitwise_and", "bitwise_or"})
#: How many overwritten values are read inside each other.
DEEPEST = 40
#: Integers up to here are exact in every floating dtype that indices are computed in.
EXACT = 2.0**24


def _covers(index: tuple[Any, ...], shape: Sequence[Any]) -> bool:
    """Whether an index of slices is all of a tensor."""
    if index == (Ellipsis,):
        return True
    if len(index) > len(shape):
        return False
    return all(
        isinstance(item, slice)
        and item.step in (None, 1)
        and (item.start is None or (isinstance(item.start, int) and item.start == 0))
        and (item.stop is None or known_true(item.stop >= size))
        for item, size in zip(index, shape, strict=False)
    )


def _in_dtype(value: Value, dtype: torch.dtype) -> Value:
    """What a rule found, if a tensor of that dtype holds it."""
    if dtype == torch.bool:
        return as_bool(value)  # True + True is True
    if dtype.is_floating_point:
        for part in branches(value):
            if any(True for _ in part.elements):
                return None  # an integer of the data may be rounded
            large = isinstance(part.const, (int, float)) and abs(part.const) > EXACT
            if large and not part.is_constant:
                return None
    return value


# Rules: one function an operation, from its arguments' values to its own. -------------------------

Rule = Callable[[Interpreter, torch_ops.Op], Value]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def rank_of(node: Any) -> int:
    tensor = torch_ops.tensor(node)
    return tensor.dim() if tensor is not None else 0


def _is_plain(op: torch_ops.Op) -> bool:
    """Whether a sum has no factor for its second operand."""
    return op["alpha"] in (None, 1)


@rule("add")
def _add(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return (
        combine(interpreter.read(op.input), interpreter.read(op["other"]), lambda x, y: x + y)
        if _is_plain(op)
        else None
    )


@rule("sub")
def _sub(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return (
        combine(interpreter.read(op.input), interpreter.read(op["other"]), lambda x, y: x - y)
        if _is_plain(op)
        else None
    )


@rule("rsub")
def _rsub(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return (
        combine(interpreter.read(op["other"]), interpreter.read(op.input), lambda x, y: x - y)
        if _is_plain(op)
        else None
    )


@rule("neg")
def _neg(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return map_parts(interpreter.read(op.input), lambda x: x.map(lambda c: -c))


@rule("mul")
def _mul(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    left, right = interpreter.read(op.input), interpreter.read(op["other"])
    if isinstance(left, BOOL) and isinstance(right, BOOL):
        return conjunction([left, right])

    def multiply(x: Affine, y: Affine) -> Affine | None:
        if x.is_constant:
            return y.map(lambda c: c * x.const)
        return x.map(lambda c: c * y.const) if y.is_constant else None

    return combine(left, right, multiply)


@rule("eq", "ne", "lt", "le", "gt", "ge")
def _comparison(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return compare(op.name, interpreter.read(op.input), interpreter.read(op["other"]))


@rule("bitwise_and", "logical_and")
def _and(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    left, right = _logical(interpreter, op)
    return None if left is None or right is None else conjunction([left, right])


@rule("bitwise_or", "logical_or")
def _or(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    left, right = _logical(interpreter, op)
    return None if left is None or right is None else disjunction([left, right])


def _logical(interpreter: Interpreter, op: torch_ops.Op) -> tuple[Bool | None, Bool | None]:
    """Operands of a logical operation; of a bitwise one only where they are boolean."""
    left, right = interpreter.read(op.input), interpreter.read(op["other"])
    if op.name.startswith("bitwise") and not (isinstance(left, BOOL) and isinstance(right, BOOL)):
        return None, None
    return as_bool(left), as_bool(right)


@rule("bitwise_not", "logical_not")
def _not(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    found = interpreter.read(op.input)
    if op.name == "bitwise_not" and not isinstance(found, BOOL):
        return None
    return negation_of(as_bool(found))


@rule("where")
def _where(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    if op["other"] is None:
        return None
    return choose(
        interpreter.boolean(op["condition"]), interpreter.read(op.input), interpreter.read(op["other"])
    )


@rule("masked_fill")
def _masked_fill(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return choose(interpreter.boolean(op["mask"]), interpreter.read(op["value"]), interpreter.read(op.input))


@rule(*torch_ops.CASTS, "cpu", "cuda")
def _cast(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    found, target = interpreter.read(op.input), torch_ops.tensor(op.node)
    if target is None or found is None:
        return None
    if _holds_elements(found) and target.dtype not in (torch.int32, torch.int64):
        return None  # the result of the cast is an element itself, or floating point
    if target.dtype == torch.bool:
        return as_bool(found)
    found = as_number(found)
    if not target.dtype.is_floating_point:
        return found if all(is_integral(part) for part in branches(found)) else None
    if target.dtype in (torch.float16, torch.bfloat16):
        # An index beyond the dtype's integers would be rounded; two-valued masks are not.
        return _rounded(found, target.dtype) if all(part.is_constant for part in branches(found)) else None
    return found if target.dtype in (torch.float32, torch.float64) else None


def _holds_elements(value: Value) -> bool:
    return any(True for part in branches(value) for _ in part.elements)


def _rounded(value: Affine | Choice | None, dtype: torch.dtype) -> Value:
    def to_dtype(part: Affine) -> Affine | None:
        if not isinstance(part.const, (int, float)):
            return None
        limit = torch.finfo(dtype).max
        return part if abs(part.const) <= limit else Affine(math.copysign(math.inf, part.const))

    return map_parts(value, to_dtype)


@rule(*torch_ops.COPIES, "detach")
def _copy(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return interpreter.read(op.input)


@rule("arange")
def _arange(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    given = [torch_ops.concrete(a) for a in op.node.args]
    keyword = {k: torch_ops.concrete(v) for k, v in op.node.kwargs.items()}
    start, step = 0, keyword.get("step", 1)
    if len(given) >= 2 or "start" in keyword:
        start = keyword.get("start", given[0] if given else 0)
    if len(given) >= 3:
        step = given[2]
    numbers = (int, float, torch.SymInt)
    if not isinstance(start, numbers) or not isinstance(step, numbers):
        return None
    return affine(start, {-1: step})


@rule("full", "full_like", "new_full")
def _full(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return _constant(op, op["fill_value"])


@rule("ones", "ones_like", "new_ones")
def _ones(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return _constant(op, 1)


@rule("zeros", "zeros_like", "new_zeros")
def _zeros(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return _constant(op, 0)


@rule("tensor", "scalar_tensor")
def _scalar(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    data = op["data"] if op["data"] is not None else op["s"]
    return _constant(op, data)


def _constant(op: torch_ops.Op, data: Any) -> Value:
    target, number = torch_ops.tensor(op.node), torch_ops.concrete(data)
    if target is None or not isinstance(number, (bool, int, float)):
        return None
    return _of_dtype(number, target.dtype)


def _of_dtype(number: bool | int | float, dtype: torch.dtype) -> Value:
    """A number in a tensor of some dtype."""
    if dtype == torch.bool:
        return bool(number)
    if dtype.is_floating_point:
        return _rounded(Affine(number), dtype)
    return Affine(number) if float(number).is_integer() else None


@rule("tril", "triu")
def _triangle(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    diagonal = torch_ops.concrete(op["diagonal"] if op["diagonal"] is not None else 0)
    if not isinstance(diagonal, (int, torch.SymInt)):
        return None
    kept = NonNegative(affine(diagonal, {-2: 1, -1: -1}))  # row - column + diagonal >= 0
    if op.name == "triu":
        kept = NonNegative(affine(-diagonal, {-2: -1, -1: 1}))
    found = interpreter.read(op.input)
    return choose(kept, found, False if isinstance(found, BOOL) else Affine(0))


@rule("cumsum")
def _cumsum(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    dim = torch_ops.concrete(op["dim"])
    found = as_number(interpreter.read(op.input))
    if not isinstance(dim, int) or not isinstance(found, Affine) or not found.is_constant:
        return None
    dim = dim if dim < 0 else dim - rank_of(op.input)
    return affine(found.const, {dim: found.const})  # c, 2c, 3c, ...


@rule("diff")
def _diff(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    dim = op["dim"] if op["dim"] is not None else -1
    found, prepend = interpreter.read(op.input), interpreter.read(op["prepend"])
    rank = rank_of(op.input)
    if op["n"] not in (None, 1) or op["append"] is not None or not isinstance(dim, int):
        return None
    dim = dim if dim < 0 else dim - rank
    if not isinstance(found, Affine) or _holds_elements(found) or _holds_elements(prepend):
        return None
    step = found.coeff(dim)
    if op["prepend"] is None:
        return Affine(step)
    before = torch_ops.tensor(op["prepend"])
    if before is None or not known_true(before.shape[dim] == 1) or not isinstance(prepend, Affine):
        return None
    first = affine(found.const, {d: c for d, c in found.coeffs if d != dim})
    gap = first - affine(prepend.const, {d: c for d, c in prepend.coeffs if d != dim})
    return Affine(step) if gap.is_constant and known_true(gap.const == step) else None
