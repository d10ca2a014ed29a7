"""The grouped GEMM on a CUDA device: numbers, memory, repeats, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inductor_fusions import config, testing
from inductor_fusions.fusions.linear_epilogue import MOST_ROWS
from tests.block_mm.support import GatedMLP, Linears

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]


def linears(width: int, outs: tuple[int, ...], bias: bool, dtype: torch.dtype) -> nn.Module:
    return Linears(width, outs, bias).to("cuda", dtype)


def gated(width: int, hidden: int, act: Callable[[Any], Any] = F.silu) -> nn.Module:
    return GatedMLP(act, width=width, hidden=hidden).to("cuda", torch.bfloat16)


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64, 100, 513, 4096])
@pytest.mark.parametrize("outs", [(1024, 256, 256), (768, 768, 768)])
def test_qkv(outs: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
    model = linears(outs[0], outs, rows % 2 == 0, dtype)
    seen = testing.check(model, (rand(rows, outs[0], dtype=dtype),), fused=1, train=False)
    assert "block_mm" in seen.ours.fused[0].kernel


@pytest.mark.parametrize("rows", [16, 512, 2048])
def test_training(rows: int) -> None:
    """Forward, the gradient of the input, and those of the weights."""
    testing.check(linears(1024, (1024, 256, 256), True, torch.bfloat16), (rand(rows, 1024),), fused=None)
    testing.check(gated(1024, 2816), (rand(rows, 1024),), fused=None)


@pytest.mark.parametrize("act", [F.silu, F.gelu, F.relu, torch.sigmoid])
@pytest.mark.parametrize("rows", [1, 16, 300, 2048])
def test_gated_mlp(rows: int, act: Callable[[Any], Any]) -> None:
    model = gated(512, 1536, act)
    few = rows <= MOST_ROWS  # then the last linear is a site as well
    testing.check(model, (rand(rows, 512),), fused=2 if few else 1, train=False)


@pytest.mark.parametrize("rows", [16, 2048])
def test_epilogue(rows: int) -> None:
    args = (rand(rows, 512), rand(1024, 512), rand(1024), rand(rows, 1024))
    testing.check(lambda x, w, b, y: torch.sigmoid(F.linear(x, w) + 0.3 * y + b), args, fused=1, train=False)


@pytest.mark.parametrize("rows", [16, 2048])
def test_tf32(rows: int, tf32: None) -> None:
    model = linears(512, (512, 128, 128), True, torch.float32)
    testing.check(model, (rand(rows, 512, dtype=torch.float32),), fused=1, train=False)


def test_dynamic_rows() -> None:
    model = linears(512, (512, 128), True, torch.bfloat16)
    with config.patch(policy="always"), torch.no_grad():
        compiled = torch.compile(model, dynamic=True)
        for rows in (3, 17, 64, 65, 1000, 4097):
            x = rand(rows, 512)
            for ours, eager in zip(compiled(x), model(x), strict=True):
                torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("train", [False, True])
def test_no_more_memory_than_stock(train: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = linears(1024, (1024, 256, 256), False, torch.bfloat16)
            self.mlp = gated(1024, 4096)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x)
            return self.mlp(x + q * k.sum(-1, keepdim=True) * v.sum(-1, keepdim=True))

    model, x = Block(), rand(4096, 1024)

    def peak(**options: Any) -> int:
        torch._dynamo.reset()
        with config.patch(**options), torch.set_grad_enabled(train):
            compiled = torch.compile(model)
            for _ in range(2):
                model.zero_grad()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                out = compiled(x)
                if train:
                    out.sum().backward()
                torch.cuda.synchronize()
                found = torch.cuda.max_memory_allocated() - before
                del out
        return int(found)

    stock = peak(enabled=False)
    assert peak(policy="always") <= 1.001 * stock + 2**20


def test_weight_updated_in_place_is_seen() -> None:
    model, x = linears(512, (512, 128), False, torch.bfloat16), rand(16, 512)
    with config.patch(policy="always"), torch.no_grad():
        compiled = torch.compile(model, mode="reduce-overhead")
        for _ in range(4):
            for ours, eager in zip(compiled(x), model(x), strict=True):
                torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)
            for part in model.parts:  # type: ignore[union-attr]
                part.weight.mul_(-1.5)


@pytest.mark.parametrize("rows", [1, 512])
def test_max_autotune(rows: int) -> None:
    """Whichever kernel wins, the result is right."""
    model, x = linears(512, (512, 128, 128), True, torch.bfloat16), rand(rows, 512)
    with torch.no_grad():
        compiled = torch.compile(model, mode="max-autotune-no-cudagraphs")
        for ours, eager in zip(compiled(x), model(x), strict=True):
            torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)
