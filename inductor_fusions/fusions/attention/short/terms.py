"""Which attentions become short ones, and their masks as the operation takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...._inductor import known_true
from ....decisions import unsupported
from ....graph import torch_ops
from ....operands import same_shape, tokens_of
from ..normal_form import Term
from ..operands import Operand, alignment, product
from ..problem import Problem
from . import plan
from .lowering import DTYPES, MOST_MASKS


def refused(problem: Problem) -> str:
    """Why the operation does not take a problem; "" where it does."""
    if why := unsupported(problem.q.value.device):
        return why
    if problem.transformed:
        return "torch.func.grad is not supported"
    if problem.stages or problem.sink is not None or problem.dropout > 0:
        return "a function of the scores, a sink or dropout"
    if problem.attn_mask is not None or not isinstance(problem.scale, (int, float, type(None))):
        return "a symbolic scale, or a mask that the call is given"
    if not known_true(problem.k.shape[1] == problem.q.shape[1]):
        return "GQA"
    sizes = (*problem.q.shape[1:], *problem.k.shape[2:], problem.v.shape[3])
    if not all(isinstance(size, int) for size in sizes):
        return "lengths, heads or head dims are symbolic"
    if tokens_of(problem.q.shape[0]) is None:
        return "the batch size depends on data"
    if problem.dtype not in DTYPES:
        return f"no kernel for {problem.dtype}"
    longest = max(problem.q.shape[2], problem.k.shape[2])
    if why := plan.too_large(longest, max(problem.q.shape[3], problem.v.shape[3]), problem.dtype):
        return why
    if len(problem.terms) > MOST_MASKS // 2 or any(term.floor is not None for term, _ in problem.terms):
        return "too many masks, or clamped scores"
    if any(_is_no_mask(term, operand) for term, operand in problem.terms):
        return "an integer mask"
    return "" if _repeat_together(problem) else "masks with different periods over the batch"


def masks(problem: Problem) -> list[tuple[Operand, float, bool]]:
    """The masks in order: operand, number, and whether a boolean one is to be negated first."""
    found = []
    for term, operand in problem.terms:
        number = term.factor if term.fill is None else max(term.fill, -math.inf)
        parts = [_part(term.node, term.lead, problem) or operand]
        if term.fill is None:
            parts = _summands(term, parts[0], problem)
        for part in parts:
            if known_true(operand.shape[-2] == 1) and not known_true(part.shape[-2] == 1):
                part = part.then("narrow", -2, 0, 1)
            found.append((part, float(number), term.fill is not None and term.hides))
    return found


def _is_no_mask(term: Term, operand: Operand) -> bool:
    boolean = operand.value.dtype == torch.bool
    return not boolean if term.fill is not None else not operand.value.is_floating_point()


def _summands(term: Term, whole: Operand, problem: Problem) -> list[Operand]:
    """The summands of a bias, if they take less memory traffic: a bias of heads and a mask of windows."""
    op = torch_ops.read(term.node)
    if op is None or op.name != "add" or op.inplace or set(op.node.kwargs) - {"input", "other"}:
        return [whole]
    parts = []
    for source in (op["input"], op["other"]):
        value = torch_ops.tensor(source)
        if value is None or not value.is_floating_point() or problem.overwritten(source):
            return [whole]
        parts.append(_part(source, term.lead, problem))
    if any(part is None for part in parts):
        return [whole]
    found = [part for part in parts if part is not None]
    return found if sum(part.numel for part in found) < whole.numel else [whole]


def _repeat_together(problem: Problem) -> bool:
    """Whether the first sizes of the masks divide the largest one, and that divides the batch."""
    batch = problem.q.shape[0]
    sizes = [operand.shape[0] for operand, _, _ in masks(problem)]
    sizes = [size for size in sizes if not known_true(size == 1)]
    if all(known_true(size == batch) for size in sizes):
        return True
    if not all(isinstance(size, int) for size in (*sizes, batch)):
        return False
    largest = max(sizes)
    return batch % largest == 0 and all(largest % size == 0 for size in sizes)


def _part(node: fx.Node, lead: Sequence[Any], problem: Problem) -> Operand | None:
    """A mask on (n, heads, q, k), where sample b has the mask b % n.

    One that is the same for all images is not repeated for each of them.

    Args:
        node: the mask, broadcastable to (*lead, q, k).
        lead: leading dims, which may split the batch, as (images, windows, heads).
        problem: whose batch and heads are meant.
    """
    operand, target = Operand.of(node), problem.q.shape[:2]
    if operand is None:
        return None
    before = _before_expand(node, problem)
    if before is not None and same_shape(lead, target):
        wide, base = before
        own = operand.padded(4).shape
        small = _periodic(base, wide.shape[:-2], own[:2])
        if small is not None and same_shape(wide.shape[-2:], own[2:]):
            return small
    return _periodic(operand, lead, target)


def _before_expand(node: fx.Node, problem: Problem) -> tuple[torch.Tensor, Operand] | None:
    """Look through an expand and a reshape: the expanded tensor, and the one before it."""
    op = torch_ops.read(node)
    inner = torch_ops.read(op.input) if op is not None and op.name in torch_ops.VIEWS else None
    if inner is None or inner.name != "expand" or problem.overwritten(inner.input):
        return None
    wide, base = torch_ops.tensor(inner.node), Operand.of(inner.input)
    return None if wide is None or base is None else (wide, base)


def _periodic(operand: Operand, lead: Sequence[Any], target: Sequence[Any]) -> Operand | None:
    operand = operand.padded(len(lead) + 2)
    pairs = alignment(lead, target)
    if pairs is None or operand.value.dim() != len(lead) + 2:
        return None
    sizes: list[Any] = []
    for sources, targets in pairs:
        own = [operand.shape[d] for d in sources]
        while own and known_true(own[0] == 1):
            own.pop(0)
        if not own:
            sizes += [1 for _ in targets]
        elif not same_shape(own, [lead[d] for d in sources][-len(own) :]):
            return None
        elif len(own) == len(sources):
            sizes += [target[d] for d in targets]
        elif targets == range(1):
            sizes.append(product(own))
        else:
            return None
    return operand.reshape((*sizes, *operand.shape[-2:]))
