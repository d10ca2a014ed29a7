"""One attention written out, as one SDPA, and as the operation of the package.

All take and return [batch, length, heads, head_dim]."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.attention.rows import Row

Tensors = tuple[torch.Tensor, ...]


def repeat_kv(x: torch.Tensor, times: int) -> torch.Tensor:
    """Each head `times` times, as Hugging Face does it."""
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, times, length, dim).reshape(batch, heads * times, length, dim)


def unfused(
    row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor
) -> torch.Tensor:
    """Attention in Hugging Face's eager spelling; [batch, length, heads, head_dim] in and out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if row.heads != row.kv_heads:
        k, v = (repeat_kv(x, row.heads // row.kv_heads) for x in (k, v))
    scale = row.head_dim**-0.5
    if row.mask == "alibi":
        flat = (row.batch * row.heads, -1, row.head_dim)
        scores = masks[0].baddbmm(q.reshape(flat), k.reshape(flat).transpose(1, 2), beta=1.0, alpha=scale)
        scores = scores.view(row.batch, row.heads, row.q_len, row.kv_len) + masks[1]
    else:
        scores = torch.matmul(q, k.transpose(2, 3)) * scale
        if row.mask == "bool4d":
            scores = torch.where(masks[0], scores, torch.finfo(scores.dtype).min)
        elif row.mask.startswith("window"):
            windows = masks[1].shape[0]
            scores = (scores + masks[0]).view(-1, windows, row.heads, row.q_len, row.kv_len)
            scores = (scores + masks[1][None]).view(-1, row.heads, row.q_len, row.kv_len)
        elif masks:
            scores = scores + masks[0]
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def fused(
    row: Row, repeat: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor
) -> torch.Tensor:
    """The same as one SDPA; with `repeat`, on K and V repeated to all heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = row.heads != row.kv_heads
    if grouped and repeat:
        k, v = (repeat_kv(x, row.heads // row.kv_heads) for x in (k, v))
    mask = None
    if row.mask.startswith("window"):
        mask = (
            (masks[0] + masks[1])[None].expand(row.batch // masks[1].shape[0], -1, -1, -1, -1).flatten(0, 1)
        )
    elif masks:
        mask = masks[0].expand(row.batch, row.heads, row.q_len, row.kv_len)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=row.mask == "causal", enable_gqa=grouped and not repeat
    )
    return out.transpose(1, 2).contiguous()


def short(row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
    """The same as the operation of the package."""
    from inductor_fusions import ops

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    given, numbers = list(masks), [1.0] * len(masks)
    if row.mask == "alibi":
        given[0] = masks[0].view(row.batch, row.heads, 1, row.kv_len)
    elif row.mask == "bool4d":
        numbers = [torch.finfo(q.dtype).min]
    out = ops.short_attention(q, k, v, given, numbers=numbers, causal=row.mask == "causal")
    return out.transpose(1, 2).contiguous()
