"""Loss curves of `bench.convergence`: smoothed, and how far apart they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from bench.docs_pieces import Json

CRITERION = (
    "A model passes if d(fused, stock) of one seed is at most the largest d of two stock runs with different "
    "seeds. d(a, b) is the largest |s(a) - s(b)| over all steps from the window on, and s the mean of the "
    "training loss over the last steps, as many as the window has. A loss that is not finite fails."
)


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """The mean over each `window` steps that follow each other; the first one ends at step `window`."""
    return [math.fsum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]


def distance(one: Sequence[float], other: Sequence[float], window: int) -> float:
    """The largest difference of two smoothed curves of the same length; NaN where a loss is not finite."""
    if not all(map(math.isfinite, (*one, *other))):
        return math.nan
    pairs = zip(smooth(one, window), smooth(other, window), strict=True)
    return max(abs(a - b) for a, b in pairs)


def judge(rows: Sequence[Json], window: int) -> list[Json]:
    """The criterion, for each model whose runs are all there.

    Args:
        rows: results of bench.convergence: "model", "variant" (stock or fused), "seed" and "loss".

    Returns:
        For each model: "model"; "fused", the distance of both variants with the fused run's seed; "stock",
        the largest of stock runs with different seeds; "within", whether the first is no larger.
    """
    found: list[Json] = []
    for model in sorted({str(row["model"]) for row in rows}):
        losses = {(row["variant"], row["seed"]): row["loss"] for row in rows if row["model"] == model}
        seeds = [seed for variant, seed in losses if variant == "stock"]
        both = [seed for seed in seeds if ("fused", seed) in losses]
        if not both or len(seeds) < 2:
            continue
        apart = [distance(losses["fused", seed], losses["stock", seed], window) for seed in both]
        spread = [
            distance(losses["stock", a], losses["stock", b], window)
            for a, b in itertools.combinations(seeds, 2)
        ]
        fused = math.nan if any(map(math.isnan, apart)) else max(apart)
        stock = math.nan if any(map(math.isnan, spread)) else max(spread)
        # A comparison with NaN is false.
        found.append({"model": model, "fused": fused, "stock": stock, "within": fused <= stock})
    return found
