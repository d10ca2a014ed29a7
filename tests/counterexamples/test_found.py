"""What mutants and random programs found, in its smallest form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.attention.support import check, qkv


def triangle(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def test_negative_scale_of_a_causal_attention() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = (q @ k.mT * -0.4).masked_fill(~triangle(q.shape[-2]), -1e9)
        return torch.softmax(scores, dim=-1) @ v

    check(attention, qkv(9, 9), slack=4.0)


def test_negative_scale_of_a_call_whose_mask_is_causal() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=triangle(q.shape[-2]), scale=-0.4)

    check(attention, qkv(9, 9), slack=4.0)
