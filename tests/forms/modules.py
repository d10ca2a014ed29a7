"""Modules of biology, vision, speech, graphs and diffusion, with their idioms of layouts and masks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .form import form, linears, named

einsum = torch.einsum


@form((2, 2 * 16 + 32, 4, 5))
class LeViTConv(nn.Module):
    """key dim narrower than value, channels first, table of biases gathered; train/eval ab"""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.randn(2, 20) * 0.3)
        p = [(i, j) for i in range(4) for j in range(5)]
        off = {}
        idx = []
        for a in p:
            for c in p:
                idx.append(off.setdefault((abs(a[0] - c[0]), abs(a[1] - c[1])), len(off)))
        self.register_buffer("i", torch.tensor(idx).view(20, 20))

    def forward(self, x: Any) -> Any:
        B, _, H, W = x.shape
        q, k, v = x.view(B, 2, -1, H * W).split([8, 8, 16], dim=2)
        attn = (q.transpose(-2, -1) @ k) * 8**-0.5 + self.b[:, self.i]
        attn = attn.softmax(dim=-1)
        return (v @ attn.transpose(-2, -1)).view(B, -1, H, W)


@form((2, 16, 8, 8), parts=lambda: dict(qkv=nn.Conv2d(16, 48, 1), b=nn.Parameter(torch.randn(1, 2, 16, 16))))
def maxvit_grid(net: Any, x: Any) -> Any:
    """grid partition channels first, relative bias, 7-D einops by hand"""
    B, C, H, W = x.shape
    x = net.qkv(x).view(B, 48, 4, H // 4, 4, W // 4).permute(0, 3, 5, 1, 2, 4).reshape(-1, 48, 16)
    q, k, v = x.view(-1, 3, 2, 8, 16).unbind(1)
    a = (q.transpose(-1, -2) @ k) * 8**-0.5
    a = a + net.b
    a = a.softmax(-1)
    o = v @ a.transpose(-1, -2)
    return o.reshape(B, H // 4, W // 4, C, 4, 4).permute(0, 3, 4, 1, 5, 2).reshape(B, C, H, W)


@form(
    (20, 2, 32), (20, 2, 32), (7, 2, 32), lambda: torch.tensor([[False] * 20, [False] * 15 + [True] * 5]),
    parts=lambda: named("kc v qc qs", linears(32, 32, 32, 32, 32)),
)  # fmt: skip
def detr_cross(net: Any, mem: Any, pos: Any, tgt: Any, pad: Any) -> Any:
    """conditional DETR: cat of content and position queries, baddbmm free, seq first"""
    n, b, _ = mem.shape
    m = tgt.shape[0]
    q = net.qc(tgt).view(m, b, 4, 8)
    qs = net.qs(tgt).view(m, b, 4, 8)
    q = torch.cat([q, qs], 3).view(m, b, 64)
    k = net.kc(mem).view(n, b, 4, 8)
    p = pos.view(n, b, 4, 8)
    k = torch.cat([k, p], dim=3).view(n, b, 64)
    v = net.v(mem)
    q = q * 16**-0.5
    q = q.contiguous().view(m, b * 4, 16).transpose(0, 1)
    k = k.contiguous().view(-1, b * 4, 16).transpose(0, 1)
    v = v.contiguous().view(-1, b * 4, 8).transpose(0, 1)
    w = torch.bmm(q, k.transpose(1, 2)).view(b, 4, m, n)
    w = w.masked_fill(pad.unsqueeze(1).unsqueeze(2), float("-inf")).view(b * 4, m, n)
    w = F.softmax(w - w.max(dim=-1, keepdim=True)[0], dim=-1)
    return torch.bmm(F.dropout(w, 0.1, False), v).transpose(0, 1).contiguous().view(m, b, 32)


@form((2, 10, 16), parts=lambda: dict(qkv=nn.Linear(16, 48)))
def scores_over_alpha(net: Any, x: Any) -> Any:
    """CogView: PB-relax softmax: alpha*(softmax of (s/alpha - max)*alpha)"""
    q, k, v = (t.view(2, 10, 2, 8).transpose(1, 2) for t in net.qkv(x).chunk(3, -1))
    alpha = 32.0
    sc = torch.matmul(q / (math.sqrt(8) * alpha), k.transpose(-1, -2))
    sc = sc - sc.amax(-1, keepdim=True).detach()
    sc = sc * alpha
    return sc.softmax(-1) @ v


@form((2, 3, 64), parts=lambda: named("q k v", (nn.Conv1d(3, 16, 1) for _ in range(3))) | dict(
    h=nn.Parameter(torch.randn(1, 2, 8, 1, 8)), w=nn.Parameter(torch.randn(1, 2, 8, 8, 1)),
))  # fmt: skip
def botnet(net: Any, x: Any) -> Any:
    """2d rel pos: q@k + content position with rel_h + rel_w summed"""
    q = net.q(x).view(2, 2, 8, -1)
    k = net.k(x).view(2, 2, 8, -1)
    v = net.v(x).view(2, 2, 8, -1)
    cc = torch.matmul(q.permute(0, 1, 3, 2), k)
    cp = (net.h + net.w).view(1, 2, 8, -1).permute(0, 1, 3, 2)
    cp = torch.matmul(cp, q)
    e = cc + cp
    a = nn.Softmax(dim=-1)(e)
    return torch.matmul(v, a.permute(0, 1, 3, 2)).view(2, 16, 64)


@form(
    (2, 16, 5, 7), fused=0, reasons=("more than one column",),
    parts=lambda: named("q k v", (nn.Conv2d(16, 8, 1) for _ in range(3))),
)  # fmt: skip
def criss_cross(net: Any, x: Any) -> Any:
    """CCNet: cat of column and row energies, one softmax, split: two products"""
    b, _, h, w = x.shape
    q, k, v = net.q(x), net.k(x), net.v(x)
    qH = q.permute(0, 3, 1, 2).contiguous().view(b * w, -1, h).permute(0, 2, 1)
    qW = q.permute(0, 2, 1, 3).contiguous().view(b * h, -1, w).permute(0, 2, 1)
    kH = k.permute(0, 3, 1, 2).contiguous().view(b * w, -1, h)
    kW = k.permute(0, 2, 1, 3).contiguous().view(b * h, -1, w)
    vH = v.permute(0, 3, 1, 2).contiguous().view(b * w, -1, h)
    vW = v.permute(0, 2, 1, 3).contiguous().view(b * h, -1, w)
    inf = -torch.diag(torch.tensor(float("inf")).repeat(h), 0).unsqueeze(0).repeat(b * w, 1, 1)
    eH = (torch.bmm(qH, kH) + torch.where(torch.isinf(inf), -1e9, 0.0)).view(b, w, h, h).permute(0, 2, 1, 3)
    eW = torch.bmm(qW, kW).view(b, h, w, w)
    c = torch.cat([eH, eW], 3).softmax(3)
    aH = c[:, :, :, 0:h].permute(0, 2, 1, 3).contiguous().view(b * w, h, h)
    aW = c[:, :, :, h : h + w].contiguous().view(b * h, w, w)
    oH = torch.bmm(vH, aH.permute(0, 2, 1)).view(b, w, -1, h).permute(0, 2, 3, 1)
    oW = torch.bmm(vW, aW.permute(0, 2, 1)).view(b, h, -1, w).permute(0, 2, 1, 3)
    return oH + oW


@form(
    (2, 9, 32), lambda: torch.tensor([[False] * 9, [False] * 6 + [True] * 3]),
    parts=lambda: named("q k v", linears(32, 32, 32, 32, bias=True)) | dict(
        g=nn.Linear(8, 8), c=nn.Parameter(torch.ones(1, 4, 1, 1)), t=nn.Embedding(20, 4),
    ),
)  # fmt: skip
def wavlm(net: Any, x: Any, pad: Any) -> Any:
    """gated relative position bias: bucketed table, gate from q"""
    B, N, _ = x.shape
    i = torch.arange(N)[:, None]
    j = torch.arange(N)[None]
    pb = net.t((j - i).clamp(-9, 9) + 9).permute(2, 0, 1)
    pb = pb.unsqueeze(0).repeat(B, 1, 1, 1).view(B * 4, N, N)
    xg = x.view(B, N, 4, 8).permute(0, 2, 1, 3)
    a, b = torch.sigmoid(net.g(xg).view(B, 4, N, 2, 4).sum(-1)).chunk(2, dim=-1)
    gate = a * (b * net.c - 1.0) + 2.0
    bias = gate.view(B * 4, -1, 1) * pb
    q = net.q(x) * 8**-0.5
    q, k, v = (t.view(B, N, 4, 8).transpose(1, 2).reshape(B * 4, N, 8) for t in (q, net.k(x), net.v(x)))
    w = torch.bmm(q, k.transpose(1, 2))
    w = w + bias
    w = w.view(B, 4, N, N).masked_fill(pad[:, None, None], float("-inf")).view(B * 4, N, N)
    w = F.softmax(w, dim=-1)
    return torch.bmm(w, v).view(B, 4, N, 8).transpose(1, 2).reshape(B, N, 32)


@form((2, 9, 32))
class DebertaDisentangled(nn.Module):
    """c2p gather, p2c gather transposed; scale by sqrt(3d)"""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.pk, self.pq = linears(32, 32, 32, 32, 32, 32, bias=True)
        self.rel = nn.Parameter(torch.randn(16, 32) * 0.3)

    def h(self, x: Any) -> Any:
        return x.view(x.shape[0], x.shape[1], 4, -1).permute(0, 2, 1, 3).contiguous().view(-1, x.size(1), 8)

    def forward(self, x: Any) -> Any:
        q, k, v = self.h(self.q(x)), self.h(self.k(x)), self.h(self.v(x))
        n = 9
        sc = math.sqrt(8 * 3)
        a = torch.bmm(q, k.transpose(-1, -2) / sc)
        i = torch.arange(n)
        rp = (i[:, None] - i[None]).clamp(-8, 7)
        pk = self.h(self.pk(self.rel[None])).repeat(2, 1, 1)
        pq = self.h(self.pq(self.rel[None])).repeat(2, 1, 1)
        c2p = torch.bmm(q, pk.transpose(-1, -2))
        c2p = torch.gather(c2p, -1, torch.clamp(rp + 8, 0, 15)[None].expand(8, n, n))
        sco = c2p / sc
        p2c = torch.bmm(k, pq.transpose(-1, -2))
        p2c = torch.gather(p2c, -1, torch.clamp(-rp + 8, 0, 15)[None].expand(8, n, n)).transpose(-1, -2)
        sco = sco + p2c / sc
        a = (a + sco).view(-1, 4, n, n)
        mask = torch.ones(2, 1, n, n).bool()
        mask[:, :, :, 7:] = False
        a = a.masked_fill(~mask, torch.finfo(a.dtype).min)
        p = F.softmax(a, -1)
        c = torch.bmm(p.view(-1, n, n), v)
        return c.view(-1, 4, n, 8).permute(0, 2, 1, 3).contiguous().view(2, n, -1)


@form(
    (2, 9, 32), lambda: torch.tensor([[1] * 9, [0] * 3 + [1] * 6]),
    parts=lambda: named("q k v", linears(32, 32, 32, 32, bias=True)),
)  # fmt: skip
def sas_rec_old(net: Any, x: Any, seen: Any) -> Any:
    """TF port: split heads, cat on batch, padding -2**32+1, tril via where, query masking"""
    Q, K, V = (torch.cat(torch.split(l(x), 8, dim=2), dim=0) for l in (net.q, net.k, net.v))
    w = torch.bmm(Q, K.transpose(1, 2))
    w = w / (8**0.5)
    tm = torch.tril(torch.ones(9, 9))
    w = torch.where(tm[None] == 0, torch.ones_like(w) * (-(2**32) + 1), w)
    w = F.softmax(w, -1)
    o = torch.bmm(w, V)
    o = torch.cat(torch.split(o, 2, dim=0), dim=2)
    return o * seen.unsqueeze(-1)


@form((2, 16, 32), fused=1, parts=lambda: dict(qkv=nn.Linear(32, 96)))
def longformer_chunks(net: Any, x: Any) -> Any:
    """overlapping chunks: local attention by lookback cat of buckets"""
    q, k, v = (t.view(2, 16, 4, 8).transpose(1, 2).reshape(8, 16, 8) for t in net.qkv(x).chunk(3, -1))
    w = 4
    bq, bk, bv = (t.reshape(8, 4, w, 8) for t in (q, k, v))

    def look(t):
        p = F.pad(t, (0, 0, 0, 0, 1, 0), value=0.0)
        return torch.cat([p[:, :-1], p[:, 1:]], dim=2)

    bk, bv = look(bk), look(bv)
    t = torch.arange(16).view(1, 4, w)
    bt = F.pad(t, (0, 0, 1, 0), value=-1)
    bt = torch.cat([bt[:, :-1], bt[:, 1:]], dim=2)
    dots = torch.einsum("bhie,bhje->bhij", bq, bk) * 8**-0.5
    mv = -torch.finfo(dots.dtype).max
    mask = t[:, :, :, None] < bt[:, :, None, :]
    dots.masked_fill_(mask, mv)
    mask = bt[:, :, None, :] == -1
    dots.masked_fill_(mask, mv)
    a = dots.softmax(dim=-1)
    return torch.einsum("bhij,bhje->bhie", a, bv).reshape(2, 4, 16, 8).transpose(1, 2).flatten(2)


@form((2, 9, 32), parts=lambda: dict(
    c=nn.Linear(32, 96), b=torch.tril(torch.ones(16, 16, dtype=torch.bool)).view(1, 1, 16, 16),
))  # fmt: skip
def gpt_neox(net: Any, x: Any) -> Any:
    """baddbmm with empty zeros, beta 1, alpha; norm; causal by where; attention_mask"""
    q, k, v = net.c(x).view(2, 9, 4, 24).transpose(1, 2).split(8, -1)
    q = q.reshape(8, 9, 8)
    k = k.reshape(8, 9, 8)
    a = torch.zeros(8, 9, 9, dtype=q.dtype, device=k.device)
    a = torch.baddbmm(a, q, k.transpose(1, 2), beta=1.0, alpha=8**-0.5).view(2, 4, 9, 9)
    mv = torch.tensor(torch.finfo(a.dtype).min, dtype=a.dtype)
    a = torch.where(net.b[:, :, :9, :9], a, mv)
    a = F.softmax(a, dim=-1).to(v.dtype)
    return torch.matmul(a, v).permute(0, 2, 1, 3).contiguous().view(2, 9, 32)


@form((2, 32, 4, 5), parts=lambda: dict(qkv=nn.Conv2d(32, 96, 1)))
def edm_unet(net: Any, x: Any) -> Any:
    """EDM: AttentionOp with einsum ncq,nck->nqk, fp32, view(-1)"""
    q, k, v = net.qkv(x).reshape(2 * 4, 8, 3, -1).unbind(2)
    w = (
        torch.einsum("ncq,nck->nqk", q.to(torch.float32), (k / math.sqrt(k.shape[1])).to(torch.float32))
        .softmax(dim=2)
        .to(q.dtype)
    )
    a = torch.einsum("nqk,nck->ncq", w, v)
    return a.reshape(*x.shape) + x


@form((2, 32, 20), parts=lambda: dict(
    qkv=nn.Conv1d(32, 96, 1, bias=False), mem=nn.Parameter(torch.randn(2, 4, 8, 4) * 0.3),
))  # fmt: skip
def stable_audio_linear(net: Any, x: Any) -> Any:
    """full attention of audio: sinks memory kv, einops"""
    b, _, n = x.shape
    q, k, v = (t.reshape(b, 4, 8, n) for t in net.qkv(x).chunk(3, dim=1))
    mk, mv = (t.unsqueeze(0).expand(b, -1, -1, -1) for t in net.mem)
    k, v = torch.cat((mk, k), -1), torch.cat((mv, v), -1)
    q = q * 8**-0.5
    sim = einsum("b h d i, b h d j -> b h i j", q, k)
    a = sim.softmax(dim=-1)
    return einsum("b h i j, b h d j -> b h i d", a, v).permute(0, 1, 3, 2).reshape(b, -1, n)


@form((2, 9, 32), (2, 5, 32), parts=lambda: dict(
    a=nn.Linear(32, 96), b=nn.Linear(32, 96), qn=nn.RMSNorm(8), kn=nn.RMSNorm(8),
))  # fmt: skip
def mm_dit(net: Any, x: Any, c: Any) -> Any:
    """joint attention: cat of text and image on sequence, rms norm, split after"""

    def f(l: Any, t: Any) -> Any:
        q, k, v = l(t).view(2, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return net.qn(q), net.kn(k), v

    q1, k1, v1 = f(net.a, x)
    q2, k2, v2 = f(net.b, c)
    q, k, v = (torch.cat(t, dim=2) for t in ((q2, q1), (k2, k1), (v2, v1)))
    sc = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(8)
    sc = sc.softmax(-1)
    o = torch.matmul(sc, v).transpose(1, 2).reshape(2, -1, 32)
    return o[:, 5:], o[:, :5]
