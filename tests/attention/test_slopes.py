"""Slopes that are data, as of ALiBi in a buffer: a bias that is 0 at a query's own key hides no row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.attention.support import INF, LOWEST, capture, cases, check, flex_everywhere, qkv
from tests.support.modules import Module

B, H, N = 2, 4, 150
CAUSAL = "flex, block mask: causal, bias in score_mod"


def distance() -> torch.Tensor:
    return torch.arange(N) - torch.arange(N)[:, None]


def later() -> torch.Tensor:
    return distance() > 0


def slopes() -> torch.Tensor:
    return torch.pow(0.5, torch.arange(1, H + 1))


def steep() -> torch.Tensor:
    """Slopes that absorb the scores of all keys but a query's own, or overflow."""
    return torch.tensor([0.5, 1e5, 1e30, 0.0])


def fill(scores: torch.Tensor, number: float = LOWEST) -> torch.Tensor:
    return scores.masked_fill(later(), number)


def head(m: torch.Tensor) -> torch.Tensor:
    return m[:, None, None]


#: What is done to the scores.
READ = {
    "distance": lambda s, m: fill(s + head(m) * distance()),
    "distance first": lambda s, m: fill(distance() * head(m) + s, -INF),
    "size": lambda s, m: fill(s + head(m) * -distance().abs()),
    "negated": lambda s, m: fill(s + -(head(m) * distance().abs()), -1e9),
    "floating": lambda s, m: fill(s + head(m) * distance().float()),
    "four dims": lambda s, m: fill(s + (head(m) * distance())[None].expand(B, -1, -1, -1)),
    "scaled": lambda s, m: fill(s + head(m) * 2.0 * distance()),
    "masked as one": lambda s, m: s + (head(m) * distance()).masked_fill(later(), -INF),
    "masked as one, finite": lambda s, m: s + (head(m) * distance()).masked_fill(later(), LOWEST),
    "where": lambda s, m: s + torch.where(later(), -INF, head(m) * distance()),
}


def attention(change: Any) -> Any:
    return lambda q, k, v, m: torch.softmax(change(q @ k.mT * 0.25, m), -1) @ v


@pytest.fixture(autouse=True)
def flex() -> Iterator[None]:
    with flex_everywhere("flex"):
        yield


@pytest.mark.parametrize("data", [slopes, steep])
@cases(READ)
def test_read(case: Any, data: Any) -> None:
    check(attention(case), (*qkv(N, N, heads=H), data()), kernel=CAUSAL, slack=4.0)


def test_slopes_that_are_not_finite() -> None:
    """0 times infinity: heads of NaN, in both."""
    data = torch.tensor([0.5, INF, -INF, float("nan")])
    fn, inputs = attention(READ["distance"]), (*qkv(N, N, heads=H, grad=False), data)
    run = capture(fn, *inputs, policy="always")
    assert run.sites[0].kernel == CAUSAL
    for result in (fn(*inputs), run.outputs):
        assert not result[:, 0].isnan().any() and result[:, 1:].isnan().all()


def test_call() -> None:
    """Slopes of a buffer, in the mask of a call of SDPA."""

    def alibi(net: Any, q: Any, k: Any, v: Any) -> Any:
        bias = (head(net.slopes) * distance()).masked_fill(later(), -INF)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias[None])

    check(Module(alibi, {"slopes": slopes()}), qkv(N, N, heads=H), kernel=CAUSAL, slack=4.0)


#: What is done to the scores, with which data: each may hide all the keys that a query sees.
NOT_READ = {
    "of keys": lambda s, m: fill(s + head(m) * (torch.arange(N) - N)),
    "off by one": lambda s, m: fill(s + head(m) * (distance() - 1)),
    "of queries": lambda s, m: fill(s - head(m) * (distance() - torch.arange(N))),
    "data alone": lambda s, m: fill(s + head(m)),
    "data beside it": lambda s, m: fill(s + (head(m) * distance() + m[0])),
    "a slope of each query": lambda s, m: fill(s + m[0] * torch.arange(N)[:, None] * distance()),
    "after a fill": lambda s, m: fill(s, -1e9) + head(m) * distance(),
    "after a fill, infinite": lambda s, m: fill(s, -INF) + head(m) * distance(),
    "beside an added mask": lambda s, m: s + head(m) * distance() + fill(torch.zeros(N, N), -1e9),
    "filled before, as one": lambda s, m: s + fill(distance().cos(), -1e9) + head(m) * distance(),
    "filled, then added": lambda s, m: s + (fill(distance().cos(), -1e9) + head(m) * distance()),
    "own key hidden": lambda s, m: (s + head(m) * distance()).masked_fill(distance() > -1, LOWEST),
    "nothing hidden": lambda s, m: s + head(m) * distance().abs(),
    "nothing hidden after all": lambda s, m: (s + head(m) * distance().abs()).masked_fill(
        distance() > N, LOWEST
    ),
}


@cases(NOT_READ)
def test_not_read(case: Any) -> None:
    seen = check(attention(case), (*qkv(N, N, heads=H), slopes()), fused=None, train=False, slack=8.0)
    assert all("bias in score_mod" not in site.kernel for site in seen.ours.fused)


def less_keys(s: Any, m: Any) -> Any:
    """The last queries have no key of their own."""
    off = torch.arange(N - 30) - torch.arange(N)[:, None]
    return (s + head(m) * off).masked_fill(off > 0, LOWEST)


def overwritten(s: Any, m: Any) -> Any:
    bias = head(m * 1.0) * distance()
    bias.add_(-1e9)
    return fill(s + bias)


@pytest.mark.parametrize(("change", "keys"), [(less_keys, N - 30), (overwritten, N)])
def test_fused_as_it_is(change: Any, keys: int) -> None:
    seen = check(attention(change), (*qkv(N, keys, heads=H), slopes()), train=False, slack=8.0)
    assert "bias in score_mod" not in seen.sites[0].kernel
