"""Errors of the kernels of `decode_attention`, for Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from inductor_fusions.fusions.attention.decode import kernels, op
from inductor_fusions.fusions.attention.decode.op import lowest_of
from tests.support.errors import relative


@dataclass(frozen=True)
class Case:
    """One attention.

    Attributes:
        batch, heads, kv_heads, queries, keys, dim, v_dim: sizes.
        mask: "", "boolean" or a dtype, whose lowest number hides.
        shape: of the mask: which of its dims are whole, of "bhq".
        used: of each sample how many keys are seen; the rest are hidden.
        hides: what hides, in place of the lowest number.
        tile: keys of a tile, and parts.
        garbage: what masked keys and values hold.
    """

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 1
    keys: int = 100
    dim: int = 32
    v_dim: int = 32
    mask: str = "boolean"
    shape: str = "b"
    used: tuple[tuple[int, int], ...] = ((3, 40), (0, 70))
    hides: float | None = None
    tile: tuple[int, int] = (16, 3)
    causal: bool = False
    garbage: float = math.nan
    layout: str = "cache"
    scale: float = 0.3


def arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, tiles: Sequence[int],
    scale: float | None = None, causal: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Those of the operation, with what it needs of the mask.

    Args:
        tiles: keys of a tile, parts of the keys, warps and stages.
        scale: default D ** -0.5.
    """
    lowest = None if mask is None or mask.dtype == torch.bool else lowest_of(mask, mask.dtype)
    listed = None if mask is None else op.DECODE_TILES(mask, lowest, k.shape[1], tiles[0])
    scale = float(q.shape[3]) ** -0.5 if scale is None else scale
    return q, k, v, mask, lowest, listed, scale, causal, q.shape[2], list(tiles)


def attend(*given: Any) -> torch.Tensor:
    """The operation, of what `arguments` takes."""
    return op.DECODE_ATTENTION(*arguments(*given))


BASE = Case()
ROWS = replace(BASE, queries=5, shape="bq")
CASES: dict[str, Case] = {
    "boolean": BASE,
    "float32": replace(BASE, mask="float32"),
    "float16": replace(BASE, mask="float16"),
    "-inf": replace(BASE, mask="float32", hides=-math.inf),
    "one part": replace(BASE, tile=(16, 1)),
    "one part, float32": replace(BASE, tile=(32, 1), mask="float32"),
    "more parts than tiles": replace(BASE, tile=(32, 8), mask="float16"),
    "no mask": replace(BASE, mask="", garbage=0.0),
    "causal": replace(BASE, mask="", causal=True, queries=7, garbage=0.0),
    "causal, more queries than keys": replace(BASE, mask="", causal=True, queries=16, keys=9, garbage=0.0),
    "heads of their own": replace(BASE, kv_heads=4),
    "one head of keys": replace(BASE, heads=3, kv_heads=1, mask="float32"),
    "several queries": ROWS,
    "several queries, float32": replace(ROWS, mask="float32"),
    "several queries, one row": replace(ROWS, shape="b"),
    "one sample of the mask": replace(ROWS, shape="q", used=((3, 40),)),
    "mask of heads": replace(BASE, shape="bh", mask="float32"),
    "mask of heads and queries": replace(ROWS, shape="bhq", mask="float16", heads=6),
    "16 queries of 8 heads": replace(ROWS, queries=16, heads=8, kv_heads=1, mask="float32"),
    "head dim 80": replace(BASE, dim=80, v_dim=80),
    "head dim 96, values of 24": replace(BASE, dim=96, v_dim=24, mask="float32"),
    "one key": replace(BASE, keys=1, used=((0, 1), (0, 1))),
    "whole tiles": replace(BASE, keys=96, used=((0, 96), (32, 48)), mask="float32"),
    "fully masked row": replace(BASE, used=((0, 0), (5, 50))),
    "fully masked row, float32": replace(BASE, mask="float32", used=((0, 0), (5, 50)), garbage=1.0),
    "fully masked row, float16": replace(BASE, mask="float16", used=((0, 0), (5, 50)), garbage=1.0),
    "fully masked row, -inf": replace(BASE, mask="float32", used=((0, 0), (5, 50)), hides=-math.inf),
    "fully masked queries": replace(ROWS, mask="float32", used=((1, 1), (60, 60)), garbage=1.0),
    "fully masked queries, boolean": replace(ROWS, used=((1, 1), (60, 60))),
    "hidden by a number that is not the lowest": replace(BASE, mask="float32", hides=-1e4, garbage=1.0),
    "keys beside each other": replace(BASE, layout="bshd"),
    "keys along the heads": replace(BASE, layout="transposed", mask="float32"),
    "infinite keys": replace(BASE, garbage=math.inf, mask="float32"),
}


def inputs(case: Case, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, ...]:
    """q, k, v, and which keys are seen (B or 1, H or 1, Q or 1, K)."""
    torch.manual_seed(0)

    def made(heads: int, length: int, dim: int) -> torch.Tensor:
        x = torch.randn(case.batch, heads, length, dim).to(dtype)
        if case.layout == "bshd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        return x.mT.contiguous().mT if case.layout == "transposed" else x

    q = made(case.heads, case.queries, case.dim)
    k, v = made(case.kv_heads, case.keys, case.dim), made(case.kv_heads, case.keys, case.v_dim)
    whole = {"b": case.batch, "h": case.heads, "q": case.queries}
    sizes = [whole[name] if name in case.shape else 1 for name in "bhq"]
    j = torch.arange(case.keys)
    shown = torch.zeros(*sizes, case.keys, dtype=torch.bool)
    for b in range(sizes[0]):
        low, high = case.used[b]
        for h in range(sizes[1]):
            for i in range(sizes[2]):
                # One more key for each query, as several tokens at once see them; others for each head.
                shown[b, h, i] = (j >= low + h) & (j < high + i)
    return q, k, v, shown


def mask_of(case: Case, shown: torch.Tensor) -> torch.Tensor | None:
    if not case.mask:
        return None
    if case.mask == "boolean":
        return shown
    dtype = getattr(torch, case.mask)
    hides = torch.finfo(dtype).min if case.hides is None else case.hides
    bias = torch.randn(shown.shape).to(dtype)
    return torch.where(shown, bias, hides)


def exact(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """softmax(scale * q @ k^T + mask) @ v in float64, as SDPA has it."""
    group = case.heads // case.kv_heads
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.mT * case.scale
    if mask is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(~(seen.tril() if case.causal else seen), -math.inf)
    elif mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    else:
        scores = scores + mask.double()
    weights = scores.softmax(-1)
    return torch.where(weights.isnan().all(-1, keepdim=True), 0.0, weights) @ v


def with_garbage(case: Case, k: torch.Tensor, v: torch.Tensor, shown: torch.Tensor) -> None:
    """Fill keys and values that no query sees."""
    group = case.heads // case.kv_heads
    seen = shown.expand(case.batch, case.heads, -1, case.keys).unflatten(1, (case.kv_heads, group))
    hidden = ~seen.any((2, 3))[..., None]
    k.masked_fill_(hidden, case.garbage)
    v.masked_fill_(hidden, case.garbage)


def prepared(
    case: Case, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """q, k, v and the mask, and the result in float64: without what is no number in keys that nobody sees."""
    q, k, v, shown = inputs(case, dtype)
    mask = mask_of(case, shown)
    if mask is not None:  # what hides all keys of a query hides none: there garbage is a number, and counts
        with_garbage(case if math.isfinite(case.garbage) else replace(case, garbage=0.0), k, v, shown)
    right = exact(case, q, k, v, mask)
    if mask is not None:
        with_garbage(case, k, v, shown)
    return q, k, v, mask, right


def errors(name: str) -> float:
    """Relative error of the result against float64, whatever is in keys that nobody sees."""
    case = CASES[name]
    q, k, v, mask, right = prepared(case)
    lowest = None if mask is None or mask.dtype == torch.bool else lowest_of(mask, mask.dtype)
    listed = None if mask is None else kernels.order(mask, lowest, case.kv_heads, case.tile[0])
    out = kernels.attention(
        q, k, v, mask, lowest, listed, case.scale, case.causal, case.queries, (*case.tile, 4, 2)
    )
    assert out.dtype == q.dtype
    assert out.transpose(1, 2).is_contiguous()
    return relative(out, right, 1e-3)
