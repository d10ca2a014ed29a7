"""The dims of scores and weights in any order, viewed apart, or in two products."""

from __future__ import annotations

from typing import Any

import torch

from tests.attention.support import (
    BATCH,
    DIM,
    HEADS,
    KV_LEN,
    Q_LEN,
    capture,
    cases,
    check,
    qkv,
    rand,
    sdpa,
    unfused,
)

B, H, Q, K, D = BATCH, HEADS, Q_LEN, KV_LEN, DIM
einsum = torch.einsum


def softmax(scores: Any, dim: int = -1) -> Any:
    return torch.softmax(scores * 0.3, dim=dim)


def channels_first() -> tuple[Any, ...]:
    return rand(B, H, D, Q), rand(B, H, D, K), rand(B, H, D, K)


def queries_first() -> tuple[Any, ...]:
    return rand(Q, B, H, D), rand(K, B, H, D), rand(K, B, H, D)


def heads_inside() -> tuple[Any, ...]:
    return rand(B, Q, H, D), rand(B, K, H, D), rand(B, K, H, D)


PRODUCTS = {
    "all channels first": (lambda q, k, v: softmax(q.mT @ k) @ v.mT, channels_first),
    "channels first by einsum": (
        lambda q, k, v: einsum("bhij,bhdj->bhid", softmax(einsum("bhdi,bhdj->bhij", q, k)), v),
        channels_first,
    ),
    "channels first and last": (
        lambda q, k, v: einsum("bhij,bhdj->bhdi", softmax(einsum("bhdi,bhdj->bhij", q, k)), v),
        channels_first,
    ),
    "weights on the right": (lambda q, k, v: v.mT @ softmax(q @ k.mT).mT, qkv),
    "weights on the right, viewed": (
        lambda q, k, v: (v @ softmax(q.mT @ k).transpose(-2, -1)).view(B, H * D, Q),
        channels_first,
    ),
    "bmm with permuted weights": (
        lambda q, k, v: torch.bmm(v, softmax(torch.bmm(q, k.permute(0, 2, 1))).permute(0, 2, 1)),
        lambda: (rand(B, Q, D), rand(B, K, D), rand(B, D, K)),
    ),
    "scores transposed": (lambda q, k, v: softmax((k @ q.mT).mT) @ v, qkv),
    "softmax over the first of both": (lambda q, k, v: v.mT @ softmax(k @ q.mT, -2), qkv),
    "weights transposed": (lambda q, k, v: softmax(k @ q.mT, -2).mT @ v, qkv),
    "queries and keys first": (
        lambda q, k, v: einsum("ijbn,jbnd->ibnd", softmax(einsum("ibnd,jbnd->ijbn", q, k), 1), v),
        queries_first,
    ),
    "queries before heads": (
        lambda q, k, v: einsum("bsht,bthd->bshd", softmax(einsum("bshd,bthd->bsht", q, k)), v),
        heads_inside,
    ),
    "heads last": (
        lambda q, k, v: einsum("bijh,bjhd->bihd", softmax(einsum("bihd,bjhd->bijh", q, k), 2), v),
        heads_inside,
    ),
    "keys before queries": (
        lambda q, k, v: einsum("bhji,bhjd->bhid", softmax(einsum("bhid,bhjd->bhji", q, k), 2), v),
        qkv,
    ),
    "ellipsis": (
        lambda q, k, v: einsum("...ij,...jd->...id", softmax(einsum("...id,...jd->...ij", q, k)), v),
        qkv,
    ),
    "ellipsis in the middle": (
        lambda q, k, v: einsum("b...ij,b...jd->b...id", softmax(einsum("b...id,b...jd->b...ij", q, k)), v),
        qkv,
    ),
    "ellipsis of one operand": (
        lambda q, k, v: einsum("...ij,jd->...id", softmax(einsum("...id,jd->...ij", q, k)), v),
        lambda: (rand(B, H, Q, D), rand(K, D), rand(K, D)),
    ),
    "no result is named": (lambda q, k, v: softmax(einsum("bhid,bhjd", q, k.detach() * 1.0)) @ v, qkv),
    "two summed letters": (
        lambda q, k, v: einsum("hnij,rjnhd->rinhd", softmax(einsum("rinhd,rjnhd->hnij", q, k) * 0.2), v),
        lambda: (rand(4, Q, B, H, 8), rand(4, K, B, H, 8), rand(4, K, B, H, 8)),
    ),
    "heads summed as well": (
        lambda q, k, v: softmax(einsum("bhqd,bhkd->bqk", q, k) * 0.3) @ v[:, 0],
        qkv,
    ),
    "leading dims transposed": (
        lambda q, k, v: softmax(q @ k.mT).transpose(0, 1) @ v.transpose(0, 1),
        qkv,
    ),
    "leading dims of the scores permuted": (
        lambda q, k, v: softmax((q @ k.mT).permute(1, 0, 2, 3)) @ v.transpose(0, 1),
        qkv,
    ),
    "queries and keys of images": (
        lambda q, k, v: einsum("bxyuw,buwd->bxyd", softmax(einsum("bxyd,buwd->bxyuw", q, k).flatten(3)).view(
            B, 2, 3, 3, 5), v),
        lambda: (rand(B, 2, 3, D), rand(B, 3, 5, D), rand(B, 3, 5, D)),
    ),
}  # fmt: skip


@cases({name: case for name, case in PRODUCTS.items() if name != "no result is named"})
def test_products(case: Any) -> None:
    fn, inputs = case
    check(fn, inputs())
    check(fn, inputs(), train=False)


def test_result_that_is_not_named() -> None:
    """Its letters are in the order of the alphabet: queries and keys come out apart from batch and heads."""
    check(lambda q, k, v: softmax(einsum("id,jd", q, k)) @ v, (rand(Q, D), rand(K, D), rand(K, D)))


@cases({
    "values summed over queries": lambda q, k, v: q.mT @ softmax(q @ k.mT),
    "softmax over the queries": lambda q, k, v: softmax(q @ k.mT, -2) @ v,
    "softmax over the heads": lambda q, k, v: softmax(q @ k.mT, 1) @ v,
    "keys and heads together": lambda q, k, v: softmax((q @ k.mT).transpose(1, 2).flatten(2)).view(
        B, Q, H, K).transpose(1, 2) @ v,
    "another dim behind": lambda q, k, v: einsum("bhij,bhid->bhjd", softmax(q @ k.mT), q),
})  # fmt: skip
def test_other_dims(case: Any) -> None:
    check(case, qkv(), fused=0)


def causal(n: int) -> Any:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


MASKED = {
    "queries and keys first": (
        lambda q, k, v: einsum(
            "ijbn,jbnd->ibnd",
            softmax(einsum("ibnd,jbnd->ijbn", q, k).masked_fill(causal(Q)[..., None, None], -1e9), 1), v,
        ),
        lambda: (rand(Q, B, H, D), rand(Q, B, H, D), rand(Q, B, H, D)),
    ),
    "queries before heads": (
        lambda q, k, v: einsum(
            "bsht,bthd->bshd",
            softmax(einsum("bshd,bthd->bsht", q, k) + torch.full((Q, Q), -torch.inf).triu(1).unsqueeze(1)), v,
        ),
        lambda: (rand(B, Q, H, D), rand(B, Q, H, D), rand(B, Q, H, D)),
    ),
    "keys before queries": (
        lambda q, k, v: softmax((k @ q.mT).masked_fill(causal(Q).T, -torch.inf), -2).mT @ v,
        lambda: qkv(Q, Q),
    ),
}  # fmt: skip


@cases(MASKED)
def test_causal(case: Any) -> None:
    """What a mask says is read at the dims of the queries and keys."""
    fn, inputs = case
    seen = check(fn, inputs(), kernel="is_causal")
    assert sdpa(seen.ours).kwargs["is_causal"] is True


def test_causal_the_other_way() -> None:
    """A mask that hides earlier keys is not causal, though it is where queries are taken for keys."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        return softmax((k @ q.mT).masked_fill(causal(Q), -1e9), -2).mT @ v

    assert not sdpa(check(fn, qkv(Q, Q)).ours).kwargs["is_causal"]


def test_padding_and_scales_in_another_order() -> None:
    def fn(q: Any, k: Any, v: Any, pad: Any, scale: Any, bias: Any) -> Any:
        s = einsum("ibnd,jbnd->ijbn", q, k) * scale + bias
        return einsum("ijbn,jbnd->ibnd", softmax(s.masked_fill(pad, -1e9), 1), v)

    pad = torch.rand(1, K, B, 1) < 0.3
    pad[:, 0] = False
    check(fn, (*queries_first(), pad, rand(H), rand(Q, K, 1, H)))


def test_shared_keys_before_heads() -> None:
    """Of two dims that could be the queries, those that masks vary over are taken."""

    def fn(q: Any, k: Any, v: Any) -> Any:
        s = einsum("bshd,btd->bsht", q, k) + torch.full((Q, Q), -torch.inf).triu(1).unsqueeze(1)
        return einsum("bsht,btd->bshd", softmax(s), v)

    seen = check(fn, (rand(B, Q, H, D), rand(B, Q, D), rand(B, Q, D)), kernel="is_causal")
    assert sdpa(seen.ours).kwargs["is_causal"] is True


def apart(q: Any, k: Any, v: Any, high: Any, wide: Any) -> Any:
    s = (q @ k.mT * 0.25).view(B, 2, 3, 2, 3) + high[..., None] + wide[..., None, :]
    return s.view(B, 6, 6).softmax(-1) @ v


def of_a_table(q: Any, k: Any, v: Any, high: Any, wide: Any) -> Any:
    """As in image encoders: each query has its own positions of rows and columns of keys."""
    r = q.reshape(B, 2, 3, D)
    return apart(q, k, v, einsum("bhwc,hkc->bhwk", r, high), einsum("bhwc,wkc->bhwk", r, wide))


def test_positions_of_images() -> None:
    operands = rand(B, 6, D), rand(B, 6, D), rand(B, 6, D)
    check(apart, (*operands, rand(B, 2, 3, 2), rand(B, 2, 3, 3)))
    check(of_a_table, (*operands, rand(2, 2, D), rand(3, 3, D)))
    check(apart, (*operands, rand(B, 2, 3, 2), rand(B, 2, 3, 3)), train=False)


def test_queries_and_keys_mixed() -> None:
    """A view in which a dim holds queries and keys is none of a matrix of scores."""

    def fn(q: Any, k: Any, v: Any, bias: Any) -> Any:
        s = (q @ k.mT * 0.25).view(B, 36) + bias
        return s.view(B, 6, 6).softmax(-1) @ v

    unfused(fn, (rand(B, 6, D), rand(B, 6, D), rand(B, 6, D), rand(36)), "in-between")


def both_ways(q: Any, k: Any, v: Any, u: Any) -> Any:
    s = q @ k.mT * 0.25
    return s.softmax(-1) @ v, s.mT.softmax(-1) @ u


def both_ways_by_einsum(q: Any, k: Any, v: Any, u: Any) -> Any:
    s = einsum("bhid,bhjd->bhij", q * 0.5, k * 0.5)
    there = torch.softmax(s, dim=-1)
    back = torch.softmax(s.transpose(-2, -1).contiguous(), dim=-1)
    return einsum("bhij,bhjd->bhid", there, v), einsum("bhji,bhid->bhjd", back, u)


def both_ways_of_one(q: Any, k: Any, v: Any, u: Any) -> Any:
    s = q @ k.mT * 0.25
    return s.softmax(-1) @ v, s.softmax(-2).mT @ u


@cases({"transposed": both_ways, "einsum": both_ways_by_einsum, "over both dims": both_ways_of_one})
def test_both_directions(case: Any) -> None:
    """Two softmaxes on one matrix are two attentions."""
    inputs = (*qkv(), rand(B, H, Q, D))
    check(case, inputs, fused=2)
    check(case, inputs, fused=2, train=False)


def test_two_softmaxes_of_which_one_is_no_attention() -> None:
    """The scores are in memory for the other one."""

    def returned(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.mT * 0.25
        return s.softmax(-1) @ v, s.mT.softmax(-1)

    def activated(q: Any, k: Any, v: Any, u: Any) -> Any:
        s = q @ k.mT * 0.25
        return s.softmax(-1) @ v, torch.tanh(s.mT).softmax(-1) @ u

    check(returned, qkv(), fused=0, reason="used-elsewhere")
    check(activated, (*qkv(), rand(B, H, Q, D)), fused=0, reason="used-elsewhere")


def test_changing_sizes() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = einsum("ibnd,jbnd->ijbn", q, k)
        s = s.masked_fill(causal(q.shape[0])[:, :, None, None], -torch.inf)
        return einsum("ijbn,jbnd->ibnd", softmax(s, 1), v)

    for n in (5, 9):
        check(fn, (rand(n, B, H, D), rand(n, B, H, D), rand(n, B, H, D)), dynamic=True)


def test_strides_of_results() -> None:
    """What a caller gets lies in memory as in eager mode."""
    for name in ("weights on the right", "queries and keys first", "queries before heads"):
        fn, inputs = PRODUCTS[name]
        given = inputs()
        seen = capture(fn, *given)
        (ours,) = seen.outputs.values() if isinstance(seen.outputs, dict) else [seen.outputs]
        assert ours.stride() == fn(*given).stride(), name
