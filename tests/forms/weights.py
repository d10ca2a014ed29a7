"""What is done to scores and weights in other words than those of the library."""

from __future__ import annotations

from typing import Any

import torch

from .form import Form, collector

WEIGHTS: dict[str, Form] = {}
form = collector(WEIGHTS)
einsum = torch.einsum
QKV = ((2, 4, 9, 8),) * 3


def slopes(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(9.0) * torch.tensor([0.5, 0.3, 0.2, 0.1])[:, None]).to(dtype)


@form(*QKV)
def narrow_bias_scaled_with_the_scores(q: Any, k: Any, v: Any) -> Any:
    """Slopes in bfloat16 on scores in float32; the scale of both comes last."""
    scores = (q @ k.mT + slopes(torch.bfloat16)[None, :, None]) * 8**-0.5
    causal = torch.full((9, 9), float("-inf")).triu(1)
    return (scores + causal).softmax(-1) @ v


@form(*QKV, fused=0, reasons=("rounded to bfloat16 on their way",))
def scores_rounded_with_the_bias(q: Any, k: Any, v: Any) -> Any:
    scores = ((q @ k.mT).bfloat16() + slopes(torch.bfloat16)[None, :, None]) * 8**-0.5
    return scores.float().softmax(-1) @ v


@form(*QKV, (4, 4), fused=0, reasons=("matmul stands between the product of q and k and the softmax",))
def scores_of_mixed_heads(q: Any, k: Any, v: Any, mix: Any) -> Any:
    scores = ((q @ k.mT * 8**-0.5).permute(0, 2, 3, 1) @ mix).permute(0, 3, 1, 2)
    return scores.softmax(-1) @ v


@form(*QKV, (4, 4))
def queries_of_mixed_heads(q: Any, k: Any, v: Any, mix: Any) -> Any:
    """The same product in front of the scores."""
    q = (q.permute(0, 2, 3, 1) @ mix).permute(0, 3, 1, 2)
    return (q @ k.mT * 8**-0.5).softmax(-1) @ v
