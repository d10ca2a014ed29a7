"""Geometric means of results, and whether new ones are worse than old ones: by ratios, never by times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

#: A ratio of stock to fused less than this is a loss, whatever its noise.
LEVEL = 1.0


def ratio(row: Mapping[str, Any]) -> float | None:
    """Stock over fused; None where it was not measured, or the result was wrong."""
    value = (row.get("ratio") or {}).get("stock/fused")
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def noise(row: Mapping[str, Any]) -> float:
    """How far the ratio may be off, relatively."""
    value = row.get("noise")
    if isinstance(value, (int, float)):
        return float(value)
    spread = row.get("spread") or {}
    return math.hypot(*(float(spread.get(name, 0.0)) for name in ("stock", "fused"))) / 2


def geometric_mean(values: Sequence[float]) -> float | None:
    """The mean of ratios; None without any."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


@dataclass(frozen=True)
class Mean:
    """The cases of one kind together.

    Attributes:
        kind: "models, inference" and so on.
        cases: number of ratios.
        mean: their geometric mean.
        below: how many are under 1.0, and how many of those by more than their noise.
    """

    kind: str
    cases: int
    mean: float | None
    below: int
    clearly: int


def means(rows: Iterable[Mapping[str, Any]]) -> list[Mean]:
    """The geometric mean of each suite, in inference and in training, in the order of the rows."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        mode = "training" if row.get("train") else "inference"
        groups.setdefault(f"{row.get('suite', 'models')}, {mode}", []).append(row)
    found = []
    for kind, group in groups.items():
        known = [(r, noise(row)) for row in group if (r := ratio(row)) is not None]
        below = sum(r < LEVEL for r, _ in known)
        clearly = sum(r * (1 + band) < LEVEL for r, band in known)
        found.append(Mean(kind, len(known), geometric_mean([r for r, _ in known]), below, clearly))
    return found


@dataclass(frozen=True)
class Change:
    """A case in old and new results.

    Attributes:
        name: the case.
        old, new: stock over fused; `old` is 1 where there are no old results: stock itself.
        band: how far the quotient of both may be off, relatively.
        problem: why there is no verdict on speed: "wrong", "failed", "not measured", "new"; else empty.
    """

    name: str
    old: float | None
    new: float | None
    band: float = 0.0
    problem: str = ""

    @property
    def change(self) -> float | None:
        """New over old."""
        return self.new / self.old if self.new is not None and self.old else None

    def worse(self, limit: float) -> bool:
        """Whether it is a regression: wrong, failed, or under the limit by more than its noise."""
        if self.problem in ("wrong", "failed"):
            return True
        return self.change is not None and self.change * (1 + self.band) < limit


def compare(new: Iterable[Mapping[str, Any]], old: Iterable[Mapping[str, Any]] | None) -> list[Change]:
    """Each case of new results against the same of old ones; without those, against stock.

    A case that the old results lack is not compared.
    """
    before = None if old is None else {str(row["name"]): row for row in old}
    found = []
    for row in new:
        name = str(row["name"])
        value = ratio(row)
        then: float | None = 1.0
        band = noise(row)
        if before is not None:
            then = ratio(before[name]) if name in before else None
            band = math.hypot(band, noise(before[name])) if name in before else 0.0
        problem = ""
        if row.get("correct") is False:
            problem = "wrong"
        elif value is None:
            problem = "failed" if row.get("failed") else "not measured"
        elif then is None:
            problem = "new"
        found.append(Change(name, then, value, band, problem))
    return found


def unlike(new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    """Why ratios of two files cannot be compared; empty if they can. Versions may differ."""
    if new.get("device") != old.get("device"):
        return f"measured on {old.get('device')}, this is {new.get('device')}"
    return ""
