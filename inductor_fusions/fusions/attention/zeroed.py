"""Weights set to 0 after the softmax at keys that were masked before it."""

from __future__ import annotations

import math
from dataclasses import replace

from ...fusion import Rejected
from ...reasons import Reason
from .masks import Interpreter, may_hide_rows, negation
from .normal_form import Attention, Term
from .operands import same_shape
from .structure import MASK_FILL


def zeroed_fill(site: Attention, interpreter: Interpreter) -> Term | None:
    """The fill at whose keys the weights are set to 0 after the softmax, too.

    They are 0 there already, but in fully masked rows: those become zero.

    Raises:
        Rejected: they are set to 0 elsewhere, or something else hides keys as well.
    """
    if site.zeroed is None:
        return _without_nan(site) if site.drops_nan else None
    hiding = [t for t in site.terms if t.fill is not None or t.floor is not None or may_hide_rows(t.node)]
    if not any(_same_keys(term, site.zeroed, interpreter) for term in hiding):
        raise Rejected(Reason.MASK("the weights are set to 0 at keys other than those masked in the scores"))
    if len(hiding) > 1 or site.sink is not None:
        raise Rejected(
            Reason.MASK(
                "the weights are set to 0 after the softmax, and the attention has a sink or may have "
                "another mask"
            )
        )
    if site.keeps_nan and not math.isfinite(hiding[0].fill or 0.0):
        raise Rejected(
            Reason.EMPTY_ROWS("a fully masked row is NaN in eager, even after a multiplication by 0")
        )
    return hiding[0]


def _without_nan(site: Attention) -> Term | None:
    """The fill whose fully masked rows are NaN, where weights that are NaN are set to 0 after the softmax."""
    hiding = [term for term in site.terms if not _is_finite(term)]
    if site.sink is not None or not hiding:
        return None
    if len(hiding) > 1 or hiding[0].fill is None:
        raise Rejected(
            Reason.EMPTY_ROWS(
                "nan_to_num sets fully masked rows to 0, and not one boolean mask alone may hide them"
            ),
            "apply one boolean mask with masked_fill",
        )
    return hiding[0]


def check_hidden_rows(site: Attention) -> None:
    """Refuse rows that are set to 0 after the softmax, where an added mask may make them NaN before.

    A kernel's gradient of such a row may be NaN.
    """
    for term in site.terms:
        if term.fill is None and not _is_finite(term):
            raise Rejected(
                Reason.EMPTY_ROWS("rows of the weights are set to 0, and a mask that is added may hold -inf"),
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
    one, other = (
        negation(seen) if seen is not None and term.hides else seen
        for term in (first, second)
        for seen in [interpreter.boolean(term.node)]
    )
    return one is not None and one == other


def finite(term: Term) -> Term:
    """A fill of which no row becomes NaN."""
    assert term.fill is not None
    return term if math.isfinite(term.fill) else replace(term, fill=MASK_FILL)
