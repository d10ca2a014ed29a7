"""Fewer combinations: each pair of values is there."""

from __future__ import annotations

from itertools import combinations, product

from tests.support.covering import covering, others_long, pairwise

AXES = ("abc", range(4), (False, True))


def pairs(rows: list[tuple[object, ...]]) -> set[tuple[object, ...]]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def test_each_pair_is_there() -> None:
    every, some = list(product(*AXES)), pairwise(*AXES)
    assert pairs(some) == pairs(every) and len(some) == 12 and some == [row for row in every if row in some]


def test_pairs_that_do_not_occur_are_not_asked_for() -> None:
    assert covering([("a", 1), ("b", 2), ("a", 1)], tuple) == [("a", 1), ("b", 2)]


def test_the_others_are_long() -> None:
    marked = [row for row in others_long(list(product(*AXES))) if hasattr(row, "marks")]
    assert {row.values for row in marked} == {*product(*AXES)} - {*pairwise(*AXES)}
    assert all(mark.name == "long" for row in marked for mark in row.marks)
