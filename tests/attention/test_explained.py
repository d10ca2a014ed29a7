"""Each softmax with a product behind it is a site of the report, with a hint where something can be done."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.attention.support import BATCH, DIM, HEADS, Q_LEN, cases, check, qkv, rand, same_as_eager
from tests.support.modules import Module


def weights(q: Any, k: Any) -> Any:
    return (q @ k.mT * 0.25).softmax(-1)


def returned(q: Any, k: Any, v: Any, r: Any) -> Any:
    w = weights(q, k)
    return w @ v, w.mean(1)


def symmetric(q: Any, k: Any, v: Any, r: Any) -> Any:
    w = weights(q, k)
    return w @ v, w + w.mT


REASONS = {
    # Two softmaxes, one product.
    "difference": (
        lambda q, k, v, r: (weights(q, k) - 0.5 * weights(r, k)) @ v,
        2,
        "differential attention",
        "two attentions",
    ),
    "difference to a mask": (lambda q, k, v, r: (weights(q, k) - torch.eye(Q_LEN)) @ v, 1, "in-between", ""),
    "sum of one with itself": (symmetric, 1, "also used by .mT", "need_weights=False"),
    "returned": (returned, 1, "weights", "need_weights=False"),
}


@cases(REASONS)
def test_reason(case: Any) -> None:
    fn, count, reason, hint = case
    seen = check(fn, (*qkv(Q_LEN, Q_LEN), rand(BATCH, HEADS, Q_LEN, DIM)), fused=0, reason=reason)
    assert len(seen.sites) == count, seen.sites
    assert all(bool(site.hint) == bool(hint) and hint in site.hint for site in seen.sites)


class Softmax(torch.autograd.Function):
    """As libraries write it that fuse its mask."""

    @staticmethod
    def forward(ctx: Any, scores: Any) -> Any:
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (weights,) = ctx.saved_tensors
        return weights * (grad - (weights * grad).sum(-1, keepdim=True))


def test_softmax_of_an_autograd_function() -> None:
    """In training its backward is the author's, and the product is outside of it."""
    seen = check(
        lambda q, k, v: Softmax.apply(q @ k.mT) @ v,
        qkv(Q_LEN, Q_LEN),
        fused=0,
        reason="outside of the region",
    )
    assert len(seen.sites) == 1


SCALED_FILLS = {
    "by where": lambda q, k, v, seen: torch.where(seen, q @ k.mT, -32767.0) / 4,
    "of a linear": lambda q, k, v, seen: F.linear(q, k[0, 0]).masked_fill(~seen, -32767) / 4,
}


@cases(SCALED_FILLS)
def test_fill_that_a_scale_raises(case: Any) -> None:
    """-2**15 + 1, divided by the root of the width, as in networks of interests."""
    inputs = (*qkv(Q_LEN, Q_LEN), torch.rand(Q_LEN, Q_LEN) > 0.3)
    check(lambda *args: case(*args).softmax(-1) @ args[2], inputs, fused=0, reason="a number above -10000")


def test_no_product() -> None:
    """A softmax that no product reads is no site."""
    seen = check(lambda q, k, v: weights(q, k).sum(-1) + v.sum(-1), qkv(Q_LEN, Q_LEN), fused=0)
    assert not seen.sites


NUMPY = {
    "scores": (lambda q, k, v: torch.from_numpy(q.numpy() @ k.mT.numpy()).softmax(-1) @ v, "by numpy.matmul"),
    "scaled": (lambda q, k, v: torch.from_numpy((q @ k.mT).numpy() * 0.5).softmax(-1) @ v, "by numpy.mul"),
    "values": (lambda q, k, v: torch.from_numpy(weights(q, k).numpy() @ v.numpy()), "by numpy.matmul"),
    "sum": (
        lambda q, k, v: torch.from_numpy(np.einsum("bhqk,bhkd->bhqd", weights(q, k).numpy(), v.numpy())),
        "by numpy.einsum",
    ),
}


@cases(NUMPY)
def test_numpy_beside_a_softmax(case: Any) -> None:
    fn, reason = case
    (site,) = same_as_eager(fn, qkv(Q_LEN, Q_LEN, grad=False)).sites
    assert site.code == "in-between" and reason in site.reason and "torch" in site.hint


def test_behind_a_graph_break() -> None:
    """Scores of another graph have a product, of which this graph knows nothing; a bias is no score."""

    def broken(q: Any, k: Any, v: Any, r: Any) -> Any:
        scores = q @ k.mT
        torch._dynamo.graph_break()
        return (scores + r[..., :Q_LEN].sin()).softmax(-1) @ v

    inputs = (*qkv(Q_LEN, Q_LEN), rand(BATCH, HEADS, Q_LEN, DIM))
    seen = check(
        lambda s, v: s.masked_fill(s > 1, -1e9).softmax(-1) @ v, (weights(*inputs[:2]), inputs[2]), fused=0
    )
    assert [site.reason.startswith("the scores are an input") for site in seen.sites] == [True]
    assert "graph_breaks" in seen.sites[0].hint
    seen = check(broken, inputs, fused=0)
    assert "an input" not in seen.sites[0].reason


def test_learned_scores() -> None:
    """Tokens are mixed by weights that are a parameter, which nothing computes."""
    scores = nn.Parameter(torch.randn(Q_LEN, Q_LEN))
    mixer = Module(lambda net, x: net.scores.softmax(-1) @ x, {"scores": scores})
    seen = check(mixer, (rand(BATCH, Q_LEN, DIM),), fused=0, reason="no product of queries and keys")
    assert len(seen.sites) == 1
