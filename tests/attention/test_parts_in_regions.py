"""A part of an attention in a checkpoint, a branch or an `autograd.Function`; weights written by `out=`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from inductor_fusions.testing import says
from tests.attention.support import TRAIN, capture, check, qkv, rand, unfused


def scored(q: Any, k: Any) -> Any:
    return q @ k.mT * 0.3


def weights(q: Any, k: Any) -> Any:
    return scored(q, k).softmax(-1)


def region(function: Any, *operands: Any) -> Any:
    return checkpoint(function, *operands, use_reentrant=False)


class Same(torch.autograd.Function):
    """The values that it is given, with another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad @ y.mT, x.mT @ grad


REGIONS = {
    "product": (lambda q, k, v: region(torch.matmul, weights(q, k), v), "the product with v"),
    "dropout": (
        lambda q, k, v: region(lambda w: F.dropout(w, 0.0), weights(q, k)) @ v, "the product with v",
    ),
    "scores": (
        lambda q, k, v: (region(torch.matmul, q, k.mT) * 0.3).softmax(-1) @ v, "q and k and the softmax, or",
    ),
}  # fmt: skip


@TRAIN
@pytest.mark.parametrize(("fn", "reason"), REGIONS.values(), ids=REGIONS)
def test_checkpoint(fn: Any, reason: str, train: bool) -> None:
    unfused(fn, qkv(9, 9), reason, train=train)


FUNCTIONS = {
    "weights": (lambda q, k, v: Same.apply(weights(q, k)) @ v, "autograd_function_apply is between"),
    "product": (lambda q, k, v: Product.apply(weights(q, k), v), "weights are also used by .mT"),
    "scores": (lambda q, k, v: Same.apply(scored(q, k)).softmax(-1) @ v, "q and k and the softmax"),
    "product of scores": (
        lambda q, k, v: (Product.apply(q, k.mT) * 0.3).softmax(-1) @ v, "q and k and the softmax, or",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "reason"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_function(fn: Any, reason: str) -> None:
    """In training; without gradients Dynamo traces the forward alone."""
    unfused(fn, qkv(9, 9), reason, train=True)
    check(fn, qkv(9, 9, grad=False), fused=1, train=False)


def branches(one: Any, other: Any) -> Any:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return torch.cond(q.sum() > 0, one, other, (weights(q, k), v))

    return fn


def test_branches() -> None:
    seen = capture(branches(lambda w, v: w @ v, lambda w, v: w @ (v * 2)), *qkv(9, 9, grad=False))
    assert [says(site, "cond is between the softmax") for site in seen.sites] == [True]
    behind = branches(lambda w, v: w * 2, lambda w, v: w * 3)
    seen = capture(lambda q, k, v: behind(q, k, v) @ v, *qkv(9, 9, grad=False))
    assert [says(site, "cond is between the softmax") for site in seen.sites] == [True]


#: No product is behind the weights, or none of them.
SILENT = {
    "elementwise branches": branches(lambda w, v: w.log() + v.sum(), lambda w, v: w * v.sum()),
    "product of others": lambda q, k, v: region(lambda w, v: (w.sum(), v @ v.mT), weights(q, k), v)[1] @ v,
    "elementwise function": lambda q, k, v: Same.apply(weights(q, k)).log().sum() + v.sum(),
}


@TRAIN
@pytest.mark.parametrize("fn", SILENT.values(), ids=SILENT)
def test_weights_of_no_attention(fn: Any, train: bool) -> None:
    assert not capture(fn, *qkv(9, 9, grad=train), train=train).sites


def test_scores_of_no_product() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return region(lambda q, k: (q - k).exp(), q, k).softmax(-1) @ v

    unfused(fn, (rand(2, 9, 13), rand(2, 9, 13), rand(2, 13, 16)), "no product of queries and keys precedes")


def into_scores(q: Any, k: Any, v: Any) -> Any:
    scores = scored(q, k)
    torch.softmax(scores, -1, out=scores)
    return scores @ v


def into_another(q: Any, k: Any, v: Any) -> Any:
    scores = scored(q, k)
    held = torch.empty_like(scores)
    torch.softmax(scores, -1, out=held)
    return held @ v


def into_a_part(q: Any, k: Any, v: Any) -> Any:
    scores = scored(q, k)
    held = scores.new_empty(2, *scores.shape)
    torch.softmax(scores, -1, out=held[1])
    return held[1] @ v


def returned(q: Any, k: Any, v: Any) -> Any:
    scores = scored(q, k)
    return torch.softmax(scores, -1, out=torch.empty_like(scores)) @ v


@pytest.mark.parametrize("fn", [into_scores, into_another, into_a_part, returned])
def test_given_memory(fn: Any) -> None:
    unfused(fn, qkv(9, 9, grad=False), "writes to a given tensor", train=False)


def test_given_memory_read_before() -> None:
    """The product reads what was there in front of the softmax."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        scores = scored(q, k)
        result = scores @ v
        torch.softmax(scores, -1, out=scores)
        return result, scores.log()

    assert not capture(fn, *qkv(9, 9, grad=False)).sites


def test_memories_that_hold_each_other() -> None:
    """Weights are written into a tensor and that into them: the search for a product ends."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        found = weights(q, k)
        held = torch.empty_like(found)
        held[:] = found
        found[:] = held
        return found.log()

    assert not capture(fn, *qkv(9, 9, grad=False)).sites
