"""Attention over time series, speech, proteins, graphs, sets, tables and trajectories."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .form import form, heads, linears, named

einsum = torch.einsum
BLHE = ((2, 9, 4, 8), (2, 13, 4, 8), (2, 13, 4, 8))


@form(*BLHE)
def full_series(queries: Any, keys: Any, values: Any) -> Any:
    """(batch, length, heads, dim), scale inside of the softmax, output contiguous."""
    scale = 1.0 / math.sqrt(queries.shape[-1])
    scores = einsum("blhe,bshe->bhls", queries, keys)
    a = nn.Dropout(0.1).eval()(torch.softmax(scale * scores, dim=-1))
    return einsum("bhls,bshd->blhd", a, values).contiguous(), None


@form(*((2, 9, 4, 8),) * 3)
def causal_series(queries: Any, keys: Any, values: Any) -> Any:
    """A mask made under no_grad, written in place with -inf."""
    b, l, _, e = queries.shape
    scores = einsum("blhe,bshe->bhls", queries, keys)
    with torch.no_grad():
        mask = torch.triu(torch.ones([b, 1, l, l], dtype=torch.bool), diagonal=1)
    scores.masked_fill_(mask, -math.inf)
    return einsum("bhls,bshd->blhd", torch.softmax(scores / e**0.5, dim=-1), values)


@form(*BLHE, (2, 1), (2, 13))
def destationary(q: Any, k: Any, v: Any, tau: Any, delta: Any) -> Any:
    """Scale and shift of a series: (scores * tau + delta)."""
    tau, delta = tau.unsqueeze(1).unsqueeze(1), delta.unsqueeze(1).unsqueeze(1)
    scores = einsum("blhe,bshe->bhls", q, k) * tau + delta
    return einsum("bhls,bshd->blhd", torch.softmax(8**-0.5 * scores, dim=-1), v).contiguous()


@form((2, 4, 9, 8), (2, 4, 13, 8), (2, 4, 13, 8))
def queries_that_matter(q: Any, k: Any, v: Any) -> Any:
    """The top queries by a sample of keys attend; the others get the mean of the values."""
    sample = k[:, :, torch.arange(0, 13, 3)]
    measure = (q @ sample.transpose(-2, -1)).amax(-1) - (q @ sample.transpose(-2, -1)).mean(-1)
    top = measure.detach().topk(4, sorted=False)[1]
    b, h = torch.arange(2)[:, None, None], torch.arange(4)[None, :, None]
    scores = torch.matmul(q[b, h, top], k.transpose(-2, -1)) / math.sqrt(8)
    context = v.mean(dim=-2, keepdim=True).expand(2, 4, 9, 8).clone()
    context[b, h, top] = torch.matmul(torch.softmax(scores, dim=-1), v)
    return context


@form((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 9), fused=0, reasons=("the scores are returned",))
def scores_of_the_last_layer(q: Any, k: Any, v: Any, prev: Any) -> Any:
    """Residual scores: returned for the next layer."""
    s = torch.matmul(q, k.transpose(-2, -1)) * 8**-0.5 + prev
    return torch.matmul(F.softmax(s, dim=-1), v), s


@form((2, 9, 32), fused=2, parts=lambda: dict(first=nn.Linear(32, 96), second=nn.Linear(32, 96)))
def two_layers_of_scores(net: Any, x: Any) -> Any:
    """The scores of the first layer are added to those of the second, inside."""
    prev = None
    for layer in (net.first, net.second):
        q, k, v = (heads(t, 4) for t in layer(x).chunk(3, -1))
        s = q @ k.mT * 8**-0.5
        s = s if prev is None else s + prev
        x = x + (s.softmax(-1) @ v).transpose(1, 2).flatten(2)
        prev = s
    return x


@form((2, 9, 32), (1, 17, 32), lambda: torch.tensor([9, 6]))
class SpeechRelative(nn.Module):
    """Relative positions, pad, view and slice; a mask of lengths; weights zeroed as well."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.p, self.o = linears(32, 32, 32, 32, 32, 32)
        self.u, self.w = nn.Parameter(torch.randn(4, 8) * 0.2), nn.Parameter(torch.randn(4, 8) * 0.2)

    @staticmethod
    def shift(x: Any) -> Any:
        zero = torch.zeros((*x.size()[:3], 1), device=x.device, dtype=x.dtype)
        padded = torch.cat([zero, x], dim=-1).view(*x.size()[:2], x.size(3) + 1, x.size(2))
        return padded[:, :, 1:].view_as(x)[:, :, :, : x.size(-1) // 2 + 1]

    def forward(self, x: Any, pos: Any, lengths: Any) -> Any:
        b, n, _ = x.shape
        q = self.q(x).view(b, n, 4, 8)
        k, v = heads(self.k(x), 4), heads(self.v(x), 4)
        p = self.p(pos).view(1, -1, 4, 8).transpose(1, 2)
        ac = torch.matmul((q + self.u).transpose(1, 2), k.transpose(-2, -1))
        bd = self.shift(torch.matmul((q + self.w).transpose(1, 2), p.transpose(-2, -1)))
        scores = (ac + bd) / math.sqrt(8)
        mask = (torch.arange(n)[None] >= lengths[:, None])[:, None, None, :]
        scores = scores.masked_fill(mask, float(torch.finfo(scores.dtype).min))
        attn = torch.softmax(scores, dim=-1).masked_fill(mask, 0.0)
        return self.o(torch.matmul(attn, v).transpose(1, 2).contiguous().view(b, n, 32))


@form((2, 9, 32))
class SpeechEncoder(nn.Module):
    """The fourth root of the dim on q and on k, float softmax, scores detached and returned to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        scale = (q.shape[-1] // 4) ** -0.25
        q, k, v = (heads(t, 4) for t in (q, k, v))
        qk = ((q * scale) @ (k * scale).transpose(-1, -2)).float()
        w = F.softmax(qk, dim=-1).to(q.dtype)
        return (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2), qk.detach()

    def forward(self, x: Any) -> Any:
        wv, _ = self.attend(self.query(x), self.key(x), self.value(x))
        return wv


@form((2, 9, 32), parts=lambda: dict(qkv=nn.Linear(32, 96, bias=False), table=nn.Embedding(17, 8)))
def relative_keys(net: Any, x: Any) -> Any:
    """Keys for each distance: einsum of queries and a table of distances, added (Shaw)."""
    n = x.shape[1]
    q, k, v = (heads(t, 4) for t in net.qkv(x).chunk(3, -1))
    dots = einsum("b h i d, b h j d -> b h i j", q, k) * 8**-0.5
    seq = torch.arange(n)
    dist = (seq[:, None] - seq[None, :]).clamp(-8, 8) + 8
    pos = einsum("b h n d, n r d -> b h n r", q, net.table(dist).to(q)) * 8**-0.5
    return einsum("b h i j, b h j d -> b h i d", (dots + pos).softmax(-1), v).transpose(1, 2).flatten(2)


@form((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), (9, 9, 8), fused=0, reasons=("weights",))
def relative_values(q: Any, k: Any, v: Any, table: Any) -> Any:
    """Values for each distance too: the weights are needed twice."""
    w = (q @ k.mT * 8**-0.5).softmax(-1)
    return w @ v + einsum("bhij,ijd->bhid", w, table)


@form((2, 20, 12), (5, 32), lambda: torch.rand(2, 20) > 0.2, parts=lambda: dict(
    q=nn.Linear(32, 32, False), kv=nn.Linear(12, 64, False), o=nn.Linear(32, 32),
))  # fmt: skip
def latents(net: Any, data: Any, latents: Any, mask: Any) -> Any:
    """A perceiver: latents repeated for the batch, a mask repeated for the heads, a wide context."""
    b, h = data.shape[0], 4
    x = latents.repeat(b, 1, 1)
    q = net.q(x)
    k, v = net.kv(data).chunk(2, dim=-1)
    q, k, v = (t.reshape(b, -1, h, 8).permute(0, 2, 1, 3).reshape(b * h, -1, 8) for t in (q, k, v))
    sim = einsum("b i d, b j d -> b i j", q, k) * 8**-0.5
    value = -torch.finfo(sim.dtype).max
    mask = mask.reshape(b, -1)[:, None, None].repeat(1, h, 1, 1).reshape(b * h, 1, -1)
    sim.masked_fill_(~mask, value)
    out = einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
    return net.o(out.reshape(b, h, -1, 8).permute(0, 2, 1, 3).reshape(b, -1, h * 8))


@form((2, 6, 16), parts=lambda: dict(to_qkv=nn.Linear(16, 48, bias=False)))
def table_columns(net: Any, x: Any) -> Any:
    """Columns of a table are tokens; one linear, heads first by permute."""
    q, k, v = net.to_qkv(x).chunk(3, dim=-1)
    q, k, v = (t.view(2, 6, 2, 8).permute(0, 2, 1, 3) for t in (q, k, v))
    sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 8**-0.5
    attn = sim.softmax(dim=-1)
    return torch.einsum("b h i j, b h j d -> b h i d", attn, v).permute(0, 2, 1, 3).flatten(
        2
    ), attn.detach().shape


@form(
    (2, 5, 8), (2, 5, 4), (2, 5, 1), lambda: torch.tensor([[0.0, 0, 1, 1, 1], [1.0] * 5]), fused=0,
    reasons=("range",),
    parts=lambda: dict(
        s=nn.Linear(8, 16), a=nn.Linear(4, 16), r=nn.Linear(1, 16), qkv=nn.Linear(16, 48),
    ),
)  # fmt: skip
def trajectories(net: Any, s: Any, a: Any, r: Any, seen: Any) -> Any:
    """Returns, states and actions of a trajectory interleaved; padding and a causal mask."""
    x = torch.stack((net.r(r), net.s(s), net.a(a)), dim=1).permute(0, 2, 1, 3).reshape(2, 15, 16)
    seen = torch.stack((seen, seen, seen), dim=1).permute(0, 2, 1).reshape(2, 15)
    q, k, v = (heads(t, 2) for t in net.qkv(x).split(16, dim=2))
    w = torch.matmul(q, k.transpose(-1, -2)) / 8**0.5
    causal = torch.tril(torch.ones((15, 15), dtype=torch.uint8)).view(1, 1, 15, 15)
    w = torch.where(causal.bool(), w, torch.tensor(-1e4).to(w.dtype))
    w = w + (1.0 - seen[:, None, None]) * -10000.0
    out = torch.matmul(nn.functional.softmax(w, dim=-1), v).permute(0, 2, 1, 3).contiguous()
    return out.view(2, 5, 3, 16).permute(0, 2, 1, 3)[:, 1]


@form((2, 9, 16), (2, 9), fused=1, parts=lambda: named("q k v", linears(16, 16, 16, 16)))
def pointer_scores(net: Any, nodes: Any, visited: Any) -> Any:
    """Routes: tanh-clipped logits, visited nodes masked by assignment."""
    q = net.q(nodes.mean(1, keepdim=True)).view(2, 1, 2, 8).permute(2, 0, 1, 3)
    k, v = (m(nodes).view(2, 9, 2, 8).permute(2, 0, 1, 3) for m in (net.k, net.v))
    compatibility = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    mask = (visited > 0.5)[:, None, :].index_fill(2, torch.tensor([0]), False)
    compatibility[mask[None].expand_as(compatibility)] = -math.inf
    return torch.matmul(torch.softmax(compatibility, dim=-1), v)


@form((2, 9, 16), fused=0, reasons=("weights",))
def hard_attention(x: Any) -> Any:
    """Straight through: the forward is one-hot, the gradient that of the softmax."""
    soft = (x @ x.transpose(1, 2) * 0.25).softmax(-1)
    index = soft.max(-1, keepdim=True)[1]
    hard = torch.zeros_like(soft).scatter_(-1, index, 1.0)
    return (hard - soft.detach() + soft) @ x


@form((2, 9, 16), fused=0, reasons=("mask",))
def renormalised(x: Any) -> Any:
    """Weights times a mask, and divided by their sum."""
    w = (x @ x.transpose(1, 2) * 0.25).softmax(-1)
    w = w * torch.ones(9, 9).tril()
    return (w / (w.sum(-1, keepdim=True) + 1e-13)) @ x


@form((2, 9, 16), (2, 9))
def gated_weights(x: Any, gate: Any) -> Any:
    """Weights times a factor of each key."""
    w = (x @ x.transpose(1, 2) * 0.25).softmax(-1)
    return (w * torch.sigmoid(gate)[:, None, :]) @ x


@form((2, 9, 16), fused=0, reasons=("in-between",), parts=lambda: dict(conv=nn.Conv2d(1, 1, 3, padding=1)))
def convolved_weights(net: Any, x: Any) -> Any:
    """A convolution over the weights of neighbouring tokens."""
    w = (x @ x.transpose(1, 2) * 0.25).softmax(-1)
    return net.conv(w.unsqueeze(1)).squeeze(1) @ x


@form((2, 9, 16), fused=0, reasons=("no-product",))
def powers_of_weights(x: Any) -> Any:
    """Two steps of a walk: the product of weights with themselves."""
    w = (x @ x.transpose(1, 2) * 0.25).softmax(-1)
    return (w @ w) @ x


@form((2, 9, 16), (2, 9, 16))
def gaussian_bias(x: Any, y: Any) -> Any:
    """A learned-width Gaussian of the distance, as the logarithm of a prior."""
    i = torch.arange(9.0)
    sigma = F.softplus(y[..., :1])
    return ((x @ y.mT) * 0.25 - (i[:, None] - i).square() / (2 * sigma**2)).softmax(-1) @ y


@form((2, 9, 16), (2, 9, 16))
def distance_scores(x: Any, y: Any) -> Any:
    """Negative squared distances of points, written out."""
    d = x.square().sum(-1, keepdim=True) - 2 * x @ y.mT + y.square().sum(-1)[:, None, :]
    return torch.softmax(-d / 8, dim=-1) @ y


@form((2, 4, 9, 8), (2, 4, 3, 8), (2, 4, 9, 8), (2, 4, 12, 8), fused=0, reasons=("other than the keys",))
def words_and_entities(q: Any, e: Any, to_entities: Any, v: Any) -> Any:
    """LUKE: words have other queries for entities than for words."""
    k, of_entities = v[:, :, :9], v[:, :, 9:]
    words = torch.cat([q @ k.mT, to_entities @ of_entities.mT], dim=3)
    entities = torch.cat([e @ k.mT, e @ of_entities.mT], dim=3)
    return (torch.cat([words, entities], dim=2) * 8**-0.5).softmax(-1) @ v


@form((2, 4, 3, 4, 8), (2, 4, 3, 4, 8), (2, 4, 2, 8), fused=0, reasons=("more than one tensor",))
def blocks_and_global_tokens(q: Any, k: Any, tokens: Any) -> Any:
    """Each block sees itself and the first and the last token, and is no feature that others multiply."""
    own = torch.einsum("bhnqd,bhnkd->bhnqk", q, k) * 8**-0.5
    first = torch.einsum("bhnqd,bhtd->bhnqt", q, tokens[:, :, :1]) * 8**-0.5
    last = torch.einsum("bhnqd,bhtd->bhnqt", q, tokens[:, :, 1:]) * 8**-0.5
    weights = torch.cat([first, own, last], dim=-1).softmax(-1)
    return torch.einsum("bhnqk,bhnkd->bhnqd", weights[..., 1:-1], k)
