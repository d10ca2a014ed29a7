"""Tiles of the kernels of `outer_product_linear`, and their launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from ...decisions import hardware
from ...lowering import is_traced, launched
from .kernels import linear_kernel, pack_kernel

Tile = Mapping[str, int]

#: Columns of a block, by the size of an element.
BLOCK_Q = {2: 64, 4: 32}
#: Tiles, warps and stages of each kernel; of that which packs, by the size of an element.
LINEAR: Tile = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "num_stages": 3}
PACK: dict[int, Tile] = {
    2: {"BLOCK_P": 64, "BLOCK_N": 4, "num_warps": 2},
    4: {"BLOCK_P": 32, "BLOCK_N": 2, "num_warps": 4},
}
#: Thread blocks at a time, where the device does not say.
PROGRAMS = 128


def linear(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """u, v (rows, P) and (rows, Q), w (N, P * Q) -> (rows, N).

    All are of one dtype, on one device; u and v may be one matrix.
    """
    (rows, p), q, n = u.shape, v.shape[1], w.shape[0]
    if not rows or not n or not p or not q:
        return u.new_zeros((rows, n))
    tile, block = LINEAR, BLOCK_Q[u.itemsize]
    tiles = triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"])
    # Thread blocks of four warps share a multiprocessor.
    each = max(1, 8 // tile["num_warps"])
    one = is_one(u, v)
    steps, parts = _split(number_of_pairs(p, q, block, one), each * programs(u), tiles)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(u):
        f = packed(w, p, q, block, one)
        out = u.new_empty((parts, rows, n), dtype=torch.float32)
        u = u.t().contiguous().t()  # one column at a time is read
        launched(linear_kernel)[(tiles, parts)](
            u, v, f, out, rows, p, q, n, f.shape[1], steps, *u.stride(), *v.stride(),
            **_constants(u.dtype, block, one), **tile,
        )  # fmt: skip
    return (out[0] if parts == 1 else out.sum(0)).to(u.dtype)


def packed(w: Tensor, p: int, q: int, block: int, one: bool) -> Tensor:
    """The weight in the order of the blocks, (N, columns)."""
    n, columns = w.shape[0], number_of_pairs(p, q, block, one) * block
    f = w.new_empty((n, columns))
    tile = PACK[w.itemsize]
    grid = (triton.cdiv(p, tile["BLOCK_P"]), triton.cdiv(q, block), triton.cdiv(n, tile["BLOCK_N"]))
    launched(pack_kernel)[grid](
        w, f, n, p, q, *w.stride(), *f.stride(), **_constants(w.dtype, block, one), **tile
    )
    return f


def is_one(u: Tensor, v: Tensor) -> bool:
    """Whether two matrices are one, of a dtype whose weights may be added up."""
    if u is v or is_traced():
        return u is v and u.dtype != torch.float16
    same = u.data_ptr() == v.data_ptr() and u.shape == v.shape and u.stride() == v.stride()
    return same and u.dtype != torch.float16


def number_of_pairs(p: int, q: int, block: int, one: bool) -> int:
    """How many pairs of a block and a p there are."""
    blocks = triton.cdiv(q, block)
    return sum(min((b + 1) * block, p) for b in range(blocks)) if one else p * blocks


def programs(like: Tensor) -> int:
    """Multiprocessors of the device."""
    found = hardware(like.device)
    return PROGRAMS if found is None else found.multiprocessors


def _constants(dtype: torch.dtype, block: int, one: bool) -> dict[str, Any]:
    return {"BLOCK_Q": block, "ONE": one, "TF32": dtype == torch.float32}


def _split(count: int, wanted: int, tiles: int) -> tuple[int, int]:
    """How many of `count` steps one thread block does, and how many do them, so that the device is full."""
    parts = min(count, max(1, wanted // max(tiles, 1)))
    steps = triton.cdiv(count, parts)
    return steps, triton.cdiv(count, steps)
