"""Windows to both sides: the algebra of |query - key| below a number, and of triangles that are added.

The windows themselves are in `tests/cases/masks.py`.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch

from inductor_fusions.fusions.attention.masks import Affine, And, NonNegative, Not, Or
from inductor_fusions.fusions.attention.masks.algebra import (
    choose,
    combine,
    compare,
    conjunction,
    disjunction,
    magnitude,
    map_parts,
)
from inductor_fusions.fusions.attention.masks.values import Select, Value
from tests.attention.support import INF, check, flex_everywhere, qkv
from tests.cases.masks import segments, written


def test_finite_triangles() -> None:
    """The sum of two finite numbers is a third one: no mask of one number, but two masks."""

    def mask(data: Any, n: int) -> torch.Tensor:
        return torch.full((n, n), -1e9).triu(1) + torch.full((n, n), -1e9).triu(9)

    with flex_everywhere("flex"):
        seen = check(written(mask, "add"), (*qkv(150, 150), segments(2, 150)))
    assert "block mask: causal" in seen.sites[0].kernel


# -- the algebra ----------------------------------------------------------------------------------

SIZE = 6
NAMES = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq}


def value_at(value: Value, row: int, column: int) -> Any:
    """A value of the algebra at one index."""
    if isinstance(value, bool):
        return value
    if isinstance(value, Affine):
        return value.const + sum(c * {-2: row, -1: column}[atom] for atom, c in value.coeffs)
    if isinstance(value, Select):
        chosen = value.then if value_at(value.condition, row, column) else value.otherwise
        return value_at(chosen, row, column)
    if isinstance(value, NonNegative):
        return value_at(value.value, row, column) >= 0
    if isinstance(value, Not):
        return not value_at(value.operand, row, column)
    assert isinstance(value, (And, Or))
    join = all if isinstance(value, And) else any
    return join(value_at(part, row, column) for part in value.operands)


INDICES = list(itertools.product(range(SIZE), range(SIZE)))
FORMS = [
    Affine(const, tuple((d, c) for d, c in ((-2, row), (-1, column)) if c))
    for const in (-2, 0, 1)
    for row, column in ((1, -1), (-1, 1), (2, -1), (0, 1), (1, 1))
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slope", [1, -1, 2, -3])
def test_comparisons_of_a_size(name: str, slope: int) -> None:
    """|x| times a slope, plus a number, on each side of every comparison."""
    bounds = [Affine(c) for c in range(-4, 9)] + [Affine(1, ((-1, 1),)), Affine(0, ((-2, 1), (-1, -1)))]
    for x, bound, shift in itertools.product(FORMS, bounds, (0, 3)):
        size = map_parts(magnitude(x), lambda y: y.map(lambda c: c * slope) + Affine(shift))  # noqa: B023
        for left, right in ((size, bound), (bound, size), (size, magnitude(bound))):
            found = compare(name, left, right)
            assert found is not None
            for at in INDICES:
                assert value_at(found, *at) == NAMES[name](value_at(left, *at), value_at(right, *at))


def test_bounds_of_a_size_are_two_comparisons() -> None:
    x, bound = FORMS[0], Affine(3)
    both = compare("le", magnitude(x), bound)
    assert isinstance(both, And) and set(both.operands) == {
        compare("le", x, bound), compare("le", x.map(operator.neg), bound)
    }  # fmt: skip


def test_parts_of_a_disjunction_that_are_in_others() -> None:
    """They are left out, each of two that are the same once; the condition stays."""
    parts = [NonNegative(form) for form in FORMS]
    pairs = [conjunction(pair) for pair in itertools.product(parts[:10], parts[5:])]
    assert len({disjunction([one, other]) for one, other in itertools.product(parts, parts)}) > 20
    for one, other in itertools.product([*parts, *pairs[::3]], pairs):
        both = disjunction([one, other])
        for at in INDICES:
            assert value_at(both, *at) == (value_at(one, *at) or value_at(other, *at))
    first, second = parts[0], parts[1]
    assert disjunction([And((first, second)), And((second, first))]) == And((first, second))
    assert disjunction([And((first, second)), second]) == second


CONDITIONS = [NonNegative(form) for form in FORMS[::3]]
PAIRS = [(0, -INF), (-INF, 0), (1, 0), (0, 1), (0, 2)]


def test_sums_of_two_choices() -> None:
    """They have a value where it is one of two numbers; then it is right."""
    read = 0
    for first, second in itertools.product(CONDITIONS, CONDITIONS):
        for one, other in itertools.product(PAIRS, PAIRS):
            left, right = (
                choose(condition, *map(Affine, pair)) for condition, pair in ((first, one), (second, other))
            )
            total = combine(left, right, operator.add)
            if total is None:
                continue
            read += 1
            for at in INDICES:
                assert value_at(total, *at) == value_at(left, *at) + value_at(right, *at)
    assert read > len(CONDITIONS) ** 2 * 4
