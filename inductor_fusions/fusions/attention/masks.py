"""Mask algebra: what a mask lets through, proved from the graph that makes it.

A mask is a function of the indices (..., q, k). `Interpreter` reads the subgraph that computes it
into one of three forms, over the dims of the value counted from the right (-1 is the key):

    Affine   const + sum(coeff[d] * index[d])                    (arange, arithmetic, gathers of those)
    boolean  And / Or / Not over `affine >= 0`                   (comparisons, logical operations)
    Choice   one affine value where a condition holds, else another    (where, masked_fill)

and to None where it meets anything else: data, a buffer, an operation that it does not know. Sizes may
be symbolic; then every comparison is made with `known_true`, which adds no guard. A class is only ever
given by proof. Contents of buffers are never read: compiled code is cached without them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from . import torch_ops
from .aliasing import Mutations

Number = Any  # int, float, SymInt or SymFloat


@dataclass(frozen=True)
class Affine:
    """`const + sum(coeff * index[dim])`, dims counted from the right."""

    const: Number
    coeffs: tuple[tuple[int, Number], ...] = ()

    def coeff(self, dim: int) -> Number:
        return dict(self.coeffs).get(dim, 0)

    @property
    def is_constant(self) -> bool:
        return not self.coeffs

    def map(self, function: Callable[[Number], Number]) -> Affine:
        """Apply a linear function without constant term to every coefficient."""
        return affine(function(self.const), {d: function(c) for d, c in self.coeffs})

    def __add__(self, other: Affine) -> Affine:
        coeffs = dict(self.coeffs)
        for dim, c in other.coeffs:
            coeffs[dim] = coeffs.get(dim, 0) + c
        return affine(self.const + other.const, coeffs)

    def __sub__(self, other: Affine) -> Affine:
        return self + other.map(lambda c: -c)


def affine(const: Number, coeffs: Mapping[int, Number]) -> Affine:
    """An `Affine` without zero coefficients."""
    kept = tuple(sorted((d, c) for d, c in coeffs.items() if not known_true(c == 0)))
    return Affine(const, kept)


@dataclass(frozen=True)
class NonNegative:
    """`value >= 0`, over integers."""

    value: Affine


@dataclass(frozen=True)
class Not:
    operand: Bool


@dataclass(frozen=True)
class And:
    operands: tuple[Bool, ...]


@dataclass(frozen=True)
class Or:
    operands: tuple[Bool, ...]


@dataclass(frozen=True)
class Unknown:
    """A boolean that the interpreter cannot read; equal only to itself."""

    node: fx.Node


@dataclass(frozen=True)
class Choice:
    """`then` where `condition` holds, else `otherwise`."""

    condition: Bool
    then: Affine
    otherwise: Affine


Bool = bool | NonNegative | Not | And | Or | Unknown
Value = Affine | Bool | Choice | None

_BOOL = (bool, NonNegative, Not, And, Or, Unknown)


def conjunction(operands: Sequence[Bool]) -> Bool:
    """The simplified And."""
    flat: list[Bool] = []
    for operand in operands:
        for part in operand.operands if isinstance(operand, And) else (operand,):
            if part is False:
                return False
            if part is not True and part not in flat:
                flat.append(part)
    flat = [part for part in flat if not any(_implies(other, part) for other in flat if other is not part)]
    if not flat:
        return True
    return flat[0] if len(flat) == 1 else And(tuple(flat))


def _implies(first: Bool, second: Bool) -> bool:
    """Whether one comparison holds wherever another does: the same slopes and a larger constant."""
    return (
        isinstance(first, NonNegative)
        and isinstance(second, NonNegative)
        and first.value.coeffs == second.value.coeffs
        and known_true(first.value.const < second.value.const)
    )


def negation(operand: Bool) -> Bool:
    """The simplified Not, pushed down to comparisons (over integers, not x >= 0 is -x - 1 >= 0)."""
    if isinstance(operand, bool):
        return not operand
    if isinstance(operand, Not):
        return operand.operand
    if isinstance(operand, NonNegative):
        flipped = operand.value.map(lambda c: -c)
        return NonNegative(Affine(flipped.const - 1, flipped.coeffs))
    if isinstance(operand, And):
        return disjunction([negation(part) for part in operand.operands])
    if isinstance(operand, Or):
        return conjunction([negation(part) for part in operand.operands])
    return Not(operand)


def disjunction(operands: Sequence[Bool]) -> Bool:
    """The simplified Or."""
    flat: list[Bool] = []
    for operand in operands:
        for part in operand.operands if isinstance(operand, Or) else (operand,):
            if part is True:
                return True
            if part is not False and part not in flat:
                flat.append(part)
    if not flat:
        return False
    return flat[0] if len(flat) == 1 else Or(tuple(flat))


@dataclass(frozen=True)
class MaskClass:
    """What was proved of a mask over a (q, k) box.

    Attributes:
        all_visible: every key is seen by every query.
        causal: exactly the keys with k <= q are seen.
    """

    all_visible: bool = False
    causal: bool = False


OPAQUE = MaskClass()


def classify(mask: Bool | None, shape: Sequence[Number]) -> MaskClass:
    """Class of a visibility predicate.

    Args:
        mask: True where a key is seen; None is opaque.
        shape: the full shape (..., q_len, kv_len) that the mask is broadcast to.
    """
    if mask is None:
        return OPAQUE
    left = reduce(mask, shape)
    if left is True:
        return MaskClass(all_visible=True)
    square = known_true(shape[-1] == shape[-2])
    if square and isinstance(left, NonNegative) and _is_causal(left.value):
        return MaskClass(causal=True)
    return OPAQUE


def _is_causal(value: Affine) -> bool:
    """Whether `value >= 0` says k <= q, over integers."""
    coeffs = dict(value.coeffs)
    if set(coeffs) != {-1, -2}:
        return False
    step = coeffs[-2]
    return known_true(step > 0) and known_true(coeffs[-1] == -step) and (
        known_true(value.const >= 0) and known_true(value.const < step)
    )  # fmt: skip


def reduce(mask: Bool, shape: Sequence[Number]) -> Bool:
    """`mask` without the parts that hold, or fail, for every index of the box `shape`."""
    if isinstance(mask, NonNegative):
        low, high = bounds(mask.value, shape)
        if low is not None and known_true(low >= 0):
            return True
        if high is not None and known_true(high < 0):
            return False
        return mask
    if isinstance(mask, And):
        return conjunction([reduce(part, shape) for part in mask.operands])
    if isinstance(mask, Or):
        return disjunction([reduce(part, shape) for part in mask.operands])
    if isinstance(mask, Not):
        return negation(reduce(mask.operand, shape))
    return mask


def bounds(value: Affine, shape: Sequence[Number]) -> tuple[Number | None, Number | None]:
    """Least and greatest value over the box 0 <= index[d] < shape[d]; None where a sign is unknown."""
    low = high = value.const
    for dim, c in value.coeffs:
        if -dim > len(shape):
            return None, None
        reach = c * (shape[dim] - 1)
        if known_true(c >= 0):
            high = high + reach
        elif known_true(c <= 0):
            low = low + reach
        else:
            return None, None
    return low, high


def visibility(value: Value) -> tuple[Bool, float] | None:
    """Read an additive mask as (predicate of what is seen, what is added elsewhere).

    None where it is no mask: more than the two values 0 and a large negative number. A value that
    is the same everywhere cancels in the softmax, and counts as all visible; unless it is so large
    that scores would lose their digits in it.
    """
    if isinstance(value, Affine) and value.is_constant and _cancels(value.const):
        return True, 0.0
    if not isinstance(value, Choice):
        return None
    then, otherwise = value.then, value.otherwise
    if not then.is_constant or not otherwise.is_constant:
        return None
    if _is_zero(then.const) and is_fill(otherwise.const):
        return value.condition, float(otherwise.const)
    if _is_zero(otherwise.const) and is_fill(then.const):
        return negation(value.condition), float(then.const)
    return None


#: Scores are taken to stay far above this, so that a masked key has weight exp(-10000) = 0.
LARGEST_FILL = -1e4


def is_fill(number: Number) -> bool:
    """Whether a number that replaces a score, or is added to one, hides the key."""
    return isinstance(number, (int, float)) and not math.isnan(number) and number <= LARGEST_FILL


def _is_zero(number: Number) -> bool:
    return isinstance(number, (int, float)) and number == 0


def _cancels(number: Number) -> bool:
    return isinstance(number, (int, float)) and abs(number) <= 1e3


# -- the interpreter ------------------------------------------------------------------------------


class Interpreter:
    """Reads nodes of one graph into `Value`s, each once.

    Args:
        mutations: which values of the graph are overwritten; those are opaque.
        bindings: for the body of a higher-order operation, what its placeholders stand for outside,
            as (interpreter of the outer graph, node there).
    """

    def __init__(
        self, mutations: Mutations, bindings: Mapping[fx.Node, tuple[Interpreter, Any]] | None = None
    ) -> None:
        self.mutations = mutations
        self._bindings = bindings or {}
        self._memo: dict[fx.Node, Value] = {}

    def read(self, node: Any) -> Value:
        """The value of a node or of a number; None where it is unknown.

        Long chains of nodes are read from their start, so that Python's stack does not grow with them.
        """
        if isinstance(node, bool):
            return node
        if isinstance(node, (int, float, torch.SymInt, torch.SymFloat)):
            return Affine(node)
        if not isinstance(node, fx.Node):
            return None
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
        if operation is None or operation.name not in _RULES:
            return []
        return [n for n in node.all_input_nodes if isinstance(torch_ops.value(n), torch.Tensor)]

    def _evaluate(self, node: fx.Node) -> Value:
        if node in self._bindings:
            outer, operand = self._bindings[node]
            return outer.read(operand)
        known = torch_ops.value(node)
        if isinstance(known, (int, float, torch.SymInt, torch.SymFloat)):
            return Affine(known)
        operation = torch_ops.read(node)
        if operation is None or not isinstance(known, torch.Tensor) or self.mutations.touch(node):
            return self._unknown(node)
        rule = _RULES.get(operation.name)
        if rule is None or operation.inplace:
            return self._unknown(node)
        found = rule(self, operation)
        # An index of a dim of size 1 is 0, whatever the dim is expanded to later.
        if any(known_true(size == 1) for size in known.shape):
            found = substitute(found, lambda dim: Affine(0) if _is_unit(known, dim) else _identity(dim))
        if isinstance(found, _BOOL):
            found = reduce(found, known.shape)
        return self._unknown(node) if found is None else found

    @staticmethod
    def _unknown(node: fx.Node) -> Value:
        tensor = torch_ops.tensor(node)
        return Unknown(node) if tensor is not None and tensor.dtype == torch.bool else None

    def boolean(self, node: Any) -> Bool | None:
        """A value as a condition: numbers are true where they are not zero."""
        return as_bool(self.read(node))


def as_bool(value: Value) -> Bool | None:
    """`value != 0`."""
    if isinstance(value, _BOOL):
        return value
    if value is None:
        return None
    return negation_of(_compare("eq", value, Affine(0)))


def negation_of(value: Bool | None) -> Bool | None:
    return None if value is None else negation(value)


def as_number(value: Value) -> Affine | Choice | None:
    """A condition as 1 and 0."""
    if isinstance(value, bool):
        return Affine(int(value))
    if isinstance(value, _BOOL):
        return Choice(value, Affine(1), Affine(0))
    return value


def choose(condition: Bool | None, then: Value, otherwise: Value) -> Value:
    """where(condition, then, otherwise)."""
    if condition is None:
        return None
    if condition is True:
        return then
    if condition is False:
        return otherwise
    if isinstance(then, _BOOL) and isinstance(otherwise, _BOOL):
        return disjunction([conjunction([condition, then]), conjunction([negation(condition), otherwise])])
    then, otherwise = as_number(then), as_number(otherwise)
    # A branch that chooses by the same condition again has chosen already.
    if isinstance(then, Choice) and then.condition in (condition, negation(condition)):
        then = then.then if then.condition == condition else then.otherwise
    if isinstance(otherwise, Choice) and otherwise.condition in (condition, negation(condition)):
        otherwise = otherwise.otherwise if otherwise.condition == condition else otherwise.then
    # A nested choice of the same outer value: where(a, where(b, x, y), y) is where(a and b, x, y).
    if isinstance(then, Choice) and isinstance(otherwise, Affine):
        if then.otherwise == otherwise:
            return choose(conjunction([condition, then.condition]), then.then, otherwise)
        if then.then == otherwise:
            return choose(conjunction([condition, negation(then.condition)]), then.otherwise, otherwise)
    if isinstance(otherwise, Choice) and isinstance(then, Affine):
        return choose(negation(condition), otherwise, then)
    if isinstance(then, Affine) and isinstance(otherwise, Affine):
        return then if then == otherwise else Choice(condition, then, otherwise)
    return None


def _map(value: Value, function: Callable[[Affine], Affine | None]) -> Value:
    """Apply a function to an affine value, or to both branches of a choice."""
    value = as_number(value)
    if isinstance(value, Affine):
        return function(value)
    if isinstance(value, Choice):
        return choose(value.condition, function(value.then), function(value.otherwise))
    return None


def _combine(left: Value, right: Value, function: Callable[[Affine, Affine], Affine | None]) -> Value:
    """Apply a function of two affine values, also where one of them is a choice."""
    left, right = as_number(left), as_number(right)
    if isinstance(left, Affine):
        return _map(right, lambda r: function(left, r))
    if isinstance(right, Affine):
        return _map(left, lambda x: function(x, right))
    return None


def _integral(value: Affine) -> bool:
    numbers = [value.const, *(c for _, c in value.coeffs)]
    return all(
        isinstance(n, (int, torch.SymInt)) or (isinstance(n, float) and n.is_integer()) for n in numbers
    )


def _compare(name: str, left: Value, right: Value) -> Bool | None:
    """A comparison as a predicate."""
    if name == "gt":
        return _compare("lt", right, left)
    if name == "ge":
        return _compare("le", right, left)
    if name == "ne":
        return negation_of(_compare("eq", left, right))
    if isinstance(left, _BOOL) and isinstance(right, _BOOL) and name == "eq":
        return choose(left, right, negation(right))  # type: ignore[return-value]
    left, right = as_number(left), as_number(right)
    if left is None or right is None:
        return None
    if isinstance(left, Choice):
        then, otherwise = _compare(name, left.then, right), _compare(name, left.otherwise, right)
        return None if then is None or otherwise is None else as_bool(choose(left.condition, then, otherwise))
    if isinstance(right, Choice):
        then, otherwise = _compare(name, left, right.then), _compare(name, left, right.otherwise)
        return (
            None if then is None or otherwise is None else as_bool(choose(right.condition, then, otherwise))
        )
    if left.is_constant and right.is_constant and isinstance(left.const, (int, float)):
        if isinstance(right.const, (int, float)):
            x, y = left.const, right.const
            return {"lt": x < y, "le": x <= y, "eq": x == y}[name]
    difference = right - left  # left <= right where this is >= 0
    if not _integral(difference):
        return None
    if name == "lt":
        return NonNegative(Affine(difference.const - 1, difference.coeffs))
    if name == "le":
        return NonNegative(difference)
    reverse = difference.map(lambda c: -c)
    return conjunction([_settled(NonNegative(difference)), _settled(NonNegative(reverse))])


def _settled(condition: NonNegative) -> Bool:
    if condition.value.is_constant:
        if known_true(condition.value.const >= 0):
            return True
        if known_true(condition.value.const < 0):
            return False
    return condition


# Rules: one function an operation, from its arguments' values to its own. -------------------------

Rule = Callable[[Interpreter, torch_ops.Op], Value]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for name in names:
            _RULES[name] = function
        return function

    return register


def _rank(node: Any) -> int:
    tensor = torch_ops.tensor(node)
    return tensor.dim() if tensor is not None else 0


def _alpha(op: torch_ops.Op) -> bool:
    return op["alpha"] in (None, 1)


@_rule("add")
def _add(read: Interpreter, op: torch_ops.Op) -> Value:
    return _combine(read.read(op.input), read.read(op["other"]), lambda x, y: x + y) if _alpha(op) else None


@_rule("sub")
def _sub(read: Interpreter, op: torch_ops.Op) -> Value:
    return _combine(read.read(op.input), read.read(op["other"]), lambda x, y: x - y) if _alpha(op) else None


@_rule("rsub")
def _rsub(read: Interpreter, op: torch_ops.Op) -> Value:
    return _combine(read.read(op["other"]), read.read(op.input), lambda x, y: x - y) if _alpha(op) else None


@_rule("neg")
def _neg(read: Interpreter, op: torch_ops.Op) -> Value:
    return _map(read.read(op.input), lambda x: x.map(lambda c: -c))


@_rule("mul")
def _mul(read: Interpreter, op: torch_ops.Op) -> Value:
    left, right = read.read(op.input), read.read(op["other"])
    if isinstance(left, _BOOL) and isinstance(right, _BOOL):
        return conjunction([left, right])

    def multiply(x: Affine, y: Affine) -> Affine | None:
        if x.is_constant:
            return y.map(lambda c: c * x.const)
        return x.map(lambda c: c * y.const) if y.is_constant else None

    return _combine(left, right, multiply)


@_rule("eq", "ne", "lt", "le", "gt", "ge")
def _comparison(read: Interpreter, op: torch_ops.Op) -> Value:
    return _compare(op.name, read.read(op.input), read.read(op["other"]))


@_rule("bitwise_and", "logical_and")
def _and(read: Interpreter, op: torch_ops.Op) -> Value:
    left, right = _logical(read, op)
    return None if left is None or right is None else conjunction([left, right])


@_rule("bitwise_or", "logical_or")
def _or(read: Interpreter, op: torch_ops.Op) -> Value:
    left, right = _logical(read, op)
    return None if left is None or right is None else disjunction([left, right])


def _logical(read: Interpreter, op: torch_ops.Op) -> tuple[Bool | None, Bool | None]:
    """Operands of a logical operation; of a bitwise one only where they are boolean."""
    left, right = read.read(op.input), read.read(op["other"])
    if op.name.startswith("bitwise") and not (isinstance(left, _BOOL) and isinstance(right, _BOOL)):
        return None, None
    return as_bool(left), as_bool(right)


@_rule("bitwise_not", "logical_not")
def _not(read: Interpreter, op: torch_ops.Op) -> Value:
    found = read.read(op.input)
    if op.name == "bitwise_not" and not isinstance(found, _BOOL):
        return None
    return negation_of(as_bool(found))


@_rule("where")
def _where(read: Interpreter, op: torch_ops.Op) -> Value:
    if op["other"] is None:
        return None
    return choose(read.boolean(op["condition"]), read.read(op.input), read.read(op["other"]))


@_rule("masked_fill")
def _masked_fill(read: Interpreter, op: torch_ops.Op) -> Value:
    return choose(read.boolean(op["mask"]), read.read(op["value"]), read.read(op.input))


@_rule(*torch_ops.CASTS, "cpu", "cuda")
def _cast(read: Interpreter, op: torch_ops.Op) -> Value:
    found, target = read.read(op.input), torch_ops.tensor(op.node)
    if target is None or found is None:
        return None
    if target.dtype == torch.bool:
        return as_bool(found)
    found = as_number(found)
    if not target.dtype.is_floating_point:
        parts = [found] if isinstance(found, Affine) else [found.then, found.otherwise] if found else []
        return found if all(_integral(part) for part in parts) else None
    if target.dtype in (torch.float16, torch.bfloat16):
        # An index beyond the dtype's integers would be rounded; two-valued masks are not.
        parts = [found] if isinstance(found, Affine) else [found.then, found.otherwise] if found else []
        return _rounded(found, target.dtype) if all(part.is_constant for part in parts) else None
    return found


def _rounded(value: Affine | Choice | None, dtype: torch.dtype) -> Value:
    def to_dtype(part: Affine) -> Affine | None:
        if not isinstance(part.const, (int, float)):
            return None
        limit = torch.finfo(dtype).max
        return part if abs(part.const) <= limit else Affine(math.copysign(math.inf, part.const))

    return _map(value, to_dtype)


@_rule(*torch_ops.COPIES, "detach")
def _copy(read: Interpreter, op: torch_ops.Op) -> Value:
    return read.read(op.input)


@_rule("arange")
def _arange(read: Interpreter, op: torch_ops.Op) -> Value:
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


@_rule("full", "full_like", "new_full")
def _full(read: Interpreter, op: torch_ops.Op) -> Value:
    return _constant(op, op["fill_value"])


@_rule("ones", "ones_like", "new_ones")
def _ones(read: Interpreter, op: torch_ops.Op) -> Value:
    return _constant(op, 1)


@_rule("zeros", "zeros_like", "new_zeros")
def _zeros(read: Interpreter, op: torch_ops.Op) -> Value:
    return _constant(op, 0)


@_rule("tensor", "scalar_tensor")
def _scalar(read: Interpreter, op: torch_ops.Op) -> Value:
    data = op["data"] if op["data"] is not None else op["s"]
    return _constant(op, data)


def _constant(op: torch_ops.Op, data: Any) -> Value:
    target, number = torch_ops.tensor(op.node), torch_ops.concrete(data)
    if target is None or not isinstance(number, (bool, int, float)):
        return None
    if target.dtype == torch.bool:
        return bool(number)
    return _rounded(Affine(number), target.dtype) if target.dtype.is_floating_point else Affine(number)


@_rule("tril", "triu")
def _triangle(read: Interpreter, op: torch_ops.Op) -> Value:
    diagonal = torch_ops.concrete(op["diagonal"] if op["diagonal"] is not None else 0)
    if not isinstance(diagonal, (int, torch.SymInt)):
        return None
    kept = NonNegative(affine(diagonal, {-2: 1, -1: -1}))  # row - column + diagonal >= 0
    if op.name == "triu":
        kept = NonNegative(affine(-diagonal, {-2: -1, -1: 1}))
    found = read.read(op.input)
    return choose(kept, found, False if isinstance(found, _BOOL) else Affine(0))


@_rule("cumsum")
def _cumsum(read: Interpreter, op: torch_ops.Op) -> Value:
    dim = torch_ops.concrete(op["dim"])
    found = as_number(read.read(op.input))
    if not isinstance(dim, int) or not isinstance(found, Affine) or not found.is_constant:
        return None
    dim = dim if dim < 0 else dim - _rank(op.input)
    return affine(found.const, {dim: found.const})  # c, 2c, 3c, ...


@_rule("diff")
def _diff(read: Interpreter, op: torch_ops.Op) -> Value:
    dim = op["dim"] if op["dim"] is not None else -1
    found, prepend = read.read(op.input), read.read(op["prepend"])
    rank = _rank(op.input)
    if op["n"] not in (None, 1) or op["append"] is not None or not isinstance(dim, int):
        return None
    dim = dim if dim < 0 else dim - rank
    if not isinstance(found, Affine):
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


# Views: the same numbers at other indices. --------------------------------------------------------


def substitute(value: Value, index: Callable[[int], Affine | None]) -> Value:
    """The value whose index[d] is given by `index(d)`; None where that is unknown."""

    def of_affine(x: Affine) -> Affine | None:
        total = Affine(x.const)
        for dim, c in x.coeffs:
            inner = index(dim)
            if inner is None:
                return None
            total = total + inner.map(partial(operator.mul, c))
        return total

    def of_bool(x: Bool) -> Bool | None:
        if isinstance(x, bool):
            return x
        if isinstance(x, NonNegative):
            inner = of_affine(x.value)
            return None if inner is None else _settled(NonNegative(inner))
        if isinstance(x, Not):
            return negation_of(of_bool(x.operand))
        if isinstance(x, (And, Or)):
            parts = [of_bool(part) for part in x.operands]
            if any(part is None for part in parts):
                return None
            join = conjunction if isinstance(x, And) else disjunction
            return join([part for part in parts if part is not None])
        return None  # data: at other indices it is another unknown

    if isinstance(value, Choice):
        condition = of_bool(value.condition)
        return choose(condition, of_affine(value.then), of_affine(value.otherwise))
    if isinstance(value, Affine):
        return of_affine(value)
    if isinstance(value, _BOOL):
        return of_bool(value)
    return None


def _is_unit(tensor: torch.Tensor, dim: int) -> bool:
    return -dim <= tensor.dim() and known_true(tensor.shape[dim] == 1)


def _identity(dim: int) -> Affine:
    return Affine(0, ((dim, 1),))


def _renamed(mapping: Mapping[int, int]) -> Callable[[int], Affine | None]:
    """Dims that only move: source dim -> result dim; a dim that is gone had one index, 0."""
    return lambda dim: affine(0, {mapping[dim]: 1}) if dim in mapping else Affine(0)


@_rule(*torch_ops.TRANSPOSES, "getattr")
def _transpose(read: Interpreter, op: torch_ops.Op) -> Value:
    dims = torch_ops.transposed_attribute(op) if op.name == "getattr" else torch_ops.permutation(op)
    if dims is None:
        return None
    rank = len(dims)
    return substitute(read.read(op.input), _renamed({d - rank: i - rank for i, d in enumerate(dims)}))


@_rule("expand", "expand_as", "broadcast_to")
def _expand(read: Interpreter, op: torch_ops.Op) -> Value:
    return read.read(op.input)  # dims count from the right, and an expanded dim had one index


@_rule(*torch_ops.VIEWS)
def _view(read: Interpreter, op: torch_ops.Op) -> Value:
    """A view that only adds and removes dims of size 1."""
    found = read.read(op.input)
    if isinstance(found, (bool, Affine)) and (isinstance(found, bool) or found.is_constant):
        return found
    source, target = torch_ops.tensor(op.input), torch_ops.tensor(op.node)
    if source is None or target is None:
        return None

    def wide(t: torch.Tensor) -> list[int]:
        return [d - t.dim() for d, size in enumerate(t.shape) if not known_true(size == 1)]

    before, after = wide(source), wide(target)
    if len(before) != len(after) or not all(
        known_true(source.shape[b] == target.shape[a]) for b, a in zip(before, after, strict=True)
    ):
        return None
    return substitute(found, _renamed(dict(zip(before, after, strict=True))))


@_rule("select")
def _select(read: Interpreter, op: torch_ops.Op) -> Value:
    dim, rank = torch_ops.concrete(op["dim"]), _rank(op.input)
    if not isinstance(dim, int):
        return None
    index: list[Any] = [slice(None)] * rank
    index[dim] = op["index"]
    return _indexed(read, op, tuple(index))


@_rule("slice")
def _slice(read: Interpreter, op: torch_ops.Op) -> Value:
    dim = torch_ops.concrete(op["dim"] or 0)
    index: list[Any] = [slice(None)] * _rank(op.input)
    index[dim] = slice(op["start"], op["end"], op["step"])
    return _indexed(read, op, tuple(index))


@_rule("getitem")
def _getitem(read: Interpreter, op: torch_ops.Op) -> Value:
    if torch_ops.tensor(op.input) is None:
        return None
    index = op["index"]
    return _indexed(read, op, index if isinstance(index, tuple) else (index,))


def _indexed(read: Interpreter, op: torch_ops.Op, index: tuple[Any, ...]) -> Value:
    source, target = torch_ops.tensor(op.input), torch_ops.tensor(op.node)
    if source is None or target is None:
        return None
    found = read.read(op.input)
    tensors = [i for i in index if torch_ops.tensor(i) is not None]
    if tensors:
        return _gathered(read, found, source, index)
    used = sum(i is not None and i is not Ellipsis for i in index)
    full: list[Any] = []
    for item in index:
        full.extend([slice(None)] * (source.dim() - used) if item is Ellipsis else [item])
    full.extend([slice(None)] * (source.dim() - sum(i is not None for i in full)))
    mapping: dict[int, Affine] = {}
    here, there = 0, 0  # dims of the source and of the result
    for item in full:
        if item is None:
            there += 1
            continue
        size = source.shape[here]
        item = torch_ops.concrete(item)
        if isinstance(item, slice):
            start, step = item.start or 0, 1 if item.step is None else item.step
            if not isinstance(start, (int, torch.SymInt)) or not isinstance(step, int) or step < 1:
                return None
            if not known_true(start >= 0):
                start = start + size
            if not known_true(start >= 0) or not (
                (isinstance(start, int) and start == 0) or known_true(start < size)
            ):
                return None
            mapping[here - source.dim()] = affine(start, {there - target.dim(): step})
            there += 1
        elif isinstance(item, (int, torch.SymInt)) and not isinstance(item, bool):
            item = item if known_true(item >= 0) else item + size
            mapping[here - source.dim()] = Affine(item)
        else:
            return None
        here += 1
    return substitute(found, mapping.get)


def _gathered(read: Interpreter, found: Value, source: torch.Tensor, index: tuple[Any, ...]) -> Value:
    """`x[i, j, ...]` with one index tensor for each dim of x, each affine and in range."""
    if isinstance(found, (bool, Affine)) and (isinstance(found, bool) or found.is_constant):
        return found
    if len(index) != source.dim():
        return None
    mapping: dict[int, Affine] = {}
    for dim, item in enumerate(index):
        inner = read.read(item)
        given = torch_ops.tensor(item)
        if not isinstance(inner, Affine) or given is None or given.dtype == torch.bool:
            return None
        low, _ = bounds(inner, given.shape)  # a negative index would count from the end
        if low is None or not known_true(low >= 0):
            return None
        mapping[dim - source.dim()] = inner
    return substitute(found, mapping.get)


# -- what a mask depends on -----------------------------------------------------------------------

_POINTWISE = (
    "add sub rsub mul div neg eq ne lt le gt ge bitwise_and bitwise_or bitwise_not logical_and logical_or "
    "logical_not where masked_fill clamp minimum maximum cpu cuda"
).split()


def constant_over(node: Any, dim: int, interpreter: Interpreter) -> bool:
    """Whether a value is the same at every index of `dim` (negative), as its graph shows.

    A padding mask that was expanded to (batch, 1, q_len, kv_len) is constant over the queries: the
    kernel can read one row of it.
    """
    tensor = torch_ops.tensor(node)
    if tensor is None or -dim > tensor.dim() or known_true(tensor.shape[dim] == 1):
        return True
    if _lacks(interpreter.read(node), dim):
        return True
    op = torch_ops.read(node)
    if op is None or op.inplace or interpreter.mutations.touch(node):
        return False
    name, rank = op.name, tensor.dim()
    if name in _POINTWISE or name in torch_ops.CASTS or name in torch_ops.COPIES or name == "detach":
        tensors = [n for n in op.node.all_input_nodes if torch_ops.tensor(n) is not None]
        if name == "to" or name == "type_as":
            tensors = tensors[:1]
        return all(constant_over(n, dim, interpreter) for n in tensors)
    source = torch_ops.tensor(op.input)
    if source is None:
        return False
    if name in ("expand", "expand_as", "broadcast_to"):
        return constant_over(op.input, dim, interpreter)
    if name in torch_ops.TRANSPOSES:
        dims = torch_ops.permutation(op)
        return dims is not None and constant_over(op.input, dims[dim % rank] - source.dim(), interpreter)
    if name == "unsqueeze" and isinstance(op["dim"], int):
        position = dim % rank
        new = op["dim"] % rank
        if position == new:
            return True
        return constant_over(op.input, (position - (position > new)) - source.dim(), interpreter)
    if name == "getitem":
        return _indexed_constant(op, source, tensor, dim, interpreter)
    return False


def _lacks(value: Value, dim: int) -> bool:
    """Whether a value that was read does not depend on the index of `dim`."""
    if isinstance(value, bool):
        return True
    if isinstance(value, Affine):
        return all(d != dim for d, _ in value.coeffs)
    if isinstance(value, NonNegative):
        return _lacks(value.value, dim)
    if isinstance(value, Not):
        return _lacks(value.operand, dim)
    if isinstance(value, (And, Or)):
        return all(_lacks(part, dim) for part in value.operands)
    if isinstance(value, Choice):
        return all(_lacks(part, dim) for part in (value.condition, value.then, value.otherwise))
    return False


def _indexed_constant(
    op: torch_ops.Op, source: torch.Tensor, result: torch.Tensor, dim: int, interpreter: Interpreter
) -> bool:
    index = op["index"] if isinstance(op["index"], tuple) else (op["index"],)
    tensors = [i for i in index if torch_ops.tensor(i) is not None]
    if tensors:
        whole = len(tensors) == len(index) == source.dim()
        return whole and all(constant_over(i, dim, interpreter) for i in tensors)
    used = sum(i is not None and i is not Ellipsis for i in index)
    here, there = 0, 0
    for item in index:
        steps = source.dim() - used if item is Ellipsis else 1
        for _ in range(steps):
            if item is None:
                if there - result.dim() == dim:
                    return True
                there += 1
                continue
            if item is Ellipsis or isinstance(item, slice):
                if there - result.dim() == dim:
                    return constant_over(op.input, here - source.dim(), interpreter)
                there += 1
            here += 1
    return constant_over(op.input, here + (dim + result.dim() - there) - source.dim(), interpreter)


def may_hide_rows(node: Any) -> bool:
    """Whether a bias may add a finite number so low that scores drown in it.

    Only then can a query that sees no key have a finite result: the mean of the values. A learned bias
    or a relative-position table holds no such number; a mask given by the user may.
    """
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if not isinstance(current, fx.Node):
            if isinstance(current, (int, float)) and not isinstance(current, bool):
                if current <= LARGEST_FILL or current >= -LARGEST_FILL:
                    return True
            continue
        if current in seen:
            continue
        seen.add(current)
        tensor = torch_ops.tensor(current)
        if tensor is not None and not tensor.is_floating_point() and torch_ops.read(current) is None:
            continue  # integers and conditions add nothing by themselves
        op = torch_ops.read(current)
        if op is None:
            # A leaf: parameters are learned numbers, any other input may be a mask.
            if tensor is None or tensor.is_floating_point():
                if tensor is None or not (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
                    return True
            continue
        if op.name in _DRAWN:
            continue
        if tensor is not None and not tensor.is_floating_point():
            continue
        stack.extend(_numbers(current))
    return False


#: Results of these are sums of products of activations and weights, or bounded: never a fill.
_DRAWN = frozenset(
    "linear matmul bmm baddbmm einsum embedding layer_norm sigmoid softmax conv2d conv1d normalize".split()
)


def _numbers(node: fx.Node) -> list[Any]:
    found: list[Any] = []

    def visit(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            for item in argument:
                visit(item)
        elif isinstance(argument, (fx.Node, int, float)):
            found.append(argument)

    for argument in (*node.args, *node.kwargs.values()):
        visit(argument)
    return found
