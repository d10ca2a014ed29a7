"""Triton functions whose machine code is known to need much or little."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, out, SIZE: tl.constexpr):
    """out = a @ b, with the three whole matrices in one thread block."""
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    at = rows * SIZE + columns
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def scaled_products(a, factors, b, out, COUNT, SIZE: tl.constexpr, WAIT: tl.constexpr):
    """out = sum over i of (a * factors[i]) @ b[i]: the left operand is made anew in each step.

    Without WAIT nothing but the next product needs a product, and Triton leaves it under way.
    """
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    at = rows * SIZE + columns
    x = tl.load(a + at)
    acc = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for i in range(COUNT):
        acc = tl.dot(x * tl.load(factors + i), tl.load(b + i * SIZE * SIZE + at), acc)
        if WAIT:
            acc = acc * 2
    tl.store(out + at, acc)
