"""Readers of the scores and of the weights: some that nobody uses, and some that are used."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.attention.support import HEADS, cases, check, qkv, unfused


def scores_of(q: Any, k: Any) -> Any:
    return q @ k.mT * 0.25


def cloned(q: Any, k: Any, v: Any) -> Any:
    scores = scores_of(q, k)
    _ = scores.clone()
    return scores.softmax(-1) @ v


def exponentials(q: Any, k: Any, v: Any) -> Any:
    scores = scores_of(q, k)
    _ = torch.exp(scores)
    return scores.softmax(-1) @ v


def detached_behind(q: Any, k: Any, v: Any) -> Any:
    scores = scores_of(q, k)
    out = scores.softmax(-1) @ v
    _ = scores.detach()
    return out


def statistics(q: Any, k: Any, v: Any) -> Any:
    weights = scores_of(q, k).softmax(-1)
    out = weights @ v
    _ = (weights.mean(1).sqrt(), -(weights * weights.log()).sum(-1))
    return out


def cast_for_its_dtype(q: Any, k: Any, v: Any) -> Any:
    """Weights in float32, cast to the dtype of the weights that were cast before."""
    scores = scores_of(q, k)
    wide = scores.softmax(-1, dtype=torch.float32)
    weights = wide.type_as(scores)
    return F.dropout(wide.type_as(weights), 0.1, False) @ v


class Keeps(nn.Module):
    """As attention modules do whose callers may ask for the scores."""

    def scores(self, q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.mT * 0.25
        before = scores.clone()
        weights = scores.softmax(-1)
        return weights @ v, (before, weights.clone())

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        out, _ = self.scores(q, k, v)
        return out


@cases({
    "clone": cloned, "exponentials": exponentials, "detach": detached_behind, "statistics": statistics,
    "dtype": cast_for_its_dtype, "module": Keeps(),
})  # fmt: skip
def test_dead_readers(case: Any) -> None:
    seen = check(case, qkv())
    assert not seen.ours.calls("softmax") and not seen.ours.calls("clone")
    check(case, qkv(), train=False)


def test_readers_that_are_used() -> None:
    def scores_too(q: Any, k: Any, v: Any) -> Any:
        scores = scores_of(q, k)
        before = scores.clone()
        return scores.softmax(-1) @ v, before * 2.0

    def written_into(q: Any, k: Any, v: Any) -> Any:
        scores = scores_of(q, k)
        copy = scores.clone()
        copy += 1
        return scores.softmax(-1) @ v

    def weights_too(q: Any, k: Any, v: Any) -> Any:
        weights = scores_of(q, k).softmax(-1)
        _ = weights.clone()
        return weights @ v, weights.sum()

    mean, variance = torch.zeros(HEADS), torch.ones(HEADS)

    def normalised(q: Any, k: Any, v: Any) -> Any:
        scores = scores_of(q, k)
        F.batch_norm(scores, mean.to(q.dtype), variance.to(q.dtype), training=True)
        return scores.softmax(-1) @ v

    def cast_too(q: Any, k: Any, v: Any) -> Any:
        wide = scores_of(q, k).softmax(-1)
        weights = wide.to(torch.float64)
        return wide.type_as(weights).float() @ v + weights.sum(-1, keepdim=True).float()

    unfused(normalised, qkv(), "used-elsewhere")
    unfused(scores_too, qkv(), "used-elsewhere")
    unfused(written_into, qkv(), "used-elsewhere")
    unfused(weights_too, qkv(), "weights")
    unfused(cast_too, qkv(), "weights")


def test_used_twice() -> None:
    """One product of the scores for two softmaxes; one softmax for two products is one attention."""
    check(
        lambda q, k, v: (lambda s: torch.softmax(s, -1) @ v + torch.softmax(-s, -1) @ v)(q @ k.mT),
        qkv(), fused=0, reason="used-elsewhere",
    )  # fmt: skip
    check(lambda q, k, v: (lambda w: torch.cat([w @ v, w @ v.flip(-1)]))(torch.softmax(q @ k.mT, -1)), qkv())


RETURNED = {
    "scores": lambda q, k, v: (lambda s: (torch.softmax(s, -1) @ v, s))(q @ k.mT * 0.3),
    "product": lambda q, k, v: (lambda s: (torch.softmax(s * 0.3, -1) @ v, s))(q @ k.mT),
    "logsumexp": lambda q, k, v: (lambda s: (torch.softmax(s, -1) @ v, s.logsumexp(-1)))(q @ k.mT * 0.3),
}

WEIGHTS_RETURNED = {
    "weights": lambda w, v: (w @ v, w),
    "weights, dropped": lambda w, v: (lambda w: (w @ v, w))(nn.functional.dropout(w, 0.0)),
    "entropy": lambda w, v: (w @ v, (w * w.log()).sum()),
    "view of the weights": lambda w, v: (w @ v, w[0]),
}


@cases(RETURNED)
def test_returned(case) -> None:
    check(case, qkv(), fused=0, reason="used-elsewhere")


@cases(WEIGHTS_RETURNED)
def test_weights_returned(case) -> None:
    check(lambda q, k, v: case(torch.softmax(q @ k.mT * 0.3, -1), v), qkv(), fused=0, reason="weights")


def test_shape_of_the_scores() -> None:
    """The size of an intermediate is no use of its values."""

    def fn(q, k, v):
        scores = q @ k.mT
        weights = torch.softmax(scores / scores.shape[-1] ** 0.5, dim=-1)
        return (weights @ v) * weights.size(-2)

    check(fn, qkv())
    check(fn, qkv(), dynamic=True, fused=None)
