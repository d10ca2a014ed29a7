"""Keys and values shared by groups of query heads."""

from __future__ import annotations

import pytest
import torch

from tests.attention.support import BATCH, DIM, KV_LEN, Q_LEN, cases, check, qkv, rand, scored, sdpa

HEADS, SHARED = 6, 2
TIMES = HEADS // SHARED
B, Q, K, D = BATCH, Q_LEN, KV_LEN, DIM


def inputs(heads: int = HEADS, shared: int = SHARED) -> tuple[torch.Tensor, ...]:
    return qkv(heads=heads, kv_heads=shared)


attend = scored(lambda s: s * 0.3)


def repeat_kv(t, times=TIMES):
    """As in Hugging Face's models."""
    b, h, s, d = t.shape
    return t[:, :, None, :, :].expand(b, h, times, s, d).reshape(b, h * times, s, d)


REPEATS = {
    "repeat_kv": repeat_kv,
    "unsqueeze": lambda t: t.unsqueeze(2).expand(-1, -1, TIMES, -1, -1).reshape(B, HEADS, K, D),
    "expand_as": lambda t: t[:, :, None].expand_as(t.new_empty(B, SHARED, TIMES, K, D)).flatten(1, 2),
    "broadcast_to": lambda t: torch.broadcast_to(t[:, :, None], (B, SHARED, TIMES, K, D)).flatten(1, 2),
    "contiguous": lambda t: t[:, :, None].expand(B, SHARED, TIMES, K, D).contiguous().view(B, HEADS, K, D),
    "repeat_interleave": lambda t: t.repeat_interleave(TIMES, dim=1),
    "repeat_interleave, function": lambda t: torch.repeat_interleave(t, TIMES, 1),
    "repeat_interleave, negative dim": lambda t: t.repeat_interleave(TIMES, dim=-3),
    "before the transpose": lambda t: t.transpose(1, 2).repeat_interleave(TIMES, dim=2).transpose(1, 2),
    "cast afterwards": lambda t: repeat_kv(t).to(t.dtype),
}


@cases(REPEATS)
def test_repeated(case) -> None:
    seen = check(lambda q, k, v: attend(q, case(k), case(v)), inputs(), kernel="enable_gqa")
    call = sdpa(seen.ours)
    assert call.kwargs["enable_gqa"] is True
    assert call.args[1].meta["example_value"].shape == (B, SHARED, K, D)


def _repeat(t):
    return t.repeat(1, TIMES, 1, 1)


NOT_GROUPED = {
    "repeat": _repeat,
    "concatenated": lambda t: torch.cat([t] * TIMES, dim=1),
    "expand in front": lambda t: t[:, None].expand(B, TIMES, SHARED, K, D).reshape(B, HEADS, K, D),
    "tile": lambda t: torch.tile(t, (1, TIMES, 1, 1)),
    "interleaved over keys": lambda t: (
        t[:, :, :, None].expand(B, SHARED, K, TIMES, D).reshape(B, HEADS, K, D)
    ),
}


@cases(NOT_GROUPED)
def test_other_order_of_heads(case) -> None:
    """Head i is not head i // n: fused with k and v as they are."""
    seen = check(lambda q, k, v: attend(q, case(k), case(v)), inputs())
    assert "enable_gqa" not in seen.sites[0].kernel


MISMATCHED = {
    "k repeated, v interleaved": (_repeat, repeat_kv),
    "k interleaved, v repeated": (repeat_kv, _repeat),
    "v has all heads": (repeat_kv, lambda t: t.flip(1).repeat(1, TIMES, 1, 1) * 2.0),
    "permuted afterwards": (lambda t: repeat_kv(t).flip(1), repeat_kv),
    "groups of other size": (
        lambda t: t.repeat_interleave(TIMES, dim=1),
        lambda t: t[:, :1].repeat_interleave(HEADS, dim=1),
    ),
}


@cases(MISMATCHED)
def test_mismatched(case) -> None:
    change_k, change_v = case
    seen = check(lambda q, k, v: attend(q, change_k(k), change_v(v)), inputs())
    assert "enable_gqa" not in seen.sites[0].kernel


@pytest.mark.parametrize("heads", [2, 5])
def test_multi_query(heads: int) -> None:
    """One head of keys and values, by broadcast."""
    check(attend, inputs(heads, 1))
    check(
        lambda q, k, v: attend(q, k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)), inputs(heads, 1)
    )
    check(lambda q, k, v: attend(q, k[:, 0:1], v[:, 0:1]), inputs(heads, 2))


def test_multi_query_without_dim() -> None:
    """k and v have no head dim at all."""
    check(attend, (rand(3, Q, D), rand(K, D), rand(K, D)))
    fn = lambda q, k, v: torch.einsum(  # noqa: E731
        "bhqk,bkd->bhqd", torch.softmax(torch.einsum("bhqd,bkd->bhqk", q, k) * 0.3, -1), v
    )
    check(fn, (rand(B, 3, Q, D), rand(B, K, D), rand(B, K, D)))


def test_merged_queries() -> None:
    """GPTBigCode: queries of all heads in one dim, against one key head."""

    def fn(q, k, v):
        b, h, s, d = q.shape
        scores = torch.bmm(q.transpose(1, 2).reshape(b, s * h, d), k.mT).view(b, s, h, -1)
        weights = torch.softmax(scores * 0.3, dim=-1)
        return torch.bmm(weights.view(b, s * h, -1), v).view(b, s, h, d)

    check(fn, (rand(B, 3, Q, D), rand(B, K, D), rand(B, K, D)), fused=None)


FIVE_DIMS = {
    "einsum": (
        lambda q, k, v: torch.einsum(
            "bhgqk,bkhd->bqhgd", torch.softmax(torch.einsum("bqhgd,bkhd->bhgqk", q, k) * 0.3, -1), v
        ),
        lambda: (rand(B, Q, SHARED, TIMES, D), rand(B, K, SHARED, D), rand(B, K, SHARED, D)),
    ),
    "einsum, groups first": (
        lambda q, k, v: torch.einsum(
            "bghqk,bkhd->bqghd", torch.softmax(torch.einsum("bqghd,bkhd->bghqk", q, k) * 0.3, -1), v
        ),
        lambda: (rand(B, Q, TIMES, SHARED, D), rand(B, K, SHARED, D), rand(B, K, SHARED, D)),
    ),
    "broadcast": (
        lambda q, k, v: attend(
            q.view(B, SHARED, TIMES, Q, D), k.unsqueeze(2), v.unsqueeze(2)
        ).reshape(B, HEADS, Q, D),
        lambda: inputs(),
    ),
    "broadcast, groups first": (
        lambda q, k, v: attend(q, k.unsqueeze(1), v.unsqueeze(1)),
        lambda: (rand(B, TIMES, SHARED, Q, D), rand(B, SHARED, K, D), rand(B, SHARED, K, D)),
    ),
    "broadcast, mask": (
        lambda q, k, v, m: torch.softmax(
            q.view(B, SHARED, TIMES, Q, D) @ k.unsqueeze(2).mT * 0.3 + m[:, :, None], -1
        ) @ v.unsqueeze(2),
        lambda: (*inputs(), rand(B, 1, Q, K, grad=False)),
    ),
}  # fmt: skip


@cases(FIVE_DIMS)
def test_five_dims(case) -> None:
    fn, make = case
    check(fn, make())


BROADCAST = {
    "v without batch": lambda q, k, v: attend(q, k, v[:1]),
    "k without batch": lambda q, k, v: attend(q, k[:1], v),
    "both without batch": lambda q, k, v: attend(q, k[0], v[0]),
    "v without head": lambda q, k, v: attend(q, k, v[:, :1]),
    "k without head": lambda q, k, v: attend(q, k[:, :1], v),
    "v with two dims": lambda q, k, v: attend(q, k, v[0, 0]),
    "q without batch": lambda q, k, v: attend(q[:1], k, v),
    "q without head": lambda q, k, v: attend(q[:, :1], k, v),
    "v with more batch": lambda q, k, v: attend(q[:1], k[:1], v),
    "v with more heads": lambda q, k, v: attend(q[:, :1], k[:, :1], v),
    "v with another dim": lambda q, k, v: attend(q, k, v[None]),
    "weights expanded": lambda q, k, v: torch.softmax(q[:1] @ k[:1].mT * 0.3, -1).expand(B, -1, -1, -1) @ v,
}


@cases(BROADCAST)
def test_broadcast(case) -> None:
    """Fused where it can be, and right."""
    check(case, qkv(heads=3), fused=None)


def test_expanded_weights_are_told() -> None:
    check(BROADCAST["weights expanded"], qkv(heads=3), fused=0, reason="expanded")
    check(BROADCAST["v with another dim"], qkv(heads=3), fused=1)


def test_few_heads_of_an_sdpa_call() -> None:
    """The default path of Hugging Face repeats keys before it calls SDPA."""

    def fn(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v))

    seen = check(fn, inputs(), kernel="enable_gqa")
    call = sdpa(seen.ours)
    assert call.args[1].meta["example_value"].shape == (B, SHARED, K, D)

    def other(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, _repeat(k), _repeat(v))

    check(other, inputs(), fused=0)
