"""Values that are read twice in each step of a chain: 2^60 paths, which nothing may follow one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inductor_fusions import testing

STEPS, LENGTH = 60, 16


def numbers(y: Any) -> Any:
    for _ in range(STEPS):
        y = torch.tanh(y) * (y + 1.0)
    return y


def conditions(m: Any) -> Any:
    for _ in range(STEPS):
        m = (m & ~m.t()) | (m | m.t())
    return m


def bias(q: Any, k: Any, v: Any, b: Any) -> Any:
    return torch.softmax(q @ k.mT + numbers(b), -1) @ v


def mask(q: Any, k: Any, v: Any, b: Any) -> Any:
    return torch.softmax((q @ k.mT).masked_fill(conditions(b > 0), -1e9), -1) @ v


def mask_of_indices(q: Any, k: Any, v: Any, b: Any) -> Any:
    n = torch.arange(LENGTH)
    hidden = ~conditions(n[:, None] >= n[None])
    return torch.softmax((q @ k.mT).masked_fill(hidden, -torch.inf), -1) @ v


def scores(q: Any, k: Any, v: Any, b: Any) -> Any:
    return torch.softmax(numbers(q @ k.mT), -1) @ v


@pytest.mark.parametrize(
    ("fn", "verdict"), [(bias, "fused"), (mask, "fused"), (mask_of_indices, "fused"), (scores, "rejected")]
)
def test_chain(fn: Any, verdict: str) -> None:
    inputs = [torch.randn(2, 4, LENGTH, 8) for _ in range(3)] + [torch.randn(LENGTH, LENGTH)]
    fused = verdict == "fused"
    seen = testing.check(fn, inputs, fused=int(fused), train=False, backend=testing.EAGER_AFTER_PASSES)
    assert {site.verdict for site in seen.ours.sites if site.fusion == "attention"} == {verdict}
