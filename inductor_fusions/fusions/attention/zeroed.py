"""Weights set to 0 after the softmax at keys that were masked before it."""

from __future__ import annotations

import math
from dataclasses import replace

from ..._inductor import known_true
from ...graph import torch_ops
from ...operands import same_shape
from ...reasons import Reason
from .masks import Bool, Interpreter, may_hide_rows, negation
from .normal_form import Attention, Term
from .structure import MASK_FILL


def zeroed_fills(site: Attention, interpreter: Interpreter) -> list[Term]:
    """The fills at whose keys the weights are set to 0 after the softmax, too.

    They are 0 there already, but in fully masked rows: those become zero. Keys that are the same for all
    queries lose their values instead, if something else hides keys as well.

    Raises:
        Rejected: they are set to 0 elsewhere, and not the same for all queries.
    """
    if site.zeroed is None:
        return _without_nan(site, interpreter) if site.drops_nan else []
    hiding = [t for t in site.terms if t.fill is not None or t.floor is not None or may_hide_rows(t.node)]
    if site.keeps_nan and not all(map(_is_finite, hiding)):
        raise Reason.EMPTY_ROWS.rejected(
            "a fully masked row is NaN in eager, even after a multiplication by 0"
        )
    same = any(_same_keys(term, site.zeroed, interpreter) for term in hiding)
    if same and len(hiding) == 1 and site.sink is None:
        return hiding
    condition = torch_ops.tensor(site.zeroed.node)
    plain = site.sink is None and not site.renormalised
    if condition is not None and plain and known_true([1, 1, *condition.shape][-2] == 1):
        site.behind.append(site.zeroed.as_scaler())
        return []
    raise Reason.MASK.rejected(
        "weights are set to 0 after the softmax, and the attention has a sink or may have another mask"
        if same
        else "the weights are set to 0 at keys other than those masked in the scores"
    )


def _without_nan(site: Attention, interpreter: Interpreter) -> list[Term]:
    """The fills whose fully masked rows are NaN, where NaN among the weights is set to 0."""
    hiding = [term for term in site.terms if not _is_finite(term)]
    if site.sink is not None or not hiding:
        return []
    changed = len(hiding) > 1 and any(interpreter.mutations.touch(term.node) for term in hiding)
    if changed or any(term.fill is None for term in hiding):
        raise Reason.EMPTY_ROWS.rejected(
            "nan_to_num sets fully masked rows to 0, and an added or overwritten mask may hide them",
            "apply boolean masks with masked_fill",
        )
    return hiding


def check_hidden_rows(site: Attention) -> None:
    """Refuse rows that are set to 0 after the softmax, where an added mask may make them NaN before.

    A kernel's gradient of such a row may be NaN.
    """
    for term in site.terms:
        if term.fill is None and not _is_finite(term):
            raise Reason.EMPTY_ROWS.rejected(
                "rows of the weights are set to 0, and a mask that is added may hold -inf",
                "apply a boolean mask with masked_fill",
            )


def _is_finite(term: Term) -> bool:
    """Whether a term cannot make all scores of a row -inf."""
    if term.fill is not None:
        return math.isfinite(term.fill)
    return not may_hide_rows(term.node) or (term.depth is not None and math.isfinite(term.depth))


def _same_keys(first: Term, second: Term, interpreter: Interpreter) -> bool:
    """Whether two fills hide the same keys."""
    if first.fill is None or first.floor is not None or not same_shape(first.lead, second.lead):
        return False
    if first.node == second.node:
        return first.hides == second.hides

    def visible(term: Term) -> Bool | None:
        condition = interpreter.boolean(term.node)
        return negation(condition) if condition is not None and term.hides else condition

    own = visible(first)
    return own is not None and own == visible(second)


def finite(term: Term) -> Term:
    """A fill of which no row becomes NaN."""
    assert term.fill is not None
    return term if math.isfinite(term.fill) else replace(term, fill=MASK_FILL)
