"""Biases of float32 beside half-precision operands: SDPA would round them, which large ones do not bear."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inductor_fusions import testing
from tests.attention.support import check, qkv

REASON = "a bias of float32, which SDPA takes as bfloat16"


def attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.softmax(q @ k.mT * 0.2 + bias, -1).to(v.dtype) @ v


class Learned(torch.nn.Module):
    """A table of biases, which is no mask."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(2, 1, 7, 13) * size)

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, self.bias)


@pytest.mark.parametrize("size", [1.0, 20.0, 60.0])
def test_a_bias_is_not_rounded(size: float) -> None:
    run = testing.capture(
        Learned(size), *qkv(dtype=torch.bfloat16), train=True, backend=testing.EAGER_AFTER_PASSES
    )
    assert [(site.verdict, REASON in site.reason) for site in run.sites] == [("rejected", True)]


def test_one_of_their_own_dtype_is_fused() -> None:
    check(attention, (*qkv(dtype=torch.bfloat16), torch.randn(2, 1, 7, 13, dtype=torch.bfloat16)))


def test_what_may_be_a_mask_is_fused() -> None:
    """Rounding 0 and low numbers changes nothing that a softmax sees."""

    def masked(q: Any, k: Any, v: Any, seen: Any) -> Any:
        return attention(q, k, v, torch.zeros(seen.shape).masked_fill(~seen, -1e9))

    seen = torch.rand(2, 1, 7, 13) < 0.7
    seen[..., 0] = True
    check(masked, (*qkv(dtype=torch.bfloat16), seen))


@pytest.mark.parametrize("cast", [False, True])
def test_autocast(cast: bool) -> None:
    """Under autocast the scores are rounded before the bias is added to them, so that it may be as well."""

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return torch.softmax(q @ k.mT * 0.2 + bias, -1) @ v

    inputs = (*qkv(grad=False), torch.randn(2, 1, 7, 13))
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
        run = testing.capture(
            attention if not cast else fn, *inputs, train=False, backend=testing.EAGER_AFTER_PASSES
        )
    assert [site.verdict for site in run.sites] == ["fused"]


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
