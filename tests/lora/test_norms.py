"""DoRA: a linear and its adapter, times one vector, in the forms that libraries give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.block_mm.support import check, rand
from tests.lora.spellings import WHOLE, operands

#: Of the input, of what the linear and the adapter give, and of the vector.
FORMS: dict[str, Callable[..., Any]] = {
    "torchtune": lambda x, y, up, v: (v - 1) * y + v * (up * 0.5) + y,
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
    def fn(x: Any, w: Any, a: Any, b: Any, v: Any) -> Any:
        return form(x, F.linear(x, w), F.linear(F.linear(x.to(a.dtype), a), b), v)

    return fn


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, WHOLE], ids=str)
def test_form(name: str, dtype: torch.dtype) -> None:
    args = (*operands(dtype=dtype), rand(128, dtype=dtype))
    seen = check(adapted(FORMS[name]), args, budget=2.0)
    assert seen.fused("lora") == 1 and len(seen.calls()) == 1 and not seen.products()


def test_training_keeps_both() -> None:
    """The gradient of the vector reads the linear and the adapter."""
    seen = check(adapted(FORMS["torchtune"]), (*operands(), rand(128)), train=True, budget=2.0)
    assert any("saved for the backward" in reason for reason in seen.reasons("lora"))


@pytest.mark.parametrize("name", OTHERS)
def test_left_alone(name: str) -> None:
    seen = check(adapted(OTHERS[name]), (*operands(), rand(128)), budget=2.0)
    assert not seen.fused("lora") and seen.reasons("lora")
