"""The two products of an attention where they are spelled as an einsum."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...fusion import Rejected
from .operands import Operand
from .torch_ops import Op


def queries_and_keys(op: Op) -> tuple[Operand, Operand]:
    """The operands of an einsum that gives the scores, as (*lead, length, dim)."""
    first, second, result, left, right = _letters(op)
    if len(result) < 2:
        raise Rejected("the scores have one dim")
    row, column, lead = result[-2], result[-1], result[:-2]
    if row not in first:
        first, second, left, right = second, first, right, left
    summed = [c for c in first if c in second and c not in result]
    if (
        len(summed) != 1
        or row not in first or row in second
        or column not in second or column in first
        or set(first) - {row, summed[0]} - set(lead)
        or set(second) - {column, summed[0]} - set(lead)
    ):  # fmt: skip
        raise Rejected(f"einsum {op['equation']!r} is no product of queries and keys")
    return _arranged(left, first, lead + row + summed[0]), _arranged(right, second, lead + column + summed[0])


def values(op: Op, weights: fx.Node) -> tuple[Operand, tuple[int, ...]]:
    """The values of an einsum with the weights (*lead, length, dim), and the permutation of its result."""
    first, second, result, left, right = _letters(op)
    if left is right:
        raise Rejected("the attention weights are multiplied with themselves")
    if left is not weights:
        first, second, left, right = second, first, right, left
    lead, row, column = first[:-2], first[-2], first[-1]
    free = [c for c in second if c not in first]
    if (
        len(free) != 1
        or column not in second or column in result or row in second
        or set(result) != set(lead) | {row, free[0]}
    ):  # fmt: skip
        raise Rejected(f"einsum {op['equation']!r} is no product of weights and values")
    natural = lead + row + free[0]
    value = _arranged(right, second, lead + column + free[0])
    return value, tuple(natural.index(c) for c in result)


def _letters(op: Op) -> tuple[str, str, str, Any, Any]:
    equation = op["equation"]
    operands = op.rest
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not operands and isinstance(op.args.get("tensors"), (list, tuple)):
        operands = tuple(op.args["tensors"])
    if not isinstance(equation, str) or len(operands) != 2 or "..." in equation or "->" not in equation:
        raise Rejected("an einsum of this form is not read")
    inputs, result = equation.replace(" ", "").split("->")
    first, _, second = inputs.partition(",")
    if any(len(set(part)) != len(part) for part in (first, second, result)):
        raise Rejected("an einsum that repeats an index")
    return first, second, result, operands[0], operands[1]


def _arranged(node: fx.Node, letters: str, wanted: str) -> Operand:
    """The operand with its dims in the order `wanted`; letters that it lacks become dims of size 1."""
    operand = Operand.of(node)
    if operand is None or operand.value.dim() != len(letters):
        raise Rejected("an operand of an einsum has other dims than its letters")
    present = [c for c in wanted if c in letters]
    operand = operand.permute([letters.index(c) for c in present])
    if len(present) == len(wanted):
        return operand
    sizes = iter(operand.shape)
    return operand.reshape([next(sizes) if c in letters else 1 for c in wanted])
