"""Caches, memories and packed batches of language models, and layers of torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .form import QKV, form, heads, merged, scored

einsum = torch.einsum


@form((2, 1, 32), (2, 4, 16, 8), (2, 4, 16, 8), lambda: torch.tensor(5), parts=lambda: dict(
    qkv=nn.Linear(32, 96),
))  # fmt: skip
def static_cache(net: Any, x: Any, k_cache: Any, v_cache: Any, position: Any) -> Any:
    """One token; its keys are written into a cache, and what is behind it is masked."""
    q, k, v = (heads(t, 4) for t in net.qkv(x).chunk(3, -1))
    k = k_cache.index_copy(2, position[None], k)
    v = v_cache.index_copy(2, position[None], v)
    s = q @ k.transpose(-2, -1) / 8**0.5
    s = s.masked_fill((torch.arange(16) > position)[None, None, None], float("-inf"))
    return merged(s.softmax(-1) @ v)


@form((2, 9, 32), (2, 4, 6, 8), (2, 4, 6, 8), parts=lambda: dict(qkv=nn.Linear(32, 96)))
def growing_cache(net: Any, x: Any, past_k: Any, past_v: Any) -> Any:
    """Past and present keys; a mask that is right aligned."""
    q, k, v = (heads(t, 4) for t in net.qkv(x).chunk(3, -1))
    k, v = torch.cat((past_k, k), dim=-2), torch.cat((past_v, v), dim=-2)
    nd, ns = q.size(-2), k.size(-2)
    mask = torch.ones(ns, ns).tril()[None, None, ns - nd : ns, :ns]
    w = (q @ k.mT) * 8**-0.5
    w = w * mask - 1e10 * (1 - mask)
    return merged(F.softmax(w, dim=-1) @ v), k, v


@form((2, 9, 32), (1, 4, 32), parts=lambda: dict(
    qkv=nn.Linear(32, 96, bias=False), mem=nn.Parameter(torch.randn(2, 4, 3, 8) * 0.3),
))  # fmt: skip
def memory_tokens(net: Any, x: Any, registers: Any) -> Any:
    """Learned keys and values in front, and registers that are dropped behind."""
    b = x.shape[0]
    x = torch.cat([registers.expand(b, -1, -1), x], dim=1)
    q, k, v = (heads(t, 4) for t in net.qkv(x).chunk(3, -1))
    mem_k, mem_v = (t.unsqueeze(0).expand(b, -1, -1, -1) for t in net.mem)
    k, v = torch.cat((mem_k, k), dim=-2), torch.cat((mem_v, v), dim=-2)
    out = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(dim=-1) @ v
    return merged(out)[:, 4:]


@form((2, 9, 32), lambda: torch.rand(2, 9) > 0.3, parts=lambda: dict(
    q=nn.Linear(32, 32, bias=False), kv=nn.Linear(32, 16, bias=False), null=nn.Parameter(torch.randn(2, 8)),
))  # fmt: skip
def null_key(net: Any, x: Any, mask: Any) -> Any:
    """A learned null key that padding never hides: the mask padded by True."""
    b = x.shape[0]
    q = heads(net.q(x), 4) * 8**-0.5
    k, v = net.kv(x).chunk(2, dim=-1)
    nk, nv = (t[None, None].expand(b, 1, 8) for t in net.null)
    k, v = torch.cat((nk, k), dim=-2), torch.cat((nv, v), dim=-2)
    sim = einsum("b h i d, b j d -> b h i j", q, k)
    mask = F.pad(mask, (1, 0), value=True)[:, None, None, :]
    sim = sim.masked_fill(~mask, -torch.finfo(sim.dtype).max)
    return merged(einsum("b h i j, b j d -> b h i d", sim.softmax(dim=-1), v))


@form((2, 9, 32), fused=4)
def last_token_queries(x: Any) -> Any:
    """Pooling by the last token, 2-D products by loops over heads."""
    out = []
    for part in x.split(8, dim=-1):
        w = torch.softmax(part[:, -1:] @ part.transpose(1, 2) / 8**0.5, dim=-1)
        out.append(w @ part)
    return torch.cat(out, -1)


@form((9, 32), (13, 32))
def two_dimensional(q: Any, k: Any) -> Any:
    """No batch and no heads."""
    return torch.mm(torch.softmax(torch.mm(q, k.t()) / 32**0.5, dim=1), k)


@form((2, 9, 32), parts=lambda: dict(q=nn.Linear(32, 32), kv=nn.Linear(32, 64)))
def retrieval_over_chunks(net: Any, x: Any) -> Any:
    """Chunks of tokens attend to their own neighbours: (batch, chunk, tokens, dim) and a batch of 3 dims."""
    x = x.reshape(2, 3, 3, 32)
    retrieved = torch.stack([x.roll(1, 1), x.roll(2, 1)], 2).flatten(2, 3)
    q = net.q(x).unflatten(-1, (4, 8)).transpose(2, 3)
    k, v = (t.unflatten(-1, (4, 8)).transpose(2, 3) for t in net.kv(retrieved).chunk(2, -1))
    return ((q * 8**-0.5) @ k.mT).softmax(-1).matmul(v).transpose(2, 3).flatten(3)


@form((2, 9, 32), lambda: torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 5 + [1] * 4]), parts=lambda: dict(
    qkv=nn.Linear(32, 96),
))  # fmt: skip
def packed_documents(net: Any, x: Any, document: Any) -> Any:
    """Tokens of one document see each other, backwards."""
    q, k, v = (heads(t, 4) for t in net.qkv(x).chunk(3, -1))
    same = document[:, None, :, None] == document[:, None, None, :]
    causal = torch.tril(torch.ones(9, 9, dtype=torch.bool))
    bias = torch.zeros_like(same, dtype=x.dtype).masked_fill_(~(same & causal), torch.finfo(x.dtype).min)
    return merged(((q @ k.transpose(-2, -1)) / 8**0.5 + bias).softmax(-1) @ v)


@form(*QKV, lambda: torch.rand(2, 1, 9) > 0.4, (1, 4, 9, 9))
def everything_at_once(q: Any, k: Any, v: Any, pad: Any, bias: Any) -> Any:
    """Scale, bias, two masks, both as (batch, heads, i, j) by repeat."""
    s = torch.matmul(q / math.sqrt(q.size(-1)), k.transpose(-1, -2))
    s = s + bias
    pad = pad.repeat(1, 9, 1)[:, None].repeat(1, 4, 1, 1)
    s = s.masked_fill(pad == 0, -1e9).masked_fill(torch.ones(9, 9).triu(1).bool(), -1e9)
    return torch.matmul(torch.dropout(s.softmax(dim=-1), 0.1, False), v)


@form((2, 9, 32), lambda: torch.rand(2, 9) > 0.4, fused=0, reasons=("chosen",), parts=lambda: dict(
    attn=nn.MultiheadAttention(32, 4, batch_first=True),
))  # fmt: skip
def fixed_windows_of_long(net: Any, x: Any, seen: Any) -> Any:
    """multi_head_attention of torch with both masks, weights not asked for."""
    seen = seen.index_fill(1, torch.tensor([0]), True)
    causal = torch.ones(9, 9, dtype=torch.bool).triu(1)
    return net.attn(x, x, x, key_padding_mask=~seen, attn_mask=causal, need_weights=False)[0]


@form((2, 9, 32), fused=0, reasons=("chosen",), parts=lambda: dict(
    layer=nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
))  # fmt: skip
def encoder_layer_of_torch(net: Any, x: Any) -> Any:
    """One operation in inference."""
    return net.layer(x)


@form((9, 2, 32), parts=lambda: dict(attn=nn.MultiheadAttention(32, 4, bias=False, add_bias_kv=False)))
def layers_of_torch(net: Any, x: Any) -> Any:
    """A weight that nobody reads: the second result is dropped."""
    out, _ = net.attn(x, x, x)
    return out


@form(*((2, 2, 4, 8),) * 3, fused=0, reasons=("chunks of a sliding window",))
def window_of_chunks(q: Any, k: Any, v: Any) -> Any:
    """Longformer's: the scores of chunks are written into a new tensor."""
    scores = scored(q, k)
    window = scores.new_full((2, 2, 4, 8), -1e9)
    window[:, :, :, 4:] = scores
    window[:, 1, :, :4] = scored(q[:, 1], k[:, 0])
    before = F.pad(v, (0, 0, 0, 0, 1, 0))[:, :2]
    return window.softmax(-1) @ torch.cat((before, v), 2)


@form(*QKV, (2, 9, 9), fused=0, reasons=("overwritten",))
def scores_of_one_head_replaced(q: Any, k: Any, v: Any, other: Any) -> Any:
    """The others are a product's."""
    scores = scored(q, k).clone()
    scores[:, 0] = other
    return scores.softmax(-1) @ v
