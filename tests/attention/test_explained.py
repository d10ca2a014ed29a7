"""Each softmax with a product behind it is a site of the report, with a reason that is true."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.attention.support import BATCH, DIM, HEADS, Q_LEN, cases, check, qkv, rand

B, H, N, D = BATCH, HEADS, Q_LEN, DIM


def weights(q: Any, k: Any) -> Any:
    return (q @ k.mT * 0.25).softmax(-1)


def difference(q: Any, k: Any, v: Any, r: Any) -> Any:
    """Two softmaxes, one product."""
    return (weights(q, k) - 0.5 * weights(r, k)) @ v


def difference_of_heads(q: Any, k: Any, v: Any, r: Any) -> Any:
    w = weights(torch.stack((q, r), 1), k[:, None])
    return (w[:, 0] - 0.5 * w[:, 1]) @ v


def less_a_mask(q: Any, k: Any, v: Any, r: Any) -> Any:
    return (weights(q, k) - torch.eye(N)) @ v


def squared(q: Any, k: Any, v: Any, r: Any) -> Any:
    return weights(q, k).square() @ v


def mixed(q: Any, k: Any, v: Any, r: Any) -> Any:
    return F.conv2d(weights(q, k), torch.eye(H)[..., None, None].to(q.dtype)) @ v


def twice(q: Any, k: Any, v: Any, r: Any) -> Any:
    w = weights(q, k)
    return w @ v + w @ r


def returned(q: Any, k: Any, v: Any, r: Any) -> Any:
    w = weights(q, k)
    return w @ v, w.mean(1)


REASONS = {
    "difference": (difference, 2, "differential attention", "two attentions"),
    "difference of heads": (difference_of_heads, 1, "differential attention", "two attentions"),
    "difference to a mask": (less_a_mask, 1, "sub stands between the softmax and the product with v", ""),
    "squared": (squared, 1, "square stands between the softmax and the product with v", ""),
    "mixed": (mixed, 1, "conv2d stands between the softmax and the product with v", ""),
    "twice": (twice, 1, "used elsewhere, by matmul", ""),
    "returned": (returned, 1, "used elsewhere, by mean", "need_weights=False"),
}


@cases(REASONS)
def test_reason(case: Any) -> None:
    fn, count, reason, hint = case
    seen = check(fn, (*qkv(N, N), rand(B, H, N, D)), fused=0, reason=reason)
    assert len(seen.sites) == count, seen.sites
    assert all(bool(site.hint) == bool(hint) and hint in site.hint for site in seen.sites)


def test_no_product() -> None:
    """A softmax that no product reads is no site."""
    seen = check(lambda q, k, v: weights(q, k).sum(-1) + v.sum(-1), qkv(N, N), fused=0)
    assert not seen.sites
