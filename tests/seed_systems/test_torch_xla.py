"""Rows X1 to X7: what torch_xla's FlashAttention did as a custom operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import inductor_fusions
from inductor_fusions import config, testing
from tests.attention.support import flex_everywhere
from tests.seed_systems.support import LOWEST, QUICK, check, leaf, qkv

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def attention(q: Any, k: Any, v: Any, scale: float = 1.0, bias: Any = None, hidden: Any = None) -> Any:
    """As its reference is written: scores, bias, mask, softmax in float32, product with v."""
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    scores = scores if bias is None else scores + bias
    scores = scores if hidden is None else scores.masked_fill(hidden, LOWEST)
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


# -- X2 to X6: attention ------------------------------------------------------------------------------


def hides_later(q: Any, k: Any) -> Any:
    i = torch.arange(q.shape[-2], device=q.device)[:, None]
    return torch.arange(k.shape[-2], device=q.device) > i


def test_X2_causal_and_scale(device: torch.device) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, 0.31, hidden=hides_later(q, k))

    run = check(fn, qkv(), device, kernel="is_causal", slack=2.5)
    for call in run.ours.calls("scaled_dot_product_attention"):
        assert call.kwargs["scale"] == pytest.approx(0.31)


def segments(length: int) -> torch.Tensor:
    found = torch.randint(0, 4, (2, length)).sort(-1).values
    found[:, :1] = 0
    return found


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kv_len", [150, 200], ids=["self", "cross"])
def test_X3_segment_ids(kv_len: int, causal: bool, device: torch.device) -> None:
    """Packed sequences as a block mask; segments of queries and of keys may be different tensors."""

    def fn(q: Any, k: Any, v: Any, of_q: Any, of_k: Any) -> Any:
        hidden = of_q[:, None, :, None] != of_k[:, None, None, :]
        hidden = hidden | hides_later(q, k) if causal else hidden
        return attention(q, k, v, 0.25, hidden=hidden)

    of_q = segments(150)
    of_k = of_q.clone() if kv_len == 150 else segments(kv_len)
    with flex_everywhere("flex"):
        run = check(fn, (*qkv(150, kv_len), of_q, of_k), device, kernel="document", backend=QUICK)
    assert "flex" in run.ours.fused[0].kernel
    # With the mask as a tensor, where flex attention is not measured to pay.
    check(fn, (*qkv(150, kv_len), of_q, of_k), device, backend=QUICK)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 3, 24, 24), (1, 3, 24, 24), (3, 24, 24), (2, 1, 24, 24)], ids=str)
def test_X4_bias_with_gradient_on_a_gpu(shape: tuple[int, ...]) -> None:
    def fn(q: Any, k: Any, v: Any, ab: Any) -> Any:
        return attention(q, k, v, 0.25, bias=ab)

    run = check(fn, (*qkv(), leaf(*shape)), torch.device("cuda"))
    assert run.ours.grads["3"] is not None and run.ours.grads["3"].shape == shape


class Positions(nn.Module):
    """A table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 3)

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        place = torch.arange(q.shape[-2], device=q.device)
        bias = self.table((place - place[:, None]).clamp(-8, 8) + 8).permute(2, 0, 1)
        return attention(q, k, v, 0.25, bias=bias)


def test_X4_table_of_positions(device: torch.device) -> None:
    run = check(Positions(), qkv(), device, slack=4.0)
    assert "table.weight" in run.errors


@pytest.mark.parametrize("length", [513, 127, 1])
def test_X5_any_length(length: int, device: torch.device) -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, 0.25, hidden=hides_later(q, k) if length > 1 else None)

    check(
        fn, qkv(length, batch=1, heads=2), device, backend="inductor" if length == 513 else QUICK, slack=4.0
    )


@pytest.mark.parametrize("lead", [(6,), (2, 3), (2, 2, 3)], ids=["3-D", "4-D", "5-D"])
def test_X6_leading_dims(lead: tuple[int, ...], device: torch.device) -> None:
    inputs = tuple(leaf(*lead, length, 16) for length in (24, 37, 37))
    check(
        lambda q, k, v: attention(q, k, v, 0.25),
        inputs,
        device,
        backend="inductor" if len(lead) == 3 else QUICK,
    )


# -- X7: sharded --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "heads"])
def test_X7_partition(dim: int, mesh: Any, device: torch.device) -> None:
    """Sharded by the batch or by the heads: attention on the local tensors is fused."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    def fn(q: Any, k: Any, v: Any) -> Any:
        local = [t.to_local() for t in (q, k, v)]
        return DTensor.from_local(attention(*local, 0.25), mesh, [Shard(dim)])

    whole, parts = shards(dim, mesh, device, distribute_tensor, Shard)
    inductor_fusions.clear()
    with config.patch(policy="always"):
        out = torch.compile(fn, backend=testing.AfterPasses([]))(*parts)
        out.square().mean().backward()
    assert inductor_fusions.report().count("fused", "attention") == 1
    assert out.placements == (Shard(dim),)
    expected = attention(*whole, 0.25)
    expected.square().mean().backward()
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    for x, y in zip(parts, whole, strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), y.grad, rtol=1e-4, atol=1e-5)


def test_X7_attention_on_dtensors(mesh: Any, device: torch.device) -> None:
    """Not every fused kernel is defined for DTensors: they are left to stock, with that reason."""
    from torch.distributed.tensor import Shard, distribute_tensor

    whole, parts = shards(0, mesh, device, distribute_tensor, Shard)
    inductor_fusions.clear()
    with config.patch(policy="always"):
        out = torch.compile(attention, backend=testing.AfterPasses([]))(*parts)
        out.square().mean().backward()
    (site,) = inductor_fusions.report()
    assert site.verdict == "left to stock" and "DTensor" in site.reason and "ColwiseParallel" in site.hint
    (explained,) = inductor_fusions.explain(attention, *parts, train=True)
    assert explained.reason == site.reason
    assert inductor_fusions.verify(attention, *parts).ok
    torch.testing.assert_close(out.full_tensor(), attention(*whole), rtol=1e-4, atol=1e-5)


def shards(
    dim: int, mesh: Any, device: torch.device, distribute: Any, shard: Any
) -> tuple[list[Any], list[Any]]:
    """q, k and v on a device, and the same as DTensors."""
    whole = [t.detach().to(device).requires_grad_() for t in qkv()]
    return whole, [distribute(t.detach(), mesh, [shard(dim)]).requires_grad_() for t in whole]
