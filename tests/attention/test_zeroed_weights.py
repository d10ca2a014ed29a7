"""Weights that are set to 0 where the scores were masked: a row without a key is zero.

`softmax(scores.masked_fill(m, -inf)).masked_fill(m, 0) @ v`: in speech models (ESPnet, WeNet), and CPM-Ant.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions import config
from tests.attention.support import cases, check, flex_everywhere, qkv, rand, short_everywhere, unfused

B, H, S = 3, 2, 9
LOWEST = torch.finfo(torch.float32).min
INF = float("inf")
REASON = "the weights are set to 0 at other keys"

TRAIN = pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])


def padding() -> torch.Tensor:
    """(B, S), 1 where there is a token: a whole sample, the end of one, nothing."""
    pad = torch.ones(B, S, dtype=torch.int64)
    pad[0] = 0
    pad[1, 5:] = 0
    return pad


def causal(pad: torch.Tensor) -> torch.Tensor:
    """(B, 1, S, S), True where a key is seen: left padding gives queries without any."""
    place = torch.arange(S)
    return (place <= place[:, None]) & (pad.flip(-1) > 0)[:, None, None, :]


def scores(q: Any, k: Any) -> Any:
    return q @ k.mT * 0.3


def fills(q, k, v, pad, number=-INF):
    hidden = ~causal(pad)
    return torch.softmax(scores(q, k).masked_fill(hidden, number), -1).masked_fill(hidden, 0.0) @ v


def espnet(q, k, v, pad):
    hidden = pad[:, None, None, :].eq(0)
    filled = scores(q, k).masked_fill(hidden, torch.finfo(q.dtype).min)
    return F.dropout(torch.softmax(filled, -1).masked_fill(hidden, 0.0), 0.0) @ v


def computed_twice(q, k, v, pad):
    """As CPM-Ant has it."""
    seen = causal(pad)
    filled = torch.masked_fill(
        scores(q, k), seen.view(B, 1, S, S) == torch.tensor(False), torch.scalar_tensor(-INF, dtype=q.dtype)
    )
    weights = torch.softmax(filled, -1)
    return (
        torch.masked_fill(
            weights, seen.view(B, 1, S, S) == torch.tensor(False), torch.scalar_tensor(0, dtype=q.dtype)
        )
        @ v
    )


def where_it_is_seen(q, k, v, pad):
    seen = causal(pad)
    return torch.where(seen, torch.softmax(torch.where(seen, scores(q, k), -INF), -1), 0.0) @ v


def where_it_is_hidden(q, k, v, pad):
    hidden = ~causal(pad)
    zero = torch.zeros((), dtype=v.dtype)
    return torch.where(hidden, zero, torch.softmax(scores(q, k).masked_fill(hidden, -INF), -1)) @ v


def in_place(q, k, v, pad):
    hidden = ~causal(pad)
    return torch.softmax(scores(q, k).masked_fill_(hidden, -INF), -1).masked_fill_(hidden, 0.0) @ v


def in_float32(q, k, v, pad):
    hidden = ~causal(pad)
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.softmax(scores(q, k).to(wide).masked_fill(hidden, torch.finfo(wide).min), -1)
    return weights.masked_fill(hidden, 0.0).to(v.dtype) @ v


def merged_heads(q, k, v, pad):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    hidden = (~causal(pad)).repeat_interleave(H, 0).squeeze(1)
    filled = torch.bmm(q, k.mT).mul(0.3).masked_fill(hidden, -INF)
    return torch.bmm(torch.softmax(filled, -1).masked_fill(hidden, 0.0), v)


SPELLINGS = {
    "-inf": fills,
    "lowest": lambda q, k, v, pad: fills(q, k, v, pad, torch.finfo(q.dtype).min),
    "-1e9": lambda q, k, v, pad: fills(q, k, v, pad, -1e9),
    "-1e4": lambda q, k, v, pad: fills(q, k, v, pad, -1e4),
    "ESPnet": espnet,
    "computed twice": computed_twice,
    "where it is seen": where_it_is_seen,
    "where it is hidden": where_it_is_hidden,
    "in float32": in_float32,
    "merged heads": merged_heads,
}


@TRAIN
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@cases(SPELLINGS)
def test_spelling(case, dtype: torch.dtype, train: bool) -> None:
    seen = check(case, (*qkv(S, S, batch=B, heads=H), padding()), dtype=dtype, train=train)
    empty = (
        ~causal(padding()).any(-1, keepdim=True) if case is not espnet else torch.tensor([True, False, False])
    )
    out = seen.ours.outputs[0] if isinstance(seen.ours.outputs, tuple) else seen.ours.outputs
    rows = out.view(B, H, S, -1) if out.dim() == 3 else out
    empty = empty if empty.dim() == 4 else empty[:, None, None, None]
    assert empty.any() and not rows[empty.expand(B, H, S, 1).squeeze(-1)].any()


def test_in_place() -> None:
    """In training, torch raises on it: a softmax keeps its result."""
    check(in_place, (*qkv(S, S, batch=B, heads=H), padding()), train=False)


@TRAIN
def test_float16(train: bool) -> None:
    """Its least number is no lower than what a score may be."""
    check(fills, (*qkv(S, S, batch=B, heads=H), padding()), dtype=torch.float16, train=train)


@TRAIN
def test_bias(train: bool) -> None:
    """Relative positions, which a product of the graph makes. One that is given may hide keys itself."""

    def fn(q, k, v, pad, bias):
        hidden = ~causal(pad)
        filled = (scores(q, k) + bias).masked_fill(hidden, LOWEST)
        return torch.softmax(filled, -1).masked_fill(hidden, 0.0) @ v

    def relative(q, k, v, pad, positions):
        return fn(q, k, v, pad, q @ positions.mT)

    inputs = (*qkv(S, S, batch=B, heads=H), padding())
    check(relative, (*inputs, rand(H, S, inputs[0].shape[-1])), train=train)
    unfused(fn, (*inputs, rand(H, S, S, grad=False)), "one more mask perhaps", train=train)


@TRAIN
def test_grouped_heads(train: bool) -> None:
    def fn(q, k, v, pad):
        return fills(q, *(t.repeat_interleave(3, dim=1) for t in (k, v)), pad)

    check(fn, (*qkv(S, S, batch=B, heads=6, kv_heads=2), padding()), train=train)


def test_layers_share_what_is_zero() -> None:
    def fn(q, k, v, pad):
        hidden = ~causal(pad)
        for _ in range(3):
            q = torch.softmax(scores(q, k).masked_fill(hidden, -INF), -1).masked_fill(hidden, 0.0) @ v
        return q

    seen = check(fn, (*qkv(S, S, batch=B, heads=H), padding()), train=False, fused=3)
    assert len(seen.ours.calls("any")) == 1


def test_every_query_sees_a_key() -> None:
    """A mask that is causal and nothing else leaves nothing to be zero."""

    def fn(q, k, v):
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
        return torch.softmax(scores(q, k).masked_fill(hidden, -INF), -1).masked_fill(hidden, 0.0) @ v

    seen = check(fn, qkv(S, S, batch=B, heads=H), kernel="is_causal")
    assert not seen.ours.calls("where")


@pytest.mark.parametrize("rows", ["ignore", "stock"])
@TRAIN
def test_settings_of_empty_rows(rows: str, train: bool) -> None:
    """They are zero, and send no gradient, whatever is set: the unfused graph says so."""
    with config.patch(empty_rows=rows):
        check(fills, (*qkv(S, S, batch=B, heads=H), padding()), train=train)


@pytest.mark.parametrize("case", [fills, espnet, computed_twice], ids=lambda fn: fn.__name__)
def test_flex_attention(case) -> None:
    """Rows without a key are zero there by themselves."""
    with flex_everywhere("flex"):
        seen = check(case, (*qkv(S, S, batch=B, heads=H), padding()), kernel="flex, block mask")
    assert not seen.ours.calls("any")


@pytest.mark.parametrize("case", [fills, espnet], ids=lambda fn: fn.__name__)
def test_short_attention(case) -> None:
    with short_everywhere():
        check(case, (*qkv(S, S, batch=B, heads=H), padding()), kernel="short")


@TRAIN
def test_dynamic(train: bool) -> None:
    check(espnet, (*qkv(S, S, batch=B, heads=H), padding()), dynamic=True, train=train)


def test_full_compile() -> None:
    check(fills, (*qkv(S, S, batch=B, heads=H), padding()), backend="inductor", train=False)


def other_keys(q, k, v, pad):
    hidden = ~causal(pad)
    return torch.softmax(scores(q, k).masked_fill(hidden, LOWEST), -1).masked_fill(hidden.mT, 0.0) @ v


def negated(q, k, v, pad):
    hidden = ~causal(pad)
    return torch.softmax(scores(q, k).masked_fill(hidden, LOWEST), -1).masked_fill(~hidden, 0.0) @ v


def another_mask(q, k, v, pad):
    """A row that both masks hide together is no row of zeros."""
    hidden, first = pad[:, None, None, :] == 0, torch.arange(S) < 2
    filled = scores(q, k).masked_fill(hidden, LOWEST).masked_fill(first, LOWEST)
    return torch.softmax(filled, -1).masked_fill(hidden, 0.0) @ v


def unmasked_scores(q, k, v, pad):
    return torch.softmax(scores(q, k), -1).masked_fill(~causal(pad), 0.0) @ v


def one_more_mask(q, k, v, pad):
    hidden = ~causal(pad)
    weights = torch.softmax(scores(q, k).masked_fill(hidden, LOWEST), -1)
    return weights.masked_fill(hidden | (torch.arange(S) < 2), 0.0) @ v


def a_sink(q, k, v, pad):
    hidden, column = ~causal(pad), torch.ones(B, H, S, 1, dtype=q.dtype)
    filled = torch.cat([scores(q, k).masked_fill(hidden, LOWEST), column], -1)
    return torch.softmax(filled, -1)[..., :-1].masked_fill(hidden, 0.0) @ v


def overwritten_between(q, k, v, pad):
    hidden = ~causal(pad)
    weights = torch.softmax(scores(q, k).masked_fill(hidden, LOWEST), -1)
    hidden.logical_not_()
    return weights.masked_fill(hidden, 0.0) @ v


@TRAIN
@pytest.mark.parametrize(
    "case",
    [other_keys, negated, unmasked_scores, one_more_mask],
    ids=lambda fn: fn.__name__,
)
def test_other_keys(case, train: bool) -> None:
    unfused(case, (*qkv(S, S, batch=B, heads=H), padding()), REASON, train=train)


@TRAIN
@pytest.mark.parametrize("case", [another_mask, a_sink], ids=lambda fn: fn.__name__)
def test_one_more_mask(case, train: bool) -> None:
    unfused(case, (*qkv(S, S, batch=B, heads=H), padding()), "one more mask perhaps", train=train)


def test_mask_that_is_overwritten_in_between() -> None:
    unfused(overwritten_between, (*qkv(S, S, batch=B, heads=H), padding()), "", train=False)


NO_ZEROS = {
    "another number": lambda w, hidden: w.masked_fill(hidden, 0.5),
    "a number that is data": lambda w, hidden: torch.where(hidden, w.detach().amin(), w),
    "a product with twice the mask": lambda w, hidden: w * ((~hidden).to(w.dtype) * 2),
    "a product with the hidden keys": lambda w, hidden: w * hidden.to(w.dtype),
}


@cases(NO_ZEROS)
def test_no_zeros(case) -> None:
    def fn(q, k, v, pad):
        hidden = ~causal(pad)
        return case(torch.softmax(scores(q, k).masked_fill(hidden, LOWEST), -1), hidden) @ v

    unfused(fn, (*qkv(S, S, batch=B, heads=H), padding()), "", train=False)
