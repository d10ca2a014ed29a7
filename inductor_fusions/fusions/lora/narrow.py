"""Configurations of the skinny GEMM: tiles and split-K."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...decisions import Query, row_with_tiles, tables
from ...decisions.schema import padded as padded

#: Thread blocks that fill a device, about: three for each two multiprocessors of an H100.
FILLS = 192
#: A K of at most this is not split up: the kernel that adds up the parts takes as long as is saved.
SHORT = 768
#: Most columns of one narrow matrix, and of all in one kernel: their accumulators are in registers.
MOST_COLUMNS, MOST_TOGETHER = 128, 256
#: Most columns of tiles in which the summands of narrow matrices lie beside each other.
MOST_BESIDE = 128
#: Bytes of a thread block's tiles under way that leave room on every architecture.
SHARED_BUDGET = 98304


@dataclass(frozen=True)
class Shape:
    """The sizes of a skinny GEMM.

    Attributes:
        rows: M; None where it is symbolic.
        inner: K; None where it is symbolic.
        ranks: columns of each narrow matrix.
        layout: "n" where x has its elements in order along K, "t" where along M.
        dtype, narrow: of x, and of the narrow matrices.
        made: how many summands of the dtype of x each narrow matrix comes in; 0: in none.
        masks: how many masks x is multiplied by: one for each narrow matrix, or 0.
    """

    rows: int | None
    inner: int | None
    ranks: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    narrow: torch.dtype
    made: int = 0
    masks: int = 0


@dataclass(frozen=True)
class Config:
    """One configuration of the template.

    Attributes:
        block_m, block_k: the tile of x.
        splits: parts of K that thread blocks of their own compute; they are added up afterwards.
    """

    block_m: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


def beside(shape: Shape, summands: int) -> int:
    """How many matrices lie beside each other in a tile, where one comes in summands; 1: its summands follow
    each other.

    Beside each other x is multiplied once for all of them. They are filled up to a power of two.
    """
    wide = padded(summands, 1)
    return wide if wide * sum(map(padded, shape.ranks)) <= MOST_BESIDE else 1


def columns_of(shape: Shape) -> int:
    """The columns of all tiles of narrow matrices together, at most."""
    # Three summands of 16 bits in place of a float32.
    mixed = shape.narrow != shape.dtype and shape.dtype == torch.bfloat16
    return sum(map(padded, shape.ranks)) * (beside(shape, 3) if mixed else 1)


def shared_bytes(config: Config, shape: Shape) -> int:
    """About what the tiles under way need of shared memory."""
    columns = sum(map(padded, shape.ranks))
    size = columns * shape.narrow.itemsize
    if shape.narrow != shape.dtype:
        size = max(columns * 6, columns_of(shape) * shape.dtype.itemsize)
    return (config.block_m * shape.dtype.itemsize + size) * config.block_k * config.num_stages


def default(shape: Shape) -> Config:
    """A configuration that fits every device.

    On an H100 and an H200 it takes 6% longer than the fastest one, in the mean (`bench.lora_tiles`).
    """
    block_k = 128 if shape.inner is not None and shape.inner <= SHORT else 64
    # Beside each mask there is a sum in registers.
    return _made(shape, 64, block_k, 1, 8 if shape.masks > 1 else 4, 4)


def _made(shape: Shape, block_m: int, block_k: int, fewer: int, warps: int, stages: int) -> Config:
    """A configuration for a shape, whose parts of K fill a device; or that are `fewer` times fewer."""
    rows = 512 if shape.rows is None else shape.rows
    while block_m > 16 and block_m >= 2 * rows:
        block_m //= 2
    splits = max(1, splits_for(rows, block_m, shape.inner, block_k) // fewer)
    return fitted(Config(block_m, block_k, splits, warps, stages), shape)


def key(shape: Shape) -> dict[str, Any]:
    """The columns of a table's row; its tokens are the rows of x, or K if x is transposed."""
    width = shape.inner if shape.layout == "n" else shape.rows
    return {"width": width, **tables.columns_of(shape, "rows", "inner", "made")}


def problem(shape: Shape) -> dict[str, Any] | None:
    """The problem as a table's row; None if a size is symbolic."""
    found = {**key(shape), "tokens": shape.rows if shape.layout == "n" else shape.inner}
    return None if None in found.values() else found


def measured(shape: Shape, device: torch.device) -> Config | None:
    """The configuration of the very problem, if it was measured.

    Those of others are no better than the default (`bench.lora_tiles`).
    """
    wanted = problem(shape)
    row = None if wanted is None else row_with_tiles(Query("narrow_mm", wanted), device)
    return None if row is None else Config(**row["config"])


def splits_for(rows: int, block_m: int, inner: int | None, block_k: int) -> int:
    """Parts of K with which the tiles of rows fill a device; each is two steps long at least."""
    if inner is None or inner <= SHORT:
        return 1
    tiles, most = -(-rows // block_m), max(1, inner // (2 * block_k))
    return min(16, most, 1 << round(math.log2(max(1.0, FILLS / tiles))))


def fitted(config: Config, shape: Shape) -> Config:
    """The configuration with a smaller `block_k` or fewer stages, if shared memory or registers need it."""
    columns = columns_of(shape)
    if shape.dtype == torch.float32:
        # A product is three, and the parts of both sides are in registers.
        while config.block_m > 16 and config.block_m * columns > 32 * 32 * config.num_warps:
            config = replace(config, block_m=config.block_m // 2)
    # Beside a mask there is a sum of the step next to that of all steps.
    sums = (32 if shape.masks else 64) * 32
    if config.block_m * columns > sums * config.num_warps:
        config = replace(config, num_warps=8)
    while config.block_m > 16 and config.block_m * columns > sums * config.num_warps:
        config = replace(config, block_m=config.block_m // 2)
    # A step of the narrow matrices is in registers while it is split up.
    held = (64 if shape.narrow == shape.dtype else 24) * 32 * config.num_warps
    while config.block_k > 32 and config.block_k * sum(map(padded, shape.ranks)) > held:
        config = replace(config, block_k=config.block_k // 2)
    if shape.dtype == torch.float32:
        while config.block_k > 32 and config.block_m * config.block_k > 1024 * config.num_warps // 4:
            config = replace(config, block_k=config.block_k // 2)
    while shared_bytes(config, shape) > SHARED_BUDGET:
        if config.num_stages > 2:
            config = replace(config, num_stages=config.num_stages - 1)
        elif config.block_k > 16:
            config = replace(config, block_k=config.block_k // 2)
        else:
            break
    return config


#: What is tried first beside the default: tile of x, how many times fewer parts of K, warps, stages. The
#: first three are those that add most together on the timed problems of `bench.lora_tiles`. Where x and the
#: narrow matrices have one dtype, these are long steps in K; where the narrow ones come in summands, high
#: tiles of x.
TRIED = ((64, 128, 2, 4, 4), (16, 256, 1, 4, 3), (32, 256, 2, 4, 4), (16, 256, 2, 4, 3), (128, 64, 1, 4, 4))
TRIED_OF_SUMMANDS = ((64, 64, 2, 4, 4), (128, 64, 2, 4, 4), (64, 128, 1, 4, 3), (128, 64, 1, 8, 3))


def candidates(shape: Shape) -> list[Config]:
    """Configurations worth measuring, those that most often are the fastest first."""
    rows = 512 if shape.rows is None else shape.rows
    found = [default(shape)]
    heights = (16, 32, 64, 128) if shape.masks < 2 else (64, 128)  # lower tiles spill beside the sums
    first = TRIED if shape.narrow == shape.dtype else TRIED_OF_SUMMANDS
    found += [_made(shape, *sizes) for sizes in first if sizes[0] in heights]
    for block_m in heights:
        if block_m > 16 and block_m >= 2 * rows:
            continue
        for block_k in (64, 128, 256):
            splits = splits_for(rows, block_m, shape.inner, block_k)
            for more in {splits, max(1, splits // 2), min(16, 2 * splits)}:
                for warps, stages in ((4, 4), (4, 3), *([(8, 3)] if block_m >= 64 else [])):
                    wanted = Config(block_m, block_k, more, warps, stages)
                    if fitted(wanted, shape) == wanted and (more == 1 or shape.inner is not None):
                        found.append(wanted)
    return list(dict.fromkeys(found))
