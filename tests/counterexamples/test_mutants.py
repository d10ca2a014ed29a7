"""Attentions that are fused, of which one detail is changed.

All sizes are equal, so that every change of dims still runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions import testing
from tests.attention.support import check, rand
from tests.counterexamples.mutator import LOWEST, verify

SIZE = 4


def tensors(count: int = 3) -> list[torch.Tensor]:
    return [rand(SIZE, SIZE, SIZE, SIZE) for _ in range(count)]


def padding() -> torch.Tensor:
    mask = torch.ones(SIZE, 1, 1, SIZE, dtype=torch.bool)
    mask[1:, ..., -1] = False
    return mask


def causal(q: Any, k: Any, v: Any) -> Any:
    place = torch.arange(q.shape[-2])
    scores = q @ k.transpose(-2, -1) / 2.0
    return torch.softmax(scores.masked_fill(place[:, None] < place, LOWEST), dim=-1) @ v


def triangle(q: Any, k: Any, v: Any) -> Any:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(diagonal=0)
    scores = torch.where(seen, torch.matmul(q, k.mT) * 0.4, LOWEST)
    return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32), v)


def heads_behind(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.5, dim=-1)
    return torch.einsum("bhqk,bhkd->bqhd", weights, v)


def flat(q: Any, k: Any, v: Any, alibi: Any) -> Any:
    shape = q.shape
    q, k, v = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, v))
    scores = torch.baddbmm(alibi.reshape(-1, *shape[-2:]), q, k.transpose(1, 2), beta=0.5, alpha=0.3)
    weights = torch.softmax(scores.view(shape), -1).view(-1, *shape[-2:])
    return torch.bmm(weights, v).view(shape)


def grouped(q: Any, k: Any, v: Any) -> Any:
    k, v = (t[:, :2, None].expand(SIZE, 2, 2, SIZE, SIZE).reshape(SIZE, SIZE, SIZE, SIZE) for t in (k, v))
    return torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]), dim=-1) @ v


def padded(q: Any, k: Any, v: Any, seen: Any) -> Any:
    place = torch.arange(q.shape[-2])
    visible = (place[:, None] >= place) & seen
    mask = torch.where(visible, 0.0, LOWEST)
    return torch.softmax(q @ k.transpose(-2, -1) * 0.5 + mask, dim=-1) @ v


def call(q: Any, k: Any, v: Any) -> Any:
    place = torch.arange(q.shape[-2])
    seen = (place <= place[:, None]) & (place > place[:, None] - 9)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.4)


def call_grouped(q: Any, k: Any, v: Any, seen: Any) -> Any:
    k, v = (t[:, :2].repeat_interleave(2, dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


ATTENTIONS: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]]]] = {
    "causal": (causal, tensors),
    "triangle": (triangle, tensors),
    "biased": (
        lambda q, k, v, bias: torch.softmax(torch.add(q @ k.permute(0, 1, 3, 2) * 0.7, bias), -1) @ v,
        lambda: tensors(4),
    ),
    "heads_behind": (heads_behind, tensors),
    "flat": (flat, lambda: tensors(4)),
    "grouped": (grouped, tensors),
    "padded": (padded, lambda: [*tensors(), padding()]),
    "call": (call, tensors),
    "call_grouped": (call_grouped, lambda: [*tensors(), padding()]),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_original(name: str) -> None:
    """What is mutated is fused."""
    function, inputs = ATTENTIONS[name]
    check(function, inputs(), slack=8.0)


def right(mutant: Any, inputs: list[torch.Tensor]) -> None:
    check(mutant, inputs, fused=None, slack=16.0)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_some_mutants(name: str) -> None:
    function, inputs = ATTENTIONS[name]
    assert verify(function, inputs(), right, lambda index: index % 16 == len(name) % 16)


@pytest.mark.long
@pytest.mark.parametrize("name", ATTENTIONS)
def test_all_mutants(name: str) -> None:
    function, inputs = ATTENTIONS[name]
    assert verify(function, inputs(), right)


def test_other_strides_and_sizes() -> None:
    """Inputs laid out otherwise than when the graph was traced, and of other sizes."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v

    with torch.no_grad(), testing.config.patch(policy="always"):
        torch._dynamo.reset()
        compiled = torch.compile(attention, backend=testing.AfterPasses([]))
        for batch, heads, q_len, kv_len in ((2, 3, 7, 13), (3, 2, 13, 7), (1, 1, 2, 5), (2, 3, 7, 13)):
            for order in ((0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 2, 0), (2, 0, 3, 1)):
                inverse = [order.index(i) for i in range(4)]
                q, k, v = (
                    torch.randn([(batch, heads, n, 8)[i] for i in order]).permute(inverse)
                    for n in (q_len, kv_len, kv_len)
                )
                torch.testing.assert_close(compiled(q, k, v), attention(q, k, v))
