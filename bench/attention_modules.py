"""Attention as others write it: in diffusion, segmentation, proteins, speech, sets and graphs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

LOWEST = torch.finfo(torch.bfloat16).min


class _Projected(nn.Module):
    """q, k, v and an output projection of `width`, in `heads` heads."""

    def __init__(self, width: int, heads: int, context: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k, self.v = (nn.Linear(context or width, width, bias=bias) for _ in range(2))
        self.out = nn.Linear(width, width)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) -> (batch, heads, length, dim)."""
        return x.view(*x.shape[:2], self.heads, self.dim).transpose(1, 2)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """The way back, through the output projection."""
        out: torch.Tensor = self.out(x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1))
        return out


class ChannelsFirst(nn.Module):
    """Self-attention of a U-Net: one 1x1 convolution, products by einsum over channels that come first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1, bias=False), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        q, k, v = (t.reshape(b, self.heads, c // self.heads, h * w) for t in self.qkv(x).chunk(3, dim=1))
        scores = torch.einsum("bhdi,bhdj->bhij", q * (c // self.heads) ** -0.5, k)
        out = torch.einsum("bhij,bhdj->bhid", scores.softmax(dim=-1), v)
        return x + self.out(out.permute(0, 1, 3, 2).reshape(b, c, h, w))


class ValuesFirst(nn.Module):
    """The block of an autoencoder of images: one head, and the values are the left operand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        q = self.q(x).reshape(b, c, h * w).permute(0, 2, 1)
        weights = F.softmax(torch.bmm(q, self.k(x).reshape(b, c, h * w)) * c**-0.5, dim=2)
        out = torch.bmm(self.v(x).reshape(b, c, h * w), weights.permute(0, 2, 1))
        return x + self.out(out.reshape(b, c, h, w))


class Cross(_Projected):
    """Attention of an image to a text, with the scale behind the product."""

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(text)), self.split(self.v(text))
        return self.joined((torch.matmul(q, k.transpose(-1, -2)) * self.dim**-0.5).softmax(-1) @ v)


class DecomposedPositions(nn.Module):
    """Relative positions of rows and of columns, added to scores in a view of five dims."""

    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads, self.side = heads, side
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.rows, self.columns = (
            nn.Parameter(torch.randn(2 * side - 1, width // heads) * 0.1) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        side, dim = self.side, width // self.heads
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, b * self.heads, n, dim).unbind(0)
        scores = (q * dim**-0.5) @ k.transpose(-2, -1)
        at = torch.arange(side, device=x.device)
        at = at[:, None] - at[None] + side - 1
        grid = q.reshape(b * self.heads, side, side, dim)
        rows = torch.einsum("bhwc,hkc->bhwk", grid, self.rows[at])
        columns = torch.einsum("bhwc,wkc->bhwk", grid, self.columns[at])
        scores = scores.view(b * self.heads, side, side, side, side)
        scores = scores + rows[:, :, :, :, None] + columns[:, :, :, None, :]
        weights = scores.view(b * self.heads, n, n).softmax(dim=-1)
        out = (weights @ v).view(b, self.heads, n, dim).permute(0, 2, 1, 3).reshape(b, n, width)
        result: torch.Tensor = self.out(out)
        return result


class CosineWindows(nn.Module):
    """Windows of an image: cosines with a learned temperature, biases of positions, a mask."""

    def __init__(self, width: int, heads: int, tokens: int, windows: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.log(10 * torch.ones(heads, 1, 1)))
        self.bias = nn.Parameter(torch.randn(heads, tokens, tokens) * 0.1)
        region = torch.arange(windows * tokens).view(windows, tokens) // 7 % 2
        mask = (region[:, None] != region[:, :, None]).float() * -100.0
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * torch.clamp(self.scale, max=math.log(100.0)).exp() + self.bias.unsqueeze(0)
        windows = self.mask.shape[0]
        scores = scores.view(b // windows, windows, self.heads, n, n) + self.mask.unsqueeze(1).unsqueeze(0)
        weights = F.softmax(scores.view(-1, self.heads, n, n), dim=-1)
        result: torch.Tensor = self.out((weights @ v).transpose(1, 2).reshape(b, n, width))
        return result


class PairBias(nn.Module):
    """Rows of an alignment of sequences: a bias of pairs, a mask of gaps, a gate behind."""

    def __init__(self, width: int, heads: int, pair: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.pair = nn.Linear(pair, heads, bias=False)

    def forward(self, m: torch.Tensor, z: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        def split(x: torch.Tensor) -> torch.Tensor:
            return x.view(*x.shape[:-1], self.heads, -1).transpose(-2, -3)

        q, k, v = split(self.q(m)), split(self.k(m)), split(self.v(m))
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
        scores = scores + (1e4 * (seen.to(m.dtype) - 1))[..., None, None, :]
        scores = scores + self.pair(z).permute(0, 3, 1, 2)[:, None]
        out = torch.matmul(torch.softmax(scores, -1), v).transpose(-2, -3)
        out = out.reshape(*m.shape[:-1], -1) * torch.sigmoid(self.gate(m))
        result: torch.Tensor = self.out(out)
        return result


class ShiftedPositions(_Projected):
    """Speech: relative positions that are shifted by a pad and views, two learned offsets of the queries."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, bias=True)
        self.positions = nn.Linear(width, width, bias=False)
        self.u, self.w = (nn.Parameter(torch.randn(heads, self.dim) * 0.1) for _ in range(2))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q = self.q(x).view(b, n, self.heads, self.dim)
        k, v = self.split(self.k(x)), self.split(self.v(x))
        p = self.positions(positions).view(1, -1, self.heads, self.dim).transpose(1, 2)
        content = torch.matmul((q + self.u).transpose(1, 2), k.transpose(-2, -1))
        moved = torch.matmul((q + self.w).transpose(1, 2), p.transpose(-2, -1))
        padded = torch.cat([torch.zeros_like(moved[..., :1]), moved], dim=-1)
        moved = padded.view(b, self.heads, 2 * n, n)[:, :, 1:].view(b, self.heads, n, 2 * n - 1)[..., :n]
        return self.joined(torch.softmax((content + moved) / math.sqrt(self.dim), dim=-1) @ v)


class KeysFirst(nn.Module):
    """A language model whose sequence comes first, as do the keys of its scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, b, width = x.shape
        q, k, v = (t.view(n, b, self.heads, -1) for t in self.qkv(x).chunk(3, dim=-1))
        scores = torch.einsum("ibnd,jbnd->ijbn", q, k) * (width // self.heads) ** -0.5
        hidden = torch.triu(torch.ones(n, n, dtype=torch.bool, device=x.device), 1)
        scores = scores.masked_fill(hidden[:, :, None, None], -1e30)
        out = torch.einsum("ijbn,jbnd->ibnd", F.softmax(scores, dim=1), v)
        result: torch.Tensor = self.out(out.reshape(n, b, width))
        return result


class TrilBuffer(nn.Module):
    """A small language model: one linear for q, k, v, a causal buffer that is compared with 0."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :n, :n] == 0, float("-inf"))
        out = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(b, n, width)
        result: torch.Tensor = self.out(out)
        return result


class Slopes(_Projected):
    """A language model whose positions are slopes of the heads, in the mask."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        at = torch.arange(n, device=x.device)
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1, device=x.device) / self.heads)
        bias = -slopes[:, None, None] * (at[:, None] - at[None]).clamp(min=0)
        bias = bias.masked_fill(at[None] > at[:, None], float("-inf")).to(x.dtype)
        return self.joined(
            torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * self.dim**-0.5 + bias, -1) @ v
        )


class Band(_Projected):
    """A long document: a token sees those at most `reach` away, and the padding is hidden."""

    def __init__(self, width: int, heads: int, reach: int) -> None:
        super().__init__(width, heads)
        self.reach = reach

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        at = torch.arange(x.shape[1], device=x.device)
        near = (at[:, None] - at[None]).abs() <= self.reach
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.dim)
        scores = scores.masked_fill(~(near[None, None] & seen.bool()[:, None, None]), LOWEST)
        return self.joined(scores.softmax(-1) @ v)


class Capped(_Projected):
    """Scores through tanh, causal."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = torch.tanh(q @ k.mT * self.dim**-0.5 / 50.0) * 50.0
        hidden = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        return self.joined(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v)


class OneKeyHead(nn.Module):
    """All heads of the queries share one head of keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q = self.q(x).view(b, n, self.heads, self.dim).permute(0, 2, 1, 3) * self.dim**-0.5
        k, v = self.kv(x).chunk(2, dim=-1)
        scores = torch.einsum("bhid,bjd->bhij", q, k)
        hidden = torch.ones((n, n), device=x.device, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.finfo(scores.dtype).max).softmax(dim=-1)
        out = torch.einsum("bhij,bjd->bhid", weights, v).permute(0, 2, 1, 3).reshape(b, n, width)
        result: torch.Tensor = self.out(out)
        return result


class HeadsInTheBatch(_Projected):
    """A block on sets: heads are split into the batch by `cat`, queries are added to the result."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(y), self.v(y)
        q, k, v = (torch.cat(t.split(self.dim, 2), 0) for t in (q, k, v))
        weights = torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(self.dim * self.heads), 2)
        out = torch.cat((q + weights.bmm(v)).split(x.size(0), 0), 2)
        return out + F.relu(self.out(out))


class Graph(_Projected):
    """Nodes of a dense graph: a boolean adjacency, and scores of edges beside those of nodes."""

    def forward(self, x: torch.Tensor, edges: torch.Tensor, adjacent: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = torch.einsum("bhnd,bhmd->bhnm", q, k) / math.sqrt(self.dim) + edges.permute(0, 3, 1, 2)
        scores = torch.where(adjacent[:, None] > 0, scores, torch.full_like(scores, -9e15))
        return self.joined(F.softmax(scores, dim=-1) @ v)


class Axial(_Projected):
    """Rows of a square of tokens, each by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, h, w, width = x.shape
        x = x.reshape(b * h, w, width)
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * self.dim**-0.5
        out = torch.einsum("bhij,bhjd->bhid", torch.softmax(scores, dim=-1), v)
        return self.joined(out).view(b, h, w, width)


class Resampler(_Projected):
    """Few learned queries that attend to many tokens and to themselves."""

    def __init__(self, width: int, heads: int, latents: int) -> None:
        super().__init__(width, heads)
        self.latents = nn.Parameter(torch.randn(latents, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        both = torch.cat((x, latents), dim=-2)
        q = self.split(self.q(latents)) * self.dim**-0.5
        k, v = self.split(self.k(both)), self.split(self.v(both))
        scores = torch.einsum("...id,...jd->...ij", q, k)
        scores = scores - scores.amax(dim=-1, keepdim=True).detach()
        return self.joined(torch.einsum("...ij,...jd->...id", scores.softmax(dim=-1), v))
