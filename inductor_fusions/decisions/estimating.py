"""Estimates the speedup of a problem, with a deviation, from nearby measurements.

The logarithms of speedups are modelled as a Gaussian process over the sizes of problems: the nearer two
problems are, the more alike are their speedups; without measurements the expected speedup is 1. (C. E.
Rasmussen and C. K. I. Williams, Gaussian Processes for Machine Learning, 2006, sections 2.2 and 4.2.)
`python -m bench.regret` tests it by cross-validation; its parameters were chosen there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Rows that an estimate is made of, at most: the nearest ones.
NEAREST = 8
#: Variance of a level that all rows of an estimate share.
LEVEL = 0.1
#: The share of the scatter of the rows that counts as doubt: where they disagree, the sizes do not tell all.
SCATTER = 0.3
#: Standard deviation for each doubling to the nearest row: far away, more may differ than near rows show.
AWAY = 0.02
#: How many standard deviations the lower end is below what is expected.
BELOW = 0.8


@dataclass(frozen=True)
class Process:
    """How speedups vary over the problems of a section.

    Attributes:
        deviation: standard deviation of the logarithm of a speedup from the level of the rows around it.
        length: the distance, in doublings, over which the covariance falls by a factor of e.
        noise: standard deviation of the logarithm of a measured speedup.
    """

    deviation: float
    length: float
    noise: float

    def covariance(self, distance: float) -> float:
        """The covariance of the speedups of two problems."""
        return self.deviation**2 * math.exp(-distance / self.length) + LEVEL

    def worth(self, doubt: float) -> float:
        """The distance at which speedups differ by a standard deviation; at most 1.9 lengths."""
        return -self.length * math.log(max(1 - doubt**2 / (2 * self.deviation**2), 0.15))


@dataclass(frozen=True)
class Nearby:
    """A row from which an estimate may be made.

    Attributes:
        place: the logarithms of its sizes, weighted: `distance` is between two places.
        gain: the logarithm of its gain.
        index: which row it is.
        doubt: a standard deviation of the logarithm, as of the rows of another device.
        device: where it was measured: between rows of one device there is no such doubt.
        is_slow: whether the kernel was clearly slower than stock there.
    """

    place: tuple[float, ...]
    gain: float
    index: int
    doubt: float = 0.0
    device: str = ""
    is_slow: bool = False


@dataclass(frozen=True)
class Estimate:
    """An estimate of the logarithm of a gain.

    Attributes:
        rows: indices of the rows that it is made of, the nearest first.
        distance: of the nearest row.
        is_slow: whether one of the nearest rows is, with or without their doubt.
    """

    mean: float
    doubt: float
    rows: tuple[int, ...]
    distance: float
    is_slow: bool

    @property
    def lower(self) -> float:
        """The lower bound, `BELOW` standard deviations below the mean."""
        return self.mean - BELOW * self.doubt


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """The distance of two places, in doublings."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True))


def estimate(
    place: Sequence[float], near: Iterable[Nearby], process: Process, reach: float, further: float = 0.0
) -> Estimate | None:
    """The estimate from rows; None if there are none.

    A row of another device counts as one that is as far away as its doubt is worth.

    Args:
        place: that of the problem.
        near: the rows.
        reach: rows that are further away do not count.
        further: additional standard deviation.
    """
    distances = [(distance(place, row.place), row) for row in near]
    found = sorted(
        ((far + process.worth(row.doubt), far, row) for far, row in distances if far <= reach),
        key=lambda entry: (entry[0], entry[2].gain),
    )[:NEAREST]
    if not found:
        return None
    rows = [row for *_, row in found]

    def between(a: Nearby, b: Nearby) -> float:
        other = 0.0 if a.device == b.device else process.worth(max(a.doubt, b.doubt))
        return process.covariance(distance(a.place, b.place) + other)

    among = [[between(a, b) + (process.noise**2 if a is b else 0.0) for b in rows] for a in rows]
    to = [process.covariance(counted) for counted, *_ in found]
    weights = _solve(among, to)
    mean = sum(w * row.gain for w, row in zip(weights, rows, strict=True))
    own = process.covariance(0.0) + process.noise**2 - sum(w * c for w, c in zip(weights, to, strict=True))
    sizes = [abs(w) for w in weights]
    scatter = sum(w * (row.gain - mean) ** 2 for w, row in zip(sizes, rows, strict=True)) / sum(sizes)
    away = AWAY * found[0][1]
    doubt = math.sqrt(max(own, 0.0) + SCATTER * scatter + away**2 + further**2)
    first, closest = found[0][0], min(far for _, far, _ in found)
    is_slow = any(row.is_slow for counted, far, row in found if counted <= first or far <= closest)
    return Estimate(mean, doubt, tuple(row.index for row in rows), found[0][1], is_slow)


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """The solution of a symmetric, positive definite system.

    Estimates are made while torch compiles, where operations on tensors would be traced.
    """
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            for j in range(i, len(row)):
                row[j] -= factor * pivot[j]
    found: list[float] = []
    for i, row in reversed(list(enumerate(rows))):
        known = sum(a * x for a, x in zip(row[i + 1 : -1], reversed(found), strict=True))
        found.append((row[-1] - known) / row[i])
    return found[::-1]
