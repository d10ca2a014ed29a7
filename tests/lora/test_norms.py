"""DoRA: a linear and its adapter, times one vector, in the forms that libraries give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.block_mm.support import check, rand
from tests.lora.spellings import WHOLE, operands


def parts(x: Any, w: Any, a: Any, b: Any) -> tuple[Any, Any]:
    return F.linear(x, w), F.linear(F.linear(x.to(a.dtype), a), b)


def torchtune(x: Any, w: Any, a: Any, b: Any, v: Any) -> Any:
    y, up = parts(x, w, a, b)
    return (v - 1) * y + v * (up * 0.5) + y


def peft(x: Any, w: Any, a: Any, b: Any, v: Any) -> Any:
    y, up = parts(x, w, a, b)
    v = v.view(1, -1)
    return (y + ((v - 1) * y + v * up * 0.5)).to(x.dtype)


def with_a_residual(x: Any, w: Any, a: Any, b: Any, v: Any) -> Any:
    y, up = parts(x, w, a, b)
    return x.repeat(1, 2) + (y + (v - 1) * y + v * up) + v


def in_halves(x: Any, w: Any, a: Any, b: Any, v: Any) -> Any:
    y, up = parts(x, w, a, b)
    return (v + 0.5) * y * 2.0 - y + v * up


@pytest.mark.parametrize("fn", [torchtune, peft, with_a_residual, in_halves], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, WHOLE], ids=str)
def test_form(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    args = (*operands(dtype=dtype), rand(128, dtype=dtype))
    seen = check(fn, args, budget=2.0)
    assert seen.fused("lora") == 1 and len(seen.calls()) == 1 and not seen.products()


def test_training_keeps_both() -> None:
    """The gradient of the vector reads the linear and the adapter."""
    seen = check(torchtune, (*operands(), rand(128)), train=True, budget=2.0)
    assert any("kept for a backward" in reason for reason in seen.reasons("lora"))


def another_number(x: Any, w: Any, a: Any, b: Any, v: Any) -> Any:
    y, up = parts(x, w, a, b)
    return (v - 2) * y + v * up + y


def another_vector(x: Any, w: Any, a: Any, b: Any, v: Any) -> Any:
    y, up = parts(x, w, a, b)
    return (v - 1) * y + v.flip(0) * up + y


def a_vector_of_the_rows(x: Any, w: Any, a: Any, b: Any, v: Any) -> Any:
    y, up = parts(x, w, a, b)
    v = v[:96, None]
    return (v - 1) * y + v * up + y


def read_elsewhere(x: Any, w: Any, a: Any, b: Any, v: Any) -> Any:
    y, up = parts(x, w, a, b)
    return (v - 1) * y + v * up + y, y.relu()


def another_linear(x: Any, w: Any, a: Any, b: Any, v: Any) -> Any:
    y, up = parts(x, w, a, b)
    return (v - 1) * y + v * up + F.linear(x, w * 2)


OTHERS = [another_number, another_vector, a_vector_of_the_rows, read_elsewhere, another_linear]


@pytest.mark.parametrize("fn", OTHERS, ids=lambda f: f.__name__)
def test_left_alone(fn: Callable[..., Any]) -> None:
    seen = check(fn, (*operands(), rand(128)), budget=2.0)
    assert not seen.fused("lora") and seen.reasons("lora")
