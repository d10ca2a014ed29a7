"""Attention over time series, speech, proteins, graphs, sets, tables and trajectories."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .form import Form, collector, linears

SEQUENCES: dict[str, Form] = {}
form = collector(SEQUENCES)
einsum = torch.einsum
BLHE = ((2, 9, 4, 8), (2, 13, 4, 8), (2, 13, 4, 8))


def heads(x: Any, n: int) -> Any:
    return x.view(*x.shape[:-1], n, -1).transpose(-2, -3)


@form(*BLHE)
class FullSeries(nn.Module):
    """(batch, length, heads, dim), scale inside of the softmax, output contiguous."""

    def forward(self, queries: Any, keys: Any, values: Any) -> Any:
        scale = 1.0 / math.sqrt(queries.shape[-1])
        scores = einsum("blhe,bshe->bhls", queries, keys)
        a = nn.Dropout(0.1).eval()(torch.softmax(scale * scores, dim=-1))
        return einsum("bhls,bshd->blhd", a, values).contiguous(), None


@form(*((2, 9, 4, 8),) * 3)
class CausalSeries(nn.Module):
    """A mask made under no_grad, written in place with -inf."""

    def forward(self, queries: Any, keys: Any, values: Any) -> Any:
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


@form(
    (2, 4, 9, 8),
    (2, 4, 9, 8),
    (2, 4, 9, 8),
    (2, 4, 9, 9),
    fused=0,
    reasons=("used-elsewhere",),
)
def scores_of_the_last_layer(q: Any, k: Any, v: Any, prev: Any) -> Any:
    """Residual scores: returned for the next layer."""
    s = torch.matmul(q, k.transpose(-2, -1)) * 8**-0.5 + prev
    return torch.matmul(F.softmax(s, dim=-1), v), s


@form((2, 9, 32), fused=2)
class TwoLayersOfScores(nn.Module):
    """The scores of the first layer are added to those of the second, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 96), nn.Linear(32, 96)

    def forward(self, x: Any) -> Any:
        prev = None
        for layer in (self.first, self.second):
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


@form((2, 9, 32))
class RelativeKeys(nn.Module):
    """Keys for each distance: einsum of queries and a table of distances, added (Shaw)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.table = nn.Linear(32, 96, bias=False), nn.Embedding(17, 8)

    def forward(self, x: Any) -> Any:
        n = x.shape[1]
        q, k, v = (heads(t, 4) for t in self.qkv(x).chunk(3, -1))
        dots = einsum("b h i d, b h j d -> b h i j", q, k) * 8**-0.5
        seq = torch.arange(n)
        dist = (seq[:, None] - seq[None, :]).clamp(-8, 8) + 8
        pos = einsum("b h n d, n r d -> b h n r", q, self.table(dist).to(q)) * 8**-0.5
        return einsum("b h i j, b h j d -> b h i d", (dots + pos).softmax(-1), v).transpose(1, 2).flatten(2)


@form(
    (2, 4, 9, 8),
    (2, 4, 9, 8),
    (2, 4, 9, 8),
    (9, 9, 8),
    fused=0,
    reasons=("weights",),
)
def relative_values(q: Any, k: Any, v: Any, table: Any) -> Any:
    """Values for each distance too: the weights are needed twice."""
    w = (q @ k.mT * 8**-0.5).softmax(-1)
    return w @ v + einsum("bhij,ijd->bhid", w, table)


@form((9, 2, 32), lambda: torch.tensor([[False] * 9, [False] * 6 + [True] * 3]))
class ProteinHeads(nn.Module):
    """(time, batch, embed) as in fairseq: heads in the batch, weights in float32, one copy for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = linears(32, 32, 32, 32, bias=True)

    def forward(self, x: Any, padding: Any) -> Any:
        t, b, e = x.size()
        q = self.q(x)
        q *= 8**-0.5
        q, k, v = (y.contiguous().view(t, b * 4, 8).transpose(0, 1) for y in (q, self.k(x), self.v(x)))
        w = torch.bmm(q, k.transpose(1, 2))
        assert list(w.size()) == [b * 4, t, t]
        w = w.view(b, 4, t, t)
        w = w.masked_fill(padding.unsqueeze(1).unsqueeze(2).to(torch.bool), float("-inf"))
        w = w.view(b * 4, t, t)
        w_float = F.softmax(w, dim=-1, dtype=torch.float32)
        w = w_float.type_as(w)
        attn = torch.bmm(F.dropout(w_float.type_as(w), p=0.1, training=False), v)
        kept = w_float.view(b, 4, t, t).transpose(1, 0).mean(dim=0)
        del kept
        return attn.transpose(0, 1).contiguous().view(t, b, e)


@form((3, 9, 32), (9, 9, 16), lambda: (torch.rand(3, 9) > 0.2).float())
class RowsWithPairBias(nn.Module):
    """Rows of an alignment: a bias of pairs, a mask of 1e9 * (mask - 1), gated, autocast off around it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.g = linears(32, 32, 32, 32, 32)
        self.bias = nn.Linear(16, 4, bias=False)

    def forward(self, m: Any, z: Any, mask: Any) -> Any:
        biases = [
            (1e9 * (mask - 1))[..., :, None, None, :].transpose(-2, -3),
            self.bias(z).permute(2, 0, 1)[None],
        ]
        q, k, v = (y(m).view(m.shape[:-1] + (4, -1)).transpose(-2, -3) for y in (self.q, self.k, self.v))
        q = q / math.sqrt(8)
        with torch.autocast("cpu", enabled=False):
            a = torch.matmul(q, k.transpose(-1, -2))
        for bias in biases:
            a += bias
        a = F.softmax(a, dim=-1)
        o = torch.matmul(a, v).transpose(-2, -3)
        o = o * torch.sigmoid(self.g(m)).view(m.shape[:-1] + (4, -1))
        return o.reshape(o.shape[:-2] + (-1,))


@form((2, 7, 7, 16), lambda: (torch.rand(2, 7, 7) > 0.2).float())
class TriangleAroundStart(nn.Module):
    """Pairs (b, i, j): each row attends with a bias of the third edge; 5-D products."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.bias = linears(16, 16, 16, 16, 2)

    def forward(self, z: Any, mask: Any) -> Any:
        q, k, v = (y(z).view(*z.shape[:-1], 2, 8).movedim(-2, -3) for y in (self.q, self.k, self.v))
        mask_bias = (1e9 * (mask - 1))[..., :, None, None, :]
        triangle = self.bias(z).permute(0, 3, 1, 2).unsqueeze(-4)
        a = torch.einsum("...qc,...kc->...qk", q * 8**-0.5, k) + mask_bias + triangle
        return torch.einsum("...hqk,...hkc->...qhc", a.softmax(-1), v).flatten(-2)


@form((2, 7, 7, 16), (2, 7, 7, 16))
def triangle_by_einsum(a: Any, b: Any) -> Any:
    """Columns of pairs without transposes."""
    q = k = v = a.unflatten(-1, (2, 8))
    s = einsum("bikhd,bjkhd->bhkij", q, k) * 8**-0.5 + b[..., :2].permute(0, 3, 1, 2)[:, :, None]
    return einsum("bhkij,bjkhd->bikhd", torch.softmax(s, dim=-1), v).flatten(-2)


@form((2, 5, 9, 32))
class TiedRows(nn.Module):
    """One matrix of weights for all rows of an alignment: rows are summed over."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = linears(32, 32, 32, 32)

    def forward(self, x: Any) -> Any:
        b, r, n, _ = x.shape
        q, k, v = (y(x).view(b, r, n, 4, 8) for y in (self.q, self.k, self.v))
        w = einsum("brihd,brjhd->bhij", q, k) * (8 * r) ** -0.5
        return einsum("bhij,brjhd->brihd", w.softmax(-1), v).reshape(b, r, n, 32)


@form((2, 9, 32), (2, 9, 9), lambda: torch.rand(2, 9, 9) > 0.3)
class GraphBias(nn.Module):
    """A transformer of graphs: distances and edges as biases, self-loops, no edge no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = linears(32, 32, 32, 32, bias=True)
        self.edge = nn.Linear(1, 4)
        self.distance = nn.Embedding(4, 4)

    def forward(self, x: Any, edges: Any, adjacency: Any) -> Any:
        q, k, v = (heads(m(x), 4) for m in (self.q, self.k, self.v))
        bias = self.edge(edges.unsqueeze(-1)).permute(0, 3, 1, 2)
        bias = bias + self.distance(adjacency.long() + 1).permute(0, 3, 1, 2)
        scores = q @ k.transpose(-1, -2) / 8**0.5 + bias
        adjacency = adjacency | torch.eye(9, dtype=torch.bool)
        scores = scores.masked_fill(~adjacency.unsqueeze(1), -9e15)
        return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)


@form((9, 16), lambda: torch.rand(9, 9) > 0.4, fused=0, reasons=("no-product",))
class GraphByPairs(nn.Module):
    """Additive attention of graphs: leaky relu of a sum, where with -9e15."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Linear(16, 16, bias=False), nn.Parameter(torch.randn(32, 1))

    def forward(self, h: Any, adjacency: Any) -> Any:
        wh = self.w(h)
        e = F.leaky_relu(wh @ self.a[:16] + (wh @ self.a[16:]).T, 0.2)
        attention = torch.where(adjacency | torch.eye(9).bool(), e, -9e15 * torch.ones_like(e))
        return F.elu(F.softmax(attention, dim=1) @ wh)


@form((2, 9, 16), (2, 9, 9, 16), fused=0, reasons=("no-product",))
class EdgesInTheScores(nn.Module):
    """Edges multiply the products of single channels: no product of matrices."""

    def forward(self, x: Any, e: Any) -> Any:
        q = k = v = x.view(2, 9, 2, 8)
        y = q.unsqueeze(2) * k.unsqueeze(1) * e.view(2, 9, 9, 2, 8)
        return (F.softmax(y.sum(-1), dim=2).unsqueeze(-1) * v.unsqueeze(1)).sum(2)


@form((2, 9, 16), (1, 4, 16), fused=2)
class InducedSet(nn.Module):
    """Inducing points attend to the set, and the set to them; heads in the batch by cat of split."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linears(16, 16, 16, 16, bias=True)
        self.second = linears(16, 16, 16, 16, bias=True)

    @staticmethod
    def block(fc: Any, q: Any, k: Any) -> Any:
        q, k, v = fc[0](q), fc[1](k), fc[2](k)
        q_, k_, v_ = (torch.cat(t.split(8, 2), 0) for t in (q, k, v))
        a = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(16), 2)
        return torch.cat((q_ + a.bmm(v_)).split(q.size(0), 0), 2)

    def forward(self, x: Any, points: Any) -> Any:
        return self.block(self.second, x, self.block(self.first, points.repeat(x.size(0), 1, 1), x))


@form((2, 20, 12), (5, 32), lambda: torch.rand(2, 20) > 0.2)
class Latents(nn.Module):
    """A perceiver: latents repeated for the batch, a mask repeated for the heads, a wide context."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(32, 32, False), nn.Linear(12, 64, False), nn.Linear(32, 32)

    def forward(self, data: Any, latents: Any, mask: Any) -> Any:
        b, h = data.shape[0], 4
        x = latents.repeat(b, 1, 1)
        q = self.q(x)
        k, v = self.kv(data).chunk(2, dim=-1)
        q, k, v = (t.reshape(b, -1, h, 8).permute(0, 2, 1, 3).reshape(b * h, -1, 8) for t in (q, k, v))
        sim = einsum("b i d, b j d -> b i j", q, k) * 8**-0.5
        value = -torch.finfo(sim.dtype).max
        mask = mask.reshape(b, -1)[:, None, None].repeat(1, h, 1, 1).reshape(b * h, 1, -1)
        sim.masked_fill_(~mask, value)
        out = einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
        return self.o(out.reshape(b, h, -1, 8).permute(0, 2, 1, 3).reshape(b, -1, h * 8))


@form((2, 6, 16))
class TableColumns(nn.Module):
    """Columns of a table are tokens; one linear, heads first by permute."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(2, 6, 2, 8).permute(0, 2, 1, 3) for t in (q, k, v))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 8**-0.5
        attn = sim.softmax(dim=-1)
        return torch.einsum("b h i j, b h j d -> b h i d", attn, v).permute(0, 2, 1, 3).flatten(
            2
        ), attn.detach().shape


@form(
    (2, 5, 8),
    (2, 5, 4),
    (2, 5, 1),
    lambda: torch.tensor([[0.0, 0, 1, 1, 1], [1.0] * 5]),
    fused=0,
    reasons=("range",),
)
class Trajectories(nn.Module):
    """Returns, states and actions of a trajectory interleaved; padding and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.s, self.a, self.r = nn.Linear(8, 16), nn.Linear(4, 16), nn.Linear(1, 16)
        self.qkv = nn.Linear(16, 48)

    def forward(self, s: Any, a: Any, r: Any, seen: Any) -> Any:
        x = torch.stack((self.r(r), self.s(s), self.a(a)), dim=1).permute(0, 2, 1, 3).reshape(2, 15, 16)
        seen = torch.stack((seen, seen, seen), dim=1).permute(0, 2, 1).reshape(2, 15)
        q, k, v = (heads(t, 2) for t in self.qkv(x).split(16, dim=2))
        w = torch.matmul(q, k.transpose(-1, -2)) / 8**0.5
        causal = torch.tril(torch.ones((15, 15), dtype=torch.uint8)).view(1, 1, 15, 15)
        w = torch.where(causal.bool(), w, torch.tensor(-1e4).to(w.dtype))
        w = w + (1.0 - seen[:, None, None]) * -10000.0
        out = torch.matmul(nn.functional.softmax(w, dim=-1), v).permute(0, 2, 1, 3).contiguous()
        return out.view(2, 5, 3, 16).permute(0, 2, 1, 3)[:, 1]


@form((2, 9, 16), (2, 9), fused=1)
class PointerScores(nn.Module):
    """Routes: tanh-clipped logits, visited nodes masked by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = linears(16, 16, 16, 16)

    def forward(self, nodes: Any, visited: Any) -> Any:
        q = self.q(nodes.mean(1, keepdim=True)).view(2, 1, 2, 8).permute(2, 0, 1, 3)
        k, v = (m(nodes).view(2, 9, 2, 8).permute(2, 0, 1, 3) for m in (self.k, self.v))
        compatibility = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        mask = (visited > 0.5)[:, None, :].index_fill(2, torch.tensor([0]), False)
        compatibility[mask[None].expand_as(compatibility)] = -math.inf
        return torch.matmul(torch.softmax(compatibility, dim=-1), v)


@form((2, 9, 16), fused=0, reasons=("weights",))
class HardAttention(nn.Module):
    """Straight through: the forward is one-hot, the gradient that of the softmax."""

    def forward(self, x: Any) -> Any:
        soft = (x @ x.transpose(1, 2) * 0.25).softmax(-1)
        index = soft.max(-1, keepdim=True)[1]
        hard = torch.zeros_like(soft).scatter_(-1, index, 1.0)
        return (hard - soft.detach() + soft) @ x


@form((2, 9, 16), fused=0, reasons=("in-between",))
class Renormalised(nn.Module):
    """Weights times a mask, and divided by their sum."""

    def forward(self, x: Any) -> Any:
        w = (x @ x.transpose(1, 2) * 0.25).softmax(-1)
        w = w * torch.ones(9, 9).tril()
        return (w / (w.sum(-1, keepdim=True) + 1e-13)) @ x


@form((2, 9, 16), (2, 9))
def gated_weights(x: Any, gate: Any) -> Any:
    """Weights times a factor of each key."""
    w = (x @ x.transpose(1, 2) * 0.25).softmax(-1)
    return (w * torch.sigmoid(gate)[:, None, :]) @ x


@form((2, 9, 16), fused=0, reasons=("in-between",))
class ConvolvedWeights(nn.Module):
    """A convolution over the weights of neighbouring tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Any) -> Any:
        w = (x @ x.transpose(1, 2) * 0.25).softmax(-1)
        return self.conv(w.unsqueeze(1)).squeeze(1) @ x


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


def lengths() -> torch.Tensor:
    return torch.tensor([13, 5])


@form((2, 16), (2, 13, 16), lengths)
def decoder_state_squeezed(state: Any, memory: Any, n: Any) -> Any:
    """Luong: one query for each sample, whose dim goes before the softmax and comes back."""
    scores = torch.bmm(memory, state.unsqueeze(2)).squeeze(2)
    scores = scores.masked_fill(torch.arange(13)[None] >= n[:, None], float("-inf"))
    return torch.bmm(torch.softmax(scores, 1).unsqueeze(1), memory).squeeze(1)


@form((2, 16), (2, 13, 16), lengths)
def decoder_state_by_index(state: Any, memory: Any, n: Any) -> Any:
    scores = (memory @ state[:, :, None])[:, :, 0] / 4
    scores = torch.where(torch.arange(13) < n[:, None], scores, -1e9)
    return (scores.softmax(-1)[:, None] @ memory)[:, 0]


@form((8,), (2, 13, 8))
def pooling_by_a_learned_query(query: Any, x: Any) -> Any:
    return einsum("bn,bnd->bd", (einsum("d,bnd->bn", query, x) * 0.3).softmax(-1), x)


@form((2, 3, 8), (13, 2, 3, 8), (13, 2, 3, 8))
def pooling_of_heads_keys_first(q: Any, k: Any, v: Any) -> Any:
    return einsum("nbh,nbhd->bhd", (einsum("nbhd,bhd->nbh", k, q) * 0.3).softmax(0), v)


@form((2, 7, 16), (2, 7, 5, 16), (2, 7, 5, 3))
def neighbours_of_points(q: Any, k: Any, v: Any) -> Any:
    return einsum("bnk,bnkc->bnc", (einsum("bnd,bnkd->bnk", q, k) * 0.25).softmax(-1), v)


@form((2, 7, 16), (2, 7, 16), fused=0, reasons=("no-product",))
def points_with_themselves(q: Any, k: Any) -> Any:
    """Each row has a query of its own: nothing is shared."""
    return einsum("bn,bnd->bd", (einsum("bnd,bnd->bn", q, k) * 0.25).softmax(-1), k)


@form((2, 9, 16), (2, 1, 16))
class AdditiveAttention(nn.Module):
    """Bahdanau: a linear of one output is the query of all keys; a softmax does not see its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.state, self.score = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 1)

    def forward(self, memory: Any, state: Any) -> Any:
        scores = self.score(torch.tanh(self.keys(memory) + self.state(state))).squeeze(-1)
        return torch.bmm(F.softmax(scores, dim=-1).unsqueeze(1), memory).squeeze(1)


@form((20, 16))
class PoolingOfInstances(nn.Module):
    """Gated pooling of a bag of instances, by three queries."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.score = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        scores = self.score(torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x)))
        return torch.mm(F.softmax(torch.transpose(scores, 1, 0), dim=1), x)


@form((2, 9, 16), (4, 16, 8), fused=0, reasons=("no-product",))
class ChoiceOfExperts(nn.Module):
    """Each token weighs experts of its own: nothing is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)

    def forward(self, x: Any, experts: Any) -> Any:
        return einsum("bne,bnef->bnf", self.router(x).softmax(-1), einsum("bnd,edf->bnef", x, experts))


class Memory(nn.Module):
    """Keys and values of a memory are the weights of two linears."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(16, 12), nn.Linear(12, 16, bias=bias)

    def forward(self, x: Any) -> Any:
        return self.values(F.softmax(self.keys(x) * 0.5, dim=-1))


form((2, 9, 16))(type("MemoryOfLinears", (Memory,), {}))
form((2, 9, 16), fused=0, reasons=("in-between",))(
    type("MemoryWithABias", (Memory,), {"__init__": lambda self: Memory.__init__(self, bias=True)})
)


@form((9, 16), (13, 16), (13, 8))
def product_by_tensordot(q: Any, k: Any, v: Any) -> Any:
    weights = torch.softmax(torch.tensordot(q, k, dims=([1], [1])) * 0.25, dim=1)
    return torch.tensordot(weights, v, dims=1)


@form((9, 16), (13, 16), (13, 8), (9, 13))
def bias_by_addmm(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.mm(torch.addmm(bias, q, k.t(), alpha=0.25).softmax(1), v)


@form((9, 16), (13, 16), (13, 8), (9, 8), fused=0, reasons=("in-between",))
def residual_by_addmm(q: Any, k: Any, v: Any, x: Any) -> Any:
    return torch.addmm(x, (q @ k.t() * 0.25).softmax(1), v)


@form((2, 9, 16), (2, 13, 16), fused=0, reasons=("elementwise",))
def products_by_elements(q: Any, k: Any) -> Any:
    return ((q[:, :, None] * k[:, None]).sum(-1) * 0.25).softmax(-1) @ k


@form((2, 9, 16), (2, 3, 16), lambda: torch.tensor([0, 1, 1, 1, 1, 2, 2, 3, 3]))
def media_in_front(x: Any, media: Any, count: Any) -> Any:
    """Each token attends to the medium before it; what stands in front of the first one gets nothing."""
    sim = einsum("bid,bjd->bij", x, media) * 0.25
    sim = sim.masked_fill(count[:, None] != torch.arange(1, 4), -torch.finfo(sim.dtype).max)
    sim = sim - sim.amax(dim=-1, keepdim=True).detach()
    return sim.softmax(-1).masked_fill((count == 0)[:, None], 0.0) @ media


@form((2, 9, 16), (2, 3, 16), lambda: torch.zeros(9, 3), fused=0, reasons=("empty-rows",))
def rows_that_a_mask_may_hide(x: Any, media: Any, mask: Any) -> Any:
    """It is not known whether the mask holds -inf, and the gradient of a kernel be NaN."""
    weights = (einsum("bid,bjd->bij", x, media) + mask).softmax(-1)
    return weights.masked_fill((torch.arange(9) < 2)[:, None], 0.0) @ media
