"""Dropout between the softmax and the product with v."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.attention.support import capture, cases, check, qkv, scored, sdpa, unfused


def dropped(drop):
    return lambda q, k, v: drop(torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1)) @ v


NOTHING = {
    "p = 0": lambda w: F.dropout(w, p=0.0),
    "not training": lambda w: F.dropout(w, p=0.3, training=False),
    "positional": lambda w: F.dropout(w, 0.3, False),
    "function": lambda w: torch.dropout(w, 0.3, False),
    "module in evaluation": lambda w: nn.Dropout(0.3).eval()(w),
    "module with p = 0": lambda w: nn.Dropout(0.0)(w),
    "in place": lambda w: F.dropout(w, 0.3, training=False, inplace=True),
    "aten": lambda w: torch.ops.aten.dropout.default(w, 0.3, False),
    "twice": lambda w: F.dropout(F.dropout(w, 0.0), 0.3, training=False),
    "identity": lambda w: nn.Identity()(w),
}


@cases(NOTHING)
def test_that_drops_nothing(case) -> None:
    seen = check(dropped(case), qkv())
    assert sdpa(seen.ours).kwargs.get("dropout_p", 0.0) == 0.0


class Module(nn.Module):
    def __init__(self, p: float = 0.25) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)

    def forward(self, q, k, v):
        return self.dropout(torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1)) @ v


DROPS = {
    "functional": dropped(lambda w: F.dropout(w, p=0.25)),
    "functional, training given": dropped(lambda w: F.dropout(w, p=0.25, training=True)),
    "positional": dropped(lambda w: F.dropout(w, 0.25, True)),
    "function": dropped(lambda w: torch.dropout(w, 0.25, True)),
    "method of a module": Module(),
    "in place": dropped(lambda w: F.dropout(w, 0.25, inplace=True)),
    "after a cast": dropped(lambda w: F.dropout(w.to(torch.float32), 0.25).to(w.dtype)),
    "with one that does not": dropped(lambda w: F.dropout(F.dropout(w, 0.25), 0.25, training=False)),
}


@cases(DROPS)
def test_that_drops(case) -> None:
    """The probability is handed on; the random stream is another one, the mean is not."""
    # Weights of 1/400 each on values around 1: the result is near 1 with a small spread.
    q, k, v = qkv(400, 400, batch=1, heads=2)
    with torch.no_grad():
        q.mul_(0.01)
        v.mul_(0.1).add_(1.0)
    run = capture(case, q, k, v, train=True)
    assert len(run.fused) == 1, run.sites
    assert sdpa(run).kwargs["dropout_p"] == 0.25
    stock = DROPS["functional"](q, k, v)
    assert run.outputs.isfinite().all()
    torch.testing.assert_close(run.outputs.mean(), stock.mean(), rtol=1e-2, atol=0.0)
    torch.testing.assert_close(run.outputs.std(), stock.std(), rtol=0.2, atol=0.0)
    assert all(grad.isfinite().all() for grad in run.grads.values())


def test_it_is_random() -> None:
    q, k, v = qkv(64, 64)
    run = capture(
        lambda q, k, v: (DROPS["functional"](q, k, v), DROPS["functional"](q, k, v)), q, k, v, train=True
    )
    assert len(run.fused) == 2
    assert not torch.equal(*run.outputs)


NOT_READ = {
    "twice": (lambda w: F.dropout(F.dropout(w, 0.1), 0.2), "two dropouts"),
    "of channels": (lambda w: F.dropout2d(w, 0.1), ""),
    "alpha": (lambda w: F.alpha_dropout(w, 0.1), ""),
    "with its mask": (lambda w: torch.native_dropout(w, 0.1, True)[0], "native_dropout is between"),
    "other noise": (lambda w: w * torch.bernoulli(torch.ones(w.shape)), "mul is between the softmax"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_not_read(name: str) -> None:
    drop, reason = NOT_READ[name]
    run = capture(dropped(drop), *qkv())
    assert not run.fused and run.sites
    assert all(reason in site.reason for site in run.sites), run.sites


def test_on_the_scores() -> None:
    run = capture(scored(lambda s: F.dropout(s, 0.1)), *qkv(), train=True)
    assert not run.fused
    assert "before the softmax" in run.sites[0].reason


def test_on_the_scores_off() -> None:
    check(scored(lambda s: F.dropout(s * 0.3, 0.1, training=False)), qkv())
    unfused(scored(lambda s: F.dropout(torch.relu(s), 0.1, training=False)), qkv(), "relu")


class Layer(nn.Module):
    """A layer that asks for its weights, of which one operation holds the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.25, batch_first=True)

    def forward(self, q, k, v):
        return self.attention(*(x.flatten(0, 1) for x in (q, k, v)))[0]


AS_EAGER = {
    "written out": DROPS["functional"],
    "a call": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(9, 9, dtype=torch.bool).tril(), dropout_p=0.25
    ),
    "a layer": Layer(),
}


@cases(AS_EAGER)
@pytest.mark.parametrize("as_eager", [False, True])
def test_numbers_of_eager_mode(case, as_eager) -> None:
    """Where Inductor is told to draw what eager mode draws, no other kernel draws instead."""
    with torch._inductor.config.patch(fallback_random=as_eager):
        run = capture(case, *qkv(9, 9))
    assert [site.code for site in run.sites] == (["random"] if as_eager else [""]), run.sites
