"""The two products of an attention where they are written as an einsum, a tensordot or a linear."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...graph.einsum import Equation, equation, equation_of
from ...graph.torch_ops import Op
from ...operands import tensor
from ...reasons import Reason
from .arrangement import NOT_OVER_KEYS, OVER_ANOTHER_DIM, OWN_VALUES, Arrangement, Misplaced
from .operands import Operand, product

Groups = tuple[str, str, str]


def queries_and_keys(op: Op, at: Arrangement) -> tuple[Operand, Operand]:
    """The operands of an einsum that gives the scores, as (*lead, length, dim)."""
    found = equation(op)
    lead, rows, columns = ("".join(found.result[d] for d in dims) for dims in (at.lead, at.rows, at.columns))
    if not set(rows) <= set(found.first) or columns[0] in found.first:
        found = found.turned()
    summed = found.summed
    alone = _are_of(columns, found.second, found.first)
    others = set(found.first + found.second) - set(found.result + summed)
    if not summed or not alone or others - _of_size_1(found):
        raise Misplaced(Reason.NO_PRODUCT(f"{found.text} is not a product of queries and keys"))
    if not _are_of(rows, found.first, found.second):
        raise Misplaced(NOT_OVER_KEYS)
    return (
        _arranged(found.left, found.first, (lead, rows, summed)),
        _arranged(found.right, found.second, (lead, columns, summed)),
    )


def of_repeated(op: Op, weights: fx.Node) -> Equation | None:
    """The equation of a product of matrices that repeats the weights along leading dims of the values.

    Such a dim is part of the values, and a dim of the weights of size 1 in its place is another one. None of
    other products.
    """
    found, whole = equation_of(op) if op.name == "matmul" else None, tensor(weights)
    if found is not None and found.left is not weights:
        found = found.turned()
    held = None if found is None else tensor(found.right)
    if found is None or found.left is not weights or whole is None or held is None:
        return None
    spare = (c for c in string.ascii_letters if c not in found.first + found.second)
    alike = zip(found.first, whole.shape, strict=True)
    first = "".join(
        next(spare) if c in found.result and known_true(size == 1) and _is_longer(c, found, held) else c
        for c, size in alike
    )
    repeated = set(found.result) & set(found.second) - set(first)
    return replace(found, first=first) if len(repeated) > 1 else None


def _is_longer(letter: str, found: Equation, held: torch.Tensor) -> bool:
    place = found.second.find(letter)
    return place >= 0 and not known_true(held.shape[place] == 1)


def values(
    op: Op, found: Equation, weights: fx.Node, at: Arrangement
) -> tuple[Operand, tuple[Any, ...], tuple[int, ...]]:
    """The values of an einsum with the weights, and its result: as (*lead, *queries, *dim), and permuted.

    Args:
        found: the equation of `op`. Letters of the weights alone, of size 1, are the last dims of the result.
    """
    if found.left is found.right:
        raise Reason.NO_PRODUCT.rejected("the attention weights are multiplied by themselves")
    if found.left is not weights:
        found = found.turned()
    if all(found.first[d] in found.result for d in (*at.rows, *at.columns)):
        raise Reason.IN_BETWEEN.rejected(f"{found.text} is between the softmax and the product with v")
    lead, rows, columns = ("".join(found.first[d] for d in dims) for dims in (at.lead, at.rows, at.columns))
    dropped = set(found.first) | _of_size_1(found)
    free = "".join(c for c in found.second if c not in dropped)
    natural = lead + rows + free
    ones = "".join(c for c in lead if c in _of_size_1(found))
    over_columns = set(columns) <= set(found.second) and not set(columns) & set(found.result)
    if rows and over_columns and set(rows) <= set(found.second) & set(found.result):
        raise Misplaced(OWN_VALUES)
    if set(columns) & set(found.result):
        raise Misplaced(OVER_ANOTHER_DIM)
    if (
        not free
        or set(columns) - set(found.second)
        or set(rows) & set(found.second)
        or {*found.result, *ones} != set(natural)
    ):
        raise Misplaced(Reason.NO_PRODUCT(f"{found.text} is not a product of weights and values"))
    if op["bias"] is not None:
        raise Reason.IN_BETWEEN.rejected("a bias is added to the product with v by linear")
    whole, held = tensor(weights), tensor(found.right)
    assert whole is not None and held is not None
    shape = [whole.shape[found.first.index(c)] for c in lead + rows]
    shape += [held.shape[found.second.index(c)] for c in free]
    value = _arranged(found.right, found.second, (lead, columns, free))
    return value, tuple(shape), tuple(natural.index(c) for c in found.result + ones)


def _of_size_1(found: Equation) -> set[str]:
    """The letters of dims of size 1 that one operand has and the result has not: a sum over one is a view."""
    letters = set[str]()
    for node, own, other in (
        (found.left, found.first, found.second),
        (found.right, found.second, found.first),
    ):
        held = tensor(node)
        assert held is not None
        alone = (c for c in own if c not in other + found.result)
        letters.update(c for c in alone if known_true(held.shape[own.index(c)] == 1))
    return letters


def _are_of(letters: str, one: str, other: str) -> bool:
    """Whether letters are all in one operand, and none in the other."""
    return not set(letters) - set(one) and not set(letters) & set(other)


def _arranged(node: fx.Node, letters: str, groups: Groups) -> Operand:
    """The operand as (*lead, length, dim), of the letters of each; leading ones that it lacks have size 1.

    Its dims of other letters have size 1 and are dropped.
    """
    operand = Operand.of(node)
    assert operand is not None
    lead, length, dim = groups
    wanted = lead + length + dim
    present = [c for c in wanted if c in letters]
    dropped = [c for c in letters if c not in wanted]
    operand = operand.permute([letters.index(c) for c in (*present, *dropped)])
    if len(present) == len(wanted) and len(length) == 1 == len(dim) and not dropped:
        return operand
    sizes = dict(zip((*present, *dropped), operand.shape, strict=True))
    shape = [sizes.get(c, 1) for c in lead]
    return operand.reshape([*shape, product([sizes[c] for c in length]), product([sizes[c] for c in dim])])
