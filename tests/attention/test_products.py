"""The two products: spellings, layouts, ranks, softmaxes, and products that only look alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.attention.support import BATCH, DIM, HEADS, KV_LEN, Q_LEN, cases, check, qkv, rand, scored, unfused

B, H, Q, K, D = BATCH, HEADS, Q_LEN, KV_LEN, DIM


def softmax(scores):
    return torch.softmax(scores * 0.3, dim=-1)


def merged(t):
    return t.reshape(-1, *t.shape[-2:])


FOUR_DIMS = {
    "@": lambda q, k, v: softmax(q @ k.transpose(-2, -1)) @ v,
    "matmul": lambda q, k, v: torch.matmul(softmax(torch.matmul(q, k.transpose(2, 3))), v),
    "matmul, keywords": lambda q, k, v: torch.matmul(
        input=softmax(torch.matmul(input=q, other=k.transpose(2, 3))), other=v
    ),
    "method": lambda q, k, v: softmax(q.matmul(k.transpose(-1, -2))).matmul(v),
    "mT": lambda q, k, v: softmax(q @ k.mT) @ v,
    "swapaxes": lambda q, k, v: softmax(q @ k.swapaxes(-1, -2)) @ v,
    "swapdims": lambda q, k, v: softmax(q @ torch.swapdims(k, 2, 3)) @ v,
    "permute": lambda q, k, v: softmax(q @ k.permute(0, 1, 3, 2)) @ v,
    "permute, list": lambda q, k, v: softmax(q @ torch.permute(k, (0, 1, -1, -2))) @ v,
    "transpose, function": lambda q, k, v: softmax(q @ torch.transpose(k, 3, 2)) @ v,
    "contiguous": lambda q, k, v: softmax(q.contiguous() @ k.mT.contiguous()).contiguous() @ v.contiguous(),
    "clone": lambda q, k, v: softmax((q @ k.mT.clone()).clone()).clone() @ v,
    "transposed three times": lambda q, k, v: softmax(q @ k.mT.mT.mT) @ v,
    "bmm": lambda q, k, v: torch.bmm(
        softmax(torch.bmm(merged(q), merged(k).transpose(1, 2))), merged(v)
    ).view(B, H, Q, D),
    "bmm, softmax on 4 dims": lambda q, k, v: torch.bmm(
        merged(softmax(torch.bmm(merged(q), merged(k).mT).view(B, H, Q, K))), merged(v)
    ).view(B, H, Q, D),
    "bmm and matmul": lambda q, k, v: softmax(torch.bmm(merged(q), merged(k).mT).view(B, H, Q, K)) @ v,
    "matmul and bmm": lambda q, k, v: torch.bmm(merged(softmax(q @ k.mT)), merged(v)).view(B, H, Q, D),
    "view of the scores": lambda q, k, v: softmax((q @ k.mT).view(B * H, Q, K)).view(B, H, Q, K) @ v,
    "unflatten": lambda q, k, v: softmax(torch.bmm(merged(q), merged(k).mT).unflatten(0, (B, H))) @ v,
    "flatten": lambda q, k, v: softmax((q @ k.mT).flatten(0, 1)).unflatten(0, (B, H)) @ v,
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", softmax(torch.einsum("bhqd,bhkd->bhqk", q, k)), v
    ),
    "einsum, other letters": lambda q, k, v: torch.einsum(
        "n h i j , n h j c -> n h i c", softmax(torch.einsum("n h i c , n h j c -> n h i j", q, k)), v
    ),
    "einsum, k first": lambda q, k, v: torch.einsum(
        "bhkd,bhqk->bhqd", v, softmax(torch.einsum("bhkd,bhqd->bhqk", k, q))
    ),
    "einsum, list": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", [softmax(torch.einsum("bhqd,bhkd->bhqk", [q, k])), v]
    ),
    "einsum, k transposed": lambda q, k, v: softmax(torch.einsum("bhqd,bhdk->bhqk", q, k.mT)) @ v,
    "einsum, out as (b, q, h, d)": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bqhd", softmax(torch.einsum("bhqd,bhkd->bhqk", q, k)), v
    ),
    "baddbmm": lambda q, k, v: softmax(
        torch.baddbmm(q.new_zeros(B * H, Q, K), merged(q), merged(k).mT, beta=0.0, alpha=0.5).view(B, H, Q, K)
    ) @ v,
    "baddbmm, empty": lambda q, k, v: softmax(
        torch.baddbmm(q.new_empty(B * H, Q, K), merged(q), merged(k).mT, beta=0, alpha=0.5).view(B, H, Q, K)
    ) @ v,
    "scores - 0": lambda q, k, v: softmax(q @ k.mT - 0) @ v,
}  # fmt: skip


@cases(FOUR_DIMS)
def test_four_dims(case) -> None:
    check(case, qkv())


SOFTMAXES = {
    "function": lambda s: torch.softmax(s, -1),
    "positive dim": lambda s: torch.softmax(s, 3),
    "keyword": lambda s: torch.softmax(input=s, dim=-1),
    "functional": lambda s: F.softmax(s, dim=-1),
    "functional, dtype": lambda s: F.softmax(s, dim=-1, dtype=torch.float32).to(s.dtype),
    "method": lambda s: s.softmax(-1),
    "method, dtype": lambda s: s.softmax(dim=3, dtype=torch.float32).to(s.dtype),
    "module": lambda s: torch.nn.Softmax(dim=-1)(s),
    "special": lambda s: torch.special.softmax(s, -1),
    "aten": lambda s: torch.ops.aten.softmax.int(s, -1),
    "aten, _softmax": lambda s: torch.ops.aten._softmax.default(s, -1, False),
}


@cases(SOFTMAXES)
def test_softmax(case) -> None:
    check(lambda q, k, v: case(q @ k.mT * 0.3) @ v, qkv())


LAYOUTS = {
    # XLNet
    "ibnd,jbnd->bnij": (
        lambda q, k, v: torch.einsum("bnij,jbnd->ibnd", softmax(torch.einsum("ibnd,jbnd->bnij", q, k)), v),
        lambda: (rand(Q, B, H, D), rand(K, B, H, D), rand(K, B, H, D)),
    ),
    "transposed views": (
        lambda q, k, v: (
            (softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) @ v.transpose(1, 2))
            .transpose(1, 2).contiguous().view(B, Q, H * D)
        ),
        lambda: (rand(B, Q, H, D), rand(B, K, H, D), rand(B, K, H, D)),
    ),
    "k given transposed": (
        lambda q, k, v: softmax(q @ k) @ v,
        lambda: (rand(B, H, Q, D), rand(B, H, D, K), rand(B, H, K, D)),
    ),
    "packed qkv": (
        lambda x: (lambda q, k, v: softmax(q @ k.mT) @ v)(
            *x.view(B, Q, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        ),
        lambda: (rand(B, Q, 3 * H * D),),
    ),
    "chunked": (
        lambda x: (lambda q, k, v: softmax(q @ k.mT) @ v)(
            *(t.view(B, Q, H, D).transpose(1, 2) for t in x.chunk(3, dim=-1))
        ),
        lambda: (rand(B, Q, 3 * H * D),),
    ),
    "split": (
        lambda x: (lambda q, k, v: softmax(q @ k.mT) @ v)(*x.split([4, 4, 6], dim=-1)),
        lambda: (rand(B, H, Q, 14),),
    ),
    "every second": (
        lambda q, k, v: softmax(q[..., ::2] @ k[..., ::2].mT) @ v[..., 1::2],
        lambda: qkv(),
    ),
    "two dims, t and mm": (
        lambda q, k, v: torch.mm(softmax(torch.mm(q, k.t())), v),
        lambda: (rand(Q, D), rand(K, D), rand(K, D)),
    ),
    "three dims": (
        lambda q, k, v: torch.bmm(softmax(torch.bmm(q, k.transpose(1, 2))), v),
        lambda: (rand(B, Q, D), rand(B, K, D), rand(B, K, D)),
    ),
    "five dims": (
        lambda q, k, v: softmax(q @ k.mT) @ v,
        lambda: (rand(B, 2, H, Q, D), rand(B, 2, H, K, D), rand(B, 2, H, K, D)),
    ),
    "five dims, mask per window": (
        lambda q, k, v, m: softmax(q @ k.mT + m[:, None]) @ v,
        lambda: (rand(B, 2, H, Q, D), rand(B, 2, H, K, D), rand(B, 2, H, K, D), rand(2, Q, K, grad=False)),
    ),
    # Swin: windows split off the batch for the mask, and merged again
    "windows, bias before": (
        lambda q, k, v, m, b: softmax(
            (((q @ k.mT) + b).view(B, 2, H, Q, K) + m.unsqueeze(1).unsqueeze(0)).view(-1, H, Q, K)
        ) @ v,
        lambda: (
            rand(2 * B, H, Q, D), rand(2 * B, H, K, D), rand(2 * B, H, K, D), rand(2, Q, K, grad=False),
            rand(H, Q, K),
        ),
    ),
    # BLOOM
}  # fmt: skip


@cases(LAYOUTS)
def test_layout(case) -> None:
    fn, inputs = case
    check(fn, inputs())


SIZES = {
    "one query": dict(q_len=1),
    "one key": dict(kv_len=1),
    "one query, one key": dict(q_len=1, kv_len=1),
    "one batch": dict(batch=1),
    "one head": dict(heads=1),
    "all ones": dict(q_len=1, kv_len=1, batch=1, heads=1, dim=1),
    "equal lengths": dict(q_len=9, kv_len=9),
    "more queries than keys": dict(q_len=13, kv_len=5),
    "head dim 24": dict(dim=24),
    "head dim 5": dict(dim=5),
    "wider values": dict(v_dim=24),
    "narrower values": dict(v_dim=8),
    "length is dim is heads": dict(q_len=4, kv_len=4, dim=4, heads=4, batch=4),
}


@cases(SIZES)
def test_size(case) -> None:
    q_len, kv_len = case.get("q_len", Q), case.get("kv_len", K)
    mask = rand(q_len, kv_len, grad=False)
    # With one key, the gradients of q and k are zero: what is computed is rounding.
    check(scored(lambda s, m: s * 0.3 + m), (*qkv(**case), mask), train=kv_len > 1)


@pytest.mark.parametrize(
    "dims", [(0, 2, 1, 3), (1, 0, 2, 3), (0, 3, 2, 1), (3, 1, 2, 0), (2, 1, 0, 3)], ids=str
)
def test_k_permuted(dims: tuple[int, ...]) -> None:
    """All sizes are equal, so that any permutation of K gives a product of the right shape."""
    q, k, v = qkv(4, 4, batch=4, heads=4, dim=4)
    check(lambda q, k, v: softmax(q @ k.permute(dims)) @ v, (q, k, v), fused=None)
    check(lambda q, k, v: softmax(q.permute(dims) @ k.mT) @ v.permute(dims), (q, k, v), fused=None)


@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_softmax_over_another_dim(dim: int) -> None:
    def fn(q, k, v):
        return torch.softmax(q @ k.transpose(-2, -1), dim=dim) @ v

    unfused(fn, qkv(4, 4, batch=4, heads=4, dim=4), "no-product")


@pytest.mark.parametrize("equation", ["bhqk,bhkd->bqd", "bhqk,bhqd->bhkd"])
def test_einsum_that_sums_over_heads_or_queries(equation: str) -> None:
    fn = lambda q, k, v: torch.einsum(equation, softmax(q @ k.mT), v)  # noqa: E731
    unfused(fn, qkv(Q, Q), "no-product")


def test_dot_products_of_neighbours() -> None:
    """Each query has keys of its own: every score is a product of a row and a column."""

    def neighbours(q, k, v):
        s = (q[:, :, None, None, :] @ k[..., None]).view(B, Q, K)
        return (softmax(s)[..., None, :] @ v)[..., 0, :]

    near = rand(B, Q, K, D)
    unfused(neighbours, (rand(B, Q, D), near, near.detach()), "elementwise")


def test_softmax_of_some_scores() -> None:
    """Weights that are put back to their keys have a site."""

    def of_the_largest(q, k, v):
        s = q @ k.mT
        largest, keys = s.topk(4, dim=-1)
        return torch.zeros_like(s).scatter(-1, keys, softmax(largest)) @ v

    unfused(of_the_largest, qkv(), "in-between")


def test_einsum_with_scale() -> None:
    """Three operands."""
    fn = lambda q, k, v, s: softmax(torch.einsum("bhqd,bhkd,h->bhqk", q, k, s)) @ v  # noqa: E731
    check(fn, (*qkv(), rand(H)), fused=None)


ALIKE = {
    "weights on the right": lambda q, k, v: (q.mT @ softmax(q @ k.mT)).mT,
    "weights transposed": lambda q, k, v: softmax(q @ k.mT).mT @ q,
    "scores viewed otherwise": lambda q, k, v: softmax((q @ k.mT).view(B, H, K, Q)).view(B, H, Q, K) @ v,
    "weights viewed otherwise": lambda q, k, v: softmax(q @ k.mT).view(B, H, K, Q) @ q,
    "weights of a slice": lambda q, k, v: softmax(q @ k.mT)[..., :5] @ v[..., :5, :],
    "scores of a slice": lambda q, k, v: softmax((q @ k.mT)[..., :5]) @ v[..., :5, :],
    "rolled scores": lambda q, k, v: softmax(torch.roll(q @ k.mT, 1, -1)) @ v,
    "flipped weights": lambda q, k, v: softmax(q @ k.mT).flip(-1) @ v,
    "sum of weights": lambda q, k, v: softmax(q @ k.mT).sum(1) @ v[:, 0],
    "log_softmax": lambda q, k, v: F.log_softmax(q @ k.mT, -1) @ v,
    "softmin over queries": lambda q, k, v: F.softmin(q @ k.mT, -2) @ v,
    "no product above": lambda q, k, v: softmax(torch.cdist(q, k)) @ v,
    "v is the weights": lambda q, k, v: (lambda w: w @ w.mT)(softmax(q @ k.mT)),
    "addmm": lambda q, k, v: torch.addmm(v[0, 0, :Q], softmax(q[0, 0] @ k[0, 0].T), v[0, 0]),
    "with a vector": lambda q, k, v: softmax(q @ k.mT) @ v[0, 0, :, 0],
}


@cases(ALIKE)
def test_alike(case) -> None:
    check(case, qkv(), fused=0)


def test_out_argument() -> None:
    """A tensor that is called out, and one that is written to."""
    check(lambda q, k, out: softmax(q @ k.mT) @ out, qkv())

    def written(q, k, v, buffer):
        torch.matmul(q, k.mT, out=buffer)
        return softmax(buffer) @ v, buffer

    check(written, (*qkv(grad=False), torch.empty(B, H, Q, K)), train=False, fused=None)


def test_router() -> None:
    """A mixture of experts: a softmax over a product, times a matrix, and no attention of queries."""
    fn = lambda x, gate, experts: torch.softmax(x @ gate.mT, dim=-1) @ experts  # noqa: E731
    check(fn, (rand(5, 16), rand(4, 16), rand(4, 24)))


def test_classifier() -> None:
    """A linear layer above the softmax: no product of two activations is lost."""
    linear, softmax = torch.nn.Linear, torch.nn.Softmax(-1)
    check(torch.nn.Sequential(linear(16, 8), softmax, linear(8, 4)), (rand(5, 16),), fused=0)
