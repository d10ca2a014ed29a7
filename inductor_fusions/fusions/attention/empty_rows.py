"""Fully masked rows: where they cannot be kept, and which they are. `mask_builder` equalises their scores."""

from __future__ import annotations

import math

import torch
from torch import fx

from ... import config
from ..._inductor import hint, known_true
from ...graph.builder import Builder
from ...reasons import Reason
from . import predicates
from .mask_builder import MaskMemo
from .masks import may_be_low, may_hide_rows
from .normal_form import Attention, Term
from .problem import Problem
from .structure import EMPTY_BELOW, Structure


def rows_with_a_key(build: Builder, problem: Problem, memo: MaskMemo) -> fx.Node:
    """Which rows of the mask that makes others zero show a key, with one column."""
    assert problem.zeros is not None
    operand, hides = problem.zeros

    def make() -> fx.Node:
        mask = operand.built(build)
        seen = build.call(torch.logical_not, mask) if hides else mask
        return build.call(torch.any, seen, -1, True)

    version = problem.version(operand.node, build.before)
    return memo.once(make, "shown", operand.node, version, operand.steps, hides)


def empty_rows(build: Builder, problem: Problem, memo: MaskMemo, structure: Structure) -> fx.Node:
    """Which rows are fully masked, as (batch or 1, 1, q_len, 1)."""
    shape = (*problem.q.shape[:3], problem.k.shape[2])

    def make() -> fx.Node:
        seen = predicates.whole(build, structure.visible, shape, problem.q.value.device)
        return build.call(torch.logical_not, build.call(torch.any, seen, -1, True))

    return memo.once(make, "empty", structure.visible, shape)


def bytes_beside(problem: Problem) -> int:
    """What kernels read and write for the gradient of fully masked rows, forward and backward; 0 for nothing.

    A mask is read to find the rows and to open them, and written. Queries, keys and values are read or
    written eleven times (`emit.Emitter`). There is no such gradient if a fill replaces the scores, and none
    is kept if all queries have one row of the mask.
    """
    structure, terms = problem.structure, problem.terms
    if not problem.train or config.empty_rows != "keep" or problem.sink is not None:
        return 0
    if (structure is not None and structure.never_empty) or any(t.fill is not None for t, _ in terms):
        return 0
    masks = [operand.value for term, operand in terms if may_hide_rows(term.node)]
    if all(known_true(mask.shape[-2] == 1) for mask in masks):
        return 0
    passes = 3 * sum(hint(mask.numel()) for mask in masks) + 11 * hint(problem.q.value.numel())
    return passes * problem.dtype.itemsize


def check_empty_rows(problem: Problem, site: Attention) -> None:
    """Leave a site in training to stock if the user wants all gradients of fully masked rows as in stock.

    Raises:
        LeftToStock: under INDUCTOR_FUSIONS_EMPTY_ROWS=stock, where such rows cannot be ruled out.
        Rejected: a mask that may hold low numbers is subtracted, so that the raised keys absorb the other
            scores and the gradient into k is lost; or the logsumexp of a row of fills is the fill; or a bias
            is added to a row of fills, or scores are clamped, and the number is not low enough to absorb
            them (number + score rounds to number); or the fill is subtracted again before a bias is added.
    """
    terms = [term for term, _ in problem.terms]
    hides = _hide_rows(terms)
    if config.empty_rows != "ignore" and not (problem.structure and problem.structure.never_empty):
        if len(site.terms) > site.below_shift and _hide_rows(site.terms[: site.below_shift]):
            raise Reason.EMPTY_ROWS.rejected(
                "a mask hides rows whose largest score or logsumexp is subtracted, which takes its fill away "
                "before a bias or another mask is added",
                "add it before",
            )
        if site.by_logsumexp and hides:
            raise Reason.EMPTY_ROWS.rejected(
                "each weight of a fully masked row is 1, because its logsumexp rounds to the fill",
                "torch.softmax",
            )
        half = problem.dtype == torch.float16
        _check_absorbed(terms, torch.finfo(torch.float16).min if half else EMPTY_BELOW)
    subtracted = [t.node for t in terms if t.fill is None and t.factor < 0 and t.depth is None]
    if problem.train and any(problem.overwritten(node) or may_be_low(node) for node in subtracted):
        raise Reason.RANGE.rejected(
            "a mask that may hold low numbers is subtracted from the scores, which raises keys"
        )
    if config.empty_rows == "stock" and problem.train and problem.zeros is None and hides:
        raise Reason.EMPTY_ROWS.left_to_stock(
            "a row may be fully masked, and INDUCTOR_FUSIONS_EMPTY_ROWS=stock",
            "INDUCTOR_FUSIONS_EMPTY_ROWS=keep fuses, and keeps the values of such rows",
        )


def _hide_rows(terms: list[Term]) -> bool:
    """Whether terms may give all scores of a row one finite number that absorbs them."""
    return any(may_hide_rows(t.node) if t.fill is None else math.isfinite(t.fill) for t in terms)


def _check_absorbed(terms: list[Term], lowest: float) -> None:
    """Refuse fully masked rows whose number does not absorb the scores and biases that are added to it.

    Args:
        lowest: a number above this one does not absorb scores.
    """
    for term in terms:
        if term.floor is not None and term.floor > lowest:
            raise Reason.RANGE.rejected(
                f"scores are clamped to {term.floor:g}, which is too large: a fully masked row would "
                "not be uniform"
            )
    shallow = False  # whether scores are filled with a number that does not absorb a bias
    for term in terms:
        if term.fill is not None:
            shallow |= math.isfinite(term.fill) and term.fill > EMPTY_BELOW
        elif shallow and not may_hide_rows(term.node):
            raise Reason.RANGE.rejected(
                "a bias is added to masked scores, and their fill value is too small to cancel it"
            )
    fills = [t.fill for t in terms if t.fill is not None and math.isfinite(t.fill)]
    # Masks that are added, and may hold numbers that hide a key without absorbing its score.
    added = [t for t in terms if t.fill is None and (t.depth is None or lowest < t.depth < 0)]
    if any(f > lowest for f in fills) and any(may_hide_rows(t.node) for t in added):
        raise Reason.RANGE.rejected(
            (
                "a masked fill and an additive mask may together mask a row fully, and the fill value "
                "is too small to cancel the scores"
            ),
            "fill with torch.finfo(dtype).min",
        )
