"""Which attentions become `decode_attention`, and with which tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .... import decisions
from ...._inductor import hint, known_true
from ....decisions import tables, unsupported
from ....decisions.schema import padded
from ....graph import torch_ops
from ..problem import Problem
from .op import DTYPES, MASKS, MOST_DIM, TILE_ROWS

#: Queries at most: a token, or those of speculative decoding.
MOST_QUERIES = 16
#: Parts of the keys at most.
MOST_SPLITS = 64
#: Multiprocessors of a device of which nothing is known.
PROCESSORS = 108


@dataclass(frozen=True)
class Config:
    """Tiles of the kernel that reads the keys.

    Attributes:
        block_n: keys of a tile.
        programs: thread blocks of a multiprocessor that the keys are split for.
    """

    block_n: int
    programs: int
    num_warps: int
    num_stages: int

    def splits(self, shape: Shape, processors: int) -> int:
        """Parts of the keys, so that the device is full; a power of two."""
        wanted = self.programs * processors / (shape.batch * shape.kv_heads)
        tiles = -(-shape.kv_len // self.block_n)
        return min(padded(round(wanted), 1), MOST_SPLITS, padded(tiles, 1))

    def fits(self, head_dim: int) -> bool:
        """Whether the tiles of keys and values fit 99 KiB of shared memory, the least that a device has."""
        wide = padded(head_dim)
        tiles = 4 * self.block_n * wide * max(1, self.num_stages - 1)
        return tiles + 4 * TILE_ROWS * (wide + self.block_n) <= 99 * 1024


@dataclass(frozen=True)
class Shape:
    """The sizes of an attention; of symbolic ones the hints."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    mask: str

    @property
    def row(self) -> dict[str, Any]:
        """The shape as a row of a table."""
        return tables.columns_of(self)


def default(shape: Shape) -> Config:
    """Tiles that fit every device; they are not tuned."""
    return Config(64 if shape.head_dim <= 128 else 32, 4, 4, 2)


def tiles(shape: Shape, device: torch.device) -> list[int]:
    """The tiles of the nearest measured attention, or the default ones, as the operation takes them."""

    def fits(row: Mapping[str, Any]) -> Config | None:
        found = Config(**row["config"])
        return found if found.fits(shape.head_dim) else None

    query = decisions.Query("decode_attention", shape.row)
    chosen = decisions.tiles(query, device, fits) or default(shape)
    found = decisions.hardware(device)
    splits = chosen.splits(shape, PROCESSORS if found is None else found.multiprocessors)
    return [chosen.block_n, splits, chosen.num_warps, chosen.num_stages]


def most_queries(problem: Problem) -> int:
    """How many queries there are at most; 0 where there may be too many."""
    queries = problem.q.shape[2]
    return queries if isinstance(queries, int) else MOST_QUERIES if known_true(queries <= MOST_QUERIES) else 0


def shape_of(problem: Problem) -> Shape:
    """The sizes of a problem, as tables have them."""
    (batch, heads, q_len, dim), (_, kv_heads, kv_len, _) = problem.q.shape, problem.k.shape
    batch, heads, kv_heads, q_len, kv_len, dim = map(hint, (batch, heads, kv_heads, q_len, kv_len, dim))
    return Shape(batch, heads, kv_heads, q_len, kv_len, dim, problem.dtype, _mask_of(problem))


def _mask_of(problem: Problem) -> str:
    mask = torch_ops.tensor(problem.attn_mask)
    if mask is None:
        return "causal" if problem.causal else "additive" if problem.terms else "none"
    return "boolean" if mask.dtype == torch.bool else "additive"


def refused(problem: Problem) -> str:
    """Why the operation does not take a problem; "" where it does."""
    if why := unsupported(problem.q.value.device):
        return why
    if problem.train or problem.transformed:
        return "it has no backward"
    if problem.stages or problem.sink is not None or problem.dropout > 0:
        return "a function of the scores, a sink or dropout"
    if not isinstance(problem.scale, (int, float, type(None))):
        return "a symbolic scale"
    if problem.dtype not in DTYPES:
        return f"no kernel for {problem.dtype}"
    sizes = (problem.q.shape[1], problem.k.shape[1], problem.q.shape[3], problem.v.shape[3])
    if not all(isinstance(size, int) for size in sizes) or max(sizes[2:]) > MOST_DIM:
        return f"heads or head dims are symbolic, or a head dim is above {MOST_DIM}"
    if not 0 < most_queries(problem) <= MOST_QUERIES:
        return f"there are or may be more than {MOST_QUERIES} queries"
    return _refused_mask(problem)


def _refused_mask(problem: Problem) -> str:
    mask = torch_ops.tensor(problem.attn_mask)
    if problem.attn_mask is None:
        return ""
    if mask is None or mask.dim() > 4 or mask.device != problem.q.value.device:
        return "a mask with more than 4 dims, or on another device"
    if mask.dtype != torch.bool and mask.dtype not in MASKS:
        return f"a mask of {mask.dtype}"
    return ""
