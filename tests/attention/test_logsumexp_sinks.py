"""Attention sinks as a factor of the output: `out * sigmoid(logsumexp(scores) - sink)`."""

from __future__ import annotations

import pytest
import torch

from inductor_fusions import testing
from tests.attention.support import HEADS, Q_LEN, cases, check, flex_everywhere, qkv, rand
from tests.attention.test_sinks import SLACK, causal, check_fully_masked_rows, window


def attention(
    mask=lambda scores: scores,
    factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1)).sigmoid().unsqueeze(-1),
    lse=lambda scores: torch.logsumexp(scores, dim=-1),
    end=lambda out, factor: out * factor,
    weights=lambda scores: torch.softmax(scores, dim=-1),
):
    """Attention with a sink for each head, as Granite's sliding windows have it."""

    def fn(q, k, v, sinks):
        scores = mask(q @ k.transpose(-1, -2) * 0.3)
        return end(weights(scores) @ v, factor(lse(scores), sinks))

    return fn


SPELLINGS = {
    "plain": attention(),
    "the factor first": attention(end=lambda out, factor: factor * out),
    "a method": attention(lse=lambda s: s.logsumexp(-1)),
    "keepdim": attention(
        lse=lambda s: s.logsumexp(-1, keepdim=True),
        factor=lambda lse, sinks: torch.sigmoid(lse - sinks.view(-1, 1, 1)),
    ),
    "a new dim first": attention(
        factor=lambda lse, sinks: torch.sigmoid(lse[..., None] - sinks[None, :, None, None])
    ),
    "casts": attention(
        factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1)).to(torch.float32).sigmoid()[..., None].float()
    ),
    "a sink for each row": attention(
        factor=lambda lse, sinks: torch.sigmoid(lse - (sinks[:, None] * torch.arange(13) / 13))[..., None]
    ),
    "one sink": attention(factor=lambda lse, sinks: torch.sigmoid(lse - sinks.sum())[..., None]),
    "causal": attention(causal),
    "window": attention(window),
    "capped": attention(lambda s: torch.tanh(s / 5) * 5),
}  # fmt: skip


@cases(SPELLINGS)
def test_spelling(case) -> None:
    length = 13
    inputs = (*qkv(length, length), rand(HEADS))
    with flex_everywhere("flex"):
        check(case, inputs, kernel="flex", slack=SLACK)
    if case is not SPELLINGS["capped"]:
        check(case, inputs, kernel="sink", slack=SLACK)


NOT_A_SINK = {
    "of other scores": attention(lse=lambda s: torch.logsumexp(s * 2.0, -1)),
    "over the queries": attention(
        lse=lambda s: torch.logsumexp(s, -2), factor=lambda lse, sinks: lse.sigmoid().unsqueeze(-1)
    ),
    "the other way round": attention(
        factor=lambda lse, sinks: (sinks.view(1, -1, 1) - lse).sigmoid().unsqueeze(-1)
    ),
    "twice": attention(factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1) * lse).sigmoid()[..., None]),
    "another function": attention(factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1)).tanh()[..., None]),
    "no function": attention(factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1))[..., None]),
    "a multiple": attention(
        factor=lambda lse, sinks: torch.sub(lse, sinks.view(1, -1, 1), alpha=2.0).sigmoid()[..., None]
    ),
    "added": attention(end=lambda out, factor: out + factor),
    "of each column": attention(
        lse=lambda s: s.logsumexp(-1), factor=lambda lse, sinks: (lse - sinks.view(1, -1, 1)).sigmoid(),
        end=lambda out, factor: out * factor[..., None, :1],
    ),
    "read elsewhere": attention(end=lambda out, factor: out * factor + out),
    "zeroed weights": attention(
        weights=lambda s: torch.softmax(s, -1).masked_fill(torch.arange(s.shape[-1]) > 9, 0.0)
    ),
    "of two": attention(end=lambda out, factor: out * factor * factor),
}  # fmt: skip


@cases(NOT_A_SINK)
def test_not_a_sink(case) -> None:
    inputs = (*qkv(13, 13, grad=False), rand(HEADS, grad=False))
    run = testing.capture(case, *inputs, policy="always", backend=testing.EAGER_AFTER_PASSES)
    assert [s.verdict for s in run.sites] == ["rejected"], run.sites
    assert "the scores are also used by" in run.sites[0].reason
    torch.testing.assert_close(run.outputs, case(*inputs))


def test_wider_output() -> None:
    """A factor in float32 makes the result of a bfloat16 product float32."""
    fn = attention(factor=lambda lse, sinks: (lse.float() - sinks.view(1, -1, 1)).sigmoid()[..., None])
    inputs = (*qkv(grad=False, dtype=torch.bfloat16), rand(HEADS, grad=False))
    run = testing.capture(fn, *inputs, policy="always", backend=testing.EAGER_AFTER_PASSES)
    assert [s.verdict for s in run.sites] == ["rejected"] and run.outputs.dtype == torch.float32


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_fully_masked_rows(kernel: str) -> None:
    """Their logsumexp is the lowest number, and the factor 0."""
    check_fully_masked_rows(attention, kernel)


def test_shift() -> None:
    """A softmax does not see it, but the sink does."""
    inputs = [*qkv(Q_LEN, Q_LEN), rand(HEADS)]
    for shift in (lambda s: s + 2.0, lambda s: s - s.amax(-1, keepdim=True)):
        with flex_everywhere():
            check(attention(shift), inputs, fused=None, slack=SLACK)
