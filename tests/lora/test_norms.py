"""Vectors that multiply an adapter: DoRA in the forms that libraries give it, and factors before autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.block_mm.support import check, rand
from tests.lora.spellings import WHOLE, operands

pytestmark = pytest.mark.usefixtures("any_device")

#: Of the input, of what the linear and the adapter give, and of the vector.
FORMS: dict[str, Callable[..., Any]] = {
    "PEFT": lambda x, y, up, v: (y + ((v.view(1, -1) - 1) * y + v.view(1, -1) * up * 0.5)).to(x.dtype),
    "with a residual": lambda x, y, up, v: x.repeat(1, 2) + (y + (v - 1) * y + v * up) + v,
    "in halves": lambda x, y, up, v: (v + 0.5) * y * 2.0 - y + v * up,
}
OTHERS: dict[str, Callable[..., Any]] = {
    "another number": lambda x, y, up, v: (v - 2) * y + v * up + y,
    "another vector": lambda x, y, up, v: (v - 1) * y + v.flip(0) * up + y,
    "a vector of the rows": lambda x, y, up, v: (v[:96, None] - 1) * y + v[:96, None] * up + y,
    "read elsewhere": lambda x, y, up, v: ((v - 1) * y + v * up + y, y.relu()),
    "another linear": lambda x, y, up, v: (v - 1) * y + v * up + y.roll(1, 0),
}


def adapted(form: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w, a, b, v: form(x, F.linear(x, w), F.linear(F.linear(x.to(a.dtype), a), b), v)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, WHOLE], ids=str)
def test_form(name: str, dtype: torch.dtype) -> None:
    args = (*operands(dtype=dtype), rand(128, dtype=dtype))
    seen = check(adapted(FORMS[name]), args, budget=2.0)
    assert seen.fused("lora") == 1 and len(seen.calls()) == 1 and not seen.products()


@pytest.mark.parametrize("name", FORMS)
def test_training(name: str) -> None:
    """The sum is saved for the gradient of the vector, and neither the linear nor the adapter."""
    seen = check(adapted(FORMS[name]), (*operands(), rand(128)), train=True, budget=2.0)
    assert len(seen.calls()) == 1 and not seen.products()


@pytest.mark.parametrize("name", OTHERS)
def test_left_alone(name: str) -> None:
    seen = check(adapted(OTHERS[name]), (*operands(), rand(128)), budget=2.0)
    assert not seen.fused("lora") and seen.reasons("lora")


def without_a_gradient(x: Any, y: Any, h: Any, b: Any, v: Any) -> Any:
    with torch.no_grad():
        up = F.linear(h, b)
    return y + v * up


def overwritten_in_between(x: Any, y: Any, h: Any, b: Any, v: Any) -> Any:
    up = F.linear(h, b.detach())  # else eager mode needs h
    h.detach().add_(1.0)
    return y + v * up


def overwritten_behind(x: Any, y: Any, h: Any, b: Any, v: Any) -> Any:
    out = y + v * F.linear(h, b.detach())
    h.detach().add_(1.0)
    return out


def another_vector_by_then(x: Any, y: Any, h: Any, b: Any, v: Any) -> Any:
    v = v * 1.0
    first = (v - 1) * y
    v.detach().add_(1.0)
    return first + v * F.linear(h, b) + y


def a_linear_without_a_gradient(x: Any, y: Any, h: Any, b: Any, v: Any) -> Any:
    with torch.no_grad():
        first = (v - 1) * y
    return first + v * F.linear(h, b) + y


def a_sum_of_rows(x: Any, y: Any, h: Any, b: Any, v: Any) -> Any:
    return (v - 1) * y + v * F.linear(h[:1], b) + y


UNLIKE = (
    without_a_gradient, overwritten_in_between, overwritten_behind, another_vector_by_then,
    a_linear_without_a_gradient, a_sum_of_rows,
)  # fmt: skip


@pytest.mark.parametrize("fn", UNLIKE, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("train", [False, True])
def test_numbers_where_it_is_not_moved(fn: Callable[..., Any], train: bool) -> None:
    """What is written in place, or has another gradient mode, keeps its meaning."""

    def whole(x: Any, w: Any, a: Any, b: Any, v: Any) -> Any:
        return fn(x, F.linear(x, w), F.linear(x, a), b, v)

    check(whole, (*operands(), rand(128)), train=train, budget=2.0)
