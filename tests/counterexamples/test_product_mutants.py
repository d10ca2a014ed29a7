"""Linears that are fused, alone and with adapters, of which one detail is changed.

Decided as on a GPU; the graphs run on the CPU. Widths are equal, so that most changes of dims still run. What
is frozen can be overwritten between two products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.block_mm.support import rand
from tests.counterexamples.mutator import verify
from tests.fuzz.judge import check_products

WIDTH, RANK = 32, 16


def frozen(*shape: int) -> torch.Tensor:
    return rand(*shape, grad=False)


def adapter(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [rand(RANK, WIDTH, dtype=dtype), rand(WIDTH, RANK, dtype=dtype)]


def square(count: int, train: bool = True) -> list[torch.Tensor]:
    """An input, which takes a gradient in training, and frozen weights."""
    return [rand(WIDTH, WIDTH, grad=train), *(frozen(WIDTH, WIDTH) for _ in range(count))]


def shared(x: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
    return F.linear(x, q), F.linear(x, k, bias), x @ v.t()


def heads(x: Any, q: Any, k: Any, v: Any) -> Any:
    return tuple(F.linear(x, w).view(2, 16, 4, 8).transpose(1, 2) for w in (q, k, v))


def gated(x: Any, gate: Any, up: Any) -> Any:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def whole_mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return F.linear(F.gelu(x @ gate.t(), approximate="tanh") * F.linear(x, up), down)


def epilogue(x: Any, w: Any, bias: Any, residual: Any) -> Any:
    return torch.sigmoid(F.linear(x, w, bias) * 0.3 + residual)


def activated(x: Any, w: Any) -> Any:
    return F.gelu(torch.matmul(x, w.mT))


def adapted(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0


def scaled_by_alpha(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.add(x @ w.t(), (x @ a.t()) @ b.t(), alpha=0.5)


def in_float32(x: Any, w: Any, a: Any, b: Any) -> Any:
    base = F.linear(x, w)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * 2.0).to(base.dtype)


def two_adapted(x: Any, w: Any, v: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return adapted(x, w, a, b), adapted(x, v, c, d)


def gated_adapted(x: Any, w: Any, v: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return F.silu(adapted(x, w, a, b)) * adapted(x, v, c, d)


#: The function, its inputs, and the fusion that takes it.
PRODUCTS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]], str]] = {
    "shared": (shared, lambda: [*square(3), frozen(WIDTH)], "qkv"),
    "heads": (heads, lambda: [rand(2, 16, WIDTH), *square(3)[1:]], "qkv"),
    "gated": (gated, lambda: square(2, train=False), "gated_mlp"),
    "whole_mlp": (whole_mlp, lambda: square(3, train=False), "gated_mlp"),
    "epilogue": (epilogue, lambda: [*square(1), frozen(WIDTH), rand(WIDTH, WIDTH)], "linear_epilogue"),
    "activated": (activated, lambda: square(1), "linear_epilogue"),
    "adapted": (adapted, lambda: [*square(1), *adapter()], "lora"),
    "scaled_by_alpha": (scaled_by_alpha, lambda: [*square(1), *adapter()], "lora"),
    "in_float32": (in_float32, lambda: [*square(1), *adapter(torch.float32)], "lora"),
    "two_adapted": (two_adapted, lambda: [*square(2), *adapter(), *adapter()], "lora"),
    "gated_adapted": (gated_adapted, lambda: [*square(2), *adapter(), *adapter()], "lora"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_original(name: str) -> None:
    """What is mutated is fused."""
    function, inputs, fusion = PRODUCTS[name]
    sites = check_products(function, inputs())
    assert fusion in {site.fusion for site in sites if site.verdict == "fused"}, sites


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_some_mutants(name: str) -> None:
    function, inputs, _ = PRODUCTS[name]
    assert verify(function, inputs(), check_products, lambda index: index % 48 == len(name))


@pytest.mark.long
@pytest.mark.parametrize("name", PRODUCTS)
def test_all_mutants(name: str) -> None:
    function, inputs, _ = PRODUCTS[name]
    assert verify(function, inputs(), check_products)
