"""Fewer combinations that find what all of them find: each pair of values, instead of the whole product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def covering(rows: Sequence[T], traits: Callable[[T], Iterable[Any]]) -> list[T]:
    """Rows in which each pair of traits occurs that occurs in `rows`: most faults need two values to meet.

    Args:
        rows: what there is to choose from; the result is in their order.
        traits: the values of a row that matter, which can be hashed, as many for each.
    """
    pairs = [set(combinations(enumerate(traits(row)), 2)) for row in rows]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda row: len(pairs[row] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [rows[i] for i in sorted(chosen)]


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis, in which each pair of values of two axes occurs."""
    return covering(list(product(*axes)), tuple)


def others_long(
    rows: Sequence[tuple[Any, ...]], traits: Callable[[tuple[Any, ...]], Iterable[Any]] = tuple
) -> list[Any]:
    """The rows as parameter sets, of which those that `covering` leaves are for long runs."""
    kept = {id(row) for row in covering(rows, traits)}
    return [row if id(row) in kept else pytest.param(*row, marks=pytest.mark.long) for row in rows]
