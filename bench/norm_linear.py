"""Measure a norm in the kernels of the linears of one row, against a kernel of its own, with several tiles.

    mlp d4096 n14336     layers of RMSNorm, gate and up, down, and the sum of the residual stream
    qkv d4096 n1024      layers of RMSNorm, Q of 4096 columns, K and V of 1024, and the linear behind them
    head d4096 n128256   one such layer of an MLP, a norm and the head

Several layers run one after the other in a CUDA graph, as in decoding: no weights stay in the L2 cache.

    apart        the norm has its own kernel
    as chosen    the norm is in the kernels, with the tile that the package takes
    C x K, W     the same with tiles of C columns, K elements a step and W warps

    python -m bench.norm_linear --out bench/results/norm_linear_h200.json --budget 200
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import inductor_fusions
from bench import tuning
from bench.common import Json, apart, both_clocks, compiled_only, fresh_cache, relative_error
from inductor_fusions import config
from inductor_fusions.block_mm import configurations
from inductor_fusions.block_mm.configurations import Config

#: Columns, step of K, warps.
TILES = (
    (2, 1024, 4), (4, 1024, 4), (2, 2048, 4), (2, 2048, 8), (4, 2048, 8), (4, 512, 4), (2, 512, 4),
    (1, 2048, 4),
)  # fmt: skip
#: Bytes of weights that the layers of a row have together, at least: several times the L2 cache.
BYTES = 2**29


@dataclass(frozen=True)
class Row:
    """One model: its kind, its width, and the columns of the linears behind the norm."""

    kind: str
    width: int
    columns: int

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.kind} d{self.width} n{self.columns}"


def grid(quick: bool) -> list[Row]:
    """What is measured, the most important first."""
    if quick:
        return [Row("mlp", 64, 96), Row("qkv", 64, 32), Row("head", 64, 96)]
    shapes = [
        ("mlp", 4096, 14336), ("head", 4096, 128256), ("mlp", 2048, 8192), ("qkv", 4096, 1024),
        ("qkv", 2048, 512), ("head", 2048, 128256), ("mlp", 3072, 8192), ("head", 2304, 256000),
        ("mlp", 8192, 28672), ("qkv", 8192, 1024), ("mlp", 1536, 8960), ("mlp", 896, 4864),
        ("mlp", 3584, 18944), ("qkv", 1536, 256), ("head", 2048, 49152), ("mlp", 2560, 9728),
        ("mlp", 5120, 14336), ("mlp", 1024, 3072), ("mlp", 2304, 9216), ("qkv", 3584, 512),
        ("qkv", 896, 128), ("head", 960, 49152), ("qkv", 2560, 1024), ("qkv", 5120, 1024),
        ("qkv", 1024, 1024), ("mlp", 576, 1536), ("head", 1024, 151936),
    ]  # fmt: skip
    return [Row(*shape) for shape in shapes]


class Layer(nn.Module):
    """A norm with linears behind it, and the linear whose result joins the residual stream.

    The RMSNorm is written out as in transformers.
    """

    def __init__(self, row: Row) -> None:
        super().__init__()
        d, n = row.width, row.columns
        self.gated = row.kind != "qkv"
        wide = [n, n] if self.gated else [d, n, n]
        self.weight = nn.Parameter(torch.ones(d))
        self.linears = nn.ModuleList(nn.Linear(d, each, bias=False) for each in wide)
        self.last = nn.Linear(wide[0], d, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """The residual stream behind the layer."""
        parts = [each(_normed(h, self.weight)) for each in self.linears]
        if self.gated:
            return h + self.last(F.silu(parts[0]) * parts[1])
        q, k, v = parts
        return h + self.last(torch.sin(q) + (k * v).repeat(1, 1, q.shape[-1] // k.shape[-1]))


class Head(nn.Module):
    """A layer, a norm, and a linear to a vocabulary."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.layer = Layer(Row("mlp", row.width, 4 * row.width))
        self.weight = nn.Parameter(torch.ones(row.width))
        self.head = nn.Linear(row.width, row.columns, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """The logits."""
        logits: torch.Tensor = self.head(_normed(self.layer(h), self.weight))
        return logits


def _normed(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = h.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).to(h.dtype) * weight


def build(row: Row, device: str) -> nn.Module:
    """The model of a row: of as many layers as its weights must be large."""
    with torch.device(device):
        first = Head(row) if row.kind == "head" else Layer(row)
        size = 2 * sum(each.numel() for each in first.parameters())
        more = [] if row.kind == "head" or device == "cpu" else [Layer(row) for _ in range(BYTES // size)]
        return nn.Sequential(first, *more).bfloat16().requires_grad_(False)


def measure(row: Row, device: str, quick: bool) -> Json:
    """One row of the results."""
    model = build(row, device)
    h = torch.randn(1, 1, row.width, device=device, dtype=torch.bfloat16)
    tiles = {f"{c} x {k}, {w}": Config("row", 1, c, k, w, 1) for c, k, w in TILES[: 2 if quick else None]}
    calls: dict[str, Callable[[], Any]] = {}
    results, fused = {}, {}
    torch._dynamo.reset()
    with torch.no_grad():
        for name in ("apart", "as chosen", *tiles):
            inductor_fusions.clear()
            compiled = torch.compile(apart(model.forward, name), mode="reduce-overhead")
            tile = tiles.get(name)
            forced = tile and mock.patch.object(configurations, "with_norm", lambda *_, tile=tile: tile)
            settings = {"norm_linear": name != "apart", "policy": "always"}
            with config.patch(**settings), fresh_cache(), forced or nullcontext():
                for _ in range(3):
                    results[name] = compiled(h).clone()
            found = inductor_fusions.report().sites
            fused[name] = sum(site.fusion == "norm_linear" and site.verdict == "fused" for site in found)
            calls[name] = lambda compiled=compiled: compiled(h)
        exact = copy.deepcopy(model).double()(h.double())
        with compiled_only():
            times = both_clocks(calls, device, 3 if quick else 9, 0.001 if quick else 0.02)
    errors = {name: relative_error(result, exact) for name, result in results.items()}
    return {"key": row.key, **asdict(row), "dtype": "bfloat16", **times, "fused": fused, "error": errors}


def describe(found: Json) -> str:
    """A result in a few words."""
    return f"{found.get('device_us', found['times_us'])}, fused {found['fused']}, error {found['error']}"


def main() -> None:
    """The command line."""
    tuning.script("bench.norm_linear", __doc__, grid, measure, describe)


if __name__ == "__main__":
    main()
