"""Attention sinks: a column concatenated to the scores, and dropped after the softmax; or a factor of the
output, `out * sigmoid(logsumexp(scores) - sink)`."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from inductor_fusions.fusions.attention.kernels import FORBIDDEN
from tests.attention.support import (
    BATCH,
    HEADS,
    LOWEST,
    Q_LEN,
    capture,
    cases,
    check,
    flex_everywhere,
    qkv,
    rand,
    same_as_eager,
    visible,
)
from tests.support.modules import Module

#: The weight of a sink is exp(sink - logsumexp): one eps of a logsumexp of 5 is 5 eps of the weight.
SLACK = 6.0


def attention(mask=lambda scores: scores, join=None, drop=None, change=lambda scores: scores):
    """Attention with a sink for each head."""

    def fn(q, k, v, sinks):
        scores = mask(q @ k.transpose(-1, -2) * 0.3)
        column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        scores = change((join or (lambda s, c: torch.cat([s, c], dim=-1)))(scores, column))
        weights = torch.softmax(scores, dim=-1)
        return (drop or (lambda w: w[..., :-1]))(weights) @ v

    return fn


def factored(
    mask=lambda scores: scores,
    factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1)).sigmoid().unsqueeze(-1),
    lse=lambda scores: torch.logsumexp(scores, dim=-1),
    end=lambda out, factor: out * factor,
    weights=lambda scores: torch.softmax(scores, dim=-1),
):
    """The same as a factor, as Granite's sliding windows have it."""

    def fn(q, k, v, sinks):
        scores = mask(q @ k.transpose(-1, -2) * 0.3)
        return end(weights(scores) @ v, factor(lse(scores), sinks))

    return fn


def causal(scores):
    rows, keys = (torch.arange(n) for n in scores.shape[-2:])
    return scores.masked_fill(keys > rows[:, None], LOWEST)


def window(scores):
    rows, keys = (torch.arange(n) for n in scores.shape[-2:])
    seen = (keys <= rows[:, None]) & (keys > rows[:, None] - 4)
    return scores + torch.where(seen, 0.0, LOWEST)


SPELLINGS = {
    "plain": attention(),
    "minus the maximum": attention(change=lambda s: s - s.max(dim=-1, keepdim=True).values),
    "minus the maximum, positional": attention(change=lambda s: s - s.max(-1, True)[0]),
    "minus the maximum, detached": attention(change=lambda s: s - s.amax(-1, keepdim=True).detach()),
    "first": attention(join=lambda s, c: torch.cat((c, s), -1), drop=lambda w: w[..., 1:]),
    "narrow": attention(drop=lambda w: w.narrow(-1, 0, w.shape[-1] - 1)),
    "the number of keys": attention(drop=lambda w: w[..., : w.shape[-2]]),
    "the number of keys, all dims": attention(drop=lambda w: w[:, :, :, 0 : w.shape[-1] - 1 : 1]),
    "first, the number of keys": attention(
        join=lambda s, c: torch.cat((c, s), -1), drop=lambda w: w[..., -w.shape[-2] :]
    ),
    "first, narrow": attention(
        join=lambda s, c: torch.cat((c, s), -1), drop=lambda w: torch.narrow(w, 3, 1, w.shape[-2])
    ),
    "split": attention(drop=lambda w: w.split([w.shape[-2], 1], -1)[0]),
    "split, by a number": attention(drop=lambda w: torch.split(w, w.shape[-2], dim=-1)[0]),
    "first, split": attention(
        join=lambda s, c: torch.cat((c, s), -1), drop=lambda w: torch.split(w, [1, w.shape[-2]], dim=3)[1]
    ),
    "all dims": attention(drop=lambda w: w[:, :, :, :-1]),
    "concat": attention(join=lambda s, c: torch.concat([s, c], axis=-1)),
    "scaled together": attention(change=lambda s: s * 0.5),
    "causal": attention(causal),
    "window": attention(window),
    "factor: plain": factored(),
    "factor: the factor first": factored(end=lambda out, factor: factor * out),
    "factor: a method": factored(lse=lambda s: s.logsumexp(-1)),
    "factor: keepdim": factored(
        lse=lambda s: s.logsumexp(-1, keepdim=True),
        factor=lambda lse, sinks: torch.sigmoid(lse - sinks.view(-1, 1, 1)),
    ),
    "factor: a new dim first": factored(
        factor=lambda lse, sinks: torch.sigmoid(lse[..., None] - sinks[None, :, None, None])
    ),
    "factor: casts": factored(
        factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()[..., None].float()
    ),
    "factor: a sink for each row": factored(
        factor=lambda lse, sinks: torch.sigmoid(lse - (sinks[:, None] * torch.arange(13) / 13))[..., None]
    ),
    "factor: one sink": factored(factor=lambda lse, sinks: torch.sigmoid(lse - sinks.sum())[..., None]),
    "factor: causal": factored(causal),
    "factor: window": factored(window),
    "factor: capped": factored(lambda s: torch.tanh(s / 5) * 5),
}  # fmt: skip


@cases(SPELLINGS)
def test_spelling(case) -> None:
    length = 13
    inputs = (*qkv(length, length), rand(HEADS))
    if case is not SPELLINGS["factor: capped"]:
        check(case, inputs, kernel="sink", slack=SLACK)
    with flex_everywhere("flex"):
        check(case, inputs, kernel="flex", slack=SLACK)


#: By the reason that is given.
NOT_A_SINK = {
    "is between": {
        "the second part of a split": attention(drop=lambda w: w.split([1, w.shape[-1] - 1], -1)[1]),
        "the first part of a split": attention(
            join=lambda s, c: torch.cat((c, s), -1), drop=lambda w: w.split([13, 1], -1)[0]
        ),
        "the split-off column is read": attention(drop=lambda w: (lambda a, b: a + b)(*w.split([13, 1], -1))),
        "the last key is dropped": attention(join=lambda s, c: torch.cat((c, s), -1)),
    },
    "is between the softmax": {"the first key is dropped": attention(drop=lambda w: w[..., 1:])},
    "more than one": {
        "of two columns": attention(join=lambda s, c: torch.cat([s, c, c], -1), drop=lambda w: w[..., :-2])
    },
    "added to the attention sink": {
        "masked as well": attention(
            change=lambda s: s.masked_fill(torch.ones(s.shape[-1]).cumsum(0) > 9, LOWEST)
        ),
    },
    "applied to an attention sink": {"capped as well": attention(change=lambda s: torch.tanh(s))},
    "a dim other than the keys": {
        "over the queries": attention(
            join=lambda s, c: torch.cat([s, s[..., :1, :]], -2), drop=lambda w: w[..., :-1, :]
        ),
    },
    "the scores are also used by": {
        "of other scores": factored(lse=lambda s: torch.logsumexp(s * 2.0, -1)),
        "logsumexp over the queries": factored(
            lse=lambda s: torch.logsumexp(s, -2), factor=lambda lse, sinks: lse.sigmoid().unsqueeze(-1)
        ),
        "the other way round": factored(
            factor=lambda lse, sinks: (sinks.view(1, -1, 1) - lse).sigmoid().unsqueeze(-1)
        ),
        "twice": factored(factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1) * lse).sigmoid()[..., None]),
        "another function": factored(
            factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1)).tanh()[..., None]
        ),
        "no function": factored(factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1))[..., None]),
        "a multiple": factored(
            factor=lambda lse, sinks: torch.sub(lse, sinks.view(1, -1, 1), alpha=2.0).sigmoid()[..., None]
        ),
        "added": factored(end=lambda out, factor: out + factor),
        "of each column": factored(
            lse=lambda s: s.logsumexp(-1),
            factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1)).sigmoid(),
            end=lambda out, factor: out * factor[..., None, :1],
        ),
        "read elsewhere": factored(end=lambda out, factor: out * factor + out),
        "zeroed weights": factored(
            weights=lambda s: torch.softmax(s, -1).masked_fill(torch.arange(s.shape[-1]) > 9, 0.0)
        ),
        "of two": factored(end=lambda out, factor: out * factor * factor),
    },
}


@pytest.mark.parametrize(
    ("name", "reason"), [(name, reason) for reason, fns in NOT_A_SINK.items() for name in fns]
)
def test_not_a_sink(name: str, reason: str) -> None:
    inputs = (*qkv(13, 13, grad=False), rand(HEADS, grad=False))
    run = same_as_eager(NOT_A_SINK[reason][name], inputs, policy="always")
    assert [s.verdict for s in run.sites] == ["rejected"], run.sites
    assert reason in run.sites[0].reason


SYMBOLIC = [
    "plain", "the number of keys", "first, the number of keys", "first, narrow", "split", "first, split",
]  # fmt: skip


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_length(name: str) -> None:
    def fn(q, k, v, sinks):
        q, k, v = (t.view(*t.shape[:2], HEADS, 16).transpose(1, 2) for t in (q, k, v))
        return SPELLINGS[name](q, k, v, sinks)

    inputs = (*(rand(BATCH, 13, HEADS * 16, grad=False) for _ in range(3)), rand(HEADS, grad=False))
    with flex_everywhere("flex"):
        check(fn, inputs, kernel="flex", slack=SLACK, dynamic=True, train=False)


@pytest.mark.parametrize("spelled", [attention, factored])
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_fully_masked_rows(kernel: str, spelled) -> None:
    """The sink takes all their weight: their logsumexp is the lowest number, and the factor 0."""
    mask = visible(BATCH, 1, Q_LEN, 13)
    mask[0, :, 3] = False

    def fn(q, k, v, sinks, mask):
        return spelled(lambda s: s.masked_fill(~mask, LOWEST))(q, k, v, sinks)

    with flex_everywhere(kernel):
        check(fn, (*qkv(), rand(HEADS), mask), slack=SLACK)


def test_grouped_heads() -> None:
    def fn(q, k, v, sinks):
        return attention(causal)(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), sinks)

    inputs = (*qkv(9, 9, heads=4, kv_heads=2), rand(4))
    for kernel in ("sdpa", "flex"):
        with flex_everywhere(kernel):
            check(fn, inputs, kernel="sink", slack=SLACK)


def test_small_sink_weight() -> None:
    """Where the sink takes next to nothing its gradient keeps its digits."""
    with flex_everywhere("flex"):
        check(attention(), (*qkv(33, 200), rand(HEADS) - 8.0), kernel="flex", slack=SLACK)


def test_overwritten_sink() -> None:
    """The scores have the sink as it was."""

    def fn(q, k, v, sinks):
        sinks = sinks * 1.0
        scores = torch.cat([q @ k.mT, sinks.view(1, -1, 1, 1).expand(BATCH, -1, Q_LEN, -1)], -1)
        sinks.zero_()
        return torch.softmax(scores, -1)[..., :-1] @ v + sinks.sum()

    with flex_everywhere("flex"):
        check(fn, (*qkv(grad=False), rand(HEADS, grad=False)), fused=None, train=False, slack=SLACK)


SHIFTS = {
    "a number": lambda s: s + 2.0,
    "a tensor of one number": lambda s: s + torch.full(s.shape[-2:], 2.0),
    "the maximum": lambda s: s - s.amax(-1, keepdim=True),
}


@cases(SHIFTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spelled", [attention, factored])
def test_shift_before_the_sink(spelled, masked: bool, case) -> None:
    """A softmax does not see it, but the sink is not shifted."""
    fn = spelled(mask=(lambda s: case(causal(s))) if masked else case)
    inputs = [*qkv(Q_LEN, Q_LEN), rand(HEADS)]
    with flex_everywhere():
        check(fn, inputs, fused=None, slack=SLACK)


def test_sink_that_learns_is_a_mask_that_learns() -> None:
    """With a mask that takes a gradient, no backend of SDPA on a CPU is left but that for math."""
    inputs = [*qkv(Q_LEN, Q_LEN), rand(HEADS)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        check(attention(mask=window), inputs, fused=0, reason=FORBIDDEN)
        fixed = [*inputs[:3], inputs[3].detach()]
        check(attention(mask=window), fixed, slack=SLACK)


def test_no_sink_learns_in_inference() -> None:
    """Although sinks are parameters."""
    fn = attention(mask=window)
    model = Module(lambda net, q, k, v: fn(q, k, v, net.sinks), {"sinks": torch.nn.Parameter(rand(HEADS))})
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        seen = capture(model, *qkv(Q_LEN, Q_LEN, grad=False))
    assert [site.verdict for site in seen.sites] == ["fused"]


def test_only_the_sink_learns() -> None:
    inputs = [*qkv(Q_LEN, Q_LEN, grad=False), rand(HEADS)]
    with flex_everywhere("flex"):
        check(attention(mask=window), inputs, fused=None, slack=SLACK)


def test_wider_output() -> None:
    """A factor in float32 makes the result of a bfloat16 product float32."""
    fn = factored(factor=lambda lse, sinks: (lse.float() - sinks.view(1, -1, 1)).sigmoid()[..., None])
    inputs = (*qkv(grad=False, dtype=torch.bfloat16), rand(HEADS, grad=False))
    run = capture(fn, *inputs, policy="always")
    assert [s.verdict for s in run.sites] == ["rejected"] and run.outputs.dtype == torch.float32
