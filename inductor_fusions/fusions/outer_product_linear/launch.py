"""What launches the kernels of `outer_product_linear`: at once, or, where a graph is traced, with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from .kernels import factors_kernel, linear_kernel, pack_kernel, unpack_kernel, weight_kernel

Tile = Mapping[str, int]

#: Columns of a block, by the size of an element.
BLOCK_Q = {2: 64, 4: 32}
#: Tiles, warps and stages of each kernel, by the size of an element.
LINEAR: dict[int, Tile] = {
    2: {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "num_stages": 3},
    4: {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "num_stages": 3},
}
FACTORS: dict[int, Tile] = {
    2: {"BLOCK_M": 128, "BLOCK_N": 128, "DEEP": 2, "num_warps": 8, "num_stages": 3},
    4: {"BLOCK_M": 128, "BLOCK_N": 32, "DEEP": 4, "num_warps": 8, "num_stages": 2},
}
WEIGHT: dict[int, Tile] = {
    2: {"BLOCK_R": 128, "BLOCK_N": 256, "BLOCK_M": 64, "num_warps": 8, "num_stages": 3},
    4: {"BLOCK_R": 128, "BLOCK_N": 128, "BLOCK_M": 32, "num_warps": 8, "num_stages": 3},
}
PACK: dict[int, Tile] = {
    2: {"BLOCK_P": 64, "BLOCK_N": 4, "num_warps": 2},
    4: {"BLOCK_P": 32, "BLOCK_N": 2, "num_warps": 4},
}
#: Rows of the gradient of the weight that are computed at a time.
PIECE = 256
#: Thread blocks at a time, where the device does not say.
PROGRAMS = 128


def _launcher(kernel: Any, traced: bool) -> Any:
    return torch.library.wrap_triton(kernel) if traced else kernel


def linear(
    u: Tensor, v: Tensor, w: Tensor, tile: Tile | None = None, block: int = 0, traced: bool = False
) -> Tensor:
    """u, v (rows, P) and (rows, Q), w (N, P * Q) -> (rows, N).

    Args:
        u, v, w: of one dtype, on one device; u and v may be one matrix.
        tile: of `LINEAR` by default.
        block: columns of a block; of `BLOCK_Q` by default.
        traced: whether this makes a graph, which holds the kernels.
    """
    (rows, p), q, n = u.shape, v.shape[1], w.shape[0]
    if not rows or not n or not p or not q:
        return u.new_zeros((rows, n))
    tile, block = tile or LINEAR[u.itemsize], block or BLOCK_Q[u.itemsize]
    tiles = triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"])
    # Thread blocks of four warps share a multiprocessor.
    each = max(1, 8 // tile["num_warps"])
    one = is_one(u, v, traced)
    steps, parts = _split(pairs(p, q, block, one), each * programs(u), tiles)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(u):
        f = packed(w, p, q, block, one, traced=traced)
        out = u.new_empty((parts, rows, n), dtype=torch.float32)
        u = u.t().contiguous().t()  # one column at a time is read
        _launcher(linear_kernel, traced)[(tiles, parts)](
            u, v, f, out, rows, p, q, n, f.shape[1], steps, *u.stride(), *v.stride(),
            **_constants(u.dtype, block, one), **tile,
        )  # fmt: skip
    return (out[0] if parts == 1 else out.sum(0)).to(u.dtype)


def factors(
    dy: Tensor, u: Tensor, v: Tensor, w: Tensor, one: bool, tile: Tile | None = None, block: int = 0,
    traced: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of u and v, from that of the result (rows, N).

    Args:
        dy: the gradient of the result.
        u, v, w: as in `linear`.
        one: whether u and v are one variable, of which only the sum of both gradients is wanted: then it is
            the first, and the second is zero. Two variables may well share their memory.
        tile, block, traced: as in `linear`.
    """
    (rows, p), q, n = u.shape, v.shape[1], w.shape[0]
    if not rows or not n or not p or not q:
        return torch.zeros_like(u), torch.zeros_like(v)
    tile, block = tile or FACTORS[u.itemsize], block or BLOCK_Q[u.itemsize]
    one = one and is_one(u, v, traced)
    blocks, count = triton.cdiv(q, block), pairs(p, q, block, one)
    pieces = triton.cdiv(n, tile["BLOCK_N"] * tile["DEEP"])
    tiles = triton.cdiv(rows, tile["BLOCK_M"])
    # Of a triangle, a block has half of all p on average.
    length, chunks = _split(p, 2 * programs(u), tiles * pieces * blocks // (2 if one else 1))
    dy = dy.contiguous()
    with torch.cuda.device_of(u):
        # The tensor cores read TF32 along the dim that is summed.
        f = packed(w, p, q, block, one, turned=u.dtype == torch.float32, traced=traced)
        du = u.new_empty((pieces, count, rows), dtype=torch.float32)
        dv = u.new_empty((pieces, chunks, rows, q), dtype=torch.float32)
        _launcher(factors_kernel, traced)[(tiles, pieces * chunks * blocks)](
            dy, u, v, f, du, dv, rows, p, q, n, count, length, chunks, dy.stride(0),
            *u.stride(), *v.stride(), *f.stride(), **_constants(u.dtype, block, one), **tile,
        )  # fmt: skip
    right, pair_sums = dv.sum((0, 1)), du.sum(0)
    left = right if one else u.new_zeros((rows, p), dtype=torch.float32)
    start = 0
    for b in range(blocks):
        size = min((b + 1) * block, p) if one else p
        left[:, :size] += pair_sums[start : start + size].t()
        start += size
    if one:
        return left.to(u.dtype), torch.zeros_like(v)
    return left.to(u.dtype), right.to(v.dtype)


def weight(
    dy: Tensor, u: Tensor, v: Tensor, tile: Tile | None = None, block: int = 0, traced: bool = False
) -> Tensor:
    """The gradient of w, (N, P * Q)."""
    (rows, p), q, n = u.shape, v.shape[1], dy.shape[1]
    dw = u.new_empty((n, p * q))
    if not rows or not dw.numel():
        return dw.zero_()
    tile, block = tile or WEIGHT[u.itemsize], block or BLOCK_Q[u.itemsize]
    one, dy = (
        is_one(u, v, traced),
        rounded((dy.t() if u.dtype == torch.float32 else dy).contiguous()),
    )
    columns = pairs(p, q, block, one) * block
    left = u.t().contiguous()
    right = left if one else v.t().contiguous()
    with torch.cuda.device_of(u):
        # In pieces: the gradient in the order of the blocks is as large as that of w.
        g = u.new_empty((columns, min(n, PIECE)))
        for first in range(0, n, PIECE):
            given = dy[first : first + PIECE] if u.dtype == torch.float32 else dy[:, first : first + PIECE]
            wide = min(n - first, PIECE)
            tiles = triton.cdiv(columns, tile["BLOCK_R"]) * triton.cdiv(wide, tile["BLOCK_N"])
            _launcher(weight_kernel, traced)[(tiles,)](
                left, right, given, g, rows, p, q, wide, columns, left.stride(0), right.stride(0),
                dy.stride(0), **_constants(u.dtype, block, one), **tile,
            )  # fmt: skip
            _launcher(unpack_kernel, traced)[(p, triton.cdiv(q, block), triton.cdiv(wide, 64))](
                g, dw, first, p, q, wide, BLOCK_Q=block, BLOCK_N=64, ONE=one
            )
    return dw


def packed(
    w: Tensor, p: int, q: int, block: int, one: bool, turned: bool = False, traced: bool = False
) -> Tensor:
    """The weight in the order of the blocks, (N, columns); `turned`, with its rows next to each other."""
    n, columns = w.shape[0], pairs(p, q, block, one) * block
    f = w.new_empty((columns, n)).t() if turned else w.new_empty((n, columns))
    tile = PACK[w.itemsize]
    grid = (triton.cdiv(p, tile["BLOCK_P"]), triton.cdiv(q, block), triton.cdiv(n, tile["BLOCK_N"]))
    _launcher(pack_kernel, traced)[grid](
        w, f, n, p, q, *w.stride(), *f.stride(), **_constants(w.dtype, block, one), **tile
    )
    return f


def is_one(u: Tensor, v: Tensor, traced: bool = False) -> bool:
    """Whether the two hold one matrix, of a dtype whose weights may be added up.

    Args:
        u, v: matrices.
        traced: whether they are those of a graph, which have no addresses.
    """
    if u is v or traced:
        return u is v and u.dtype != torch.float16
    same = u.data_ptr() == v.data_ptr() and u.shape == v.shape and u.stride() == v.stride()
    return same and u.dtype != torch.float16


def pairs(p: int, q: int, block: int, one: bool) -> int:
    """How many pairs of a block and a p there are."""
    blocks = triton.cdiv(q, block)
    return sum(min((b + 1) * block, p) for b in range(blocks)) if one else p * blocks


def rounded(x: Tensor) -> Tensor:
    """float32 rounded to the nearest number of TF32; other dtypes as they are."""
    if x.dtype != torch.float32:
        return x
    return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def programs(like: Tensor) -> int:
    """Multiprocessors of the device."""
    if not like.is_cuda:
        return PROGRAMS
    return int(torch.cuda.get_device_properties(like.device).multi_processor_count)


def _constants(dtype: torch.dtype, block: int, one: bool) -> dict[str, Any]:
    return {"BLOCK_Q": block, "ONE": one, "TF32": dtype == torch.float32}


def _split(count: int, wanted: int, tiles: int) -> tuple[int, int]:
    """How many of `count` steps one thread block does, and how many do them, so that the device is full."""
    parts = min(count, max(1, wanted // max(tiles, 1)))
    steps = triton.cdiv(count, parts)
    return steps, triton.cdiv(count, steps)
