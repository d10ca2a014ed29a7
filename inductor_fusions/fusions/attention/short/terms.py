"""Which attentions become short ones, and their masks as the operation takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...._inductor import known_true
from ..operands import Operand, alignment, product, same_shape
from ..problem import Problem
from ..recognise import Term
from . import plan
from .lowering import DTYPES, MOST_MASKS

#: Types of devices that there are kernels for.
DEVICES = frozenset({"cuda"})
#: Compute capability from which on they compile.
CAPABILITY = (8, 0)


def refused(problem: Problem) -> str:
    """Why the operation does not take a problem; "" where it does."""
    device = problem.q.value.device
    if device.type not in DEVICES:
        return f"no kernel for devices of type {device.type}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        return "the device is older than compute capability 8.0"
    if problem.stages or problem.sink is not None or problem.dropout > 0:
        return "a function of the scores, a sink or dropout"
    if problem.attn_mask is not None or not isinstance(problem.scale, (int, float, type(None))):
        return "a mask that is passed on, or a symbolic scale"
    if not known_true(problem.k.shape[1] == problem.q.shape[1]):
        return "heads that share keys"
    sizes = (*problem.q.shape[1:], *problem.k.shape[2:], problem.v.shape[3])
    if not all(isinstance(size, int) for size in sizes):
        return "symbolic lengths, heads or head dims"
    if max(problem.q.shape[2], problem.k.shape[2]) > plan.MOST_KEYS:
        return f"more than {plan.MOST_KEYS} queries or keys"
    if problem.dtype not in DTYPES:
        return f"no kernel for {problem.dtype}"
    if max(problem.q.shape[3], problem.v.shape[3]) > plan.MOST_DIM[problem.dtype.itemsize]:
        return f"more than {plan.MOST_DIM[problem.dtype.itemsize]} head dims"
    if len(problem.terms) > MOST_MASKS or any(term.floor is not None for term, _ in problem.terms):
        return "many masks, or scores that are clamped"
    if any(_is_no_mask(term, operand) for term, operand in problem.terms):
        return "a mask of integers"
    return "" if _repeat_together(problem) else "masks that repeat in different ways"


def _is_no_mask(term: Term, operand: Operand) -> bool:
    boolean = operand.value.dtype == torch.bool
    return not boolean if term.fill is not None else not operand.value.is_floating_point()


def masks(problem: Problem) -> list[tuple[Operand, float, bool]]:
    """The masks in order: operand, number, and whether a boolean one is to be negated first."""
    found = []
    for term, operand in problem.terms:
        given = _periodic(term, problem.q.shape[:2]) or operand
        if known_true(operand.shape[-2] == 1) and not known_true(given.shape[-2] == 1):
            given = given.then("narrow", -2, 0, 1)
        number = term.factor if term.fill is None else max(term.fill, -math.inf)
        found.append((given, float(number), term.fill is not None and term.hides))
    return found


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


def _periodic(term: Term, target: Sequence[Any]) -> Operand | None:
    """A mask on (n, heads, q, k), where sample b has the mask b % n: one that is the same for all images is not
    repeated for each of them.

    Args:
        term: whose leading dims may split the batch, as (images, windows, heads).
        target: (batch, heads).
    """
    operand = Operand.of(term.node)
    if operand is None:
        return None
    operand = operand.padded(len(term.lead) + 2)
    pairs = alignment(term.lead, target)
    if pairs is None or operand.value.dim() != len(term.lead) + 2:
        return None
    sizes: list[Any] = []
    for sources, targets in pairs:
        own = [operand.shape[d] for d in sources]
        while own and known_true(own[0] == 1):
            own.pop(0)
        if not own:
            sizes += [1 for _ in targets]
        elif not same_shape(own, [term.lead[d] for d in sources][-len(own) :]):
            return None
        elif len(own) == len(sources):
            sizes += [target[d] for d in targets]
        elif targets == range(1):
            sizes.append(product(own))
        else:
            return None
    return operand.reshape((*sizes, *operand.shape[-2:]))
