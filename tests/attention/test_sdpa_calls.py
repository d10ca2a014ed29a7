"""Calls of scaled_dot_product_attention: what their mask costs and does not say, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions import config
from tests.attention.support import (
    BATCH,
    HEADS,
    KV_LEN,
    Q_LEN,
    additive,
    capture,
    cases,
    check,
    flex_everywhere,
    qkv,
    rand,
    same_as_eager,
    sdpa,
    unfused,
    visible,
)

S = 9


def causal(q, k):
    return torch.arange(k.shape[-2]) <= torch.arange(q.shape[-2])[:, None]


def test_options_are_kept() -> None:
    def fn(q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=causal(q, k), dropout_p=0.25, scale=0.3, enable_gqa=True
        )

    run = capture(fn, *qkv(S, S, heads=6, kv_heads=2), train=True)
    kwargs = dict(sdpa(run).kwargs)
    assert kwargs.pop("attn_mask", None) is None
    assert kwargs == {"dropout_p": 0.25, "is_causal": True, "scale": 0.3, "enable_gqa": True}


def test_default_scale_is_kept() -> None:
    """No scale given is 1 / sqrt(dim), not 1."""
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q, k))  # noqa: E731
    call = sdpa(check(fn, qkv(S, S, dim=24)).ours)
    assert call.kwargs.get("scale") in (None, 24**-0.5)


@pytest.mark.parametrize("call", [
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal(q, k), 0.0, False, scale=0.3),
    lambda q, k, v: torch.ops.aten.scaled_dot_product_attention.default(q, k, v, causal(q, k), scale=0.3),
], ids=["by position", "of aten"])  # fmt: skip
def test_options(call: Any) -> None:
    check(call, qkv(S, S), kernel="is_causal")


GIVEN = {
    "boolean": lambda: visible(BATCH, 1, Q_LEN, KV_LEN),
    "additive": lambda: additive(visible(BATCH, 1, Q_LEN, KV_LEN)),
    "padding": lambda: visible(BATCH, 1, 1, KV_LEN),
    "bias": lambda: rand(1, HEADS, Q_LEN, KV_LEN),
    "two dims": lambda: torch.randn(Q_LEN, KV_LEN),
    "three dims": lambda: torch.randn(HEADS, Q_LEN, KV_LEN),
}


@cases(GIVEN)
def test_unknown_mask_is_unchanged(case) -> None:
    fn = lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.3)  # noqa: E731
    seen = check(fn, (*qkv(), case()), fused=0)
    assert [site.verdict for site in seen.sites] == ["left to stock"]
    (mask,) = [n for n in seen.ours.graphs[0].graph.nodes if n.op == "placeholder" and n.name[-2] == "m"]
    assert sdpa(seen.ours).kwargs["attn_mask"] is mask


UNCHANGED = {
    "no mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "causal, rectangle": lambda q, k, v: F.scaled_dot_product_attention(q[..., :4, :], k, v, is_causal=True),
    "three dims": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=causal(q, k)),
    "five dims": lambda q, k, v: F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=causal(q, k)
    ),
    "strict": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=(torch.arange(S) < torch.arange(S)[:, None]) | (torch.arange(S) == 0)
    ),
}


@cases(UNCHANGED)
def test_other_calls(case) -> None:
    check(case, qkv(S, S), fused=None)


def test_mask_with_gradient() -> None:
    """A bias that starts as zeros, or as a causal mask, may be learned."""

    def fn(q, k, v, weight):
        mask = torch.where(causal(q, k), 0.0, -1e9) + 0.0 * weight
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def learned(q, k, v):
        mask = torch.zeros(S, S, dtype=q.dtype, requires_grad=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    check(fn, (*qkv(S, S), rand(S, S)), fused=None)
    check(learned, qkv(S, S), fused=None)


def test_mask_that_is_overwritten() -> None:
    def fn(q, k, v):
        mask = torch.zeros(S, S, dtype=q.dtype)
        mask[:, 4:] = -3.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def later(q, k, v):
        mask = torch.ones(S, S, dtype=torch.bool).tril()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mask.fill_(False)
        return out + mask.sum()

    check(fn, qkv(S, S), fused=0)
    check(later, qkv(S, S), fused=None)


@cases({
    # As an additive mask they are a bias of one.
    "1.0 and 0.0": lambda seen: seen.float(),
    **{f"filled with {fill}": lambda seen, f=fill: torch.zeros(S, S).masked_fill(~seen, f)
       for fill in (-1.0, -100.0, 1e9)},
})  # fmt: skip
def test_numbers_that_do_not_hide(case) -> None:
    fn = lambda q, k, v: F.scaled_dot_product_attention(  # noqa: E731
        q, k, v, attn_mask=case(causal(q, k)).to(q.dtype)
    )
    assert not sdpa(check(fn, qkv(S, S), fused=0).ours).kwargs.get("is_causal")


def test_several_calls() -> None:
    """A mask shared by layers: each becomes causal."""

    def fn(q, k, v):
        mask = causal(q, k)
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return q

    check(fn, qkv(S, S), fused=3, kernel="is_causal")


@pytest.mark.parametrize("length", [8, 300])
def test_multihead_attention_that_does_not_pay_has_a_reason(length: int) -> None:
    """Where no kernel is measured to be faster."""
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(1, length, 32)
    run = capture(lambda x: module(x, x, x)[0], x, policy="profitable")
    (site,) = run.sites
    assert site.verdict == "left to stock" and site.reason


@pytest.mark.parametrize("more", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("additive", [False, True])
def test_multihead_attention_with_more_keys_than_tokens(more: dict[str, bool], additive: bool) -> None:
    """A mask is causal over the tokens; the keys that the module adds are seen by all."""
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True, **more)
    for name in ("bias_k", "bias_v"):
        if getattr(module, name) is not None:
            torch.nn.init.normal_(getattr(module, name))

    def call(x: Any) -> Any:
        mask = torch.full((9, 9), -math.inf).triu(1) if additive else torch.ones(9, 9).triu(1).bool()
        return module(x, x, x, attn_mask=mask)[0]

    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        same_as_eager(call, [x])


@pytest.mark.parametrize("shared", [0, 1], ids=["samples", "heads"])
def test_queries_that_are_shared(shared: int) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        mask = torch.ones(9, 9, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q.narrow(shared, 0, 1), k, v, attn_mask=mask)

    unfused(call, qkv(9, 9), "more samples or heads of keys")


PADDED = "already an SDPA call; its mask is causal+pad, and flex attention "


@pytest.mark.parametrize(("call", "kernel", "everywhere", "reason"), [
    (lambda q, k, v, m: sdpa_of(q, k, v, m), "auto", False, f"{PADDED}is used on cuda only, not on cpu"),
    (lambda q, k, v, m: sdpa_of(q, k, v, m), "flex", False, f"{PADDED}is used on cuda only"),
    (lambda q, k, v, m: sdpa_of(q, k, v, m, dropout_p=0.1), "auto", False, f"{PADDED}has no dropout"),
    (lambda q, k, v, m: sdpa_of(q, k, v, m), "sdpa", True, f"{PADDED}is not selected"),
    (lambda q, k, v, m: sdpa_of(q, k, v, None), "auto", False, "already an SDPA call without a mask"),
    (lambda q, k, v, m: sdpa_of(q, k, v, rand(S, S)), "auto", False, "nothing is proved about its mask"),
])  # fmt: skip
def test_reason(call: Any, kernel: str, everywhere: bool, reason: str) -> None:
    """What was proved of a mask, and what is missing for a kernel that skips what it hides."""
    inputs = (*qkv(S, S, dim=16, grad=False), torch.ones(BATCH, S).bool())
    allowed = flex_everywhere(kernel) if everywhere else config.patch(attention_kernel=kernel)
    with config.patch(policy="always"), allowed:
        seen = capture(call, *inputs)
    (site,) = seen.sites
    assert site.verdict == "left to stock" and reason in site.reason, site


def sdpa_of(q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
    if mask is not None and mask.dtype == torch.bool:
        mask = causal(q, k) & mask[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
