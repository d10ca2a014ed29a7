# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"
"""The kernels of `outer_product_linear`; `launch` has their tiles, and launches them.

The row of P * Q products is never in memory. The columns of the weight are reordered into aligned blocks,
each of which holds BLOCK_Q columns q for each of its p. In a block,

    y[m, n] = sum over p of (sum over q of (u[m, p] * v[m, q]) * w[n, p, q])

is a matrix product for each p. Its left operand is computed in registers from a block of v, which stays
there. If u and v are one matrix, w[n, p, q] and w[n, q, p] are factors of the same product. Then block b has
only the p below (b + 1) * BLOCK_Q, with the sums of the two. That is 61% of the work for 432 features in
blocks of 64. The range of float16 is too small for such sums.

In float32 the matrix products use TF32. Operands are rounded to it, because the tensor cores would truncate.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Whether Triton interprets kernels: they have no machine instructions then.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def to_tf32(x):
    """float32 rounded to the nearest number of TF32."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def waited_for(acc):
    """A sum, when the product that is added to it is over: the next one may have other left operands.

    Left operands lie in registers, and Triton 3.6 and 3.7 leave products under way that nothing else in a
    loop needs, while the next iteration writes those registers. This needs them, and is no instruction.
    """
    if INTERPRETED:
        return acc
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], tl.float32, is_pure=True, pack=1)


@triton.jit
def size_of(b, P, BLOCK_Q: tl.constexpr, ONE: tl.constexpr):
    """How many p a block has."""
    if ONE:
        size = tl.minimum((b + 1) * BLOCK_Q, P)
    else:
        size = P
    return size


@triton.jit
def start_of(b, P, BLOCK_Q: tl.constexpr, ONE: tl.constexpr):
    """How many p the blocks in front of one have. Only the last block of a triangle is cut off."""
    if ONE:
        start = BLOCK_Q * b * (b + 1) // 2
    else:
        start = b * P
    return start


@triton.jit
def pack_kernel(
    w, f, N, P, Q, w_rows, w_columns, f_rows, f_columns,
    BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    ONE: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """The weight in the order of the blocks: f[n, (start of b + p) * BLOCK_Q + q - b * BLOCK_Q]."""
    b = tl.program_id(1)
    size = size_of(b, P, BLOCK_Q, ONE)
    start = start_of(b, P, BLOCK_Q, ONE)
    first = tl.program_id(2) * BLOCK_N
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    k = tl.arange(0, BLOCK_Q)[None, :]
    q = b * BLOCK_Q + k
    inside = (p < size) & (q < Q)
    at = ((start + p) * BLOCK_Q + k).to(tl.int64) * f_columns
    for n in range(first, min(first + BLOCK_N, N)):
        row = w + tl.cast(n, tl.int64) * w_rows
        x = tl.load(row + (p * Q + q).to(tl.int64) * w_columns, mask=inside, other=0.0)
        if ONE:
            # Read along its rows, and turned around.
            i = b * BLOCK_Q + tl.arange(0, BLOCK_Q)[:, None]
            j = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)[None, :]
            across = (i < P) & (j < size)
            y = tl.load(row + (i * Q + j).to(tl.int64) * w_columns, mask=across, other=0.0)
            both = x.to(tl.float32) + tl.trans(y).to(tl.float32)
            x = tl.where(q > p, both, tl.where(q == p, x.to(tl.float32), 0.0))
        if TF32:
            x = to_tf32(x.to(tl.float32))
        tl.store(f + tl.cast(n, tl.int64) * f_rows + at, x.to(f.dtype.element_ty), mask=p < size)


@triton.jit
def linear_kernel(
    u, v, f, out, M, P, Q, N, K, per_part, u_rows, u_columns, v_rows, v_columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_Q: tl.constexpr,
    ONE: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """out[part, m, n], in float32: the sum over those pairs of a block and a p that belong to the part."""
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
    first = part * per_part
    last = first + per_part
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for b in range(tl.cdiv(Q, BLOCK_Q)):
        start = start_of(b, P, BLOCK_Q, ONE)
        low = tl.maximum(first - start, 0)
        high = tl.minimum(last - start, size_of(b, P, BLOCK_Q, ONE))
        if low < high:
            q = b * BLOCK_Q + k
            at_x = v + at_m[:, None] * v_rows + (q.to(tl.int64) * v_columns)[None, :]
            x = tl.load(at_x, mask=q[None, :] < Q, other=0.0)
            left = tl.load(u + at_m * u_rows + tl.cast(low, tl.int64) * u_columns)
            for p in range(low, high):
                # Loaded while the product in front runs; Triton does so for operands of products alone.
                following = tl.cast(tl.minimum(p + 1, high - 1), tl.int64)
                coming = tl.load(u + at_m * u_rows + following * u_columns)
                y = tl.load(f + at_n[None, :] * K + ((start + p) * BLOCK_Q + k)[:, None])
                a = x * left[:, None]  # rounded as the written product would be
                if TF32:
                    a = to_tf32(a)
                acc = waited_for(tl.dot(a, y, acc))
                left = coming
    at = (part.to(tl.int64) * M + m[:, None]) * N + n[None, :]
    tl.store(out + at, acc, mask=in_m[:, None] & in_n[None, :])
