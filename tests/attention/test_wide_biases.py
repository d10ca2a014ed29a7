"""Biases of float32 beside half-precision operands: SDPA would round them, which large ones do not bear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inductor_fusions import config, testing
from tests.attention.support import capture, check, flex_everywhere, qkv
from tests.support.errors import assert_within_budget
from tests.support.modules import Module

REASON = "a bias of dtype float32, which SDPA would round to bfloat16"


def attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.softmax(q @ k.mT * 0.2 + bias, -1).to(v.dtype) @ v


@pytest.mark.parametrize("size", [1.0, 20.0, 60.0])
def test_a_bias_is_not_rounded(size: float) -> None:
    """A learned table is no mask."""
    table = torch.nn.Parameter(torch.randn(2, 1, 7, 13) * size)
    module = Module(lambda net, q, k, v: attention(q, k, v, net.bias), {"bias": table})
    run = capture(module, *qkv(dtype=torch.bfloat16), train=True)
    assert [(site.verdict, REASON in site.reason) for site in run.sites] == [("rejected", True)]


def test_one_of_their_own_dtype_is_fused() -> None:
    check(attention, (*qkv(dtype=torch.bfloat16), torch.randn(2, 1, 7, 13, dtype=torch.bfloat16)))


def seen_keys() -> torch.Tensor:
    seen = torch.rand(2, 1, 7, 13) < 0.7
    seen[..., 0] = True
    return seen


MASKS: dict[str, Callable[[Any], Any]] = {
    "masked_fill": lambda seen: torch.zeros(seen.shape).masked_fill(~seen, -1e9),
    "where": lambda seen: torch.where(seen, 0.0, torch.finfo(torch.float32).min),
    "product": lambda seen: (1.0 - seen.float()) * torch.finfo(torch.float32).min,
    "in place": lambda seen: _written(seen, -1e9),
    "filled where it is not 0": lambda seen: (1.0 - seen.float()).masked_fill(~seen, -1e9),
}


def _written(seen: Any, fill: Any) -> Any:
    mask = torch.zeros(seen.shape)
    mask[~seen] = fill
    return mask


@pytest.mark.parametrize("spelling", MASKS)
def test_a_mask_that_the_graph_makes_is_fused(spelling: str) -> None:
    """Rounding 0 and low numbers changes nothing that a softmax sees."""
    check(
        lambda q, k, v, seen: attention(q, k, v, MASKS[spelling](seen)),
        (*qkv(dtype=torch.bfloat16), seen_keys()),
    )


UNKNOWN: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda mask, seen: mask,
    "a view": lambda mask, seen: mask[:, :, :, :].expand(2, 3, 7, 13),
    "a factor": lambda mask, seen: mask * 2.0,
    "masked": lambda mask, seen: mask.masked_fill(~seen, -1e9),
    "chosen": lambda mask, seen: torch.where(seen, mask, -1e9),
    "a sum": lambda mask, seen: mask + torch.where(seen, 0.0, -1e9),
    "written": lambda mask, seen: _written(seen, mask[~seen]) + torch.where(seen, 0.0, -1e9),
}


@pytest.mark.parametrize("spelling", UNKNOWN)
def test_numbers_that_the_graph_is_given_are_not_rounded(spelling: str) -> None:
    """Scores of bfloat16 and a mask of float32 are added in float32."""
    mask = torch.randn(2, 1, 7, 13) * 20
    run = capture(
        lambda q, k, v, mask, seen: attention(q, k, v, UNKNOWN[spelling](mask, seen)),
        *qkv(dtype=torch.bfloat16),
        mask,
        seen_keys(),
        train=True,
    )
    assert [(site.verdict, REASON in site.reason) for site in run.sites] == [("rejected", True)]


def test_flex_attention_reads_float32() -> None:
    """The mask behind a function of the scores is as exact as in eager mode."""

    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return torch.softmax(torch.tanh(q @ k.mT * 0.2) * 2 + mask, -1).to(v.dtype) @ v

    inputs = (*qkv(dim=16, dtype=torch.bfloat16, grad=False), torch.randn(2, 1, 7, 13) * 20)
    with config.patch(policy="always"), flex_everywhere("auto"):
        run = capture(fn, *inputs, train=False)
    assert [site.kernel for site in run.sites] == ["flex, tanh, dense mask"]
    true = fn(*(each.double() for each in inputs))
    assert_within_budget(run.outputs, fn(*inputs), true, slack=0.0)


@pytest.mark.parametrize("train", [False, True])
def test_a_mask_of_float16_beside_bfloat16(train: bool) -> None:
    """What hides keys in a kernel of bfloat16 is more than float16 holds."""

    def fn(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return torch.softmax(q @ k.mT * 0.2 + mask, -1, dtype=torch.float32).to(v.dtype) @ v

    mask = torch.zeros(2, 1, 1, 13, dtype=torch.float16)
    mask[..., -3:] = torch.finfo(torch.float16).min
    inputs = (*qkv(dtype=torch.bfloat16, grad=train), mask)
    with torch.autocast("cpu", torch.bfloat16):
        run = testing.capture(fn, *inputs, train=train)
    assert [site.verdict for site in run.sites] == ["fused"]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run.tensors[0], fn(*inputs), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("learned", [False, True], ids=["given", "learned"])
def test_a_bias_of_scores_with_keys_in_front_is_not_rounded(learned: bool) -> None:
    """The bias is read through a view there."""

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        weights = torch.softmax(k @ q.mT * 0.2 + bias, -2).to(v.dtype)
        return weights.mT @ v

    bias = (torch.randn(2, 1, 13, 7) * 20).requires_grad_(learned)
    run = capture(fn, *qkv(dtype=torch.bfloat16), bias, train=True, policy="always")
    sites = [site for site in run.sites if site.fusion == "attention"]
    assert [(site.verdict, REASON in site.reason) for site in sites] == [("rejected", True)]
