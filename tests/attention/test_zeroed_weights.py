"""Weights that are set to 0 where the scores were masked: a fully masked row is zero.

`softmax(scores.masked_fill(m, -inf)).masked_fill(m, 0) @ v`: in speech models (ESPnet, WeNet), and CPM-Ant.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions import config
from tests.attention.support import (
    INF,
    LOWEST,
    TRAIN,
    cases,
    check,
    flex_everywhere,
    qkv,
    rand,
    short_everywhere,
    unfused,
)

B, H, S = 3, 2, 9
REASON = "the weights are set to 0 at keys other than"


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


def zeroed(fill, zero, find=lambda pad: ~causal(pad)):
    """Scores that `fill` changes at masked keys, and weights that `zero` changes there."""

    def fn(q, k, v, pad):
        hidden = find(pad)
        return zero(torch.softmax(fill(scores(q, k), hidden), -1), hidden).to(v.dtype) @ v

    return fn


def lowest(s, hidden):
    return s.masked_fill(hidden, torch.finfo(s.dtype).min)


def zero(w, hidden):
    return w.masked_fill(hidden, 0.0)


espnet = zeroed(
    lowest, lambda w, hidden: F.dropout(zero(w, hidden), 0.0), lambda pad: pad[:, None, None, :].eq(0)
)


def cpm_ant(s, hidden, number):
    """What is hidden is computed twice."""
    seen = ~hidden
    number = torch.scalar_tensor(number, dtype=s.dtype)
    return torch.masked_fill(s, seen.view(B, 1, S, S) == torch.tensor(False), number)


computed_twice = zeroed(lambda s, hidden: cpm_ant(s, hidden, -INF), lambda w, hidden: cpm_ant(w, hidden, 0))


def in_float32(s, hidden):
    return lowest(s.to(torch.promote_types(s.dtype, torch.float32)), hidden)


def merged_heads(q, k, v, pad):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    hidden = (~causal(pad)).repeat_interleave(H, 0).squeeze(1)
    filled = torch.bmm(q, k.mT).mul(0.3).masked_fill(hidden, -INF)
    return torch.bmm(zero(torch.softmax(filled, -1), hidden), v)


SPELLINGS = {
    "-inf": fills,
    "lowest": zeroed(lowest, zero),
    "-1e9": lambda q, k, v, pad: fills(q, k, v, pad, -1e9),
    "-1e4": lambda q, k, v, pad: fills(q, k, v, pad, -1e4),
    "ESPnet": espnet,
    "CPM-Ant": computed_twice,
    "where it is seen": zeroed(
        lambda s, hidden: torch.where(~hidden, s, -INF), lambda w, hidden: torch.where(~hidden, w, 0.0)
    ),
    "where it is hidden": zeroed(
        lambda s, hidden: s.masked_fill(hidden, -INF),
        lambda w, hidden: torch.where(hidden, torch.zeros((), dtype=w.dtype), w),
    ),
    "in float32": zeroed(in_float32, zero),
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
    fn = zeroed(lambda s, m: s.masked_fill_(m, -INF), lambda w, m: w.masked_fill_(m, 0.0))
    check(fn, (*qkv(S, S, batch=B, heads=H), padding()), train=False)


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
    unfused(fn, (*inputs, rand(H, S, S, grad=False)), "mask", train=train)


@TRAIN
def test_grouped_heads(train: bool) -> None:
    def fn(q, k, v, pad):
        return fills(q, *(t.repeat_interleave(3, dim=1) for t in (k, v)), pad)

    check(fn, (*qkv(S, S, batch=B, heads=6, kv_heads=2), padding()), train=train)


@pytest.mark.parametrize("hidden", [False, True])
@TRAIN
def test_one_condition_for_all(hidden: bool, train: bool) -> None:
    """A condition without dims, such as a branch that is switched off."""

    def fn(q, k, v, off):
        return torch.softmax(scores(q, k), -1).masked_fill(off, 0.0) @ v

    check(fn, (*qkv(S, S), torch.tensor(hidden)), train=train)


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


@pytest.mark.parametrize("case", [fills, espnet, computed_twice], ids=["fills", "ESPnet", "CPM-Ant"])
def test_flex_attention(case) -> None:
    """Fully masked rows are zero there by themselves."""
    with flex_everywhere("flex"):
        seen = check(case, (*qkv(S, S, batch=B, heads=H), padding()), kernel="flex, block mask")
    assert not seen.ours.calls("any")


@pytest.mark.parametrize("case", [fills, espnet], ids=["fills", "ESPnet"])
def test_short_attention(case) -> None:
    with short_everywhere():
        check(case, (*qkv(S, S, batch=B, heads=H), padding()), kernel="short")


@TRAIN
def test_dynamic(train: bool) -> None:
    check(espnet, (*qkv(S, S, batch=B, heads=H), padding()), dynamic=True, train=train)


def test_full_compile() -> None:
    check(fills, (*qkv(S, S, batch=B, heads=H), padding()), backend="inductor", train=False)


def a_sink(q, k, v, pad):
    hidden, column = ~causal(pad), torch.ones(B, H, S, 1, dtype=q.dtype)
    filled = torch.cat([lowest(scores(q, k), hidden), column], -1)
    return zero(torch.softmax(filled, -1)[..., :-1], hidden) @ v


OTHER_KEYS = {
    "transposed": zeroed(lowest, lambda w, hidden: zero(w, hidden.mT)),
    "negated": zeroed(lowest, lambda w, hidden: zero(w, ~hidden)),
    "the scores are not masked": zeroed(lambda s, hidden: s, zero),
    "more keys": zeroed(lowest, lambda w, hidden: zero(w, hidden | (torch.arange(S) < 2))),
}
#: A row that two masks hide together is no row of zeros.
ONE_MORE = {
    "another mask": zeroed(
        lambda s, hidden: lowest(lowest(s, hidden), torch.arange(S) < 2), zero,
        lambda pad: (pad[:, None, None, :] == 0) & (torch.arange(S)[:, None] > 0),
    ),
    "a sink": a_sink,
}  # fmt: skip


@TRAIN
@pytest.mark.parametrize("name", [*OTHER_KEYS, *ONE_MORE])
def test_other_zeros(name: str, train: bool) -> None:
    reason = REASON if name in OTHER_KEYS else "mask"
    unfused((OTHER_KEYS | ONE_MORE)[name], (*qkv(S, S, batch=B, heads=H), padding()), reason, train=train)


NO_ZEROS = {
    "another number": lambda w, hidden: w.masked_fill(hidden, 0.5),
    "a number that is data": lambda w, hidden: torch.where(hidden, w.detach().amin(), w),
    "a product with twice the mask": lambda w, hidden: w * ((~hidden).to(w.dtype) * 2),
    "a product with the masked keys": lambda w, hidden: w * hidden.to(w.dtype),
    "a product with one more than the mask": lambda w, hidden: w * ((~hidden) + 1.0),
    "overwritten in between": lambda w, hidden: zero(w, hidden.logical_not_()),
}


@cases(NO_ZEROS)
def test_no_zeros(case) -> None:
    unfused(zeroed(lowest, case), (*qkv(S, S, batch=B, heads=H), padding()), "", train=False)
