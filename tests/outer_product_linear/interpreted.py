"""Errors of the kernels, for Triton's interpreter."""

from __future__ import annotations

import torch

from inductor_fusions.fusions.outer_product_linear import launch, outer_products
from tests.support.errors import relative

LINEAR = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4}
BLOCK = 16

#: Rows, P, Q, N; Q is 0 where u and v are one matrix.
SIZES: dict[str, tuple[int, int, int, int]] = {
    "one tile": (16, 4, 16, 16),
    "odd sizes": (37, 5, 19, 23),
    "one row": (1, 7, 33, 40),
    "many parts": (16, 20, 20, 16),
    "one pair": (9, 1, 1, 5),
    "more tiles than parts": (150, 2, 17, 20),
    "one matrix": (21, 35, 0, 18),
    "one matrix, one block": (16, 9, 0, 16),
    "one matrix, whole blocks": (20, 32, 0, 33),
}


def _dtypes(name: str) -> dict[str, torch.dtype]:
    """float16 has the general form alone; float32, which is rounded to TF32, the others."""
    half, whole = {"float16": torch.float16}, {"float32": torch.float32}
    return half | whole if name == "odd sizes" else whole if name.startswith("one matrix") else half


CASES = {f"{name} {kind}": (name, dtype) for name in SIZES for kind, dtype in _dtypes(name).items()}


def operands(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """u, v, w, in layouts that differ."""
    rows, p, q, n = SIZES[name]
    torch.manual_seed(0)
    u = torch.randn(p, rows).to(dtype).t()
    v = torch.randn(rows, 2 * q).to(dtype)[:, ::2] if q else u
    w = (torch.randn(n, p * (q or p)) / 4).to(dtype)
    return u, v, w if rows % 2 else w.t().contiguous().t()


def errors(case: str) -> float:
    """Relative error of the result against float64."""
    name, dtype = CASES[case]
    u, v, w = operands(name, dtype)
    launch.LINEAR, launch.BLOCK_Q = LINEAR, dict.fromkeys((2, 4), BLOCK)
    y = launch.linear(u, v, w)
    exact = outer_products(u.double(), v.double()) @ w.double().t()
    assert y.dtype == dtype
    return relative(y, exact)
