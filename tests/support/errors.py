"""How far results are from exact ones."""

from __future__ import annotations

from typing import Any

import torch

from inductor_fusions.checking import budget


def relative(found: torch.Tensor | None, exact: torch.Tensor, least: float = 0.0) -> float:
    """||found - exact|| / ||exact||, in float64; the norm of the exact result counts as `least` at least."""
    assert found is not None and found.shape == exact.shape, (found, exact.shape)
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm().clamp(min=least))


def assert_within_budget(ours: Any, stock: Any, exact: Any, slack: float = budget.SLACK) -> None:
    """Assert that every tensor of a tree is within the error budget, with the same trees of stock and of
    float64."""
    runs = (budget.Values(each, {}) for each in (ours, stock, exact))
    found = budget.problems(budget.compare(*runs, slack=slack))
    assert not found, found
