"""A small Llama block, written out: what the tests of composition and of several processes share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

WIDTH, HEADS, SHARED, LENGTH = 32, 4, 2, 12


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat((-right, left), dim=-1) * angle.sin()


class Attention(nn.Module):
    """Causal self-attention with grouped keys, in Hugging Face's eager spelling; (batch, length, width)."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, shared: int = SHARED) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shared * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        places = torch.arange(length, device=x.device)
        rate = torch.arange(self.head_dim // 2, device=x.device)
        angle = torch.cat([places[:, None] / 100.0 ** (rate / rate.numel())] * 2, dim=-1).to(x.dtype)
        q, k = rotated(q, angle), rotated(k, angle)
        times = q.shape[1] // k.shape[1]
        k, v = (
            t[:, :, None].expand(batch, t.shape[1], times, length, self.head_dim).flatten(1, 2)
            for t in (k, v)
        )
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)
        hidden = places > places[:, None]
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        out = torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(out)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Norm, attention, norm, MLP, with residuals."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, shared: int = SHARED) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, heads, shared), MLP(width)
        self.first_norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.mlp(self.second_norm(x))


class Model(nn.Module):
    """A few blocks; (batch, length, width)."""

    def __init__(self, blocks: int = 2, *sizes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model(blocks: int = 2, *sizes: int) -> Model:
    """The same weights in each process. `sizes`: width, heads, heads of the keys."""
    torch.manual_seed(0)
    return Model(blocks, *sizes)


def batch(size: int = 4, seed: int = 1) -> torch.Tensor:
    """(size, LENGTH, WIDTH), the same in each process."""
    return torch.randn(size, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def save_products(*_: Any, **__: Any) -> Any:
    """Selective checkpointing: matrix products are kept, the rest is computed again."""
    matrices = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
    return checkpoint.create_selective_checkpoint_contexts(matrices)
