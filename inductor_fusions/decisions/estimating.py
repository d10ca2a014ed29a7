"""Estimates the speedup of a problem, with a deviation, from nearby measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Rows that an estimate is made of, at most: the nearest ones.
NEAREST = 3
#: A row counts by 1 / (SOFTEN + its distance).
SOFTEN = 0.25
#: Doubt of a row itself, as a standard deviation of the logarithm.
DOUBT = 0.02
#: How many standard deviations the lower end is below what is expected.
BELOW = 1.0


@dataclass(frozen=True)
class Nearby:
    """A row from which an estimate may be made.

    Attributes:
        distance: of its problem, in doublings.
        gain: the logarithm of its gain.
        index: which row it is.
        doubt: a standard deviation of the logarithm, as of a row of another device.
    """

    distance: float
    gain: float
    index: int
    doubt: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """An estimate of the logarithm of a gain.

    Attributes:
        rows: indices of the rows that it is made of, the nearest first.
        distance: of the nearest row.
    """

    mean: float
    doubt: float
    rows: tuple[int, ...]
    distance: float

    @property
    def lower(self) -> float:
        """The lower bound: one standard deviation below the mean."""
        return self.mean - BELOW * self.doubt


def distance(a: Sequence[float], b: Sequence[float], weights: Sequence[float]) -> float:
    """The distance of two problems: the weighted sum of the doublings between their sizes."""
    return sum(w * abs(x - y) for w, x, y in zip(weights, a, b, strict=True))


def estimate(near: Iterable[Nearby], reach: float, each: float, further: float = 0.0) -> Estimate | None:
    """The estimate from rows.

    A doubtful row counts like one that is as many doublings further away as its doubt is worth. Of rows that
    count alike the slowest are taken.

    Args:
        near: the rows.
        reach: rows that are further away do not count.
        each: standard deviation for each doubling of distance.
        further: additional standard deviation.
    """

    def counted(row: Nearby) -> float:
        return row.distance + row.doubt / each

    reached = [row for row in near if row.distance <= reach]
    found = sorted(reached, key=lambda row: (counted(row), row.gain))[:NEAREST]
    if not found:
        return None
    weights = [1 / (SOFTEN + counted(row)) for row in found]

    def average(values: Iterable[float]) -> float:
        return sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)

    mean = average(row.gain for row in found)
    away = average(row.distance for row in found)
    spread = average((row.gain - mean) ** 2 for row in found)
    # The spread of a single row says nothing.
    own = (DOUBT + each * away) ** 2 * (1 + 1 / len(found))
    doubt = math.sqrt(spread + own + average(row.doubt for row in found) ** 2 + further**2)
    return Estimate(mean, doubt, tuple(row.index for row in found), found[0].distance)
