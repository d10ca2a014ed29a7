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
