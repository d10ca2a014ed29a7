"""The scale of the scores: each spelling, and what looks like one."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.attention.support import (
    BATCH,
    DIM,
    FLEX,
    HEADS,
    KV_LEN,
    Q_LEN,
    TRAIN,
    capture,
    cases,
    check,
    qkv,
    rand,
    scored,
    sdpa,
    through_flex,
    unfused,
)


def _in_place(scores, *, times):
    scores *= times
    return scores


CONSTANTS = {
    "none": scored(),
    "mul": scored(lambda s: s * 0.3),
    "mul, number first": scored(lambda s: 0.3 * s),
    "mul, integer": scored(lambda s: s * 2),
    "mul, function": scored(lambda s: torch.mul(s, 0.3)),
    "mul, alias": scored(lambda s: torch.multiply(s, 0.3)),
    "mul, method": scored(lambda s: s.mul(0.3)),
    "div": scored(lambda s: s / 3.0),
    "div, integer": scored(lambda s: s / 3),
    "div, function": scored(lambda s: torch.div(s, 3.0)),
    "div, alias": scored(lambda s: torch.true_divide(s, 3.0)),
    "div, method": scored(lambda s: s.div(3.0)),
    "div, alias method": scored(lambda s: s.divide(3.0)),
    "imul": scored(lambda s: _in_place(s, times=0.3)),
    "mul_": scored(lambda s: s.mul_(0.3)),
    "div_": scored(lambda s: s.div_(3.0)),
    "mul, then div": scored(lambda s: s * 2.0 / 3.0),
    "negative": scored(lambda s: s * -0.3),
    "neg": scored(lambda s: -s),
    "zero": scored(lambda s: s * 0.0),
    "number added as well": scored(lambda s: s * 0.3 + 1.5),
    "square root of the dim": lambda q, k, v: torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), -1) @ v,
    "power of the dim": lambda q, k, v: torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v,
    "on q": lambda q, k, v: torch.softmax((q * 0.3) @ k.mT, -1) @ v,
    "on q, div": lambda q, k, v: torch.softmax((q / 3.0) @ k.mT, -1) @ v,
    "on k": lambda q, k, v: torch.softmax(q @ (k * 0.3).mT, -1) @ v,
    "on k, transposed": lambda q, k, v: torch.softmax(q @ (k.mT * 0.3), -1) @ v,
    "on both": lambda q, k, v: torch.softmax((q * DIM**-0.25) @ (k * DIM**-0.25).mT, -1) @ v,
    "tensor from a number": scored(lambda s: s * torch.tensor(0.3)),
    "tensor from a number first": scored(lambda s: torch.tensor(0.3) * s),
    "tensor full": scored(lambda s: s * torch.full((), 0.3)),
    "tensor full, one element": scored(lambda s: s / torch.full((1,), 3.0)),
    "square root of a tensor": scored(lambda s: s / torch.sqrt(torch.tensor(DIM * 3))),
}


@cases(CONSTANTS)
def test_constant(case) -> None:
    check(case, qkv())


def test_scale_is_given() -> None:
    """Not the default of SDPA, which is 1 / sqrt(dim)."""
    for fn, scale in (
        (scored(), 1.0),
        (scored(lambda s: s * 0.3), 0.3),
        (scored(lambda s: s / 8.0 * 2.0), 0.25),
    ):
        assert sdpa(check(fn, qkv()).ours).kwargs["scale"] == scale


def test_symbolic_dim() -> None:
    """head_dim ** 0.5 where the head dim is symbolic."""
    fn = CONSTANTS["power of the dim"]
    for q, k, v in (qkv(), qkv(dim=24)):
        for t in (q, k):
            torch._dynamo.mark_dynamic(t, 3)
        check(fn, (q, k, v), fused=None, dynamic=True)


#: The gradient of a scale is a sum of thousands of terms of both signs, and much smaller than they are.
SUMMED = 64.0

TENSORS = {
    "0-d": (),
    "one element": (1,),
    "one element, 4-d": (1, 1, 1, 1),
    "per head": (HEADS, 1, 1),
    "per head, 4-d": (1, HEADS, 1, 1),
    "per batch": (BATCH, 1, 1, 1),
    "per batch and head": (BATCH, HEADS, 1, 1),
    "per query": (Q_LEN, 1),
    "per key": (KV_LEN,),
    "per batch, head and key": (BATCH, HEADS, 1, KV_LEN),
}


@cases(TENSORS)
def test_tensor(case) -> None:
    scale = torch.rand(case) + 0.5
    check(scored(lambda s, t: s * t), (*qkv(), scale))
    check(scored(lambda s, t: s / t), (*qkv(), scale), train=False)


@cases(TENSORS)
def test_tensor_with_gradient(case) -> None:
    scale = (torch.rand(case) + 0.5).requires_grad_()
    for fn in (scored(lambda s, t: t * s), scored(lambda s, t: s / t), scored(lambda s, t: s.div_(t) * 0.5)):
        check(fn, (*qkv(), scale), slack=SUMMED)


def test_two_tensors() -> None:
    per_head, number = torch.rand(HEADS, 1, 1) + 0.5, torch.tensor(0.7, requires_grad=True)
    check(scored(lambda s, t, u: s * t / u), (*qkv(), per_head, number), slack=SUMMED)


@cases({"0-d": torch.tensor(2), "per head": torch.arange(HEADS)[:, None, None]})
def test_integers(case) -> None:
    check(scored(lambda s, t: s * t), (*qkv(), case), fused=None)


def test_wider_scalar_tensor() -> None:
    """A 0-d tensor of a wider dtype does not promote the scores; one with dims does."""
    check(scored(lambda s, t: s * t), (*qkv(), torch.tensor(0.3, dtype=torch.float64)))
    wide = torch.rand(HEADS, 1, 1, dtype=torch.float64) + 0.5
    product = scored(lambda s, t: s * t)
    check(scored(lambda s, t: (s * t).float()), (*qkv(), wide), fused=None, reference=product)


def test_tensor_after_bias() -> None:
    bias, scale = rand(HEADS, Q_LEN, KV_LEN), (torch.rand(HEADS, 1, 1) + 0.5).requires_grad_()
    check(scored(lambda s, b, t: (s + b) * t), (*qkv(), bias, scale), slack=SUMMED)
    check(scored(lambda s, t: (s + LOW) * t), (*qkv(), scale), train=False)


def test_constant_after_bias() -> None:
    """The bias is scaled as well."""
    bias = rand(HEADS, Q_LEN, KV_LEN)
    check(scored(lambda s, b: (s + b) * 0.3), (*qkv(), bias))
    check(scored(lambda s, b: (s * 0.5 + b) / 3.0), (*qkv(), bias))


LOW = torch.where(torch.arange(KV_LEN) > 9, -1e9, 0.0)
NOT_A_SCALE = {
    "per query, after a bias": ((Q_LEN, 1), lambda s, t: (s + torch.ones(KV_LEN).cumsum(0)) * t, FLEX),
    "per key, after a bias": ((KV_LEN,), lambda s, t: (s + torch.ones(KV_LEN).cumsum(0)) * t, FLEX),
    "per score": ((Q_LEN, KV_LEN), lambda s, t: s / t, FLEX),
    "after a mask": ((HEADS, 1, 1), lambda s, t: (s + LOW) * t, "after a mask"),
    "rounded": ((), lambda s, t: torch.div(s, 0.01, rounding_mode="floor"), "rounding"),
    "squared": ((), lambda s, t: s**2, FLEX),
    "times itself": ((), lambda s, t: s * s, ""),
    "divides": ((), lambda s, t: t / s.add(100.0), ""),
    "exponent": ((), lambda s, t: torch.exp(s), "in-between"),
    "widens the scores": ((2, 1, 1, 1, 1), lambda s, t: s * t, ""),
}


@cases(NOT_A_SCALE)
def test_not_a_scale(case) -> None:
    shape, change, reason = case
    expect = through_flex if reason is FLEX else partial(unfused, reason=reason)
    expect(scored(change), (*qkv(), torch.rand(shape) + 0.5))


def test_scale_overwritten_afterwards() -> None:
    """The scores were scaled by the tensor as it was before."""

    def fn(q, k, v, scale):
        weights = torch.softmax(q @ k.transpose(-2, -1) * scale, dim=-1)
        scale.mul_(3.0)
        return weights @ v + scale

    check(fn, (*qkv(), torch.tensor(0.5)), fused=None, train=False)


def test_scale_overwritten_before() -> None:
    """A number that was made from a constant is not that constant any more."""

    def fn(q, k, v):
        scale = torch.full((), 0.3)
        scale.mul_(3.0)
        return torch.softmax(q @ k.transpose(-2, -1) * scale, dim=-1) @ v

    check(fn, qkv(), fused=None)


def test_zero_beside_a_causal_mask() -> None:
    """A kernel that multiplies the -inf of what it hides by the scale makes NaN of it."""

    def causal(scores: Any) -> Any:
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        return (scores * torch.zeros(HEADS, 1, 1)).masked_fill(hidden, -1e9)

    check(scored(causal), qkv(9, 9))


@cases({
    "infinite": lambda s: s * math.inf,
    "no number": lambda s: s * math.nan,
    "a shift that absorbs the scores": lambda s: s - 1e9,
})  # fmt: skip
def test_left_alone(case) -> None:
    assert not capture(scored(case), *qkv(grad=False)).fused


MAXIMA = {
    "amax": lambda s: s.amax(-1, keepdim=True),
    "amax, unsqueeze": lambda s: s.amax(dim=(-1)).unsqueeze(-1),
    "amax, a list, the last dim by its number": lambda s: s.amax([3]).unsqueeze(3),
    "amax, index": lambda s: torch.amax(s, -1)[..., None],
    "amax, index of all dims": lambda s: s.amax(-1)[:, :, :, None],
    "max, values": lambda s: s.max(dim=-1).values.unsqueeze(-1),
    "max, first": lambda s: s.max(-1)[0].unsqueeze(-1),
    "max, positional": lambda s: torch.max(s, -1, False)[0][..., None],
    "max, detached": lambda s: s.max(-1)[0].unsqueeze(-1).detach(),
}


@cases(MAXIMA)
@TRAIN
def test_minus_the_maximum(case, train: bool) -> None:
    """A softmax does not see it. As LayoutLMv3: of scores that are divided, and multiplied again."""

    def relaxed(s: Any, m: Any) -> Any:
        s = (s * 0.3 + m) / 32.0
        return (s - case(s)) * 32.0

    mask = torch.zeros(BATCH, 1, 1, KV_LEN)
    mask[0, ..., -4:] = torch.finfo(torch.float32).min
    check(scored(relaxed), (*qkv(), mask), train=train)


NOT_THE_MAXIMUM = {
    "of the queries": lambda s: s.amax(-2).unsqueeze(-2),
    "of the queries, put at the keys": lambda s: s.amax(-2).unsqueeze(-1),
    "of the keys, put at the queries": lambda s: s.amax(-1).unsqueeze(-2),
}


@cases(NOT_THE_MAXIMUM)
def test_not_the_maximum(case) -> None:
    unfused(scored(lambda s: s - case(s)), qkv(9, 9), "used-elsewhere")


@cases(MAXIMA)
def test_the_maximum_minus_the_scores(case) -> None:
    """That is the softmax of the negative scores."""
    check(scored(lambda s: case(s) - s), qkv())


def test_maximum_that_is_added_with_a_negative_alpha() -> None:
    check(scored(lambda s: torch.add(s, s.amax(-1, keepdim=True), alpha=-1)), qkv())


def test_maximum_that_is_read_elsewhere() -> None:
    def fn(q, k, v):
        scores = q @ k.mT
        highest = scores.amax(-1).unsqueeze(-1)
        return torch.softmax(scores - highest, -1) @ v + highest

    unfused(fn, qkv(), "used-elsewhere")


@pytest.mark.parametrize("behind", [False, True])
def test_factors_of_keys_in_float16(behind: bool) -> None:
    """Applied to k or v, they may overflow where eager's scores and weights do not."""

    def fn(q: Any, k: Any, v: Any, factor: Any) -> Any:
        if behind:
            return (torch.softmax(q @ k.mT, -1) * factor) @ v
        return torch.softmax(q @ k.mT * factor, -1) @ v

    inputs = (*qkv(), torch.rand(13))
    check(fn, inputs)
    check(fn, inputs, fused=0, reason="range", dtype=torch.float16, train=False)


SHIFTS = {
    "number": lambda s: s + 3.0,
    "of the queries": lambda s: s + torch.arange(s.shape[-2])[:, None],
    "maximum": lambda s: s - s.amax(-1, keepdim=True),
    "logsumexp": lambda s: s - s.logsumexp(-1, keepdim=True),
}


@cases(SHIFTS)
@pytest.mark.parametrize("queries", [1, Q_LEN])
def test_shifts_before_factors(case, queries: int) -> None:
    """What all scores of a row get is seen behind a factor of the keys, not behind one of the queries."""
    fn = scored(lambda s, factor: case(s) * factor)
    check(fn, (*qkv(queries), torch.rand(KV_LEN) + 0.2), fused=0)
    check(fn, (*qkv(queries), torch.rand(queries, 1) + 0.2))


def test_shift_before_a_factor_of_keys_through_flex() -> None:
    fn = scored(lambda s, factor: (s + torch.arange(Q_LEN)[:, None]) * factor)
    through_flex(fn, (*qkv(), torch.rand(KV_LEN) + 0.2))
