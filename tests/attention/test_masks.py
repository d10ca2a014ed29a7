"""Masks that replace scores: fills, conditions, shapes, and what only looks like a mask."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.attention.support import (
    BATCH,
    FLEX,
    HEADS,
    INF,
    KV_LEN,
    LOWEST,
    Q_LEN,
    additive,
    cases,
    check,
    qkv,
    rand,
    scored,
    through_flex,
    unfused,
    visible,
)

SHAPES = [
    (KV_LEN,), (1, KV_LEN), (Q_LEN, KV_LEN), (HEADS, 1, KV_LEN), (HEADS, Q_LEN, KV_LEN),
    (1, 1, Q_LEN, KV_LEN), (BATCH, 1, 1, KV_LEN), (BATCH, 1, Q_LEN, KV_LEN), (1, HEADS, Q_LEN, KV_LEN),
    (BATCH, HEADS, 1, KV_LEN), (BATCH, HEADS, Q_LEN, KV_LEN),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["masked_fill", "where", "additive", "additive, infinite"])
def test_shape(shape: tuple[int, ...], kind: str) -> None:
    mask = visible(*shape)
    if kind == "masked_fill":
        check(scored(lambda s, m: (s * 0.3).masked_fill(~m, LOWEST)), (*qkv(), mask))
    elif kind == "where":
        check(scored(lambda s, m: torch.where(m, s * 0.3, -INF)), (*qkv(), mask))
    else:
        fill = LOWEST if kind == "additive" else -INF
        check(scored(lambda s, m: s * 0.3 + m), (*qkv(), additive(mask, fill)))


def test_whole_heads_hidden_from_none() -> None:
    """Masks without a key dim: all or nothing of a row."""
    for shape in ((HEADS, 1, 1), (BATCH, 1, 1, 1), (BATCH, HEADS, Q_LEN, 1)):
        mask = torch.rand(shape) < 0.5
        check(scored(lambda s, m: (s * 0.3).masked_fill(m, LOWEST)), (*qkv(), mask), train=False)


def _filled_in_place(scores, mask):
    scores = scores * 0.3
    scores.masked_fill_(mask, -INF)
    return scores


SPELLINGS = {
    "masked_fill": lambda s, m: s.masked_fill(~m, LOWEST),
    "masked_fill, infinite": lambda s, m: s.masked_fill(~m, -INF),
    "masked_fill, function": lambda s, m: torch.masked_fill(s, ~m, LOWEST),
    "masked_fill, keywords": lambda s, m: s.masked_fill(mask=~m, value=-INF),
    "masked_fill, tensor": lambda s, m: s.masked_fill(~m, torch.tensor(LOWEST)),
    "masked_fill, 1e9": lambda s, m: s.masked_fill(~m, -1e9),
    "masked_fill, 1e4": lambda s, m: s.masked_fill(~m, -1e4),
    "masked_fill_": lambda s, m: s.masked_fill_(~m, LOWEST),
    "masked_fill_, result unused": lambda s, m: _filled_in_place(s, ~m),
    "where": lambda s, m: torch.where(m, s, LOWEST),
    "where, scores last": lambda s, m: torch.where(~m, LOWEST, s),
    "where, infinite": lambda s, m: torch.where(m, s, -INF),
    "where, tensor": lambda s, m: torch.where(m, s, torch.tensor(LOWEST)),
    "where, tensor with dims": lambda s, m: torch.where(~m, torch.full((1, 1), LOWEST), s),
    "where, full_like": lambda s, m: torch.where(m, s, torch.full_like(s, LOWEST)),
    "where, asarray": lambda s, m: torch.where(m, s, torch.asarray(LOWEST, dtype=s.dtype, device=s.device)),
    "where, as_tensor": lambda s, m: torch.where(m, s, torch.as_tensor(data=LOWEST)),
    "where, full": lambda s, m: torch.where(m, s, torch.full([], LOWEST, dtype=s.dtype)),
    "where, method": lambda s, m: s.where(m, torch.tensor(-INF)),
    "where, finfo of the scores": lambda s, m: torch.where(m, s, torch.finfo(s.dtype).min),
    "integers": lambda s, m: s.masked_fill(m.int() == 0, LOWEST),
    "integers, inverted": lambda s, m: s.masked_fill((1 - m.long()).bool(), LOWEST),
    "integers, to": lambda s, m: s.masked_fill((1 - m.long()).to(torch.bool), LOWEST),
    "logical_not": lambda s, m: s.masked_fill(torch.logical_not(m), LOWEST),
    "numbers": lambda s, m: s.masked_fill(m.float() < 0.5, LOWEST),
    "eq": lambda s, m: s.masked_fill(m.eq(False), LOWEST),
    "added": lambda s, m: s + torch.zeros(m.shape).masked_fill(~m, LOWEST),
    "added, where": lambda s, m: s + torch.where(m, 0.0, LOWEST),
    "added, product": lambda s, m: s + (1.0 - m.to(s.dtype)) * LOWEST,
    "added, 1e9": lambda s, m: s + (1.0 - m.to(s.dtype)) * -1e9,
    "subtracted": lambda s, m: s - (~m).to(s.dtype) * 1e9,
    "scaled after": lambda s, m: s.masked_fill(~m, -1e9) * 0.5,
    "positive fill, negated": lambda s, m: -s.masked_fill(~m, 1e9),
    "twice": lambda s, m: s.masked_fill(~m, LOWEST).masked_fill(~m, -1e9),
    "two masks": lambda s, m: torch.where(
        m, s.masked_fill(torch.ones(Q_LEN, KV_LEN).tril(3) == 0, -INF), -INF
    ),
    "joined": lambda s, m: s.masked_fill(~(m & (torch.arange(KV_LEN) < 9)), LOWEST),
    "inverted twice": lambda s, m: s.masked_fill(~(~(~m)), LOWEST),
}
# Where the lowest number is scaled or two of them meet it overflows; each row sees its first key.


@cases(SPELLINGS)
def test_spelling(case) -> None:
    check(scored(lambda s, m: case(s * 0.3, m)), (*qkv(), visible(BATCH, 1, Q_LEN, KV_LEN)))


MIXED = {
    "fill, then bias": lambda s, m, b: s.masked_fill(~m, LOWEST) + b,
    "bias, then fill": lambda s, m, b: (s + b).masked_fill(~m, -INF),
    "fill around a bias": lambda s, m, b: (s.masked_fill(~m, -1e9) + b).masked_fill(~m, LOWEST),
    "fill and additive mask": lambda s, m, b: s.masked_fill(~m, LOWEST) + torch.where(m, 0.0, -1e9) + b,
    "scaled bias, then fill": lambda s, m, b: ((s + b) / 2.0).masked_fill(~m, -INF) * 0.5,
    "clamped": lambda s, m, b: torch.clamp((s + b).masked_fill(~m, -INF), min=LOWEST),
    "maximum": lambda s, m, b: torch.max((s + b).masked_fill(~m, -INF), torch.tensor(LOWEST)),
}


@cases(MIXED)
def test_mixed(case) -> None:
    inputs = (*qkv(), visible(BATCH, 1, Q_LEN, KV_LEN), rand(HEADS, Q_LEN, KV_LEN))
    check(scored(lambda s, m, b: case(s * 0.3, m, b)), inputs)


#: What else may become of a score behind a condition: functions of one score.
NOT_A_MASK = {
    "-100": (lambda s, m: s.masked_fill(~m, -100.0), FLEX),
    "-1": (lambda s, m: s.masked_fill(~m, -1.0), FLEX),
    "0": (lambda s, m: s * m, FLEX),
    "zero fill": (lambda s, m: torch.where(m, s, 0.0), FLEX),
    "positive": (lambda s, m: s.masked_fill(~m, 1e9), "range"),
    "scaled away": (lambda s, m: s.masked_fill(~m, -1e4) / 100.0, FLEX),
    "negated": (lambda s, m: -s.masked_fill(~m, -1e9), "range"),
    "NaN": (lambda s, m: s.masked_fill(m.all(), float("nan")), "replaced by NaN"),
    "tensor": (lambda s, m: torch.where(m, s, m.float().sum(-1, keepdim=True)), "mask"),
    "asarray of a tensor": (
        lambda s, m: torch.where(m, s, torch.asarray(m.float().sum(-1, keepdim=True))),
        "mask",
    ),
    "other scores": (lambda s, m: torch.where(m, s, s - 2.0), ""),
    "of the scores": (lambda s, m: torch.where(s > 0.0, s, LOWEST), "used-elsewhere"),
    "top k": (lambda s, m: s.masked_fill(s < s.topk(3).values[..., -1:], LOWEST), "used-elsewhere"),
    "clamped": (lambda s, m: s.clamp(min=-1.0), FLEX),
    "clamped above": (lambda s, m: s.clamp(max=1.0), FLEX),
    "clamp of a mask": (lambda s, m: s.masked_fill(~m, -INF).clamp(min=-50.0), "mask"),
}


@cases(NOT_A_MASK)
def test_not_a_mask(case) -> None:
    change, reason = case
    inputs = (*qkv(), visible(BATCH, 1, Q_LEN, KV_LEN))
    expect = through_flex if reason is FLEX else partial(unfused, reason=reason)
    expect(scored(lambda s, m: change(s * 0.3, m)), inputs)


@pytest.mark.parametrize("which", ["the mask", "its inverse"])
def test_condition_overwritten(which: str) -> None:
    """The condition changes between the fill and the product with v."""

    def fn(q, k, v, mask):
        mask = mask.clone()
        hidden = ~mask
        weights = torch.softmax((q @ k.transpose(-1, -2)).masked_fill(hidden, LOWEST), dim=-1)
        if which == "the mask":
            mask.fill_(True)
        else:
            hidden.logical_not_()
        return weights @ v + mask.sum() + hidden.sum()

    check(fn, (*qkv(), visible(BATCH, 1, Q_LEN, KV_LEN)), fused=None, train=which == "the mask")


def test_shared_by_layers() -> None:
    """One mask of several layers is prepared once."""

    def fn(q, k, v, mask):
        for _ in range(3):
            scores = torch.where(mask, q @ k.transpose(-1, -2) * 0.3, LOWEST)
            q = torch.softmax(scores, dim=-1) @ v
        return q

    seen = check(fn, (*qkv(), visible(BATCH, 1, 1, KV_LEN)), fused=3)
    masks = {call.kwargs["attn_mask"] for call in seen.ours.calls("scaled_dot_product_attention")}
    assert len(masks) == 1


def test_not_shared_where_they_differ() -> None:
    """Layers whose masks differ in fill, factor or polarity keep their own."""

    def fn(q, k, v, mask, bias):
        for change in (
            lambda s: torch.where(mask, s, LOWEST),
            lambda s: torch.where(mask, LOWEST, s),
            lambda s: s + bias,
            lambda s: s + 2.0 * bias,
            lambda s: (s + bias) * 3.0,
            lambda s: s - bias,
        ):
            q = torch.softmax(change(q @ k.transpose(-1, -2) * 0.3), dim=-1) @ v
        return q

    mask = visible(BATCH, 1, 1, KV_LEN)
    mask[..., -1] = False  # each row sees something, both ways
    check(fn, (*qkv(), mask, rand(HEADS, 1, KV_LEN)), fused=6, slack=4.0)
