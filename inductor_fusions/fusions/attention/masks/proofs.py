"""What a visibility predicate proves: classes of masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...._inductor import known_true
from .algebra import negation, rebuilt
from .values import Affine, Bool, NonNegative, Number, Select, Value


def classify(mask: Bool | None, shape: Sequence[Number]) -> str:
    """What is proved of a predicate of visibility, over the full shape (..., q_len, kv_len) of a mask.

    "visible" where every query sees each key, "causal" where it sees exactly the keys k <= q, "" otherwise.
    """
    left = None if mask is None else reduce(mask, shape)
    if left is True:
        return "visible"
    square = known_true(shape[-1] == shape[-2])
    return "causal" if square and left is not None and is_causal(left) else ""


def is_causal(part: Bool) -> bool:
    """Whether a condition says k <= q, over integers."""
    if not isinstance(part, NonNegative) or [atom for atom, _ in part.value.coeffs] != [-2, -1]:
        return False
    (_, step), (_, back) = part.value.coeffs
    const = part.value.const
    return all(map(known_true, (step > 0, back == -step, const >= 0, const < step)))


def reduce(mask: Bool, shape: Sequence[Number]) -> Bool:
    """`mask` without the parts that hold, or fail, for every index of the box `shape`."""

    def leaf(part: Bool) -> Bool:
        if not isinstance(part, NonNegative):
            return part
        low, high = bounds(part.value, shape)
        if low is not None and known_true(low >= 0):
            return True
        return False if high is not None and known_true(high < 0) else part

    found = rebuilt(mask, leaf)
    assert found is not None
    return found


def bounds(value: Affine, shape: Sequence[Number]) -> tuple[Number | None, Number | None]:
    """Least and greatest value over the box 0 <= index[d] < shape[d]; None where one is not known."""
    low = high = value.const
    for dim, c in value.coeffs:
        if not isinstance(dim, int) or -dim > len(shape):
            return None, None
        if dim > 0:  # a sample of vmap: any number from 0 on
            low = low if low is not None and known_true(c >= 0) else None
            high = high if high is not None and known_true(c <= 0) else None
            continue
        reach = c * (shape[dim] - 1)
        if known_true(c >= 0):
            high = None if high is None else high + reach
        elif known_true(c <= 0):
            low = None if low is None else low + reach
        else:
            return None, None
    return low, high


def visibility(value: Value, factor: float = 1.0, cancels: bool = True) -> tuple[Bool, float] | None:
    """Read an additive mask, times a factor, as (predicate of what is seen, what is added elsewhere).

    None where it is no mask: more than the two values 0 and a large negative number. A value that
    is the same everywhere cancels in the softmax, and counts as all visible; unless it is so large
    that scores would lose their digits in it, or an attention sink sees it (not `cancels`).
    """
    if isinstance(value, Affine) and value.is_constant and isinstance(value.const, (int, float)):
        shift = value.const * factor
        if abs(shift) <= LARGEST_SHIFT if cancels else shift == 0:
            return True, 0.0
    if not isinstance(value, Select):
        return None
    if not value.then.is_constant or not value.otherwise.is_constant:
        return None
    then, otherwise = value.then.const * factor, value.otherwise.const * factor
    if _is_zero(then) and is_fill(otherwise):
        return value.condition, float(otherwise)
    if _is_zero(otherwise) and is_fill(then):
        return negation(value.condition), float(then)
    return None


#: Scores are taken to stay far above this, so that a masked key has weight exp(-10000) = 0: -10000, as
#: bfloat16 rounds it.
LARGEST_FILL = -9984.0
#: A softmax cancels a number that is added to all scores of a row; above this one, they lose digits.
LARGEST_SHIFT = 1e3


def is_fill(number: Number) -> bool:
    """Whether a number that replaces a score, or is added to one, hides the key."""
    return isinstance(number, (int, float)) and not math.isnan(number) and number <= LARGEST_FILL


def _is_zero(number: Number) -> bool:
    return isinstance(number, (int, float)) and number == 0
