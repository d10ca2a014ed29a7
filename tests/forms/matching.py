"""Attention in vision that matches, pools, or mixes its weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .form import form, linears, named

einsum = torch.einsum


@form((2, 20, 16), (2, 24, 16), fused=2)
def both_directions(a: Any, b: Any) -> Any:
    """Two images matched: one matrix of scores, softmaxed along both of its dims."""
    q, k = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (a, b))
    s = 8**-0.25
    sim = einsum("bhid,bhjd->bhij", q * s, k * s)
    m0 = einsum("bhij,bhjd->bhid", F.softmax(sim, dim=-1), k)
    m1 = einsum("bhji,bhjd->bhid", F.softmax(sim.transpose(-2, -1).contiguous(), dim=-1).transpose(-2, -1), q)
    return m0.transpose(1, 2).flatten(2), m1.transpose(1, 2).flatten(2)


@form((2, 16, 20), (2, 16, 24), (2, 16, 24))
def matching_channels_first(query: Any, key: Any, value: Any) -> Any:
    """Matching of points: heads behind the channels."""
    q, k, v = (t.view(2, 8, 2, -1) for t in (query, key, value))
    scores = einsum("bdhn,bdhm->bhnm", q, k) / 8**0.5
    prob = F.softmax(scores, dim=-1)
    return einsum("bhnm,bdhm->bdhn", prob, v).contiguous().view(2, 16, -1)


@form((2, 20, 16), (2, 24, 16), fused=0, reasons=("in-between", "in-between"))
def dual_softmax(a: Any, b: Any) -> Any:
    """A product of two softmaxes is no attention."""
    sim = a @ b.transpose(1, 2) / 0.1
    return (sim.softmax(1) * sim.softmax(2)) @ b


@form((2, 5, 16), (2, 20, 16), (2, 20, 16), fused=0, reasons=("in-between", "in-between"))
def slots(slots: Any, k: Any, v: Any) -> Any:
    """Slots compete: softmax over the slots, then normalised over the tokens."""
    for _ in range(2):
        dots = einsum("bid,bjd->bij", slots, k) * 0.25
        attn = dots.softmax(dim=1) + 1e-8
        attn = attn / attn.sum(dim=-1, keepdim=True)
        slots = slots + einsum("bjd,bij->bid", v, attn)
    return slots


@form(
    (2, 16, 4, 5),
    fused=0,
    reasons=("chosen",),
    parts=lambda: (
        dict(position=nn.Parameter(torch.randn(21, 16) * 0.2))
        | named("q k v c", linears(16, 16, 16, 16, 16, bias=True))
    ),
)
def attention_pool(net: Any, x: Any) -> Any:
    """CLIP's pool: the mean token queries all; one query."""
    x = x.flatten(start_dim=2).permute(2, 0, 1)
    x = torch.cat([x.mean(dim=0, keepdim=True), x], dim=0) + net.position[:, None, :]
    return F.multi_head_attention_forward(
        query=x[:1], key=x, value=x, embed_dim_to_check=16, num_heads=2,
        q_proj_weight=net.q.weight, k_proj_weight=net.k.weight, v_proj_weight=net.v.weight,
        in_proj_weight=None, in_proj_bias=torch.cat([net.q.bias, net.k.bias, net.v.bias]),
        bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0.0,
        out_proj_weight=net.c.weight, out_proj_bias=net.c.bias, use_separate_proj_weight=True,
        training=False, need_weights=False,
    )[0].squeeze(0)  # fmt: skip


@form((2, 9, 16), (1, 3, 16), parts=lambda: dict(q=nn.Linear(16, 16), kv=nn.Linear(16, 32)))
def latent_pool(net: Any, x: Any, latent: Any) -> Any:
    """A learned query, expanded for the batch."""
    b = x.shape[0]
    q = net.q(latent.expand(b, -1, -1)).reshape(b, -1, 2, 8).transpose(1, 2)
    k, v = net.kv(x).reshape(b, -1, 2, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    return ((q * 8**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v).transpose(1, 2).reshape(b, -1, 16)


@form((2, 10, 16), parts=lambda: named("q k v", linears(16, 16, 16, 16, bias=True)))
def class_token_only(net: Any, x: Any) -> Any:
    """Class attention: the first token queries."""
    b, n, c = x.shape
    q = net.q(x[:, 0]).unsqueeze(1).reshape(b, 1, 2, 8).permute(0, 2, 1, 3) * 8**-0.5
    k = net.k(x).reshape(b, n, 2, 8).permute(0, 2, 1, 3)
    v = net.v(x).reshape(b, n, 2, 8).permute(0, 2, 1, 3)
    attn = (q @ k.transpose(-2, -1)).softmax(dim=-1)
    return (attn @ v).transpose(1, 2).reshape(b, 1, c)


@form((2, 10, 16), fused=0, reasons=("in-between",), parts=lambda: dict(
    qkv=nn.Linear(16, 48), l=nn.Linear(2, 2), w=nn.Linear(2, 2),
))  # fmt: skip
def talking_heads(net: Any, x: Any) -> Any:
    """Heads are mixed before and after the softmax."""
    b, n, c = x.shape
    q, k, v = net.qkv(x).reshape(b, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
    attn = q @ k.transpose(-2, -1)
    attn = net.l(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(dim=-1)
    attn = net.w(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return (attn @ v).transpose(1, 2).reshape(b, n, c)


@form((2, 10, 16), fused=0, reasons=("in-between",), parts=lambda: dict(mix=nn.Parameter(torch.randn(2, 2))))
def re_attention(net: Any, x: Any) -> Any:
    """DeepViT: heads of the weights mixed by einsum, and a norm."""
    q = k = v = x.unflatten(-1, (2, 8)).transpose(1, 2)
    attn = (einsum("bhid,bhjd->bhij", q, k) * 0.3).softmax(-1)
    attn = einsum("bhij,hg->bgij", attn, net.mix)
    return einsum("bhij,bhjd->bhid", attn, v)


@form((2, 10, 16), parts=lambda: dict(
    temperature=nn.Parameter(torch.log(torch.tensor(8**-0.5))), qkv=nn.Linear(16, 48, bias=False),
))  # fmt: skip
def locality_of_diagonal(net: Any, x: Any) -> Any:
    """Small data sets: a learned temperature, and a token does not see itself."""
    q, k, v = (t.view(2, 10, 2, 8).transpose(1, 2) for t in net.qkv(x).chunk(3, dim=-1))
    dots = torch.matmul(q, k.transpose(-1, -2)) * net.temperature.exp()
    mask = torch.eye(dots.shape[-1], device=dots.device, dtype=torch.bool)
    dots = dots.masked_fill(mask, -torch.finfo(dots.dtype).max)
    return (dots.softmax(-1) @ v).transpose(1, 2).reshape(2, 10, 16)


@form((2, 10, 16))
def parallel_heads_in_batch(x: Any) -> Any:
    """Heads before the batch, as chunks that are concatenated over the batch."""
    q = torch.cat(x.chunk(2, dim=-1), dim=0)
    a = torch.bmm(q, q.transpose(1, 2)) / (16**0.5)
    o = torch.bmm(torch.softmax(a, 2), q)
    return torch.cat(o.chunk(2, dim=0), dim=2)


@form((2, 36, 16))
def neighbourhood_by_unfold(x: Any) -> Any:
    """Each pixel attends to its 3x3 neighbours, unfolded; the edges are masked."""
    b, n, c = x.shape
    image = x.transpose(1, 2).view(b, c, 6, 6)
    k = F.unfold(image, 3, padding=1).view(b, 2, 8, 9, n).permute(0, 1, 4, 3, 2)
    mask = F.unfold(torch.ones(1, 1, 6, 6), 3, padding=1).view(1, 1, n, 1, 9)
    q = x.view(b, n, 2, 8).permute(0, 2, 1, 3).unsqueeze(3)
    attn = (q * 8**-0.5) @ k.transpose(-2, -1)
    attn = attn.masked_fill(mask == 0, float("-inf")).softmax(-1)
    return (attn @ k).squeeze(3).transpose(1, 2).reshape(b, n, c)


@form((2, 4, 8, 8), fused=0, reasons=("no-product",), parts=lambda: dict(mask=nn.Conv2d(4, 1, 1)))
def low_rank_global_context(net: Any, x: Any) -> Any:
    """Global context: one weight for each pixel, from a 1x1 convolution."""
    b, c, h, w = x.shape
    weights = net.mask(x).view(b, 1, h * w).softmax(2).unsqueeze(-1)
    return torch.matmul(x.view(b, c, h * w).unsqueeze(1), weights).view(b, c, 1, 1)
