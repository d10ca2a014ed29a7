"""Reads einsums of two tensors, and other products as the einsums that they are."""

from __future__ import annotations

import string
from dataclasses import dataclass

from torch import fx

from .._inductor import known_true
from ..fusion import Rejected
from ..operands import tensor
from ..reasons import Reason
from .dims import permutation
from .torch_ops import Op, read

#: Products of matrices, or of batches of them, with the names of their operands.
_OF_MATRICES = {
    "matmul": ("input", "other"), "bmm": ("input", "other"), "baddbmm": ("batch1", "batch2"),
}  # fmt: skip


@dataclass(frozen=True)
class Equation:
    """An einsum of two operands, with a letter for each dim.

    Attributes:
        text: the einsum as written, or the name of another product; for messages.
        first, second, result: the letters of both operands and of the result, one for each dim.
        left, right: the operands.
    """

    text: str
    first: str
    second: str
    result: str
    left: fx.Node
    right: fx.Node

    def turned(self) -> Equation:
        """The equation with the operands swapped."""
        return Equation(self.text, self.second, self.first, self.result, self.right, self.left)

    @property
    def keeps_last(self) -> list[bool]:
        """Whether the result has the last dim of each operand."""
        return [letters[-1:] in self.result for letters in (self.first, self.second)]

    @property
    def summed(self) -> str:
        """The letters that it sums over products of both operands."""
        return "".join(c for c in self.first if c in self.second and c not in self.result)


def equation_of(op: Op) -> Equation | None:
    """The equation of a product; None where `equation` refuses it."""
    try:
        return equation(op)
    except Rejected:
        return None


def equation(op: Op) -> Equation:
    """The equation of an einsum, tensordot, inner product, product of matrices, or linear without its bias.

    What is added to a product is left out. Operands of a product of matrices are those in front of a
    permutation.

    Raises:
        Rejected: it is not a product of two tensors with one letter for each dim, or it sums over a dim of
            size 1 together with a larger one.
    """
    if op.name in _OF_MATRICES:
        return _of_matrices(op)
    if op.name in ("tensordot", "linear", "inner"):
        return _of_dims(op)
    if op.name != "einsum":
        raise Reason.NO_PRODUCT.rejected(f"{op.name} is not a product of two tensors")
    equation, given = op["equation"], operands(op)
    if not isinstance(equation, str):
        raise Reason.NOT_A_TENSOR.rejected("an einsum with its dims given as numbers is not supported")
    if len(given) != 2 or not all(tensor(node) is not None for node in given):
        raise Reason.NO_PRODUCT.rejected(f"einsum {equation!r} is not a product of two tensors")
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if not arrow:
        letters = sorted(c for c in set(inputs) - set(".,") if inputs.count(c) == 1)
        result = ("..." if "..." in inputs else "") + "".join(letters)
    ranks = [0 if (value := tensor(node)) is None else value.dim() for node in given]
    extra = [rank - len(part.replace("...", "")) for rank, part in zip(ranks, parts, strict=True)]
    spare = "".join(c for c in string.ascii_letters if c not in equation)
    most = max([0, *(count for count, part in zip(extra, parts, strict=True) if "..." in part)])
    first, second, result = (
        part.replace("...", spare[most - count : most])
        for part, count in zip((*parts, result), (*extra, most), strict=True)
    )
    if any(len(set(part)) != len(part) for part in (first, second, result)):
        raise Reason.SHAPES.rejected(f"einsum {equation!r} repeats an index in one operand")
    if [len(first), len(second)] != ranks:
        raise Reason.SHAPES.rejected("an operand of an einsum has another number of dims than letters")
    return _checked(Equation(f"einsum {equation!r}", first, second, result, *given))


def operands(op: Op) -> list[fx.Node]:
    """The operands of an einsum."""
    given = op.rest or op.args.get("tensors") or ()
    return list(given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given)


def _checked(found: Equation) -> Equation:
    """An equation that sums over no dim of size 1 together with a larger one.

    Raises:
        Rejected: it does, or may do so.
    """
    left, right = tensor(found.left), tensor(found.right)
    assert left is not None and right is not None
    for c in set(found.first) & set(found.second) - set(found.result):
        if not known_true(left.shape[found.first.index(c)] == right.shape[found.second.index(c)]):
            raise Reason.SHAPES.rejected(f"{found.text} broadcasts a dim that it sums over")
    return found


def _of_matrices(op: Op) -> Equation:
    sides = [op[name] for name in _OF_MATRICES[op.name]]
    values = [tensor(side) for side in sides]
    if any(value is None or not value.dim() for value in values):
        raise Reason.NO_PRODUCT.rejected(f"{op.name} is not a product of two tensors")
    ranks = [value.dim() for value in values if value is not None]
    spare = string.ascii_lowercase[3:]
    most = max(*ranks, 2)
    parts = [
        spare[most - rank : most - 2] + ("b" if rank == 1 else own)
        for rank, own in zip(ranks, ("ab", "bc"), strict=True)
    ]
    result = spare[: most - 2] + "".join(c for c in "ac" if any(c in part for part in parts))
    for i, side in enumerate(sides):
        before = read(side)
        order = None if before is None or before.inplace else permutation(before)
        if before is not None and order is not None:
            sides[i], parts[i] = before.input, "".join(parts[i][order.index(d)] for d in range(len(order)))
    return Equation(op.name, parts[0], parts[1], result, sides[0], sides[1])


def _of_dims(op: Op) -> Equation:
    """The equation of a product that names the dims that it sums over."""
    left, right = op.input, op["weight"] if op.name == "linear" else op["other"]
    one, other = tensor(left), tensor(right)
    dims = op["dims"] if op.name == "tensordot" else ([-1], [-1])
    if one is None or other is None or not (one.dim() and other.dim()):
        raise Reason.NO_PRODUCT.rejected(f"{op.name} is not a product of two tensors")
    if dims is None or isinstance(dims, int):
        count = 2 if dims is None else dims
        dims = (range(one.dim() - count, one.dim()), range(count))
    if not isinstance(dims, (list, tuple)) or len(dims) != 2 or any(isinstance(d, fx.Node) for d in dims):
        raise Reason.NOT_A_TENSOR.rejected(f"the dims of {op.name} are not constants")
    pairs = [[d] if isinstance(d, int) else list(d) for d in dims]
    first = list(string.ascii_letters[: one.dim()])
    second = list(string.ascii_letters[one.dim() : one.dim() + other.dim()])
    for mine, theirs in zip(*pairs, strict=True):
        second[theirs] = first[mine]
    summed = {first[d] for d in pairs[0]}
    result = "".join(c for c in (*first, *second) if c not in summed)
    return _checked(Equation(op.name, "".join(first), "".join(second), result, left, right))
