"""Which values of the mask algebra a dtype holds: integers wrap around, and floating dtypes round them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ....graph.torch_ops import value as value_of
from .algebra import as_bool, as_number, choose
from .proofs import bounds
from .values import Affine, Data, Element, Number, Select, Value, is_integral

#: A dim whose size is symbolic is taken to be no longer than this, and an integer of the data no larger.
LONGEST = 2**20

_FLOATING = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def held(value: Value, dtype: torch.dtype, shape: Sequence[Number]) -> Value:
    """A value as a tensor of that dtype and shape holds it; None where that may be another one.

    Constants are rounded. An index is not: all that it may be must be numbers of the dtype.
    """
    if dtype == torch.bool:
        return as_bool(value)  # True + True is True
    if isinstance(value, Data):
        return value if value_of(value.element.node).dtype == dtype else None
    if isinstance(value, Select):
        return choose(value.condition, _held(value.then, dtype, shape), _held(value.otherwise, dtype, shape))
    value = as_number(value)  # what a logical operation writes over numbers is 1 and 0
    return _held(value, dtype, shape) if isinstance(value, Affine) else value


def of_dtype(number: bool | int | float, dtype: torch.dtype) -> Value:
    """A number in a tensor of some dtype."""
    return bool(number) if dtype == torch.bool else held(Affine(number), dtype, ())


def _held(value: Affine, dtype: torch.dtype, shape: Sequence[Number]) -> Affine | None:
    if dtype.is_floating_point:
        if dtype not in _FLOATING or any(True for _ in value.elements):
            return None  # an integer of the data may be rounded
        if value.is_constant and isinstance(value.const, (int, float)):
            return Affine(rounded(value.const, dtype))
        return value if _is_exact(value, dtype, shape) else None
    if dtype.is_complex or not is_integral(value):
        return None
    info, (low, high) = torch.iinfo(dtype), _range(value, shape)
    fits = (info.min <= low and high <= info.max) or (dtype == torch.int64 and math.isinf(high))
    return value if fits else None


def rounded(number: float, dtype: torch.dtype) -> float:
    """A number as a floating dtype holds it."""
    if dtype == torch.float64 or not math.isfinite(number) or number == 0:
        return number
    info = torch.finfo(dtype)
    digits = 1 - round(math.log2(info.eps))
    exponent = max(math.frexp(number)[1], math.frexp(info.smallest_normal)[1])
    step = math.ldexp(1.0, exponent - digits)
    found = round(number / step) * step
    if abs(found) > info.max:
        return math.copysign(math.inf, number)
    return number if found == number else found  # an int stays one


def _is_exact(value: Affine, dtype: torch.dtype, shape: Sequence[Number]) -> bool:
    """Whether a floating dtype holds every value without rounding: not too many binary digits."""
    numbers = [value.const, *(c for _, c in value.coeffs)]
    static = [n for n in numbers if isinstance(n, (int, float))]
    if not all(math.isfinite(n) for n in static):
        return False
    reach = max(map(abs, _range(value, shape)))
    if math.isinf(reach):
        return dtype == torch.float64
    unit = max(float(n).as_integer_ratio()[1] for n in [1, *static])
    return bool(reach * unit <= 2 / torch.finfo(dtype).eps)


def _range(value: Affine, shape: Sequence[Number]) -> tuple[float, float]:
    """Bounds of a value: its least and greatest number if known; infinite with symbolic slopes."""
    low, high = bounds(value, shape)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return low, high
    total: float = abs(value.const) if isinstance(value.const, (int, float)) else LONGEST
    for atom, c in value.coeffs:
        if not isinstance(c, (int, float)):
            return -math.inf, math.inf
        size = LONGEST if isinstance(atom, Element) or not -len(shape) <= atom < 0 else shape[atom]
        total += abs(c) * (size if isinstance(size, int) else LONGEST)
    return -total, total
