"""Layers as models write them, and some of them as someone would write them for speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from bench.attention.spellings import repeat_kv

Tensors = tuple[torch.Tensor, ...]


class Linears(nn.Module):
    """Linears that share an input."""

    def __init__(self, width: int, widths: Sequence[int], bias: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, n, bias=bias) for n in widths)
        self.widths = list(widths)

    def forward(self, x: torch.Tensor) -> Tensors:
        return tuple(part(x) for part in self.parts)


def concatenated(module: Linears) -> Callable[[torch.Tensor], Tensors]:
    """One product on weights that were joined beforehand; in training they are joined in each step."""
    bias = module.parts[0].bias is not None

    def joined() -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = torch.cat([part.weight for part in module.parts])
        return weight, torch.cat([part.bias for part in module.parts]) if bias else None

    ready = None if any(p.requires_grad for p in module.parameters()) else joined()

    def forward(x: torch.Tensor) -> Tensors:
        weight, offset = ready or joined()
        return tuple(F.linear(x, weight, offset).split(module.widths, -1))

    return forward


class GatedMLP(nn.Module):
    """silu(x @ Wg) * (x @ Wu), and the way back."""

    def __init__(self, width: int, hidden: int, down: bool = True) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False) if down else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Projections(nn.Module):
    """The linears of Llama's layer: QKV with shared heads, and a gated MLP behind their mean."""

    def __init__(self, width: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = Linears(width, (width, shared, shared), False)
        self.mlp = GatedMLP(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x))
        x = x + q * (k * v).mean(-1, keepdim=True)
        out: torch.Tensor = x + self.mlp(self.second(x))
        return out


class MLP(nn.Module):
    """A linear, GELU, and the way back."""

    def __init__(self, width: int, hidden: int, down: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width) if down else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


def bare_pair(module: GatedMLP) -> Callable[[torch.Tensor], Tensors]:
    """The two products of a gated MLP and nothing else: a limit of the pair, not the same result."""
    return lambda x: (module.gate(x), module.up(x))


def bare(module: MLP) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product of an MLP's first linear, without bias and activation: a limit, not the same result."""
    return lambda x: F.linear(x, module.up.weight)


class Adapted(nn.Module):
    """A frozen linear with a low-rank adapter: x @ W + scale * (x @ A) @ B."""

    def __init__(self, width: int, out: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.b(self.a(x)) * self.scale
        return out


class EncoderLayer(nn.Module):
    """BERT's layer: attention written out, with the padding mask of the batch."""

    def __init__(self, width: int, heads: int, lengths: Sequence[int], seq: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = MLP(width, 4 * width)
        hidden = torch.arange(seq) >= torch.tensor(lengths)[:, None]
        mask = torch.zeros(len(lengths), 1, 1, seq).masked_fill(hidden[:, None, None], -1e4)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.mask
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.first(x + self.out(mixed))
        out: torch.Tensor = self.second(x + self.mlp(x))
        return out


class DecoderLayer(nn.Module):
    """Llama's layer without rotation: causal attention written out, with shared heads, and a gated MLP."""

    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.shared, dim = heads, shared, width // heads
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, shared * dim, bias=False) for _ in range(2))
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlp = GatedMLP(width, hidden)

    def _heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        counts = ((self.q, self.heads), (self.k, self.shared), (self.v, self.shared))
        return [p(x).unflatten(-1, (n, -1)).transpose(1, 2) for p, n in counts]

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.second(x))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._heads(self.first(x))
        k, v = (repeat_kv(t, self.heads // self.shared) for t in (k, v))
        seq = x.shape[1]
        future = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(future, float("-inf"))
        return self._mlp(x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))

    def by_hand(self, x: torch.Tensor) -> torch.Tensor:
        """The same with SDPA told what the mask is."""
        q, k, v = self._heads(self.first(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._mlp(x + self.out(mixed.transpose(1, 2).flatten(2)))
