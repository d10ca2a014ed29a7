"""Masks that are proved to hide nothing, and are dropped."""

from __future__ import annotations

import torch

from inductor_fusions import testing
from tests.attention.support import BATCH, cases, check, qkv

S = 9
LOWEST = torch.finfo(torch.float32).min
INF = float("inf")

USES = {
    "fill": lambda s, m: s.masked_fill(~m, LOWEST),
    "where": lambda s, m: torch.where(m, s, -INF),
    "added": lambda s, m: s + torch.zeros_like(m, dtype=s.dtype).masked_fill(~m, LOWEST),
}


def place(n):
    return torch.arange(n)


def with_mask(mask, use):
    def fn(q, k, v):
        return torch.softmax(use(q @ k.transpose(-1, -2) * 0.3, mask(q.shape[-2])), dim=-1) @ v

    return fn


VISIBLE = {
    "ones": lambda n: torch.ones(n, n, dtype=torch.bool),
    "ones of numbers": lambda n: torch.ones(BATCH, n)[:, None, None, :] > 0,
    "in range": lambda n: (place(n) >= 0) & (place(n)[:, None] < n),
    "wide window": lambda n: (place(n) - place(n)[:, None]).abs() < 10**6,
    "far below": lambda n: place(n) <= place(n)[:, None] + n,
    "either way": lambda n: (place(n) <= place(n)[:, None]) | (place(n) > place(n)[:, None]),
    "full": lambda n: torch.full((BATCH, 1, 1, n), True),
    "not zeros": lambda n: ~torch.zeros(n, dtype=torch.bool),
    "tril with a far diagonal": lambda n: torch.ones(n, n, dtype=torch.bool).tril(n),
    "equal to itself": lambda n: (place(n) - place(n)) == 0,
}
NOT_PROVED = {"wide window", "either way"}


@cases(VISIBLE)
def test_all_visible(case) -> None:
    name = next(n for n, f in VISIBLE.items() if f is case)
    for use in USES.values():
        seen = check(with_mask(case, use), qkv(S, S))
        if name not in NOT_PROVED:
            assert seen.sites[0].kernel == "sdpa", name


ZERO = {
    "zeros": lambda n: torch.zeros(n, n),
    "zeros, 4-d": lambda n: torch.zeros(BATCH, 1, 1, n),
    "product": lambda n: (1.0 - torch.ones(n, n)) * LOWEST,
    "a constant": lambda n: torch.full((n, n), 0.7),
    "where": lambda n: torch.where(torch.ones(n, n, dtype=torch.bool), 0.0, LOWEST),
}


@cases(ZERO)
def test_zero_bias(case) -> None:
    seen = check(with_mask(case, lambda s, m: s + m), qkv(S, S))
    assert seen.sites[0].kernel == "sdpa"


def test_nothing_visible() -> None:
    """A fill that hides every key leaves the mean of the values."""
    fn = with_mask(lambda n: torch.zeros(n, n, dtype=torch.bool), USES["fill"])
    check(fn, qkv(S, S), fused=None, train=False)


def test_a_constant_of_infinity() -> None:
    """The same everywhere as well, but it hides every key: not dropped."""
    fn = with_mask(lambda n: torch.full((n, n), -INF), lambda s, m: s + m)
    run = testing.capture(fn, *qkv(S, S, grad=False), backend=testing.EAGER_AFTER_PASSES)
    assert all("mask" in site.kernel for site in run.fused)
