"""Attention in vision that matches, pools, or mixes its weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .form import form, linears

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
class Slots(nn.Module):
    """Slots compete: softmax over the slots, then normalised over the tokens."""

    def forward(self, slots: Any, k: Any, v: Any) -> Any:
        for _ in range(2):
            dots = einsum("bid,bjd->bij", slots, k) * 0.25
            attn = dots.softmax(dim=1) + 1e-8
            attn = attn / attn.sum(dim=-1, keepdim=True)
            slots = slots + einsum("bjd,bij->bid", v, attn)
        return slots


@form((2, 16, 4, 5), fused=0, reasons=("chosen",))
class AttentionPool(nn.Module):
    """CLIP's pool: the mean token queries all; one query."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(21, 16) * 0.2)
        self.q, self.k, self.v, self.c = linears(16, 16, 16, 16, 16, bias=True)

    def forward(self, x: Any) -> Any:
        x = x.flatten(start_dim=2).permute(2, 0, 1)
        x = torch.cat([x.mean(dim=0, keepdim=True), x], dim=0) + self.position[:, None, :]
        return F.multi_head_attention_forward(
            query=x[:1], key=x, value=x, embed_dim_to_check=16, num_heads=2,
            q_proj_weight=self.q.weight, k_proj_weight=self.k.weight, v_proj_weight=self.v.weight,
            in_proj_weight=None, in_proj_bias=torch.cat([self.q.bias, self.k.bias, self.v.bias]),
            bias_k=None, bias_v=None, add_zero_attn=False, dropout_p=0.0,
            out_proj_weight=self.c.weight, out_proj_bias=self.c.bias, use_separate_proj_weight=True,
            training=False, need_weights=False,
        )[0].squeeze(0)  # fmt: skip


@form((2, 9, 16), (1, 3, 16))
class LatentPool(nn.Module):
    """A learned query, expanded for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: Any, latent: Any) -> Any:
        b = x.shape[0]
        q = self.q(latent.expand(b, -1, -1)).reshape(b, -1, 2, 8).transpose(1, 2)
        k, v = self.kv(x).reshape(b, -1, 2, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return ((q * 8**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v).transpose(1, 2).reshape(b, -1, 16)


@form((2, 10, 16))
class ClassTokenOnly(nn.Module):
    """Class attention: the first token queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = linears(16, 16, 16, 16, bias=True)

    def forward(self, x: Any) -> Any:
        b, n, c = x.shape
        q = self.q(x[:, 0]).unsqueeze(1).reshape(b, 1, 2, 8).permute(0, 2, 1, 3) * 8**-0.5
        k = self.k(x).reshape(b, n, 2, 8).permute(0, 2, 1, 3)
        v = self.v(x).reshape(b, n, 2, 8).permute(0, 2, 1, 3)
        attn = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        return (attn @ v).transpose(1, 2).reshape(b, 1, c)


@form((2, 10, 16), fused=0, reasons=("in-between",))
class TalkingHeads(nn.Module):
    """Heads are mixed before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.l, self.w = nn.Linear(16, 48), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 2, 8).permute(2, 0, 3, 1, 4)
        attn = q @ k.transpose(-2, -1)
        attn = self.l(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(dim=-1)
        attn = self.w(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (attn @ v).transpose(1, 2).reshape(b, n, c)


@form((2, 10, 16), fused=0, reasons=("in-between",))
class ReAttention(nn.Module):
    """DeepViT: heads of the weights mixed by einsum, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Any) -> Any:
        q = k = v = x.unflatten(-1, (2, 8)).transpose(1, 2)
        attn = (einsum("bhid,bhjd->bhij", q, k) * 0.3).softmax(-1)
        attn = einsum("bhij,hg->bgij", attn, self.mix)
        return einsum("bhij,bhjd->bhid", attn, v)


@form((2, 10, 16))
class LocalityOfDiagonal(nn.Module):
    """Small data sets: a learned temperature, and a token does not see itself."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.log(torch.tensor(8**-0.5)))
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.view(2, 10, 2, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.temperature.exp()
        mask = torch.eye(dots.shape[-1], device=dots.device, dtype=torch.bool)
        dots = dots.masked_fill(mask, -torch.finfo(dots.dtype).max)
        return (dots.softmax(-1) @ v).transpose(1, 2).reshape(2, 10, 16)


@form((2, 10, 16))
class ParallelHeadsInBatch(nn.Module):
    """Heads before the batch, as chunks that are concatenated over the batch."""

    def forward(self, x: Any) -> Any:
        q = torch.cat(x.chunk(2, dim=-1), dim=0)
        a = torch.bmm(q, q.transpose(1, 2)) / (16**0.5)
        o = torch.bmm(torch.softmax(a, 2), q)
        return torch.cat(o.chunk(2, dim=0), dim=2)


@form((2, 36, 16))
class NeighbourhoodByUnfold(nn.Module):
    """Each pixel attends to its 3x3 neighbours, unfolded; the edges are masked."""

    def forward(self, x: Any) -> Any:
        b, n, c = x.shape
        image = x.transpose(1, 2).view(b, c, 6, 6)
        k = F.unfold(image, 3, padding=1).view(b, 2, 8, 9, n).permute(0, 1, 4, 3, 2)
        mask = F.unfold(torch.ones(1, 1, 6, 6), 3, padding=1).view(1, 1, n, 1, 9)
        q = x.view(b, n, 2, 8).permute(0, 2, 1, 3).unsqueeze(3)
        attn = (q * 8**-0.5) @ k.transpose(-2, -1)
        attn = attn.masked_fill(mask == 0, float("-inf")).softmax(-1)
        return (attn @ k).squeeze(3).transpose(1, 2).reshape(b, n, c)


@form((2, 4, 8, 8), fused=0, reasons=("no-product",))
class LowRankGlobalContext(nn.Module):
    """Global context: one weight for each pixel, from a 1x1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Conv2d(4, 1, 1)

    def forward(self, x: Any) -> Any:
        b, c, h, w = x.shape
        weights = self.mask(x).view(b, 1, h * w).softmax(2).unsqueeze(-1)
        return torch.matmul(x.view(b, c, h * w).unsqueeze(1), weights).view(b, c, 1, 1)
