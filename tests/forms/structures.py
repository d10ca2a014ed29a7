"""Attention over proteins, graphs and sets."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .form import QKV, form, heads, linears, named, scored

einsum = torch.einsum


@form(
    (9, 2, 32), lambda: torch.tensor([[False] * 9, [False] * 6 + [True] * 3]),
    parts=lambda: named("q k v", linears(32, 32, 32, 32, bias=True)),
)  # fmt: skip
def protein_heads(net: Any, x: Any, padding: Any) -> Any:
    """(time, batch, embed) as in fairseq: heads in the batch, weights in float32, one copy for nobody."""
    t, b, e = x.size()
    q = net.q(x)
    q *= 8**-0.5
    q, k, v = (y.contiguous().view(t, b * 4, 8).transpose(0, 1) for y in (q, net.k(x), net.v(x)))
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


@form(
    (3, 9, 32),
    (9, 9, 16),
    lambda: (torch.rand(3, 9) > 0.2).float(),
    parts=lambda: named("q k v g", linears(32, 32, 32, 32, 32)) | dict(bias=nn.Linear(16, 4, bias=False)),
)
def rows_with_pair_bias(net: Any, m: Any, z: Any, mask: Any) -> Any:
    """Rows of an alignment: a bias of pairs, a mask of 1e9 * (mask - 1), gated, autocast off around it."""
    biases = [
        (1e9 * (mask - 1))[..., :, None, None, :].transpose(-2, -3),
        net.bias(z).permute(2, 0, 1)[None],
    ]
    q, k, v = (y(m).view(m.shape[:-1] + (4, -1)).transpose(-2, -3) for y in (net.q, net.k, net.v))
    q = q / math.sqrt(8)
    with torch.autocast("cpu", enabled=False):
        a = torch.matmul(q, k.transpose(-1, -2))
    for bias in biases:
        a += bias
    a = F.softmax(a, dim=-1)
    o = torch.matmul(a, v).transpose(-2, -3)
    o = o * torch.sigmoid(net.g(m)).view(m.shape[:-1] + (4, -1))
    return o.reshape(o.shape[:-2] + (-1,))


@form(
    (2, 7, 7, 16), lambda: (torch.rand(2, 7, 7) > 0.2).float(),
    parts=lambda: named("q k v bias", linears(16, 16, 16, 16, 2)),
)  # fmt: skip
def triangle_around_start(net: Any, z: Any, mask: Any) -> Any:
    """Pairs (b, i, j): each row attends with a bias of the third edge; 5-D products."""
    q, k, v = (y(z).view(*z.shape[:-1], 2, 8).movedim(-2, -3) for y in (net.q, net.k, net.v))
    mask_bias = (1e9 * (mask - 1))[..., :, None, None, :]
    triangle = net.bias(z).permute(0, 3, 1, 2).unsqueeze(-4)
    a = torch.einsum("...qc,...kc->...qk", q * 8**-0.5, k) + mask_bias + triangle
    return torch.einsum("...hqk,...hkc->...qhc", a.softmax(-1), v).flatten(-2)


@form((2, 7, 7, 16), (2, 7, 7, 16))
def triangle_by_einsum(a: Any, b: Any) -> Any:
    """Columns of pairs without transposes."""
    q = k = v = a.unflatten(-1, (2, 8))
    s = einsum("bikhd,bjkhd->bhkij", q, k) * 8**-0.5 + b[..., :2].permute(0, 3, 1, 2)[:, :, None]
    return einsum("bhkij,bjkhd->bikhd", torch.softmax(s, dim=-1), v).flatten(-2)


@form((2, 5, 9, 32), parts=lambda: named("q k v", linears(32, 32, 32, 32)))
def tied_rows(net: Any, x: Any) -> Any:
    """One matrix of weights for all rows of an alignment: rows are summed over."""
    b, r, n, _ = x.shape
    q, k, v = (y(x).view(b, r, n, 4, 8) for y in (net.q, net.k, net.v))
    w = einsum("brihd,brjhd->bhij", q, k) * (8 * r) ** -0.5
    return einsum("bhij,brjhd->brihd", w.softmax(-1), v).reshape(b, r, n, 32)


@form(
    (2, 9, 32), (2, 9, 9), lambda: torch.rand(2, 9, 9) > 0.3,
    parts=lambda: named("q k v", linears(32, 32, 32, 32, bias=True)) | dict(
        edge=nn.Linear(1, 4), distance=nn.Embedding(4, 4),
    ),
)  # fmt: skip
def graph_bias(net: Any, x: Any, edges: Any, adjacency: Any) -> Any:
    """A transformer of graphs: distances and edges as biases, self-loops, no edge no attention."""
    q, k, v = (heads(m(x), 4) for m in (net.q, net.k, net.v))
    bias = net.edge(edges.unsqueeze(-1)).permute(0, 3, 1, 2)
    bias = bias + net.distance(adjacency.long() + 1).permute(0, 3, 1, 2)
    scores = q @ k.transpose(-1, -2) / 8**0.5 + bias
    adjacency = adjacency | torch.eye(9, dtype=torch.bool)
    scores = scores.masked_fill(~adjacency.unsqueeze(1), -9e15)
    return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)


@form((9, 16), lambda: torch.rand(9, 9) > 0.4, fused=0, reasons=("no-product",), parts=lambda: dict(
    w=nn.Linear(16, 16, bias=False), a=nn.Parameter(torch.randn(32, 1)),
))  # fmt: skip
def graph_by_pairs(net: Any, h: Any, adjacency: Any) -> Any:
    """Additive attention of graphs: leaky relu of a sum, where with -9e15."""
    wh = net.w(h)
    e = F.leaky_relu(wh @ net.a[:16] + (wh @ net.a[16:]).T, 0.2)
    attention = torch.where(adjacency | torch.eye(9).bool(), e, -9e15 * torch.ones_like(e))
    return F.elu(F.softmax(attention, dim=1) @ wh)


@form((2, 9, 16), (2, 9, 9, 16), fused=0, reasons=("no-product",))
def edges_in_the_scores(x: Any, e: Any) -> Any:
    """Edges multiply the products of single channels: no product of matrices."""
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


@form(
    (2, 9, 32), (2, 9, 9, 16), lambda: (torch.rand(2, 9) > 0.2).float(),
    parts=lambda: dict(q=nn.Linear(32, 32)) | named("k v g", linears(32, 32, 32, 32)) | dict(
        b=nn.Linear(16, 4, bias=False),
    ),
)  # fmt: skip
def af3_pair_bias(net: Any, a: Any, z: Any, mask: Any) -> Any:
    """AlphaFold3: single attention with pair bias, beta, mask inf*(mask-1), gate"""
    q = net.q(a).unflatten(-1, (4, 8))
    k = net.k(a).unflatten(-1, (4, 8))
    v = net.v(a).unflatten(-1, (4, 8))
    attn = einsum("bihd,bjhd->bhij", q.float(), k.float()) / 8**0.5
    attn = attn + net.b(z).float().permute(0, 3, 1, 2)
    attn = attn + (1 - mask[:, None, None].float()) * -1e6
    attn = attn.softmax(dim=-1)
    o = einsum("bhij,bjhd->bihd", attn, v.float()).to(v.dtype)
    return net.g(a).sigmoid() * o.reshape(2, 9, 32)


@form((2, 9, 32), (2, 9, 9, 16), parts=lambda: named("q k v g", linears(32, 32, 32, 32, 32)) | dict(
    b=nn.Linear(16, 4, bias=False),
))  # fmt: skip
def rose_biased(net: Any, x: Any, z: Any) -> Any:
    """softmax over dim -2 with heads last, bias b q k h"""
    q, k, v = (l(x).reshape(2, 9, 4, 8) for l in (net.q, net.k, net.v))
    k = k * (8**-0.5)
    attn = einsum("bqhd,bkhd->bqkh", q, k) + net.b(z)
    attn = F.softmax(attn, dim=-2)
    out = einsum("bqkh,bkhd->bqhd", attn, v).reshape(2, 9, -1)
    return torch.sigmoid(net.g(x)) * out


@form((2, 7, 7, 16), parts=lambda: named("q k v", linears(16, 16, 16, 16)) | dict(
    b=nn.Linear(16, 2, bias=False),
))  # fmt: skip
def rose_pair_axial(net: Any, pair: Any) -> Any:
    """tied pair axial: sums over n"""
    B, L = pair.shape[:2]
    q, k, v = (l(pair).reshape(B, L, L, 2, 8) for l in (net.q, net.k, net.v))
    q = q * 8**-0.5
    k = k / math.sqrt(L)
    a = einsum("bnihk,bnjhk->bijh", q, k) + net.b(pair)
    a = F.softmax(a, dim=-2)
    return einsum("bijh,bnjhd->bnihd", a, v).reshape(B, L, L, -1)


@form((2, 9, 32), lambda: torch.randint(0, 5, (2, 8, 8)), (2, 8, 8, 5, 6), parts=lambda: dict(
    qkv=nn.Linear(32, 96), sp=nn.Embedding(6, 4, padding_idx=0), ed=nn.Linear(6, 4), t=nn.Embedding(1, 4),
))  # fmt: skip
def graphormer_bias(net: Any, x: Any, sp: Any, ef: Any) -> Any:
    """spatial pos + edge encoding, class token t bias written in parts, 2*..."""
    B = x.shape[0]
    bias = torch.zeros(B, 9, 9)
    gb = bias.clone().unsqueeze(1).repeat(1, 4, 1, 1)
    gb[:, :, 1:, 1:] = gb[:, :, 1:, 1:] + net.sp(sp).permute(0, 3, 1, 2)
    t = net.t.weight.view(1, 4, 1)
    gb[:, :, 1:, 0] = gb[:, :, 1:, 0] + t
    gb[:, :, 0, :] = gb[:, :, 0, :] + t
    e = net.ed(ef).mean(-2).permute(0, 3, 1, 2)
    gb[:, :, 1:, 1:] = gb[:, :, 1:, 1:] + e
    gb = gb + bias.unsqueeze(1)
    q, k, v = (z.view(B, 9, 4, 8).transpose(1, 2) for z in net.qkv(x).chunk(3, -1))
    q = q * 8**-0.5
    a = torch.matmul(q, k.transpose(2, 3))
    a = a + gb
    a = torch.softmax(a, dim=3)
    return a.matmul(v).transpose(1, 2).contiguous().view(B, -1, 32)


@form(*QKV, (2, 4, 9, 9), lambda: torch.eye(9, dtype=torch.bool).roll(1, 0) | torch.eye(9, dtype=torch.bool),
      fused=0, reasons=("in-between", "in-between"))  # fmt: skip
def edges_and_all_other_pairs(q: Any, k: Any, v: Any, e: Any, edges: Any) -> Any:
    """SAN: two softmaxes read the scores, and what is said of one has the code of the other's reason."""
    s = scored(q, k)
    known, others = s.masked_fill(~edges, -1e9), (s * e).masked_fill(edges, -1e9)
    return (known.softmax(-1) @ v + others.softmax(-1) @ v) * 0.5


#: Queries, keys, and values of both.
TWO_WAYS = ((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 7, 8), (2, 4, 9, 8))
TWO = ("used-elsewhere", "used-elsewhere")


def hidden() -> torch.Tensor:
    return torch.tensor([[False] * 9, [False] * 6 + [True] * 3])[:, None, None]


@form(*TWO_WAYS, fused=2)
def two_ways_less_the_largest_score(q: Any, k: Any, vq: Any, vk: Any) -> Any:
    """As GroundingDINO: keys attend to queries by the same scores."""
    s = scored(q, k)
    t = s.mT
    t = t - t.max(-1, keepdim=True)[0]
    return s.softmax(-1) @ vk, t.clamp(min=-50000).softmax(-1) @ vq


@form(*TWO_WAYS, fused=2)
def two_ways_with_a_transpose_for_each(q: Any, k: Any, vq: Any, vk: Any) -> Any:
    """The scores are transposed again for their largest."""
    s = scored(q, k)
    return s.softmax(-1) @ vk, (s.mT - s.mT.max(-1, keepdim=True)[0]).softmax(-1) @ vq


@form(*QKV, fused=0, reasons=("used-elsewhere",))
def largest_score_of_another_transpose(q: Any, k: Any, v: Any) -> Any:
    """Of other scores; a function does not let it cancel."""
    s = scored(q, k)
    largest = s.mT.amax(-1, keepdim=True)
    s = s * 1.0
    return torch.tanh(s.mT - largest).softmax(-1) @ v


@form(*TWO_WAYS, fused=0, reasons=TWO)
def two_ways_and_the_largest_score(q: Any, k: Any, vq: Any, vk: Any) -> Any:
    s = scored(q, k)
    largest = s.mT.max(-1, keepdim=True)[0]
    return s.softmax(-1) @ vk, (s.mT - largest).softmax(-1) @ vq, largest


@form(*TWO_WAYS, hidden, fused=2)
def two_ways_of_which_one_is_masked(q: Any, k: Any, vq: Any, vk: Any, mask: Any) -> Any:
    s = scored(q, k)
    t = s.mT.clone()
    s.masked_fill_(mask, float("-inf"))
    return s.softmax(-1) @ vk, t.softmax(-1) @ vq


@form(*TWO_WAYS, hidden, fused=0, reasons=("used-elsewhere", "overwritten"))
def two_ways_masked_through_a_view(q: Any, k: Any, vq: Any, vk: Any, mask: Any) -> Any:
    s = scored(q, k)
    t = s.mT
    s.masked_fill_(mask, -1e9)
    return s.softmax(-1) @ vk, t.softmax(-1) @ vq


#: In three dims, as GroundingDINO has them, with hidden queries and keys.
THREE = ((8, 7, 8), (8, 9, 8), (8, 7, 8), (8, 9, 8))


@form(*THREE, fused=2)
def grounding_dino(q: Any, k: Any, vq: Any, vk: Any) -> Any:
    """The largest score of all is subtracted, so that no score is above zero; each bound is a clamp."""
    s = torch.bmm(q, k.transpose(1, 2))
    s = (s - s.max()).clamp(min=-50000)
    s = s.clamp(max=50000)
    t = s.transpose(1, 2)
    t = (t - torch.max(t, dim=-1, keepdim=True)[0]).clamp(min=-50000)
    t = t.clamp(max=50000)
    return torch.bmm(s.softmax(-1), vk), torch.bmm(t.softmax(-1), vq)


@form(
    *THREE, lambda: torch.arange(9).expand(8, 1, 9) > 6, lambda: torch.arange(7).expand(8, 1, 7) > 4, fused=2
)
def grounding_dino_with_masks(q: Any, k: Any, vq: Any, vk: Any, keys: Any, queries: Any) -> Any:
    """As transformers has it: one clamp, and masks in place behind it."""
    s = torch.bmm(q, k.transpose(1, 2))
    s = torch.clamp(s - s.max(), min=-50000, max=50000)
    t = s.transpose(1, 2)
    t = torch.clamp(t - torch.max(t, dim=-1, keepdim=True)[0], min=-50000, max=50000)
    t.masked_fill_(queries, float("-inf"))
    t = t.softmax(dim=-1)
    s.masked_fill_(keys, float("-inf"))
    return torch.bmm(s.softmax(dim=-1), vk), torch.bmm(t, vq)


def chained(x: Any) -> tuple[Any, list[Any]]:
    """As RealFormer: the scores of each layer are added to those of the next one."""
    s, outs = 0, []
    for q, k, v in zip(x[::3], x[1::3], x[2::3], strict=True):
        s = scored(q, k) + s
        outs.append(s.softmax(-1) @ v)
    return s, outs


@form(*QKV * 4, fused=4)
def layers_that_add_their_scores(*x: Any) -> Any:
    return chained(x)[1]


@form(*QKV * 3, fused=0, reasons=("used-elsewhere",) * 3)
def layers_whose_last_scores_are_returned(*x: Any) -> Any:
    return chained(x)
