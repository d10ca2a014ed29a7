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
        return None
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
