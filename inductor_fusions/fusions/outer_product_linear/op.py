"""The operation `inductor_fusions::outer_product_linear`, its gradients and FLOPs.

    y[b, n] = sum over p and q of u[b, p] * v[b, q] * w[n, p * Q + q]

On CUDA devices the product of u and v is made in the GEMM that reads it, and never written to memory.
Inductor launches these kernels as it does its own, except where the number of samples is symbolic. Elsewhere
the operation is what torch makes of it. Its two gradients are computed by torch's matrix products, for some
features of u at a time. So only `CHUNK` bytes of the rows of P * Q products are in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...decisions import unsupported
from ...lowering import define
from ...operands import may_use_tf32

#: Bytes of products of u and v, or of their gradients, that a gradient has in memory at a time.
CHUNK = 32 * 2**20


def dtypes() -> tuple[torch.dtype, ...]:
    """Dtypes that the kernels multiply now: float32 where torch may use TF32."""
    half = torch.bfloat16, torch.float16
    return (*half, torch.float32) if may_use_tf32() else half


def _check(u: Tensor, v: Tensor, w: Tensor) -> None:
    if u.dim() != 2 or v.dim() != 2 or w.dim() != 2:
        raise ValueError("the operands of outer_product_linear must be matrices")
    if not (u.is_floating_point() and u.dtype == v.dtype == w.dtype):
        raise ValueError("the operands of outer_product_linear need one floating dtype")
    torch._check(u.shape[0] == v.shape[0], lambda: "u and v have different numbers of rows")
    torch._check(w.shape[1] == u.shape[1] * v.shape[1], lambda: "the weight has not one column for each pair")


def _has_kernel(u: Tensor) -> bool:
    """Whether the kernels compute this."""
    return u.dtype in dtypes() and not unsupported(u.device)


def _outer_product_linear(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    _check(u, v, w)
    if _has_kernel(u):
        from . import launch

        return launch.linear(u, v, w)
    return outer_products(u, v) @ w.t()


def factors(dy: Tensor, u: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of u and of v."""
    du = u.new_zeros(u.shape)
    dv = v.new_zeros(v.shape, dtype=torch.promote_types(v.dtype, torch.float32))
    # What is summed over all features may fit into float16 where a part of the sum does not.
    wide = torch.float32 if u.dtype == torch.float16 else u.dtype
    for part, columns in _chunks(u, v):
        d = (dy @ w[:, columns]).view(u.shape[0], part.stop - part.start, v.shape[1])
        du[:, part] = (d @ v[:, :, None])[..., 0]
        dv += (u[:, None, part].to(wide) @ d.to(wide))[:, 0]
    return du, dv.to(v.dtype)


def weight(dy: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The gradient of w."""
    dw = u.new_zeros((dy.shape[1], u.shape[1] * v.shape[1]))
    for part, columns in _chunks(u, v):
        dw[:, columns] = dy.t() @ outer_products(u[:, part], v)
    return dw


def _chunks(u: Tensor, v: Tensor) -> Iterator[tuple[slice, slice]]:
    """Some features of u at a time, and the columns of the weight that are theirs."""
    count, each = v.shape[1], v.shape[0] * v.shape[1] * v.itemsize
    size = max(1, CHUNK // max(1, each))
    for first in range(0, u.shape[1], size):
        last = min(first + size, u.shape[1])
        yield slice(first, last), slice(first * count, last * count)


def outer_products(u: Tensor, v: Tensor) -> Tensor:
    """(rows, P * Q): each product of an element of u and one of v, materialised."""
    return (u[:, :, None] * v[:, None, :]).flatten(1)


def _launches(u: Tensor, v: Tensor, w: Tensor) -> bool:
    """Whether a graph can hold the kernels, whose number of thread blocks depends on that of samples."""
    return _has_kernel(u) and all(isinstance(n, int) for t in (u, v, w) for n in t.shape)


def _empty(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    _check(u, v, w)
    return u.new_empty((u.shape[0], w.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    u, v, w = inputs
    ctx.save_for_backward(u, v, w if any(ctx.needs_input_grad[:2]) else None)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    u, v, w = ctx.saved_tensors
    du = dv = dw = None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        du, dv = FACTORS(dy, u, v, w)
    if ctx.needs_input_grad[2]:
        dw = WEIGHT(dy, u, v)
    return du, dv, dw


# FLOPs: two for each multiplication and addition of the product with the weight, in the gradients too.
FACTORS = define(
    "outer_product_linear_factors", factors, lambda dy, u, v, w: (u.new_empty(u.shape), v.new_empty(v.shape)),
    flops=lambda dy, u, v, w: 2 * u[0] * w[0] * w[1],
)  # fmt: skip
WEIGHT = define(
    "outer_product_linear_weight", weight,
    lambda dy, u, v: u.new_empty((dy.shape[1], u.shape[1] * v.shape[1])),
    flops=lambda dy, u, v: 2 * u[0] * dy[1] * u[1] * v[1],
)  # fmt: skip
OUTER_PRODUCT_LINEAR = define(
    "outer_product_linear", _outer_product_linear, _empty, flops=lambda u, v, w: 2 * u[0] * w[0] * w[1],
    setup=_setup, backward=_backward, launches=_launches,
)  # fmt: skip
