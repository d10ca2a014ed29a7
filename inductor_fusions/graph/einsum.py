"""Reads einsums of two tensors."""

from __future__ import annotations

import string
from dataclasses import dataclass

from torch import fx

from ..fusion import Rejected
from ..reasons import Reason
from .torch_ops import Op, tensor


@dataclass(frozen=True)
class Equation:
    """An einsum of two operands, with a letter for each dim.

    Attributes:
        text: as it was written, for reasons.
        first, second, result: the letters of both operands and of the result.
        left, right: the operands.
    """

    text: str
    first: str
    second: str
    result: str
    left: fx.Node
    right: fx.Node

    def turned(self) -> Equation:
        """The same with its operands in the other order."""
        return Equation(self.text, self.second, self.first, self.result, self.right, self.left)


def equation(op: Op) -> Equation:
    """The equation of an einsum.

    Raises:
        Rejected: it is no product of two tensors with a letter for each dim.
    """
    equation = op["equation"]
    operands = op.rest
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not operands and isinstance(op.args.get("tensors"), (list, tuple)):
        operands = tuple(op.args["tensors"])
    if not isinstance(equation, str):
        raise Rejected(Reason.NOT_A_TENSOR("an einsum with its dims given as numbers is not supported"))
    if len(operands) != 2 or not all(tensor(node) is not None for node in operands):
        raise Rejected(Reason.NO_PRODUCT(f"einsum {equation!r} is not a product of two tensors"))
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if not arrow:
        letters = sorted(c for c in set(inputs) - set(".,") if inputs.count(c) == 1)
        result = ("..." if "..." in inputs else "") + "".join(letters)
    ranks = [0 if (value := tensor(node)) is None else value.dim() for node in operands]
    extra = [rank - len(part.replace("...", "")) for rank, part in zip(ranks, parts, strict=True)]
    spare = "".join(c for c in string.ascii_letters if c not in equation)
    most = max([0, *(count for count, part in zip(extra, parts, strict=True) if "..." in part)])
    first, second, result = (
        part.replace("...", spare[most - count : most])
        for part, count in zip((*parts, result), (*extra, most), strict=True)
    )
    if any(len(set(part)) != len(part) for part in (first, second, result)):
        raise Rejected(Reason.SHAPES(f"einsum {equation!r} repeats an index in one operand"))
    if [len(first), len(second)] != ranks:
        raise Rejected(Reason.SHAPES("an operand of an einsum has another number of dims than letters"))
    return Equation(equation, first, second, result, operands[0], operands[1])
