"""Masks and biases that are added to the scores: number, order, shape, factor and gradient."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from inductor_fusions.fusions.attention import kernels
from tests.attention.support import (
    BATCH,
    FLEX,
    HEADS,
    KV_LEN,
    Q_LEN,
    TRAIN,
    additive,
    capture,
    cases,
    check,
    flex_everywhere,
    qkv,
    rand,
    scored,
    through_flex,
    unfused,
    visible,
)

#: Every shape that broadcasts to the scores.
SHAPES = [
    (), (1,), (KV_LEN,), (Q_LEN, 1), (1, KV_LEN), (Q_LEN, KV_LEN), (HEADS, 1, 1), (HEADS, 1, KV_LEN),
    (1, Q_LEN, KV_LEN), (HEADS, Q_LEN, KV_LEN), (1, 1, Q_LEN, KV_LEN), (BATCH, 1, 1, 1),
    (BATCH, 1, 1, KV_LEN), (BATCH, 1, Q_LEN, KV_LEN), (1, HEADS, Q_LEN, KV_LEN), (BATCH, HEADS, 1, KV_LEN),
    (BATCH, HEADS, Q_LEN, 1), (BATCH, HEADS, Q_LEN, KV_LEN),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shape(shape: tuple[int, ...]) -> None:
    """A bias without a gradient, and one with.

    Where it is the same for all keys its gradient is zero, and what is computed is rounding.
    """
    for grad in (False,) if shape[-1:] in ((), (1,)) else (False, True):
        check(scored(lambda s, b: s * 0.3 + b), (*qkv(), rand(*shape, grad=grad)))


def test_zero_gradient() -> None:
    """A bias that is the same for all keys has no influence, and gets a gradient of zero."""
    inputs = (*qkv(), rand(HEADS, 1, 1))
    run = capture(scored(lambda s, b: s * 0.3 + b), *inputs, train=True)
    assert len(run.fused) == 1
    grad = run.grads["3"]
    assert grad is None or grad.abs().max() < 1e-5


MASK = additive(visible(BATCH, 1, Q_LEN, KV_LEN))
ORDERS = {
    "one, first": lambda s, m, b, c: m + s,
    "one, last": lambda s, m, b, c: s + m,
    "two": lambda s, m, b, c: s + b + m,
    "two, other order": lambda s, m, b, c: m + (b + s),
    "two, joined": lambda s, m, b, c: s + (b + m),
    "two around a scale": lambda s, m, b, c: (s + b) * 0.5 + m,
    "three": lambda s, m, b, c: s + m + b + c,
    "three, other order": lambda s, m, b, c: c + (b + (m + s)),
    "three, mixed order": lambda s, m, b, c: c + (m + s + b),
    "three, scaled": lambda s, m, b, c: ((s * 0.5 + b) / 2.0 + c) * 3.0 + m,
    "four": lambda s, m, b, c: s + b + c + m + 2.0 * c,
    "twice the same": lambda s, m, b, c: s + b + m + b,
    "add, function": lambda s, m, b, c: torch.add(s, m),
    "add, method": lambda s, m, b, c: s.add(b).add(m),
    "alpha": lambda s, m, b, c: torch.add(s, b, alpha=2),
    "alpha, scores second": lambda s, m, b, c: torch.add(b, s, alpha=0.5),
    "alpha, method": lambda s, m, b, c: s.add(c, alpha=-0.5),
    "alpha, in place": lambda s, m, b, c: s.add_(c, alpha=3),
    "sub": lambda s, m, b, c: s - c,
    "sub, function": lambda s, m, b, c: torch.sub(s, b, alpha=2),
    "sub, in place": lambda s, m, b, c: s.sub_(b),
    "add, in place": lambda s, m, b, c: s.add_(m),
    "add, out of place and in place": lambda s, m, b, c: (s + b).add_(m),
    "number as well": lambda s, m, b, c: s + m + 1.0,
    "number first": lambda s, m, b, c: 1.0 + (s + b),
}


@cases(ORDERS)
def test_order(case) -> None:
    biases = rand(HEADS, Q_LEN, KV_LEN), rand(BATCH, HEADS, 1, KV_LEN)
    check(scored(lambda s, m, b, c: case(s * 0.3, m, b, c)), (*qkv(), MASK, *biases))


SUBTRACTED = {
    "from a bias": lambda s, b: b - s,
    "from a bias, scaled": lambda s, b: torch.sub(b, s, alpha=0.5) * 0.7,
    "from a bias of queries": lambda s, b: b[:, :, :1] - s,
    "between two biases": lambda s, b: (b[:, :, :1] - 2 * s + b[:, :1]).neg(),
}


@cases(SUBTRACTED)
def test_scores_that_are_subtracted(case) -> None:
    """As in distances of points, |q|^2 - 2 q k + |k|^2."""
    check(scored(lambda s, b: case(s * 0.3, b)), (*qkv(), rand(HEADS, Q_LEN, KV_LEN)))


NOT_A_BIAS = {
    "the weights": (lambda s, b: s, lambda w, b: w + b, "in-between"),
    "wider": (lambda s, b: s + b[None, None], None, ""),
    "of the scores": (lambda s, b: s + s.mean(-1, keepdim=True), None, "used-elsewhere"),
    "product with the scores": (lambda s, b: torch.addcmul(s, b, b), None, "in-between"),
    "after which comes relu": (lambda s, b: torch.relu(s + b), None, FLEX),
    "dropped": (lambda s, b: nn.functional.dropout(s + b, 0.0, training=True) * b, None, FLEX),
}


@cases(NOT_A_BIAS)
def test_not_a_bias(case) -> None:
    above, below, reason = case

    def fn(q, k, v, bias):
        weights = torch.softmax(above(q @ k.transpose(-1, -2) * 0.3, bias), dim=-1)
        return (weights if below is None else below(weights, bias)) @ v

    expect = through_flex if reason is FLEX else partial(unfused, reason=reason)
    expect(fn, (*qkv(), rand(HEADS, Q_LEN, KV_LEN)))


@pytest.mark.parametrize("where", ["before softmax", "after softmax", "after the output"])
def test_mask_overwritten(where: str) -> None:
    """The scores have the mask as it was when it was added."""

    def fn(q, k, v, mask):
        mask = mask * 1.0
        scores = q @ k.transpose(-1, -2) * 0.3 + mask
        if where == "before softmax":
            mask.zero_()
        weights = torch.softmax(scores, dim=-1)
        if where == "after softmax":
            mask.zero_()
        out = weights @ v
        if where == "after the output":
            mask.zero_()
        return out + mask.sum()

    check(fn, (*qkv(), torch.randn(Q_LEN, KV_LEN)), fused=None)


def test_view_of_mask_overwritten() -> None:
    """A mask built in slices, and changed through another view of the same memory later."""

    def fn(q, k, v, mask):
        bias = mask.clone()
        bias[..., -2:] = -3.0
        scores = q @ k.transpose(-1, -2) * 0.3 + bias[:, :KV_LEN]
        bias.view(-1)[0] = 100.0
        return torch.softmax(scores, dim=-1) @ v + bias.sum()

    check(fn, (*qkv(), torch.randn(Q_LEN, KV_LEN + 2)), fused=None)


def test_other_dtypes() -> None:
    """True is 1.0, not "visible"; a bias of float64 makes float64 scores."""
    added = scored(lambda s, b: (s * 0.3 + b).float())
    for bias in (
        visible(Q_LEN, KV_LEN),
        torch.randint(-3, 3, (Q_LEN, KV_LEN)),
        torch.randn(Q_LEN, KV_LEN).double(),
    ):
        check(added, (*qkv(), bias), fused=None, reference=scored(lambda s, b: s * 0.3 + b))


@TRAIN
def test_mask_times_negative(train: bool) -> None:
    """Masked keys become the only visible ones, and the scores of these are equal."""
    mask = additive(visible(Q_LEN, KV_LEN), -1e30)
    check(scored(lambda s, m: -(s * 0.3 + m)), (*qkv(), mask), fused=None, train=train)
    check(scored(lambda s, m: s * 0.3 - m), (*qkv(), mask), fused=None, train=train)


@TRAIN
def test_large_positive_bias(train: bool) -> None:
    """What is seen is raised instead of what is hidden being lowered."""
    mask = visible(Q_LEN, KV_LEN).float() * 1e4
    check(scored(lambda s, m: s * 0.3 + m), (*qkv(), mask), fused=None, train=train, slack=1e4)
    mask = visible(Q_LEN, KV_LEN).float() * 1e30
    # The raised keys absorb all scores: such rows send no exact gradient into k (docs/attention.md).
    q, k, v = qkv()
    check(scored(lambda s, m: s * 0.3 + m), (q, k.detach(), v, mask), fused=None, train=train)


FROZEN = {
    "a bias": (lambda s, b, m: s + b, (HEADS, Q_LEN, KV_LEN)),
    "a bias beside padding": (lambda s, b, m: (s + b).masked_fill(m, -1e9), (HEADS, Q_LEN, KV_LEN)),
    "a scale beside padding": (lambda s, b, m: (s * b).masked_fill(m, -1e9), (HEADS, 1, 1)),
}


@cases(FROZEN)
@pytest.mark.parametrize("flex", [False, True], ids=["sdpa", "flex"])
def test_frozen_queries_keys_and_values(case: Any, flex: bool) -> None:
    """A gradient flows into nothing but what is read beside them, and through fully masked rows."""
    change, shape = case
    padding = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, KV_LEN).contiguous()
    inputs = [*qkv(grad=False), rand(*shape), padding]
    with flex_everywhere() if flex else contextlib.nullcontext():
        check(scored(change), inputs)


@pytest.mark.gpu
def test_number_on_the_cpu_beside_a_gpu() -> None:
    inputs = [*(x.cuda() for x in qkv()), torch.tensor(-3.0)]
    unfused(lambda q, k, v, bias: torch.softmax(q @ k.mT + bias, -1) @ v, inputs, "on another device")


@pytest.mark.gpu
@pytest.mark.parametrize("kv_len", [KV_LEN, 16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shape", [(), (Q_LEN, 1), (HEADS, 1, 1), (BATCH, 1, 1, 1), (1, HEADS, Q_LEN, 1)])
def test_one_number_for_all_keys_on_a_gpu(shape: tuple[int, ...], grad: bool, kv_len: int) -> None:
    """Kernels there read a number for each key, in order."""
    inputs = [x.detach().cuda().requires_grad_() for x in qkv(kv_len=kv_len)]
    bias = rand(*shape, grad=False).cuda().requires_grad_(grad)
    check(scored(lambda s, b: s * 0.3 + b), (*inputs, bias), slack=16.0)


@pytest.mark.parametrize("alone", [False, True], ids=["with q, k and v", "alone"])
def test_learned_bias_seen_through_views_on_a_gpu(alone: bool) -> None:
    """SDPA computes its gradient, but not where nothing else takes one (pytorch#148476)."""

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        scores = torch.einsum("bihd,bjhd->bhij", q, k).view(BATCH, HEADS, Q_LEN, 2, -1)
        weights = (scores + bias).view(BATCH, HEADS, Q_LEN, -1).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v)

    found = []

    def listened(problem: Any, grouped: bool = False) -> tuple[str, ...]:
        found.append(kernels._on_cuda(problem, grouped))
        return found[-1]

    names = ("can_use_efficient_attention", "can_use_flash_attention", "can_use_cudnn_attention")
    takes = mock.patch.multiple(torch.backends.cuda, **dict.fromkeys(names, lambda params: True))
    q, k, v = (rand(BATCH, length, HEADS, 16) for length in (Q_LEN, 14, 14))
    inputs = [x.detach() if alone else x for x in (q, k, v)]
    with takes, mock.patch.object(kernels, "available", listened):
        capture(fn, *inputs, rand(HEADS, Q_LEN, 2, 7), train=True)
    assert set(found) == {() if alone else ("sdpa", "efficient")}
