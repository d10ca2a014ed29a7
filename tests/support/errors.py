"""How far results are from exact ones."""

from __future__ import annotations

import torch


def relative(found: torch.Tensor | None, exact: torch.Tensor, least: float = 0.0) -> float:
    """||found - exact|| / ||exact||, in float64; the norm of the exact result counts as `least` at least."""
    assert found is not None and found.shape == exact.shape, (found, exact.shape)
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm().clamp(min=least))
