"""Precisions: upcasts around the softmax, autocast, half types, and operands of several dtypes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.attention.support import (
    BATCH,
    HEADS,
    KV_LEN,
    Q_LEN,
    TRAIN,
    additive,
    cases,
    check,
    qkv,
    rand,
    same_as_eager,
    scored,
    sdpa,
    unfused,
    visible,
)

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
F32 = torch.float32

UPCASTS = {
    "softmax": lambda s, v: F.softmax(s, dim=-1, dtype=F32).to(v.dtype),
    "softmax, function": lambda s, v: torch.softmax(s, -1, dtype=F32).to(v.dtype),
    "float": lambda s, v: F.softmax(s.float(), dim=-1).type_as(v),
    "to": lambda s, v: torch.softmax(s.to(F32), dim=-1).to(v),
    "to, dtype of the scores": lambda s, v: torch.softmax(s.to(F32), dim=-1).to(s.dtype),
    "keyword": lambda s, v: torch.softmax(s.to(dtype=F32), dim=-1).to(dtype=v.dtype),
    "type": lambda s, v: torch.softmax(s.type(F32), dim=-1).type(v.dtype),
    "aten": lambda s, v: torch.ops.aten._softmax.default(s.float(), -1, False).to(v.dtype),
    "scale in float32": lambda s, v: torch.softmax(s.float() * 0.5, dim=-1).to(v.dtype),
    "v upcast": lambda s, v: torch.softmax(s, dim=-1, dtype=F32).to(v.dtype),
}


@HALF
@cases(UPCASTS)
def test_upcast(case, dtype: torch.dtype) -> None:
    check(lambda q, k, v: case(q @ k.mT * 0.3, v) @ v, qkv(), dtype=dtype)


@HALF
@pytest.mark.parametrize("fill", [torch.finfo(F32).min, -1e4, float("-inf")], ids=str)
def test_masked_upcast(fill: float, dtype: torch.dtype) -> None:
    """A float32 mask that is added to float32 scores of half q and k: SDPA would round it.

    What it holds is not known. One that the graph makes, of zeros and low numbers, is fused.
    """
    mask = additive(visible(BATCH, 1, Q_LEN, KV_LEN), fill)

    def fn(q, k, v, mask):
        weights = torch.softmax((q @ k.transpose(-1, -2)).float() * 0.3 + mask, dim=-1)
        return weights.to(v.dtype) @ v

    q, k, v = qkv(dtype=dtype)
    unfused(fn, (q, k, v, mask), "a bias of dtype float32")
    seen = visible(BATCH, 1, Q_LEN, KV_LEN)
    check(lambda q, k, v, seen: fn(q, k, v, torch.where(seen, 0.0, fill)), (q, k, v, seen))


@HALF
@TRAIN
def test_half(dtype: torch.dtype, train: bool) -> None:
    mask = additive(visible(BATCH, 1, 1, KV_LEN), torch.finfo(dtype).min)
    bias = rand(HEADS, Q_LEN, KV_LEN)
    check(scored(), qkv(), dtype=dtype, train=train)
    check(scored(lambda s, m: s * 0.3 + m), (*qkv(), mask), dtype=dtype, train=train)
    check(scored(lambda s, m, b: s * 0.3 + b + m), (*qkv(), mask, bias), dtype=dtype, train=train)
    hidden = ~visible(Q_LEN, KV_LEN)
    fill = lambda s, m: (s * 0.3).masked_fill(m, torch.finfo(s.dtype).min)  # noqa: E731
    check(scored(fill), (*qkv(), hidden), dtype=dtype, train=train)


def test_double() -> None:
    check(scored(lambda s: s * 0.3), qkv(), dtype=torch.float64, slack=8.0)
    mask = torch.zeros(BATCH, 1, 1, KV_LEN, dtype=torch.float64)
    mask[0, ..., -3:] = torch.finfo(torch.float64).min
    check(scored(lambda s, m: s * 0.3 + m), (*qkv(), mask), dtype=torch.float64, slack=8.0)


@HALF
def test_q_and_k_upcast(dtype: torch.dtype) -> None:
    """GPT-Neo and GPT-J compute the scores in float32, and v stays as it is."""

    def fn(q, k, v, mask):
        scores = q.to(F32) @ k.to(F32).transpose(-1, -2)
        weights = torch.softmax(torch.where(mask, scores, torch.finfo(F32).min), dim=-1)
        return weights.to(v.dtype) @ v

    check(fn, (*qkv(), visible(1, 1, Q_LEN, KV_LEN)), dtype=dtype)


@HALF
def test_everything_upcast(dtype: torch.dtype) -> None:
    """float32 attention of half tensors stays as exact as it was."""

    def fn(q, k, v):
        return (torch.softmax(q.float() @ k.float().mT * 0.3, dim=-1) @ v.float()).to(q.dtype)

    check(fn, qkv(), dtype=dtype)

    def wide(q, k, v):
        return torch.softmax(q.float() @ k.float().mT * 0.3, dim=-1) @ v.float()

    check(wide, qkv(), dtype=dtype, slack=4.0)


def test_operands_of_several_dtypes() -> None:
    q, k, v = qkv()
    fn = lambda q, k, v: torch.softmax(q @ k.to(q.dtype).mT * 0.3, -1) @ v.to(q.dtype)  # noqa: E731
    check(fn, (q, k.detach().half().requires_grad_(), v.detach().bfloat16().requires_grad_()))


def test_weights_in_half_precision() -> None:
    """float32 q and k, half v: the weights are rounded to half on the way."""
    q, k, _ = qkv()
    for dtype in (torch.bfloat16, torch.float16):
        v = rand(BATCH, HEADS, KV_LEN, 16, dtype=dtype)
        fn = lambda q, k, v: torch.softmax(q @ k.mT * 0.3, -1).to(v.dtype) @ v  # noqa: E731
        check(fn, (q, k, v), fused=None)


def test_downcast_scores() -> None:
    """float32 q and k whose scores are rounded to bfloat16 before the softmax: no need to round."""
    fn = lambda q, k, v: torch.softmax((q @ k.mT * 0.3).bfloat16(), -1).to(v.dtype) @ v  # noqa: E731
    check(fn, qkv(), fused=None, reference=scored(lambda s: s * 0.3))


@cases({
    "integer weights": lambda q, k, v: (torch.softmax(q @ k.mT * 50.0, -1) * 4).int().to(v.dtype) @ v,
    "integer scores": lambda q, k, v: torch.softmax((q @ k.mT).int().to(v.dtype), -1) @ v,
    "every weight that is not zero counts the same": lambda q, k, v: (
        (torch.softmax(q @ k.mT, -1) > 0.1).to(v.dtype) @ v
    ),
})  # fmt: skip
def test_integers_and_booleans(case) -> None:
    check(case, qkv(), fused=0)


def test_complex_values() -> None:
    inputs = (*qkv()[:2], torch.randn(BATCH, HEADS, KV_LEN, 16, dtype=torch.complex64))
    (site,) = same_as_eager(lambda q, k, v: torch.softmax(q @ k.mT, -1).to(v.dtype) @ v, inputs).sites
    assert site.reason == "the attention weights are cast to a dtype that is not floating point"


# -- autocast -------------------------------------------------------------------------------------


def test_two_autocast_regions() -> None:
    def fn(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = q @ k.mT
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.softmax(scores * 0.3, dim=-1) @ v

    check(fn, qkv(), fused=None, slack=1e4)


def test_autocast_off_inside() -> None:
    """A region of full precision inside an autocast one."""

    def fn(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scale = (q @ k.mT).amax().float()
            with torch.autocast("cpu", enabled=False):
                return torch.softmax(q @ k.mT * 0.3, dim=-1) @ v + 0.0 * scale

    seen = check(fn, qkv(), fused=1)
    assert sdpa(seen.ours).meta["example_value"].dtype == torch.float32


def test_autocast_of_half_inputs() -> None:
    """Where autocast changes nothing."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(scored(lambda s: s * 0.3), qkv(dtype=torch.bfloat16))
