"""Adapters of some columns of a linear, that `cat` or padding puts beside each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions.fusions.lora.op import NARROW_MM
from tests.block_mm.support import check, rand, run
from tests.lora.spellings import WHOLE, targets
from tests.support.arguments import named


def operands(dtype: torch.dtype = torch.bfloat16, rank: int = 16) -> tuple[Any, ...]:
    """x, the linear of q, k and v, and both matrices for q and v."""
    pairs = [rand(*shape, dtype=dtype) for shape in ((rank, 64), (64, rank)) * 2]
    return rand(2, 48, 64), rand(192, 64), *pairs


def delta(x: Any, a: Any, b: Any) -> Any:
    return F.linear(F.linear(x.to(a.dtype), a), b)


def by_cat(x: Any, w: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    q, v = delta(x, a, b), delta(x, c, d) * 0.5
    base = F.linear(x, w)
    return (base + torch.cat([q, torch.zeros_like(q), v], dim=-1) * 2.0).to(base.dtype)


def split_behind(x: Any, w: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return tuple(t.relu() for t in by_cat(x, w, a, b, c, d).split(64, dim=-1))


def of_matrices(x: Any, w: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    x = x.view(96, 64)
    q, v = x @ a.t() @ b.t(), x @ c.t() @ d.t()
    return x @ w.t() - torch.cat((q, v, q.new_zeros(96, 64)), 1)


@pytest.mark.parametrize("fn", [by_cat, split_behind, of_matrices], ids=lambda f: f.__name__)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_form(fn: Callable[..., Any], train: bool) -> None:
    seen = check(fn, operands(), train=train, budget=2.0)
    (call,) = seen.calls()
    assert list(named(call).groups) == [0, 0, 0] and not seen.products()
    (narrow,) = targets(seen, NARROW_MM)
    assert len(named(narrow).b) == 2
    if train:
        assert seen.fused("lora") > 1


@pytest.mark.parametrize("rank", [5, 16])
def test_float32_adapters(rank: int) -> None:
    seen = check(by_cat, operands(WHOLE, rank), train=True, budget=2.0)
    (call,) = seen.calls()
    assert list(named(call).groups) == [0, 0, 0]


def test_few_rows() -> None:
    """The operation for few rows has no columns: it is two kernels, which are not measured."""
    x, *rest = operands()
    few = (x[:, :2].detach(), *rest)
    assert check(by_cat, few, budget=2.0).calls()
    (reason, *_) = run(by_cat, few, policy="profitable").reasons("lora")
    assert "after B" in reason


def read_elsewhere(x: Any, w: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    both = torch.cat([delta(x, a, b), delta(x, c, d), delta(x, a, d)], -1)
    return F.linear(x, w) + both, both


def viewed_apart(x: Any, w: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    q, v = (t.reshape(2, 96, 32) for t in (delta(x, a, b), delta(x, c, d)))
    return F.linear(x, w[:128]) + torch.cat([q, v, q, v], -1)[:, ::2]


OTHERS: dict[str, Callable[..., Any]] = {
    "beside a linear": lambda x, w, a, b, c, d: (
        F.linear(x, w) + torch.cat([delta(x, a, b), F.linear(x, w[:128])], -1)
    ),
    "along the rows": lambda x, w, a, b, c, d: (
        F.linear(x, w[:64]) + torch.cat([delta(x[:1], a, b), delta(x[1:], c, d)], 0)
    ),
    "viewed apart": viewed_apart,
    "among ones": lambda x, w, a, b, c, d: F.linear(x, w) + F.pad(delta(x, a, b), (64, 64), value=1.0),
    "cropped": lambda x, w, a, b, c, d: F.linear(x, w)[..., :128] + F.pad(delta(x, a, b), (-16, 80)),
    "read elsewhere": read_elsewhere,
}


@pytest.mark.parametrize("name", OTHERS)
def test_left_alone(name: str) -> None:
    seen = check(OTHERS[name], operands(), budget=2.0)
    assert not seen.fused("lora") and seen.reasons("lora")
