"""Operations of torch that have no public name."""

from __future__ import annotations

import warnings
from typing import Any

import torch

#: What `torch.nn.functional.grouped_mm` calls; None on a torch that is too old for it.
GROUPED_MM: Any = getattr(torch, "_grouped_mm", None)


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Raise where a condition does not hold: at once on a CPU, by an assert of the device elsewhere."""
    torch._assert_async(condition, message)


def sdpa_is_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, dropout: float, causal: bool, grouped: bool
) -> bool:
    """Whether SDPA takes a fused kernel for these arguments, and not the products one by one.

    False as well where it may take neither.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(torch._fused_sdp_choice(q, k, v, mask, dropout, causal, enable_gqa=grouped) != 0)
        except RuntimeError:
            return False
