"""What mutants and random programs found, in its smallest form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions import testing
from tests.attention.support import check, qkv, rand


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


def repeated(t: Any) -> Any:
    """(2, 2, length, dim) -> (2, 4, length, dim)"""
    return t[:, :, None].expand(2, 2, 2, *t.shape[-2:]).reshape(2, 4, *t.shape[-2:])


#: A copy is made, of q cast or of heads repeated, and then the copy or what it was made of is written to.
def heads_written_through_an_alias(q: Any, k: Any, v: Any) -> Any:
    k, v = repeated(k), repeated(v)
    k.view(8, *k.shape[-2:]).mul_(0.5)
    return torch.softmax(q @ k.mT * 0.3, dim=-1) @ v


def heads_written_before_they_were_repeated(q: Any, k: Any, v: Any) -> Any:
    first = k * 1.0
    k, v = repeated(first), v.repeat_interleave(2, dim=1)
    first.mul_(0.5)
    return torch.softmax(q @ k.mT * 0.3, dim=-1) @ v


def heads_of_a_call(q: Any, k: Any, v: Any) -> Any:
    first = v * 1.0
    k, v = repeated(k), repeated(first)
    first.add_(1.0)
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def heads_of_a_call_written_through_an_alias(q: Any, k: Any, v: Any) -> Any:
    k, v = repeated(k), repeated(v)
    v[0].mul_(2.0)
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@pytest.mark.parametrize("function", [
    heads_written_through_an_alias,
    heads_written_before_they_were_repeated,
    heads_of_a_call,
    heads_of_a_call_written_through_an_alias,
])  # fmt: skip
def test_repeated_heads_that_are_overwritten(function: Any) -> None:
    inputs = [rand(2, 4, 7, 8), rand(2, 2, 13, 8), rand(2, 2, 13, 8)]
    run = check(function, inputs, fused=None, slack=4.0).ours
    assert not any(call.kwargs.get("enable_gqa") for call in run.calls("scaled_dot_product_attention"))


@pytest.mark.parametrize("which", ["before", "after"])
def test_cast_operand_that_is_overwritten(which: str) -> None:
    """q in float32 for the scores, while v is in bfloat16: the cast is not what a kernel reads."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        q = q * 1.0
        wide = q.float()
        (q if which == "before" else wide.view(6, 7, 8)).mul_(-2.0)
        weights = torch.softmax(wide @ k.float().mT * 0.3, dim=-1)
        return weights.to(v.dtype) @ v

    check(attention, qkv(7, 13, dim=8), dtype=torch.bfloat16, fused=None, slack=4.0)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_keys_in_another_order(train: bool) -> None:
    """Keys that come as (batch, heads, dim, length): SDPA has no kernel for them on a CPU, and is decomposed.
    Stock's patterns (2.13) misread what it becomes."""

    def program(a: Any, b: Any, c: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (a, b, c))
        return torch.softmax(q @ k, -1) @ v

    inputs = [torch.randn(2, 8, 3, 8, requires_grad=train) for _ in range(3)]
    found = testing.check(program, inputs, fused=1, train=train, backend="inductor", slack=8.0)
    assert found.ours.fused


def test_values_that_are_repeated_in_memory_have_gradients_of_their_own() -> None:
    """An input with a stride of 0 is a leaf: what is kept for the backward is not one of its repetitions."""
    q, k, _ = qkv(7, 13)
    v = torch.randn(1, *k.shape[1:]).expand_as(k).detach().requires_grad_()
    check(lambda q, k, v: torch.softmax(q @ k.mT * 0.3, dim=-1) @ v, (q, k, v), slack=4.0)


class Tagged(torch.Tensor):
    """A subclass that acts by `__torch_function__` alone."""


@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
def test_inputs_of_a_subclass(which: int) -> None:
    """torch (2.13) refuses SDPA's kernel for them in the first call."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = (q @ k.transpose(-2, -1) * 0.3).masked_fill(~triangle(q.shape[-2]), -1e9)
        return torch.softmax(scores, dim=-1) @ v

    inputs = list(qkv(9, 9, grad=False))
    inputs[which] = inputs[which].as_subclass(Tagged)
    run = testing.capture(lambda: attention(*inputs))
    assert [(site.verdict, site.code) for site in run.sites] == [("left to stock", "subclass")]
    torch.testing.assert_close(run.outputs, attention(*inputs))


def test_a_parameter_is_of_no_subclass() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return torch.softmax((q @ k.mT * 0.3).masked_fill(~triangle(9), -1e9), dim=-1) @ v

    q, k, v = qkv(9, 9, grad=False)
    assert testing.capture(attention, torch.nn.Parameter(q), k, v, train=True).fused
