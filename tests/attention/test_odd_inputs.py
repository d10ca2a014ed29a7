"""Attentions with odd inputs: numbers from elsewhere, garbage behind masks, sizes that become 0 or 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from inductor_fusions import config, testing
from inductor_fusions._inductor.compiling import fresh_compile
from inductor_fusions.fusions.attention import flex

Function = Callable[..., Any]


def run(
    fn: Function, backend: Any, calls: list[tuple[Any, ...]], dynamic: bool | None, train: bool
) -> list[Any]:
    """Results of some calls of one function, and gradients of what takes them."""
    found: list[Any] = []
    with fresh_compile(), config.patch(policy="always"):
        compiled = torch.compile(fn, backend=backend, dynamic=dynamic) if backend else fn
        for args in calls:
            given = [x.detach().clone().requires_grad_(train and x.is_floating_point() and i < 3)
                     if isinstance(x, torch.Tensor) else x for i, x in enumerate(args)]  # fmt: skip
            out = compiled(*given)
            found.append(out)
            leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
            if leaves and out.requires_grad:
                weight = torch.linspace(-1, 1, max(out.numel(), 1), dtype=torch.float64)[: out.numel()]
                found += torch.autograd.grad(
                    (out.double().flatten() * weight).sum(), leaves, allow_unused=True
                )
    return found


def wide(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args)


def judge(fn: Function, *calls: tuple[Any, ...], dynamic: bool | None = None, train: bool = True) -> None:
    """Each result is as exact as that of eager mode."""
    ours = run(fn, testing._AfterPasses([]), list(calls), dynamic, train)
    eager = run(fn, None, list(calls), None, train)
    true = run(fn, None, [wide(each) for each in calls], None, train)
    for found, plain, exact in zip(ours, eager, true, strict=True):
        if plain is None or found is None:
            assert (plain is None) == (found is None)
            continue
        assert found.shape == plain.shape and found.dtype == plain.dtype
        assert torch.equal(found.isnan(), plain.isnan())
        error = (found.double() - exact).nan_to_num().abs().max() if found.numel() else 0.0
        least = (plain.double() - exact).nan_to_num().abs().max() if found.numel() else 0.0
        bound = (
            8
            * torch.finfo(found.dtype).eps
            * max(1.0, float(exact.nan_to_num().abs().max()) if found.numel() else 0)
        )
        assert error <= 2 * least + bound


def qkv(
    q_len: int = 5, kv_len: int = 7, dtype: torch.dtype = torch.float32, batch: int = 2
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(q_len + kv_len)
    return tuple(torch.randn(batch, 3, n, 8).to(dtype) for n in (q_len, kv_len, kv_len))


SEEN: dict[str, Function] = {
    "masked_fill": lambda s, m: s.masked_fill(~m, -math.inf),
    "where": lambda s, m: torch.where(m, s, torch.finfo(s.dtype).min),
    "added": lambda s, m: s + torch.zeros_like(m, dtype=s.dtype).masked_fill(~m, -math.inf),
}
NUMBERS: dict[str, Function] = {
    "divided by a tensor": lambda s: s / torch.tensor(8.0).sqrt(),
    "times a tensor of float64": lambda s: s * torch.tensor(0.35, dtype=torch.float64),
    "times an integer": lambda s: s * torch.tensor(2),
    "tensor on the left": lambda s: torch.tensor(0.35) * s,
    "divided by a root of an integer": lambda s: s / math.sqrt(s.shape[-1]),
    "zero": lambda s: s * 0,
    "two tensors": lambda s: s * torch.tensor(1e3) * torch.tensor(3e-4),
    "power": lambda s: s * s.shape[-1] ** -0.5,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str, train: bool, dtype: torch.dtype) -> None:
    judge(lambda q, k, v: NUMBERS[name](q @ k.mT).softmax(-1) @ v, qkv(dtype=dtype), train=train)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.parametrize("spelling", SEEN)
def test_values_of_keys_that_nobody_sees(spelling: str, garbage: float) -> None:
    """0 times NaN is NaN in eager mode as well."""
    q, k, v = qkv()
    seen = torch.ones(5, 7, dtype=torch.bool)
    seen[:, -2:] = False
    v[..., -1, :] = garbage
    judge(
        lambda q, k, v, seen: SEEN[spelling](q @ k.mT * 0.3, seen).softmax(-1) @ v,
        (q, k, v, seen),
        train=False,
    )


SIZES = [(5, 7), (1, 7), (5, 1), (1, 1), (6, 6), (0, 7), (5, 7)]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_sizes_that_become_one_or_none(mask: str, train: bool, dynamic: bool | None) -> None:
    def fn(q: Any, k: Any, v: Any, seen: Any) -> Any:
        s = q @ k.mT * 0.3
        if mask == "causal":
            rows, columns = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
            s = s.masked_fill(columns > rows[:, None], -1e9)
        if mask == "padding":
            s = s.masked_fill(~seen, -1e9)
        return s.softmax(-1) @ v

    calls = [(*qkv(*sizes), torch.arange(sizes[1]) < max(sizes[1] - 1, 1)) for sizes in SIZES]
    judge(fn, *calls, dynamic=dynamic, train=train)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", ["window", "factor", "slice", "power", "fill"])
def test_numbers_that_become_symbols(kind: str, train: bool) -> None:
    def fn(q: Any, k: Any, v: Any, n: int) -> Any:
        rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        s = q @ k.mT * 0.3
        if kind == "window":
            s = s.masked_fill((rows - columns).abs() > n, -1e9)
        elif kind == "factor":
            s = s * n / 3
        elif kind == "slice":
            return s[..., :n].softmax(-1) @ v[..., :n, :]
        elif kind == "power":
            s = s / n**0.5
        else:
            s = s.masked_fill(columns >= n, -1000.0 * n)
        return s.softmax(-1) @ v

    judge(fn, *[(*qkv(), n) for n in (2, 3, 5, 1)], train=train)


@pytest.mark.parametrize("batch", [2, 1])
def test_derivatives_of_derivatives(batch: int) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        def loss(q: Any) -> Any:
            return ((q @ k.mT * 0.3).softmax(-1) @ v).square().sum()

        return torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum())(q)

    judge(fn, qkv(batch=batch), train=False)


@pytest.mark.parametrize("dims, reason", [(3, "takes views of tensors of four dims"), (4, "")])
def test_views_in_flex_attention_on_a_cpu(dims: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its template reads the sizes of what q is a view of."""
    monkeypatch.setattr(flex, "flex_on_cpu", lambda: True)
    q, k, v = (torch.randn((2, 12, 32) if dims == 3 else (2, 12, 2, 16)) for _ in range(3))

    def fn(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.view(2, 12, 2, 16).transpose(1, 2) for x in (q, k, v))
        return (torch.tanh(q @ k.mT).softmax(-1) @ v) @ torch.ones(16, 16)

    found = testing.capture(fn, q, k, v, backend=testing.EAGER_AFTER_PASSES)
    (site,) = found.sites
    assert reason in site.reason and site.verdict == ("left to stock" if reason else "fused")
