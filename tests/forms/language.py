"""Attention in language models: positions, masks, caches, memories, and what is done to the scores."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .form import QKV, form, heads, linears, merged, named

einsum = torch.einsum
CROSS = ((2, 4, 7, 8), (2, 4, 13, 8), (2, 4, 13, 8))


@form((2, 9, 32), parts=lambda: dict(
    c_attn=nn.Linear(32, 96), c_proj=nn.Linear(32, 32),
    bias=torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16),
))  # fmt: skip
def nano_decoder(net: Any, x: Any) -> Any:
    """A buffer of ones, sliced to the length."""
    t = x.size(1)
    q, k, v = (heads(y, 4) for y in net.c_attn(x).split(32, dim=2))
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(net.bias[:, :, :t, :t] == 0, float("-inf"))
    return net.c_proj(merged(F.softmax(att, dim=-1) @ v))


def rotated(x: Any) -> Any:
    """Pairs of neighbours as complex numbers."""
    t = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * 10000 ** (-torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones_like(t), t)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(3).type_as(x)


@form((2, 9, 32), parts=lambda: named("q k v o", linears(32, 32, 16, 16, 32)))
def grouped_decoder(net: Any, x: Any) -> Any:
    """Rotary by complex numbers, repeated keys, a mask of -inf by triu, softmax in float32."""
    b, n, _ = x.shape
    q, k, v = heads(net.q(x), 4), heads(net.k(x), 2), heads(net.v(x), 2)
    q, k = rotated(q), rotated(k)
    k, v = (t[:, :, None].expand(b, 2, 2, n, 8).reshape(b, 4, n, 8) for t in (k, v))
    mask = torch.full((1, 1, n, n), float("-inf"), device=x.device)
    mask = torch.triu(mask, diagonal=1).type_as(x)
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(8)
    scores = F.softmax((scores + mask).float(), dim=-1).type_as(q)
    return net.o(merged(torch.matmul(scores, v)))


@form((2, 9, 32), (2, 9, 16), parts=lambda: dict(
    q_nope=nn.Linear(32, 32), q_pe=nn.Linear(32, 16), k_pe=nn.Linear(32, 4),
    w_uk=nn.Parameter(torch.randn(4, 8, 16) * 0.2), w_uv=nn.Parameter(torch.randn(4, 8, 16)),
))  # fmt: skip
def latent_keys(net: Any, x: Any, latent: Any) -> Any:
    """Keys and values from a latent, a rotary part beside it that all heads share; scores 'bsht'."""
    b, s, _ = x.shape
    q_nope = einsum("bshd,hdc->bshc", net.q_nope(x).view(b, s, 4, 8), net.w_uk)
    q_pe, k_pe = net.q_pe(x).view(b, s, 4, 4), net.k_pe(x)
    scores = (einsum("bshc,btc->bsht", q_nope, latent) + einsum("bshr,btr->bsht", q_pe, k_pe)) * 12**-0.5
    mask = torch.full((s, s), float("-inf")).triu_(1)
    scores = scores + mask.unsqueeze(1)
    scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
    out = einsum("bsht,btc->bshc", scores, latent)
    return einsum("bshc,hdc->bshd", out, net.w_uv).flatten(2)


@form((2, 9, 32), parts=lambda: dict(q=nn.Linear(32, 48), kv_a=nn.Linear(32, 20), kv_b=nn.Linear(16, 64)))
def latent_keys_made(net: Any, x: Any) -> Any:
    """The same with keys and values made for each head: cat of both parts, values narrower than keys."""
    b, s, _ = x.shape
    q = net.q(x).view(b, s, 4, 12)
    latent, k_pe = torch.split(net.kv_a(x), [16, 4], dim=-1)
    k_nope, v = torch.split(net.kv_b(latent).view(b, s, 4, 16), [8, 8], dim=-1)
    k = torch.cat([k_nope, k_pe.unsqueeze(2).expand(-1, -1, 4, -1)], dim=-1)
    scores = einsum("bshd,bthd->bsht", q, k) * 12**-0.5
    scores += torch.full((s, s), float("-inf")).triu_(1).unsqueeze(1)
    scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
    return einsum("bsht,bthd->bshd", scores, v).flatten(2)


@form((9, 2, 32), (14, 32))
class SegmentRecurrence(nn.Module):
    """Scores (i, j, b, n), relative shift by cat, view and slice; softmax over dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.r = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.u, self.w = nn.Parameter(torch.randn(4, 8) * 0.2), nn.Parameter(torch.randn(4, 8) * 0.2)

    @staticmethod
    def shift(x: Any) -> Any:
        zero = torch.zeros((x.size(0), 1) + x.size()[2:], device=x.device, dtype=x.dtype)
        padded = torch.cat([zero, x], dim=1).view(x.size(1) + 1, x.size(0), *x.size()[2:])
        return padded[1:].view_as(x)

    def forward(self, x: Any, r: Any) -> Any:
        n, b, _ = x.shape
        mems = x.new_zeros(5, b, 32)
        q, k, v = torch.chunk(self.qkv(torch.cat([mems, x])), 3, dim=-1)
        q = q[-n:].view(n, b, 4, 8)
        k, v = k.view(-1, b, 4, 8), v.view(-1, b, 4, 8)
        r = self.r(r).view(-1, 4, 8)
        ac = einsum("ibnd,jbnd->ijbn", q + self.u, k)
        bd = self.shift(einsum("ibnd,jnd->ijbn", q + self.w, r))
        scores = (ac + bd) * 8**-0.5
        mask = torch.triu(torch.ones(n, k.size(0)), diagonal=1 + k.size(0) - n).bool()[:, :, None, None]
        scores = scores.float().masked_fill(mask, -float("inf")).type_as(scores)
        prob = F.softmax(scores, dim=1)
        return einsum("ijbn,jbnd->ibnd", prob, v).contiguous().view(n, b, 32)


@form((2, 9, 32), parts=lambda: dict(qkv=nn.Linear(32, 96)))
def slopes_bias(net: Any, x: Any) -> Any:
    """Slopes times the distance, added by baddbmm."""
    b, n, _ = x.shape
    q, k, v = net.qkv(x).view(b, n, 4, 3, 8).unbind(3)
    q, k, v = (t.transpose(1, 2).reshape(b * 4, n, 8) for t in (q, k, v))
    slopes = torch.tensor([2 ** (-2.0 * (i + 1)) for i in range(4)])
    alibi = (slopes[:, None, None] * torch.arange(n)[None, None, :]).expand(4, 1, n).repeat(b, 1, 1)
    scores = alibi.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=8**-0.5).view(b, 4, n, n)
    mask = torch.ones(n, n, dtype=torch.bool).triu(1)
    probs = F.softmax(torch.masked_fill(scores, mask, torch.finfo(scores.dtype).min), dim=-1)
    out = torch.bmm(probs.view(b * 4, n, n), v).view(b, 4, n, 8)
    return out.permute(0, 2, 1, 3).reshape(b, n, 32)


@form(
    (2, 9, 32), parts=lambda: named("q k v o", linears(32, 32, 32, 32, 32)) | dict(table=nn.Embedding(8, 4))
)
def buckets_bias(net: Any, x: Any) -> Any:
    """Buckets of logarithmic distances, no scale."""
    n = x.shape[1]
    relative = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    side = (relative > 0).long() * 4
    far = relative.abs()
    large = 2 + (torch.log(far.float() / 2) / math.log(8 / 2) * 2).long()
    bucket = side + torch.where(far < 2, far, torch.min(large, torch.full_like(large, 3)))
    bias = net.table(bucket).permute([2, 0, 1]).unsqueeze(0)
    q, k, v = (heads(m(x), 4) for m in (net.q, net.k, net.v))
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += bias
    weights = F.softmax(scores.float(), dim=-1).type_as(scores)
    return net.o(merged(weights @ v))


@form(
    (2, 9, 32), lambda: torch.tensor([[1] * 9, [1] * 5 + [0] * 4]),
    parts=lambda: named("query key value", linears(32, 32, 32, 32, bias=True)),
)  # fmt: skip
def encoder_padded(net: Any, x: Any, mask: Any) -> Any:
    """(1 - mask) * -10000 added."""
    extended = mask[:, None, None, :].to(dtype=x.dtype)
    extended = (1.0 - extended) * -10000.0
    q, k, v = (heads(m(x), 4) for m in (net.query, net.key, net.value))
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(8)
    return merged(torch.matmul(nn.Softmax(dim=-1)(scores + extended), v))


@form((2, 9, 32), lambda: torch.tensor([9, 5]), parts=lambda: dict(qkv=nn.Linear(32, 96)))
def lengths_mask(net: Any, x: Any, lengths: Any) -> Any:
    """A mask of lengths, rows and columns, filled in place with -1e9 after the scale."""
    n = x.size(1)
    mask = torch.arange(n, device=x.device)[None, :] < lengths[:, None]
    mask = (mask[:, None, :] * mask[:, :, None]).unsqueeze(1)
    q, k, v = (heads(t, 4) for t in net.qkv(x).chunk(3, -1))
    scores = (q @ k.mT).div_(8**0.5)
    scores.masked_fill_(mask.logical_not(), -1e9)
    return merged(scores.softmax(-1) @ v)


@form(*QKV, fused=0, reasons=("flex attention",))
def capped(q: Any, k: Any, v: Any) -> Any:
    """A softcap, then a causal mask."""
    s = torch.matmul(q, k.transpose(2, 3)) * 8**-0.5
    s = torch.tanh(s / 30.0) * 30.0
    n = s.shape[-1]
    s = s.where(torch.ones(n, n, dtype=torch.bool).tril(), torch.finfo(s.dtype).min)
    return torch.matmul(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), v)


@form(*QKV, (4,))
def sinks(q: Any, k: Any, v: Any, sink: Any) -> Any:
    """One more logit of each head, dropped after the softmax."""
    qk = einsum("bhqd,bhkd->bhqk", q, k) * 8**-0.5
    qk = qk + torch.triu(qk.new_full((9, 9), -float("inf")), diagonal=1)
    qk = torch.cat([qk, sink.reshape(1, -1, 1, 1).expand(2, -1, 9, 1)], dim=-1)
    return einsum("bhqk,bhkd->bhqd", torch.softmax(qk, dim=-1)[..., :-1], v)


@form(*QKV)
def one_more_in_the_sum(q: Any, k: Any, v: Any) -> Any:
    """exp / (1 + sum): a column of zeros, in front of scores that are masked already."""
    s = (q @ k.mT * 8**-0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    return F.pad(s, (1, 0)).softmax(-1)[..., 1:] @ v


@form(*QKV, fused=0, reasons=("in-between",))
def two_more_in_the_sum(q: Any, k: Any, v: Any) -> Any:
    return F.pad(q @ k.mT * 8**-0.5, (2, 0)).softmax(-1)[..., 2:] @ v


@form(*QKV)
def off_by_one(q: Any, k: Any, v: Any) -> Any:
    """exp / (1 + sum): a softmax written out, with a zero logit."""
    s = q @ k.mT * 8**-0.5
    m = s.amax(-1, keepdim=True).clamp(min=0)
    e = torch.exp(s - m)
    return (e / (torch.exp(-m) + e.sum(-1, keepdim=True))) @ v


@form((2, 9, 32), parts=lambda: dict(
    qkv=nn.Linear(32, 96), q_norm=nn.RMSNorm(8), k_norm=nn.LayerNorm(8),
    scale=nn.Parameter(torch.full((4, 1, 1), 2.0)),
))  # fmt: skip
def normed_heads(net: Any, x: Any) -> Any:
    """q and k normed by head, a learned temperature of each head, no scale."""
    q, k, v = (heads(t, 4) for t in net.qkv(x).chunk(3, -1))
    sim = einsum("b h i d, b h j d -> b h i j", net.q_norm(q), net.k_norm(k)) * net.scale
    i, j = sim.shape[-2:]
    sim = sim.masked_fill(torch.ones((i, j), dtype=torch.bool).triu(j - i + 1), -torch.finfo(sim.dtype).max)
    return merged(einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1, dtype=torch.float32), v))


@form(*QKV, fused=1)
def weights_kept_and_dropped(q: Any, k: Any, v: Any) -> Any:
    """What is kept for a look is not looked at."""
    dots = einsum("b h i d, b h j d -> b h i j", q, k) * 8**-0.5
    pre = dots.clone()
    attn = F.softmax(dots, dim=-1)
    post = attn.clone()
    out = einsum("b h i j, b h j d -> b h i d", attn, v)
    kept = {"pre": pre, "post": post.detach(), "shape": dots.shape}
    return out if kept else None


@form(*QKV, fused=0, reasons=("weights",))
def weights_returned(q: Any, k: Any, v: Any) -> Any:
    w = (q @ k.mT * 8**-0.5).softmax(-1)
    return w @ v, w


@form(
    (2, 9, 32), fused=0, reasons=("differential attention",),
    parts=lambda: named("q k v", linears(32, 32, 32, 32)) | dict(
        l=nn.Parameter(torch.tensor(0.3)), norm=nn.RMSNorm(16),
    ),
)  # fmt: skip
def differential(net: Any, x: Any) -> Any:
    """A difference of two softmaxes, times the values: two attentions and a subtraction."""
    b, n, _ = x.shape
    q, k = net.q(x).view(b, n, 4, 8).transpose(1, 2), net.k(x).view(b, n, 4, 8).transpose(1, 2)
    v = net.v(x).view(b, n, 2, 16).transpose(1, 2)
    w = torch.matmul(q * 8**-0.5, k.transpose(-1, -2))
    w = w + torch.triu(torch.zeros([n, n]).fill_(float("-inf")), 1)
    w = F.softmax(w, dim=-1, dtype=torch.float32).type_as(w).view(b, 2, 2, n, n)
    w = w[:, :, 0] - net.l * w[:, :, 1]
    return merged(net.norm(torch.matmul(w, v)) * 0.2)


@form((2, 4, 9, 8), (2, 4, 9, 8), (2, 2, 9, 16), fused=0, reasons=("differential attention",) * 2)
def differential_of_two(q: Any, k: Any, v: Any) -> Any:
    """Two softmaxes of halves."""
    (q1, q2), (k1, k2) = q.chunk(2, 1), k.chunk(2, 1)
    a1 = (q1 @ k1.mT * 8**-0.5).softmax(-1)
    a2 = (q2 @ k2.mT * 8**-0.5).softmax(-1)
    return (a1 - 0.4 * a2) @ v


@form(*QKV, fused=0, reasons=("pow, and no softmax",))
def relu_squared(q: Any, k: Any, v: Any) -> Any:
    return (F.relu(q @ k.mT) / 9) ** 2 @ v


@form(*QKV, fused=0, reasons=("used-elsewhere",))
def topk_kept(q: Any, k: Any, v: Any) -> Any:
    """All but the largest scores of each row are masked."""
    s = q @ k.mT * 8**-0.5
    kth = s.topk(3, dim=-1).values[..., -1:]
    return s.masked_fill(s < kth, -torch.finfo(s.dtype).max).softmax(-1) @ v


@form(*QKV)
def sliding_window(q: Any, k: Any, v: Any) -> Any:
    """Causal and at most 3 back, by distance."""
    i = torch.arange(9)
    distance = i[:, None] - i[None, :]
    mask = (distance >= 0) & (distance < 3)
    s = (q @ k.transpose(-1, -2)) / math.sqrt(8)
    return torch.where(mask, s, torch.tensor(-1e30)).softmax(-1) @ v


@form((2, 4, 12, 8), (2, 4, 12, 8), (2, 4, 12, 8))
def blocks_of_tokens(q: Any, k: Any, v: Any) -> Any:
    """Blocks of 4, each with the block before it as keys; the first one sees padding that is masked."""
    b, h, n, d = q.shape
    qb, kb, vb = (t.reshape(b * h, 3, 4, d) for t in (q, k, v))
    back = [torch.cat([F.pad(t, (0, 0, 0, 0, 1, 0), value=0.0)[:, :-1], t], dim=2) for t in (kb, vb)]
    at = torch.arange(12).view(1, 3, 4)
    k_at = torch.cat([F.pad(at, (0, 0, 1, 0), value=-1)[:, :-1], at], dim=-1)
    sim = einsum("b w i d, b w j d -> b w i j", qb * d**-0.5, back[0])
    mask = (at[..., :, None] < k_at[..., None, :]) | (k_at[..., None, :] == -1)
    sim = sim.masked_fill(mask, -torch.finfo(sim.dtype).max)
    return einsum("b w i j, b w j d -> b w i d", sim.softmax(-1), back[1]).reshape(b, h, n, d)
