"""Softmaxes that are no attention, or attention in other words, and values that are overwritten."""

from __future__ import annotations

import torch

from tests.attention.support import HEADS, KV_LEN, Q_LEN, cases, check, qkv, rand


def test_softmax_off_by_one() -> None:
    """exp(s) / (1 + sum exp(s)) in other words."""

    def fn(q, k, v):
        scores = torch.nn.functional.pad(q @ k.transpose(-1, -2) * 0.3, (1, 0))
        return torch.softmax(scores, dim=-1)[..., 1:] @ v

    check(fn, qkv(), fused=0)


def test_key_of_zeros() -> None:
    """add_zero_attn: the extra key is in k and v, and this is plain attention."""

    def fn(q, k, v):
        k, v = (torch.cat([t, t.new_zeros(*t.shape[:2], 1, t.shape[-1])], dim=-2) for t in (k, v))
        return torch.softmax(q @ k.transpose(-1, -2) * 0.3, dim=-1) @ v

    check(fn, qkv())


NOT_SOFTMAX = {
    "sigmoid": lambda s: torch.sigmoid(s),
    "relu": lambda s: torch.relu(s) / s.shape[-1],
    "written out": lambda s: s.exp() / s.exp().sum(-1, keepdim=True),
    "squared": lambda s: s.softmax(-1).square(),
    "of softmax": lambda s: s.softmax(-1).softmax(-1),
    "gumbel without noise": lambda s: (
        (s.softmax(-1) > 0.2).to(s.dtype) + s.softmax(-1) - s.softmax(-1).detach()
    ),
}


@cases(NOT_SOFTMAX)
def test_other_weights(case) -> None:
    check(lambda q, k, v: case(q @ k.transpose(-1, -2) * 0.3) @ v, qkv(), fused=0)


def test_linear_attention() -> None:
    check(lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v), qkv(), fused=0)


def test_sparse_weights() -> None:
    """Only the three largest weights are used."""

    def fn(q, k, v):
        weights = torch.softmax(q @ k.transpose(-1, -2) * 0.3, dim=-1)
        value, index = weights.topk(3, dim=-1)
        return torch.zeros_like(weights).scatter(-1, index, value) @ v

    check(fn, qkv(), fused=0)


def test_talking_heads() -> None:
    """Scores and weights are mixed over the heads."""

    def fn(q, k, v, before, after):
        scores = torch.einsum("bhqk,hg->bgqk", q @ k.transpose(-1, -2), before)
        return torch.einsum("bhqk,hg->bgqk", torch.softmax(scores, -1), after) @ v

    check(fn, (*qkv(), rand(HEADS, HEADS), rand(HEADS, HEADS)), fused=0)


def test_router() -> None:
    """A mixture of experts: a softmax over a product, times a matrix, and no attention of queries."""

    def fn(x, gate, experts):
        return torch.softmax(x @ gate.mT, dim=-1) @ experts

    check(fn, (rand(5, 16), rand(4, 16), rand(4, 24)))


def test_classifier() -> None:
    """A linear layer above the softmax: no product of two activations is lost."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)

        def forward(self, x):
            return self.second(torch.softmax(self.first(x), dim=-1))

    check(Model(), (rand(5, 16),), fused=0)


def test_q_overwritten() -> None:
    """The product has q as it was before."""

    def before(q, k, v):
        q = q * 1.0
        scores = q @ k.transpose(-1, -2) * 0.3
        q.mul_(2.0)
        return torch.softmax(scores, dim=-1) @ v + q.sum()

    check(before, qkv(grad=False), train=False, fused=None)

    def each(which):
        def fn(q, k, v):
            q, k, v = q * 1.0, k * 1.0, v * 1.0
            weights = torch.softmax(q @ k.transpose(-1, -2) * 0.3, dim=-1)
            (q, k, v)[which].zero_()
            return weights @ v + q.sum() + k.sum()

        return fn

    for which in range(3):
        check(each(which), qkv(grad=False), train=False, fused=None)


def test_view_of_k_overwritten() -> None:
    """A cache that is updated in place between the product of q and k and that with v."""

    def fn(q, k, v):
        cache = k.clone()
        weights = torch.softmax(q @ cache[:, :, :KV_LEN].transpose(-1, -2) * 0.3, dim=-1)
        cache[:, :, 0] = 5.0
        return weights @ v + cache.sum()

    check(fn, qkv(grad=False), train=False, fused=None)


def test_result_overwritten() -> None:
    """The output of a fused call is written to, as that of a product may be."""

    def fn(q, k, v):
        out = torch.softmax(q @ k.transpose(-1, -2) * 0.3, dim=-1) @ v
        out[:, 0] = 0.0
        out.mul_(2.0)
        view = out.transpose(1, 2).reshape(q.shape[0], Q_LEN, -1)
        return out, view

    # A kernel keeps its output for the backward: writing to it is for AOTAutograd to sort out.
    check(fn, qkv(), train=False)
    check(fn, qkv(), backend="inductor")


def test_result_viewed() -> None:
    """`view` needs strides that a fused kernel may not give."""

    def fn(q, k, v):
        out = torch.softmax(q @ k.transpose(-1, -2) * 0.3, dim=-1) @ v
        b, h, s, d = out.shape
        return (
            out.view(b * h, s, d),
            out.view(b, h, -1),
            out.permute(0, 2, 1, 3).contiguous().view(b, s, h * d),
        )

    check(fn, qkv())
    strided = tuple(t.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_() for t in qkv())
    check(fn, strided)


def test_strides_that_are_asked_for() -> None:
    def fn(q, k, v):
        out = torch.softmax(q @ k.transpose(-1, -2) * 0.3, dim=-1) @ v
        return torch.as_strided(out, (Q_LEN, 4), (16, 1)) + out.stride(-2)

    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2).detach() for t in qkv())
    check(fn, (q, k, v), train=False, fused=None)
