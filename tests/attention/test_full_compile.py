"""A few of each kind through all of Inductor: code generation, backward, modes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inductor_fusions import config, report, testing
from tests.attention.support import BATCH, HEADS, KV_LEN, Q_LEN, additive, check, qkv, rand, scored, visible

LOWEST = torch.finfo(torch.float32).min


def grouped(q, k, v):
    k, v = (
        t[:, :, None].expand(t.shape[0], 2, 3, *t.shape[2:]).reshape(t.shape[0], 6, *t.shape[2:])
        for t in (k, v)
    )
    place = torch.arange(q.shape[-2])[:, None] >= torch.arange(k.shape[-2])
    weights = torch.softmax(torch.where(place, q @ k.mT * 0.3, LOWEST), dim=-1, dtype=torch.float32)
    out = weights.to(q.dtype) @ v
    return out.transpose(1, 2).contiguous().view(q.shape[0], q.shape[2], -1)


class Layer(nn.Module):
    """Projections, a learned bias of positions, padding, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.position = nn.Embedding(9, HEADS)

    def forward(self, x, padding):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, 8).permute(2, 0, 3, 1, 4).unbind(0)
        place = torch.arange(x.shape[1])
        bias = self.position((place - place[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)
        scores = torch.matmul(q, k.transpose(-1, -2)) * 8**-0.5 + bias
        scores = scores.masked_fill(~padding[:, None, None, :], torch.finfo(scores.dtype).min)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer(dtype: torch.dtype) -> None:
    padding = visible(BATCH, Q_LEN)
    check(Layer(), (rand(BATCH, Q_LEN, 24), padding), dtype=dtype, backend="inductor", slack=4.0)


def test_grouped_and_causal() -> None:
    q, k, v = qkv(9, 9, heads=6, kv_heads=2)
    check(grouped, (q, k, v), kernel="is_causal, enable_gqa", backend="inductor")


def test_float16() -> None:
    mask = additive(visible(BATCH, 1, Q_LEN, KV_LEN), torch.finfo(torch.float16).min)
    fn = scored(lambda s, m: s * 0.3 + m)
    check(fn, (*qkv(), mask), dtype=torch.float16, backend="inductor")


def test_bias_and_scale_with_gradients() -> None:
    fn = scored(lambda s, b, t: (s * t).add_(b))
    inputs = (*qkv(), rand(1, HEADS, Q_LEN, KV_LEN), (torch.rand(HEADS, 1, 1) + 0.5).requires_grad_())
    check(fn, inputs, backend="inductor", slack=64.0)


def test_einsum_with_other_layout() -> None:
    def fn(q, k, v, mask):
        weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3 + mask, dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(BATCH, Q_LEN, -1)

    q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in qkv())
    mask = additive(visible(BATCH, 1, 1, KV_LEN))
    check(fn, (q, k, v, mask), backend="inductor")


MODES = {
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
    "fullgraph": {"fullgraph": True},
    "options": {"options": {"epilogue_fusion": True, "max_autotune": False}},
}


@pytest.mark.parametrize("mode", MODES)
def test_mode(mode: str) -> None:
    """Inference, in each way to call torch.compile; the second time from Inductor's own cache."""
    q, k, v = qkv(grad=False)
    fn = scored(lambda s: s * 0.3)
    before = report().count("fused")
    with config.patch(policy="always"), torch.no_grad():
        torch._dynamo.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            torch.testing.assert_close(torch.compile(fn, **MODES[mode])(q, k, v), fn(q, k, v))
    assert report().count("fused") == before + 1


def test_compiled_autograd() -> None:
    """The backward is compiled as a whole, at run time."""
    q, k, v = qkv()
    fn = scored(lambda s: s * 0.3)
    with config.patch(policy="always"), torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(lambda: fn(q, k, v).square().sum().backward(), backend="aot_eager")
        compiled()
    found = [t.grad for t in (q, k, v)]
    expected = torch.autograd.grad(fn(q, k, v).square().sum(), (q, k, v))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_second_derivative_is_refused_or_right() -> None:
    """torch.compile itself refuses a double backward; nothing of ours makes it silently wrong."""
    q, k, v = qkv()
    fn = scored(lambda s: s * 0.3)
    with config.patch(policy="always"):
        torch._dynamo.reset()
        out = torch.compile(fn, backend=testing._AfterPasses([]))(q, k, v)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        try:
            (second,) = torch.autograd.grad(grad.square().sum(), q)
        except RuntimeError:
            return
    (first,) = torch.autograd.grad(fn(q, k, v).square().sum(), q, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first.square().sum(), q)[0])
