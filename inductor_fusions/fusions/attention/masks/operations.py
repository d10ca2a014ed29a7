"""Operations on masks in the interpreter: arithmetic, comparisons, casts, and tensors that are made."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from ...._inductor import known_true
from ....graph import torch_ops
from .algebra import (
    as_bool,
    as_number,
    branches,
    choose,
    combine,
    compare,
    conjunction,
    disjunction,
    magnitude,
    map_parts,
    negation,
    negation_of,
)
from .dtypes import held, of_dtype
from .interpreter import Interpreter, rank_of, rule
from .values import BOOL, Affine, Bool, NonNegative, Value, affine, identity

#: Of arithmetic, torch computes these in float32, and rounds the result.
_HALF = (torch.float16, torch.bfloat16)


def _promoted(interpreter: Interpreter, op: torch_ops.Op, arithmetic: bool = False) -> tuple[Value, Value]:
    """Both operands in the dtype to which the operation promotes them; a number in that of arithmetic."""
    given = op.input, op["other"]
    kinds = [_number_of(torch_ops.value(each)) for each in given]
    if any(kind is None for kind in kinds):
        return None, None
    dtype = torch.result_type(*kinds)
    of_number = torch.float32 if arithmetic and dtype in _HALF else dtype
    left, right = (
        held(interpreter.read(each), dtype, kind.shape)
        if isinstance(kind, torch.Tensor)
        else held(interpreter.read(each), of_number, ())
        for each, kind in zip(given, kinds, strict=True)
    )
    return left, right


def _number_of(value: Any) -> Any:
    """A tensor or a number of the same kind, None for anything else."""
    if isinstance(value, torch.SymInt):
        return 1
    if isinstance(value, torch.SymFloat):
        return 1.0
    return value if isinstance(value, (torch.Tensor, bool, int, float)) else None


@rule("add", "sub", "rsub")
def _sum(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    left, right = _promoted(interpreter, op, True)
    if op["alpha"] not in (None, 1):
        return None
    left, right = (right, left) if op.name == "rsub" else (left, right)
    return combine(left, right, operator.add if op.name == "add" else operator.sub)


@rule("neg")
def _neg(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return map_parts(interpreter.read(op.input), lambda x: x.map(lambda c: -c))


@rule("abs")
def _abs(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return magnitude(interpreter.read(op.input))


@rule("log")
def _log(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    """The logarithm of a mask of ones and zeros: 0 and -inf. Other logarithms are rounded."""

    def logarithm(x: Affine) -> Affine | None:
        if not x.is_constant or not isinstance(x.const, (int, float)) or x.const not in (0, 1):
            return None
        return Affine(0.0 if x.const else -math.inf)

    return map_parts(interpreter.read(op.input), logarithm)


@rule("sqrt")
def _sqrt(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    """The root of a number, as in `scores / torch.sqrt(torch.tensor(d))`."""

    def root(x: Affine) -> Affine | None:
        known = x.is_constant and isinstance(x.const, (int, float)) and x.const >= 0
        return Affine(math.sqrt(x.const)) if known else None

    return map_parts(interpreter.read(op.input), root)


@rule("mul")
def _mul(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    left, right = _promoted(interpreter, op, True)
    if isinstance(left, BOOL) and isinstance(right, BOOL):
        return conjunction([left, right])

    def multiply(x: Affine, y: Affine) -> Affine | None:
        if x.is_constant:
            return y.map(lambda c: c * x.const)
        return x.map(lambda c: c * y.const) if y.is_constant else None

    return combine(left, right, multiply)


@rule("eq", "ne", "lt", "le", "gt", "ge")
def _comparison(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return compare(op.name, *_promoted(interpreter, op))


@rule(*(f"{kind}_{join}" for kind in ("bitwise", "logical") for join in ("and", "or", "xor")))
def _joined(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    left, right = interpreter.read(op.input), interpreter.read(op["other"])
    if op.name.startswith("bitwise") and not (isinstance(left, BOOL) and isinstance(right, BOOL)):
        return None  # of integers
    left, right = as_bool(left), as_bool(right)
    if left is None or right is None:
        return None
    if op.name.endswith("xor"):
        return choose(left, negation(right), right)
    return (conjunction if op.name.endswith("and") else disjunction)([left, right])


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
    source, target = torch_ops.tensor(op.input), torch_ops.tensor(op.node)
    if source is None or target is None:
        return None
    found = interpreter.read(op.input)
    if source.dtype == target.dtype:
        return found
    if _holds_elements(found) and target.dtype not in (source.dtype, torch.int64):
        return None  # the result of the cast is an element itself, or floating point
    return as_bool(found) if target.dtype == torch.bool else as_number(found)


def _holds_elements(value: Value) -> bool:
    return any(list(part.elements) for part in branches(value))


@rule(*torch_ops.COPIES, "detach")
def _copy(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return interpreter.read(op.input)


@rule("arange")
def _arange(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    named = {k: torch_ops.concrete(v) for k, v in op.node.kwargs.items()}
    names = ("start", "end", "step") if len(op.node.args) > 1 or "end" in named else ("end",)
    named.update(zip(names, map(torch_ops.concrete, op.node.args), strict=False))
    start, step = named.get("start", 0), named.get("step", 1)
    numbers = (int, float, torch.SymInt)
    if not isinstance(start, numbers) or not isinstance(step, numbers):
        return None
    return affine(start, {-1: step})


@rule("full", "full_like", "new_full", "tensor", "scalar_tensor")
def _full(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return _constant(op, next((op[name] for name in ("fill_value", "data", "s") if name in op.args), None))


@rule("fill")
def _fill(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return _constant(op, op["value"])


@rule("ones", "ones_like", "new_ones", "zero", "zeros", "zeros_like", "new_zeros")
def _ones(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return _constant(op, int("ones" in op.name))


def _constant(op: torch_ops.Op, data: Any) -> Value:
    target, number = torch_ops.tensor(op.node), torch_ops.concrete(data)
    if target is None or not isinstance(number, (bool, int, float)):
        return None
    return of_dtype(number, target.dtype)


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


@rule("eye")
def _eye(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return _diagonal()


@rule("fill_diagonal")
def _fill_diagonal(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    filled = _constant(op, op["fill_value"])
    if filled is None or rank_of(op.input) != 2 or op["wrap"]:  # of more dims it is where all are equal
        return None
    return choose(_diagonal(), filled, interpreter.read(op.input))


def _diagonal() -> Bool | None:
    """Where row and column are equal."""
    return compare("eq", identity(-2), identity(-1))


@rule("cumsum")
def _cumsum(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    dim = torch_ops.concrete(op["dim"])
    found = as_number(interpreter.read(op.input))
    if not isinstance(dim, int) or not isinstance(found, Affine) or not found.is_constant:
        return None
    rank = rank_of(op.input)
    if not rank:
        return found
    dim = dim if dim < 0 else dim - rank
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
