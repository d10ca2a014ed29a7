"""Tiles of the kernels: how many queries a program takes at once, and how many samples one after the
other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....decisions.schema import padded

#: Keys (and queries) of a head that one program holds at most.
MOST_KEYS = 128
#: Head dims that a kernel holds at most, by the size of an element in bytes.
MOST_DIM = {2: 128, 4: 64}
#: Keys (and queries), likewise.
MOST_KEYS_IN_KERNEL = {2: MOST_KEYS, 4: 64}
#: A program goes over several samples, with one sum of its masks, where that leaves so many programs.
ENOUGH_PROGRAMS = 1024
#: Samples that a program goes over at most.
MOST_WINDOWS = 8


@dataclass(frozen=True)
class Plan:
    """Tiles of one kernel.

    Attributes:
        block_m: queries of one step.
        block_n: all keys.
        windows: samples that a program goes over.
    """

    block_m: int
    block_n: int
    windows: int
    num_warps: int
    num_stages: int


def too_large(longest: int, widest: int, dtype: torch.dtype) -> str:
    """Why no kernel holds a head with so many queries or keys, and so wide a head dim; else ""."""
    keys, dim = MOST_KEYS_IN_KERNEL[dtype.itemsize], MOST_DIM[dtype.itemsize]
    if longest > keys:
        return f"more than {keys} queries or keys in {dtype}"
    return f"a head dim above {dim} in {dtype}" if widest > dim else ""


def windows_of(q_shape: Sequence[Any], kv_len: int, period: Any) -> int:
    """Samples for one program: those with the same masks, a period apart."""
    batch, heads, rows = q_shape[:3]
    if max(rows, kv_len) > 64 or not isinstance(batch, int) or not isinstance(period, int):
        return 1
    repeats = batch // period
    windows = 1
    while windows < min(MOST_WINDOWS, repeats) and batch * heads // (2 * windows) >= ENOUGH_PROGRAMS:
        windows *= 2
    return windows


def forward(
    q_shape: Sequence[Any], kv_len: int, v_dim: int, period: Any, masked: bool, dtype: torch.dtype
) -> Plan:
    """The tiles of the forward.

    Args:
        q_shape: (batch, heads, queries, head dim).
        kv_len, v_dim: keys, and the size of a value.
        period: after how many samples the masks repeat.
        masked: whether there are masks.
    """
    rows, columns, wide = _tile(q_shape, kv_len, v_dim, dtype)
    windows = windows_of(q_shape, kv_len, period) if masked else 1
    warps = 4 if rows * columns >= 64 * 32 else 2 if rows * columns >= 32 * 32 else 1
    if wide:
        warps = 8 if columns == MOST_KEYS else 4
    return Plan(rows, columns, windows, warps, 2)


def backward(
    q_shape: Sequence[Any], kv_len: int, v_dim: int, windows: int, fills: bool, dtype: torch.dtype
) -> Plan:
    """The tiles of the backward; `windows` is that of the gradient of the scores, or 1.

    `fills` says whether masks replace scores: which ones is held in registers.
    """
    rows, columns, wide = _tile(q_shape, kv_len, v_dim, dtype)
    if (wide or fills) and columns == MOST_KEYS:
        rows = min(32, rows)
    warps = 8 if columns == MOST_KEYS or (wide and columns == 64) else 4 if rows * columns >= 32 * 32 else 2
    return Plan(rows, columns, windows, warps, 1)


def _tile(q_shape: Sequence[Any], kv_len: int, v_dim: int, dtype: torch.dtype) -> tuple[int, int, bool]:
    """Queries of a step, keys, and whether what goes with them takes many registers."""
    wide = max(padded(q_shape[3]), padded(v_dim)) > 64 or dtype == torch.float32
    return min(64, padded(q_shape[2])), padded(kv_len), wide
