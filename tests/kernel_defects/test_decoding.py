"""cuDNN attention of one query, which is wrong on Blackwell by its report: compiled graphs do not call it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from devtools import cuda_codegen
from inductor_fusions import reporting
from inductor_fusions.fusions.kernel_defects.attention_gradients import attention
from tests.kernel_defects.test_generated import B, D, H, S, cudnn, leaf

WRONG, RIGHT = 91900, 92600


def kernels(
    monkeypatch: pytest.MonkeyPatch, *, arch: int = 100, version: int | None = WRONG, queries: int = 1,
    heads: int = H, masked: bool = False, causal: bool = False, train: bool = False,
) -> list[str]:  # fmt: skip
    """The kernels of SDPA that the generated forward calls."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    inputs = [leaf(B, n, s, D, grad=train) for n, s in ((H, queries), (heads, S), (heads, S))]
    bias = torch.zeros(B, 1, queries, S, dtype=torch.bfloat16) if masked else None
    with reporting.isolated() as sites, torch.set_grad_enabled(train):
        code = cuda_codegen.generate(
            lambda *x: cudnn(*x, bias, causal=causal), inputs, train=train, run=False, arch=arch
        )
    cured = any("cudnn_decoding" in site.kernel for site in sites if site.fusion == "kernel_defects")
    names = ("cudnn", "flash", "efficient")
    found = [n for n in names if f"_scaled_dot_product_{n}_attention.default" in code.forward.wrapper]
    assert cured == (found != ["cudnn"])
    return found


@pytest.mark.parametrize("heads", [H, 1])
def test_one_query_is_left_to_flash_attention(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many heads of keys as of queries, or fewer."""
    assert kernels(monkeypatch, heads=heads) == ["flash"]


@pytest.mark.parametrize("how", [{"masked": True}, {"causal": True}])
def test_flash_attention_takes_no_mask(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its causal mask is that of the last query, SDPA's that of the first one."""
    assert kernels(monkeypatch, **how) == []


def test_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward gets the values and the logsumexp of flash attention, and from cuDNN nothing but seeds."""
    assert kernels(monkeypatch, train=True) == ["cudnn", "flash"]


RIGHT_ONES: list[dict[str, Any]] = [
    {"arch": 90}, {"queries": 2}, {"version": RIGHT}, {"version": 92401}, {"version": 91800},
    {"version": None},
]  # fmt: skip


@pytest.mark.parametrize("right", RIGHT_ONES)
def test_right_kernels_are_called(right: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels(monkeypatch, **right) == ["cudnn"]


@pytest.mark.parametrize("heads", [H, 2])
@pytest.mark.parametrize("mask", ["none", "bias", "boolean", "causal"])
def test_products(heads: int, mask: str) -> None:
    """The values and the logsumexp, also of a row without a key that it sees."""
    q, k, v = (torch.randn(B, n, s, D, dtype=torch.float64) for n, s in ((H, 1), (heads, S), (heads, S)))
    bias = {"bias": torch.randn(B, 1, 1, S).double(), "boolean": torch.rand(B, H, 1, S) > 0.5}.get(mask)
    if mask == "boolean":
        assert bias is not None
        bias[0, 0] = False
    out, logsumexp = attention(q, k, v, bias, 0.3, mask == "causal")
    shown = torch.arange(S)[None] < 1 if mask == "causal" else bias
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, shown, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, expected.nan_to_num(0.0))
    scores = q @ k.repeat_interleave(H // heads, 1).mT * 0.3
    if shown is not None:
        scores = scores + shown if mask == "bias" else scores.masked_fill(~shown, -math.inf)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1, keepdim=True).float())
