"""A causal mask that is overwritten, and attention with a mask that is made in the graph."""

from __future__ import annotations

from typing import Any

import torch

from tests.attention.support import LOWEST

LENGTH = 9


def triangle(length: int = LENGTH) -> torch.Tensor:
    mask = torch.full((length, length), LOWEST)
    mask = torch.triu(mask, diagonal=1)
    mask *= torch.arange(length) > torch.arange(length).reshape(-1, 1)
    return mask


def attend(make: Any, late: bool = False) -> Any:
    """Attention with a mask.

    Args:
        late: whether it is made behind the scores.
    """

    def attention(q: Any, k: Any, v: Any, *given: Any) -> Any:
        mask = None if late else make(*given)
        scores = q @ k.mT * 0.3
        return torch.softmax(scores + (make(*given) if late else mask), -1) @ v

    return attention
