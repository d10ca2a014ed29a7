"""What a visibility predicate proves: classes of masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...._inductor import known_true
from .values import (
    Affine,
    And,
    Bool,
    Choice,
    NonNegative,
    Not,
    Number,
    Or,
    Value,
    conjunction,
    disjunction,
    negation,
)


@dataclass(frozen=True)
class MaskClass:
    """What was proved of a mask over a (q, k) box.

    Attributes:
        all_visible: every key is seen by every query.
        causal: exactly the keys with k <= q are seen.
    """

    all_visible: bool = False
    causal: bool = False


OPAQUE = MaskClass()


def classify(mask: Bool | None, shape: Sequence[Number]) -> MaskClass:
    """Class of a visibility predicate.

    Args:
        mask: True where a key is seen; None is opaque.
        shape: the full shape (..., q_len, kv_len) that the mask is broadcast to.
    """
    if mask is None:
        return OPAQUE
    left = reduce(mask, shape)
    if left is True:
        return MaskClass(all_visible=True)
    square = known_true(shape[-1] == shape[-2])
    if square and isinstance(left, NonNegative) and _is_causal(left.value):
        return MaskClass(causal=True)
    return OPAQUE


def _is_causal(value: Affine) -> bool:
    """Whether `value >= 0` says k <= q, over integers."""
    coeffs = dict(value.coeffs)
    if set(coeffs) != {-1, -2}:
        return False
    step = coeffs[-2]
    return known_true(step > 0) and known_true(coeffs[-1] == -step) and (
        known_true(value.const >= 0) and known_true(value.const < step)
    )  # fmt: skip


def reduce(mask: Bool, shape: Sequence[Number]) -> Bool:
    """`mask` without the parts that hold, or fail, for every index of the box `shape`."""
    if isinstance(mask, NonNegative):
        low, high = bounds(mask.value, shape)
        if low is not None and known_true(low >= 0):
            return True
        if high is not None and known_true(high < 0):
            return False
        return mask
    if isinstance(mask, And):
        return conjunction([reduce(part, shape) for part in mask.operands])
    if isinstance(mask, Or):
        return disjunction([reduce(part, shape) for part in mask.operands])
    if isinstance(mask, Not):
        return negation(reduce(mask.operand, shape))
    return mask


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
    if not isinstance(value, Choice):
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
#: A number that is added to all scores of a row is not seen, unless they lose their digits in it.
LARGEST_SHIFT = 1e3


def is_fill(number: Number) -> bool:
    """Whether a number that replaces a score, or is added to one, hides the key."""
    return isinstance(number, (int, float)) and not math.isnan(number) and number <= LARGEST_FILL


def _is_zero(number: Number) -> bool:
    return isinstance(number, (int, float)) and number == 0
