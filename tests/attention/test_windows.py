"""Windows to both sides: |query - key| below a number, and bands made of triangles that are added."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import pytest
import torch

from inductor_fusions.fusions.attention.masks import Affine, And, NonNegative, Not, Or
from inductor_fusions.fusions.attention.masks.values import (
    Choice,
    Value,
    choose,
    combine,
    compare,
    conjunction,
    disjunction,
    magnitude,
    map_parts,
)
from tests.attention.support import cases, check, flex_everywhere, qkv

N, WIDTH, DIM = 150, 40, 16
INF = math.inf


def lowest() -> float:
    """A constant; a float in a global variable is a symbol to Dynamo where sizes are dynamic."""
    return torch.finfo(torch.float32).min


def distance(n: int) -> torch.Tensor:
    return torch.arange(n)[:, None] - torch.arange(n)[None]


def bands(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((n, n), -INF).triu(1), torch.full((n, n), -INF).tril(-WIDTH)


#: Functions of the length: a boolean mask, True where a key is seen, and its class.
BOTH_SIDES = {
    "method": lambda n: distance(n).abs() <= WIDTH,
    "function": lambda n: torch.abs(distance(n)) < WIDTH,
    "builtin": lambda n: abs(distance(n)) <= WIDTH,
    "absolute": lambda n: torch.absolute(distance(n)) < WIDTH,
    "bound first": lambda n: torch.tensor(WIDTH) >= distance(n).abs(),
    "not above": lambda n: ~(distance(n).abs() > WIDTH),
    "not at least": lambda n: torch.logical_not(distance(n).abs() >= WIDTH),
    "negated": lambda n: -distance(n).abs() >= -WIDTH,
    "shifted": lambda n: distance(n).abs() - WIDTH < 1,
    "floating": lambda n: distance(n).float().abs() <= WIDTH,
    "by where": lambda n: torch.where(distance(n) < 0, -distance(n), distance(n)) <= WIDTH,
    "of four dims": lambda n: (torch.arange(n).view(1, 1, n, 1) - torch.arange(n)).abs() <= WIDTH,
    "of numbers": lambda n: (distance(n).abs() <= WIDTH).float() == 1,
    # As Gemma 3 has it: what is causal in the window is in it.
    "or causal": lambda n: (distance(n).abs() < WIDTH) | ((distance(n) >= 0) & (distance(n) < WIDTH)),
}
ONE_SIDE = {
    "abs": lambda n: (distance(n).abs() <= WIDTH) & (distance(n) >= 0),
    "tril of abs": lambda n: (distance(n).abs() < WIDTH).tril(),
    "sum of triangles": lambda n: sum(bands(n)) == 0,
    "product of triangles": lambda n: torch.ones(n, n).tril() * torch.ones(n, n).triu(-WIDTH) > 0,
}
NUMBERS = {
    "two triangles": lambda n: bands(n)[0] + bands(n)[1],
    "two triangles, in a row": lambda n: torch.zeros(n, n) + bands(n)[0] + bands(n)[1],
    "logarithm": lambda n: torch.log(torch.triu(torch.tril(torch.ones(n, n)), -WIDTH)),
    "logarithm, method": lambda n: (distance(n).abs() <= WIDTH).tril().float().log(),
}


def spelled(mask: Any) -> Any:
    def fn(q: Any, k: Any, v: Any) -> Any:
        seen, scores = mask(q.shape[-2]), q @ k.mT * 0.25
        scores = scores.masked_fill(~seen, lowest()) if seen.dtype == torch.bool else scores + seen
        return torch.softmax(scores, -1) @ v

    return fn


def called(mask: Any) -> Any:
    def fn(q: Any, k: Any, v: Any) -> Any:
        given = mask(q.shape[-2])
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, given.expand(q.shape[0], 1, q.shape[2], q.shape[2])
        )

    return fn


#: A mask, its class, and whether the sizes are symbols.
WINDOWS = {
    **{f"{name}, both sides": (mask, "window+blocks") for name, mask in BOTH_SIDES.items()},
    **{f"{name}, one side": (mask, "causal+window") for name, mask in ONE_SIDE.items()},
    **{f"{name}, numbers": (mask, "causal+window") for name, mask in NUMBERS.items()},
}


@pytest.mark.parametrize("form", [spelled, called], ids=["spelled", "called"])
@cases(WINDOWS)
def test_window(case: Any, form: Any) -> None:
    mask, kind = case
    with flex_everywhere("flex"):
        seen = check(form(mask), qkv(N, N, dim=DIM), kernel="flex")
    assert seen.sites[0].kernel == f"flex, block mask: {kind}"


SYMBOLIC = {**BOTH_SIDES, **ONE_SIDE, **NUMBERS}


@pytest.mark.parametrize("form", [spelled, called], ids=["spelled", "called"])
@pytest.mark.parametrize("name", ["method", "not above", "abs", "two triangles", "logarithm"])
def test_symbolic_sizes(name: str, form: Any) -> None:
    fn, inputs = form(SYMBOLIC[name]), [torch.randn(2, N, 2 * DIM) for _ in range(3)]

    def projected(*given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = fn(*(x.view(*x.shape[:2], 2, DIM).transpose(1, 2) for x in given))
        return result.transpose(1, 2).flatten(2)

    with flex_everywhere("flex"):
        seen = check(projected, inputs, kernel="flex", dynamic=True, train=False)
    assert seen.sites[0].kernel.endswith("window+blocks" if name in BOTH_SIDES else "causal+window")


#: Masks of the same look that are no windows: what they are is left to the mask.
OTHERS = {
    "of data": lambda n: (torch.arange(n)[:, None] - torch.arange(n).flip(0)).abs() <= WIDTH,
    "of fractions": lambda n: (distance(n) * 0.5).abs() <= 20.25,
    "of a rounded number": lambda n: distance(n).bfloat16().abs() <= 257,
    "that wraps around": lambda n: distance(n).to(torch.int8).abs() <= 100,
    "squared": lambda n: distance(n) ** 2 <= WIDTH**2,
    "logarithm of others": lambda n: distance(n).abs().float().log() <= 3.0,
}


@cases(OTHERS)
def test_no_window(case: Any) -> None:
    with flex_everywhere("flex"):
        seen = check(spelled(case), qkv(300, 300, batch=1, heads=1))
    assert "window" not in seen.sites[0].kernel


def test_finite_triangles() -> None:
    """The sum of two finite numbers is a third one: no mask of one number, but two masks."""

    def mask(n: int) -> torch.Tensor:
        return torch.full((n, n), -1e9).triu(1) + torch.full((n, n), -1e9).triu(9)

    with flex_everywhere("flex"):
        seen = check(spelled(mask), qkv(N, N))
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
    if isinstance(value, Choice):
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
