"""Indices in dtypes that do not hold all of them: integers wrap around, and floating dtypes round."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from inductor_fusions.fusions.attention.masks.dtypes import rounded
from tests.attention.support import flex_everywhere, qkv, same_as_eager


def against(place: torch.Tensor) -> torch.Tensor:
    return place[:, None] >= place


def triangle(length: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.ones(length, length, dtype=dtype).tril()


#: Length, and the mask as the model has it: none of these is what the same arithmetic without limits gives.
LIMITED = {
    "uint8, below zero": (40, lambda n: place(n, torch.uint8)[:, None] - place(n, torch.uint8) >= 0),
    "uint8, a window": (
        40,
        lambda n: (place(n, torch.uint8)[:, None] - place(n, torch.uint8) < 8) | triangle(n),
    ),
    "cast to uint8": (40, lambda n: (place(n)[:, None] - place(n)).to(torch.uint8) >= 0),
    "cast to int8": (200, lambda n: against(place(n).to(torch.int8))),
    "byte()": (300, lambda n: against(place(n).byte())),
    "int16": (300, lambda n: against(place(n, torch.int16) * 200)),
    "int32": (300, lambda n: against(place(n, torch.int32) * 2**24)),
    "negated uint8": (40, lambda n: -triangle(n, torch.uint8) >= 0),
    "uint8 minus one": (40, lambda n: triangle(n, torch.uint8) - 1 >= 0),
    "uint8, sum": (40, lambda n: torch.full((n, n), 255, dtype=torch.uint8) + triangle(n, torch.uint8) == 0),
    "256 as uint8": (40, lambda n: torch.full((n, n), 256).to(torch.uint8) + triangle(n, torch.uint8) > 0),
    "cumsum in int8": (200, lambda n: against(torch.ones(n).cumsum(0, dtype=torch.int8))),
    "cumsum in bfloat16": (300, lambda n: against(torch.ones(n).cumsum(0, dtype=torch.bfloat16))),
    "bfloat16": (300, lambda n: against(place(n, torch.bfloat16))),
    "bfloat16, difference": (
        300,
        lambda n: place(n, torch.bfloat16)[:, None] - place(n, torch.bfloat16) >= 0,
    ),
    "promoted to bfloat16": (300, lambda n: against(torch.zeros(n, dtype=torch.bfloat16) + place(n))),
    "compared in bfloat16": (
        300,
        lambda n: place(n)[:, None] >= torch.full((n,), 256.0, dtype=torch.bfloat16) + place(n) * 0,
    ),
    "float32": (300, lambda n: against(place(n, torch.float32) + (2.0**24 - 8))),
    "float32, tenths": (300, lambda n: place(n)[:, None] >= place(n, torch.float32) * 0.1 * 10),
    "bits of integers": (40, lambda n: place(n).view(torch.float64)[:, None] > place(n) - 1),
    "a start that is cut": (40, lambda n: torch.arange(0.5, n, dtype=torch.int64)[:, None] * 2 >= place(n)),
    "0.1 in two dtypes": (
        40,
        lambda n: (torch.full((n, n), 0.1) == torch.full((n, n), 0.1, dtype=torch.float64)) | triangle(n),
    ),
    "0.1 in half precision": (
        40,
        lambda n: (torch.full((n, n), 0.1, dtype=torch.float16).float() == 0.1) | triangle(n),
    ),
    "indexed with True": (40, lambda n: triangle(n)[True][0]),
}


def place(length: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.arange(length, dtype=dtype)


def attention(mask: Any) -> Any:
    def fn(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.mT * 0.25
        return torch.softmax(scores.masked_fill(~mask(q.shape[-2]), -1e9), -1) @ v

    return fn


@pytest.mark.parametrize("flex", [False, True], ids=["sdpa", "flex"])
@pytest.mark.parametrize(("length", "mask"), LIMITED.values(), ids=LIMITED)
def test_limited(length: int, mask: Any, flex: bool) -> None:
    """The same as eager: float64, which other tests compare with, would not round."""
    with flex_everywhere() if flex else contextlib.nullcontext():
        same_as_eager(attention(mask), qkv(length, length, batch=1, heads=1, grad=False))


#: Where everything that may come up is a number of the dtype, the mask is proved as before.
HELD = {
    "uint8": lambda n: against(place(n, torch.uint8)),
    "int8, difference": lambda n: place(n, torch.int8)[:, None] - place(n, torch.int8) >= 0,
    "bfloat16": lambda n: against(place(n, torch.bfloat16)),
    "float16, difference": lambda n: place(n).half()[:, None] - place(n).half() >= 0,
    "uint8 triangle": lambda n: triangle(n, torch.uint8) == 1,
    "uint8 triangle, from one": lambda n: 1 - triangle(n, torch.uint8) < 1,
    "constant in bfloat16": lambda n: torch.where(triangle(n), 0.1, -1e4).bfloat16() > -1,
}


@pytest.mark.parametrize("mask", HELD.values(), ids=HELD)
def test_held(mask: Any) -> None:
    run = same_as_eager(attention(mask), qkv(40, 40, batch=1, heads=1, grad=False))
    assert [site.kernel for site in run.fused] == ["sdpa, is_causal"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rounded(dtype: torch.dtype) -> None:
    for number in (
        0.1, -1e4, 65519.0, 65520.0, 1e-7, 3e-45, 6e-8, -3.4028234663852886e38, 1e39, 257.0, 258.0, 2049,
    ):  # fmt: skip
        assert rounded(number, dtype) == torch.tensor(number, dtype=dtype).item(), number
