"""The operation `inductor_fusions::outer_product_linear`, its gradients and FLOPs.

    y[b, n] = sum over p and q of u[b, p] * v[b, q] * w[n, p * Q + q]

On CUDA devices the product of u and v is made in the GEMM that reads it, and never written to memory; the
same holds for the two operations that are its gradients. Inductor launches these kernels as it does its own,
except where the number of samples is symbolic. Elsewhere the operations are what torch makes of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ... import _inductor
from ...operands import may_use_tf32


def dtypes() -> tuple[torch.dtype, ...]:
    """Dtypes that the kernels multiply now: float32 where torch may use TF32."""
    half = torch.bfloat16, torch.float16
    return (*half, torch.float32) if may_use_tf32() else half


def _check(u: Tensor, v: Tensor, w: Tensor) -> None:
    if u.dim() != 2 or v.dim() != 2 or w.dim() != 2:
        raise ValueError("outer_product_linear takes matrices")
    if not (u.is_floating_point() and u.dtype == v.dtype == w.dtype):
        raise ValueError("the operands of outer_product_linear have one floating dtype")
    torch._check(u.shape[0] == v.shape[0], lambda: "u and v have different numbers of rows")
    torch._check(w.shape[1] == u.shape[1] * v.shape[1], lambda: "the weight has not one column for each pair")


def _has_kernel(*tensors: Tensor) -> bool:
    """Whether the kernels compute this."""
    return tensors[0].is_cuda and torch.version.hip is None and tensors[0].dtype in dtypes()


@torch.library.custom_op("inductor_fusions::outer_product_linear", mutates_args=())
def _outer_product_linear(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    _check(u, v, w)
    if _has_kernel(u):
        from . import launch

        return launch.linear(u, v, w)
    return pairs(u, v) @ w.t()


@torch.library.custom_op("inductor_fusions::outer_product_linear_factors", mutates_args=())
def _factors(dy: Tensor, u: Tensor, v: Tensor, w: Tensor, one: bool) -> tuple[Tensor, Tensor]:
    """The gradients of u and of v; where they are one variable, their sum alone is what counts."""
    if _has_kernel(u):
        from . import launch

        return launch.factors(dy, u, v, w, one)
    d = (dy @ w).view(u.shape[0], u.shape[1], v.shape[1])
    return (d * v[:, None, :]).sum(2), (d * u[:, :, None]).sum(1)


@torch.library.custom_op("inductor_fusions::outer_product_linear_weight", mutates_args=())
def _weight(dy: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The gradient of w."""
    if _has_kernel(u):
        from . import launch

        return launch.weight(dy, u, v)
    return dy.t() @ pairs(u, v)


def pairs(u: Tensor, v: Tensor) -> Tensor:
    """(rows, P * Q): each product of an element of u and one of v, written out."""
    return (u[:, :, None] * v[:, None, :]).flatten(1)


def _traced(name: str) -> Any:
    """A function of `launch`, with kernels that a graph can hold."""

    def trace(*args: Any) -> Any:
        tensors = [t for t in args if isinstance(t, Tensor)]
        # How many thread blocks share a tile is chosen by the number of samples.
        if not _has_kernel(tensors[0]) or not all(isinstance(n, int) for t in tensors for n in t.shape):
            return NotImplemented
        from . import launch

        return getattr(launch, name)(*args, traced=True)

    return trace


_inductor.decompose_in_graphs(_outer_product_linear, _traced("linear"))
_inductor.decompose_in_graphs(_factors, _traced("factors"))
_inductor.decompose_in_graphs(_weight, _traced("weight"))

#: What graphs call.
OUTER_PRODUCT_LINEAR: Any = torch.ops.inductor_fusions.outer_product_linear.default
FACTORS: Any = torch.ops.inductor_fusions.outer_product_linear_factors.default
WEIGHT: Any = torch.ops.inductor_fusions.outer_product_linear_weight.default


@_outer_product_linear.register_fake
def _(u: Tensor, v: Tensor, w: Tensor) -> Tensor:
    _check(u, v, w)
    return u.new_empty((u.shape[0], w.shape[0]))


@_factors.register_fake
def _(dy: Tensor, u: Tensor, v: Tensor, w: Tensor, one: bool) -> tuple[Tensor, Tensor]:
    return u.new_empty(u.shape), v.new_empty(v.shape)


@_weight.register_fake
def _(dy: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return u.new_empty((dy.shape[1], u.shape[1] * v.shape[1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    u, v, w = inputs
    ctx.save_for_backward(u, v, w if any(ctx.needs_input_grad[:2]) else None)
    # Of memory that two variables share, such as x and x.detach(), each has a gradient of its own.
    ctx.one = inputs[0] is inputs[1]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    u, v, w = ctx.saved_tensors
    du = dv = dw = None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        du, dv = FACTORS(dy, u, v, w, ctx.one)
    if ctx.needs_input_grad[2]:
        dw = WEIGHT(dy, u, v)
    return du, dv, dw


_outer_product_linear.register_autograd(_backward, setup_context=_setup)


def _count(rows: int, out: int, pair_count: int) -> int:
    return 2 * rows * out * pair_count


@register_flop_formula(torch.ops.inductor_fusions.outer_product_linear)
def flops(u_shape: Any, v_shape: Any, w_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Two for each multiplication and addition of the product with the weight."""
    return _count(u_shape[0], w_shape[0], w_shape[1])


@register_flop_formula(torch.ops.inductor_fusions.outer_product_linear_factors)
def factor_flops(dy_shape: Any, u_shape: Any, v_shape: Any, w_shape: Any, *args: Any, **kwargs: Any) -> int:
    """As forward."""
    return _count(u_shape[0], w_shape[0], w_shape[1])


@register_flop_formula(torch.ops.inductor_fusions.outer_product_linear_weight)
def weight_flops(dy_shape: Any, u_shape: Any, v_shape: Any, *args: Any, **kwargs: Any) -> int:
    """As forward."""
    return _count(u_shape[0], dy_shape[1], u_shape[1] * v_shape[1])
