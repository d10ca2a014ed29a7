"""Splits a tensor into bias and mask: `bias.masked_fill(hidden, -inf)`, `bias + mask`.

As one tensor it varies over all dims, and says nothing of blocks to skip. Apart, the mask may be a predicate,
and the bias a row or a number for each head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...fusion import Rejected
from ...graph import torch_ops
from ...operands import holds
from .masks import Interpreter, is_fill, rounded, visibility
from .normal_form import Term
from .operands import Operand

Terms = list[tuple[Term, Operand]]


def separated(
    terms: Terms, interpreter: Interpreter, operand: Callable[[Term], Operand], trains: bool
) -> Terms:
    """Terms of which each that holds a bias and a mask is two or more, whose sum it is.

    Args:
        operand: brings a new term to the dims of the problem.
        trains: whether gradients may be taken of the attention.
    """
    found: Terms = []
    for term, whole in terms:
        pieces = _of_term(term, interpreter, trains)
        try:
            found += [(each, whole if each is term else operand(each)) for each in pieces]
        except Rejected:  # the dims of a piece do not line up
            found.append((term, whole))
    return found


def _of_term(term: Term, interpreter: Interpreter, trains: bool) -> list[Term]:
    mixed = torch_ops.tensor(term.node)
    if term.fill is not None or term.floor is not None or term.factor <= 0 or mixed is None:
        return [term]
    pieces = _pieces(term, interpreter, trains)
    tensors = [torch_ops.tensor(each.node) for each in pieces]
    fixed = all(t is not None and t.device == mixed.device for t in tensors) and not any(
        interpreter.mutations.touch(each.node) for each in pieces
    )
    return pieces if len(pieces) > 1 and fixed else [term]


def _pieces(term: Term, interpreter: Interpreter, trains: bool) -> list[Term]:
    """The parts whose sum a bias is, where masks are among them; else the bias alone."""
    op = torch_ops.read(term.node)
    if op is None or op.inplace or interpreter.mutations.touch(term.node) or _is_mask(term, interpreter):
        return [term]

    def of(*nodes: Any) -> list[Term]:
        if not all(_is_part(node, op.node, trains) for node in nodes):
            return []
        return [piece for node in nodes for piece in _pieces(replace(term, node=node), interpreter, trains)]

    if op.name == "add" and op["alpha"] in (None, 1):
        found = of(op.input, op["other"])
        return found if any(each.adds or _is_mask(each, interpreter) for each in found) else [term]
    filled = _filled(op, term.factor, interpreter)
    if filled is not None:
        bias, condition, number, hides = filled
        found = of(bias)
        fill = Term(condition, term.lead, fill=number, hides=hides, adds=len(found))
        return [*found, fill] if found else [term]
    source, cast, made = interpreter.source(op.node), torch_ops.tensor(op.input), torch_ops.tensor(op.node)
    if source is op.node and op.name in torch_ops.CASTS and cast is not None and made is not None:
        source = op.input if holds(made.dtype, cast.dtype) else source
    return (of(source) if source is not op.node else []) or [term]


def _is_mask(term: Term, interpreter: Interpreter) -> bool:
    return visibility(interpreter.read(term.node), term.factor) is not None


def _is_part(node: Any, whole: fx.Node, trains: bool) -> bool:
    """Whether a node may be read in the place of one made from it: a gradient flows into it there as well,
    or into nothing.
    """
    part, made = torch_ops.tensor(node), torch_ops.tensor(whole)
    if part is None or made is None or not part.is_floating_point():
        return False
    return made.requires_grad or not (trains and part.requires_grad)


def _filled(
    op: torch_ops.Op, factor: float, interpreter: Interpreter
) -> tuple[fx.Node, fx.Node, float, bool] | None:
    """Read a fill with a low number: (bias, condition, number, whether it is filled where that holds)."""
    if op.name == "masked_fill":
        condition, sides = op["mask"], [(op.input, op["value"], True)]
    elif op.name == "where":
        condition = op["condition"]
        sides = [(op.input, op["other"], False), (op["other"], op.input, True)]
    else:
        return None
    mask = torch_ops.tensor(condition)
    if mask is None or mask.dtype != torch.bool:
        return None
    result = torch_ops.tensor(op.node)
    for bias, value, hides in sides:
        with interpreter.reading(op.node):
            number = interpreter.number(value)
        if number is None or result is None or not isinstance(bias, fx.Node):
            continue
        number = rounded(number, result.dtype) * factor
        if is_fill(number):
            return bias, condition, number, hides
    return None
