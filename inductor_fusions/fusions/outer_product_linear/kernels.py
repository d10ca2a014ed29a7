# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""The kernels of `outer_product_linear`, and what launches them.

In each, one operand of a matrix product is made of two narrow tensors in registers: the row of P * Q products
is never in memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Rows, columns and depth of a tile, warps and stages, by kernel.
LINEAR = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_Q": 64, "num_warps": 8, "num_stages": 3}
FACTORS = {"BLOCK_M": 128, "BLOCK_Q": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3}
WEIGHT = {"BLOCK_N": 128, "BLOCK_Q": 64, "BLOCK_M": 64, "num_warps": 8, "num_stages": 3}
#: Thread blocks where the device does not say.
PROGRAMS = 128


@triton.jit
def linear_kernel(
    u, v, w, out, M, P, Q, N, per_part,
    u_rows, u_columns, v_rows, v_columns, w_rows, w_columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """out[part, m, n] = sum over p of the part, and q, of u[m, p] * v[m, q] * w[n, p * Q + q], in float32."""
    rows = tl.cdiv(M, BLOCK_M)
    pid_m = tl.program_id(0) % rows
    pid_n = tl.program_id(0) // rows
    part = tl.program_id(1)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_Q)
    in_m, in_n = m < M, n < N
    # Rows past the end read the first one, and are not stored.
    at_m = tl.where(in_m, m, 0).to(tl.int64)
    at_n = tl.where(in_n, n, 0).to(tl.int64)
    steps = tl.cdiv(Q, BLOCK_Q)
    first = part * per_part
    last = min(first + per_part, P)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # One loop over p and q, so that loads run ahead across the p.
    for step in range(first * steps, last * steps):
        p = step // steps
        q = (step % steps) * BLOCK_Q + k
        left = tl.load(u + at_m * u_rows + p * u_columns)
        x = tl.load(v + at_m[:, None] * v_rows + q[None, :] * v_columns, mask=q[None, :] < Q, other=0.0)
        y = tl.load(
            w + at_n[None, :] * w_rows + (p * Q + q)[:, None] * w_columns, mask=q[:, None] < Q, other=0.0
        )
        # Rounded as the written product would be.
        acc = tl.dot(x * left[:, None], y, acc)
    at = (part.to(tl.int64) * M + m[:, None]) * N + n[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def factors_kernel(
    dy, u, v, w, du, dv, M, P, Q, N, per_part,
    dy_rows, dy_columns, u_rows, u_columns, v_rows, v_columns, w_rows, w_columns,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """d[m, p, q] = sum over n of dy[m, n] * w[n, p * Q + q] stays in registers; what it is needed for is

    du[block of q, p, m] = sum over q of the block of d * v[m, q]
    dv[part, m, q] = sum over p of the part of d * u[m, p]

    both in float32.
    """
    rows = tl.cdiv(M, BLOCK_M)
    pid_m = tl.program_id(0) % rows
    pid_q = tl.program_id(0) // rows
    part = tl.program_id(1)
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    q = pid_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    in_m, in_q = m < M, q < Q
    at_m = tl.where(in_m, m, 0).to(tl.int64)
    right = tl.load(v + at_m[:, None] * v_rows + q[None, :] * v_columns, mask=in_q[None, :], other=0.0).to(
        tl.float32
    )
    sum_v = tl.zeros((BLOCK_M, BLOCK_Q), dtype=tl.float32)
    first = part * per_part
    for p in range(first, min(first + per_part, P)):
        d = tl.zeros((BLOCK_M, BLOCK_Q), dtype=tl.float32)
        for start in range(0, N, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            x = tl.load(
                dy + at_m[:, None] * dy_rows + n[None, :] * dy_columns, mask=n[None, :] < N, other=0.0
            )
            y = tl.load(
                w + n.to(tl.int64)[:, None] * w_rows + (p * Q + q)[None, :] * w_columns,
                mask=(n[:, None] < N) & in_q[None, :], other=0.0,
            )  # fmt: skip
            d = tl.dot(x, y, d)
        left = tl.load(u + at_m * u_rows + p * u_columns).to(tl.float32)
        sum_v += d * left[:, None]
        at = (pid_q.to(tl.int64) * P + p) * M + m
        tl.store(du + at, tl.sum(d * right, axis=1), mask=in_m)
    at = (part.to(tl.int64) * M + m[:, None]) * Q + q[None, :]
    tl.store(dv + at, sum_v, mask=in_m[:, None] & in_q[None, :])


@triton.jit
def weight_kernel(
    dy, u, v, dw, M, P, Q, N,
    dy_rows, dy_columns, u_rows, u_columns, v_rows, v_columns,
    BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dw[n, p * Q + q] = sum over m of dy[m, n] * u[m, p] * v[m, q]."""
    columns = tl.cdiv(N, BLOCK_N)
    pid_n = tl.program_id(0) % columns
    pid_q = tl.program_id(0) // columns
    p = tl.program_id(1)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    q = pid_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    in_n, in_q = n < N, q < Q
    at_n = tl.where(in_n, n, 0).to(tl.int64)
    at_q = tl.where(in_q, q, 0).to(tl.int64)
    acc = tl.zeros((BLOCK_N, BLOCK_Q), dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        in_m = m < M
        at_m = m.to(tl.int64)
        left = tl.load(u + at_m * u_rows + p * u_columns, mask=in_m, other=0.0)
        x = tl.load(dy + at_n[:, None] * dy_columns + at_m[None, :] * dy_rows, mask=in_m[None, :], other=0.0)
        y = tl.load(v + at_m[:, None] * v_rows + at_q[None, :] * v_columns, mask=in_m[:, None], other=0.0)
        acc = tl.dot(x * left[None, :], y, acc)
    at = n.to(tl.int64)[:, None] * (P * Q) + (p * Q + q)[None, :]
    tl.store(dw + at, acc.to(dw.dtype.element_ty), mask=in_n[:, None] & in_q[None, :])


# Triton launches on the current device, which need not be that of the tensors.


def linear(u: Tensor, v: Tensor, w: Tensor, tile: dict[str, int] = LINEAR) -> Tensor:
    """u, v (rows, P) and (rows, Q), w (N, P * Q) -> (rows, N)."""
    (rows, p), q, n = u.shape, v.shape[1], w.shape[0]
    tiles = _blocks(rows, tile["BLOCK_M"]) * _blocks(n, tile["BLOCK_N"])
    if not rows or not n or not p or not q:
        return u.new_zeros((rows, n))
    per_part, parts = _parts(p, tiles, u)
    # One part needs no sum, and is written in the dtype of the result.
    out = u.new_empty((parts, rows, n), dtype=torch.float32 if parts > 1 else u.dtype)
    with torch.cuda.device_of(u):
        linear_kernel[(tiles, parts)](
            u, v, w, out, rows, p, q, n, per_part, *u.stride(), *v.stride(), *w.stride(), **tile
        )
    return out[0] if parts == 1 else out.sum(0).to(u.dtype)


def factors(
    dy: Tensor, u: Tensor, v: Tensor, w: Tensor, tile: dict[str, int] = FACTORS
) -> tuple[Tensor, Tensor]:
    """The gradients of u and v, from that of the result (rows, N)."""
    (rows, p), q, n = u.shape, v.shape[1], w.shape[0]
    if not rows or not n or not p or not q:
        return torch.zeros_like(u), torch.zeros_like(v)
    across = _blocks(q, tile["BLOCK_Q"])
    tiles = _blocks(rows, tile["BLOCK_M"]) * across
    per_part, parts = _parts(p, tiles, u)
    du = u.new_empty((across, p, rows), dtype=torch.float32)
    dv = u.new_empty((parts, rows, q), dtype=torch.float32)
    with torch.cuda.device_of(u):
        factors_kernel[(tiles, parts)](
            dy, u, v, w, du, dv, rows, p, q, n, per_part,
            *dy.stride(), *u.stride(), *v.stride(), *w.stride(), **tile,
        )  # fmt: skip
    return du.sum(0).t().to(u.dtype, memory_format=torch.contiguous_format), dv.sum(0).to(v.dtype)


def weight(dy: Tensor, u: Tensor, v: Tensor, tile: dict[str, int] = WEIGHT) -> Tensor:
    """The gradient of w, (N, P * Q)."""
    (rows, p), q, n = u.shape, v.shape[1], dy.shape[1]
    dw = u.new_empty((n, p * q))
    if not rows or not dw.numel():
        return dw.zero_()
    grid = (_blocks(n, tile["BLOCK_N"]) * _blocks(q, tile["BLOCK_Q"]), p)
    with torch.cuda.device_of(u):
        weight_kernel[grid](dy, u, v, dw, rows, p, q, n, *dy.stride(), *u.stride(), *v.stride(), **tile)
    return dw


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _parts(count: int, tiles: int, like: Tensor) -> tuple[int, int]:
    """How many of `count` steps one thread block does, and how many do them, so that the device is full."""
    programs: Any = PROGRAMS
    if like.is_cuda:
        programs = torch.cuda.get_device_properties(like.device).multi_processor_count
    parts = min(count, max(1, programs // tiles))
    per_part = _blocks(count, parts)
    return per_part, _blocks(count, per_part)
