"""What the tests of kernels that are known to be wrong share: operands in each order of dims, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

aten = torch.ops.aten
HALVES = [torch.bfloat16, torch.float16]
#: Errors of gradients, relative to their largest number: at most that of a right kernel, at least that of a
#: wrong one.
RIGHT, WRONG = 0.03, 0.2
ORDERS = {
    "bhsd": (0, 1, 2, 3),
    "bshd": (0, 2, 1, 3),
    "hbsd": (1, 0, 2, 3),
    "sbhd": (2, 0, 1, 3),
    "shbd": (2, 1, 0, 3),
    "hsbd": (1, 2, 0, 3),
}


def laid_out(tensor: torch.Tensor, order: str) -> torch.Tensor:
    dims = ORDERS[order]
    return tensor.permute(dims).contiguous().permute([dims.index(dim) for dim in range(4)])


def rand(*shape: int, dtype: torch.dtype, order: str = "bhsd") -> torch.Tensor:
    return laid_out(torch.randn(shape, device="cuda", dtype=dtype), order).requires_grad_()


def exact(inputs: Sequence[torch.Tensor], grad: torch.Tensor, fn: Callable[..., Any]) -> list[torch.Tensor]:
    """Gradients in float64."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        return list(torch.autograd.grad(fn(*wide), wide, grad.double()))


def error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest error, relative to the largest number of each; NaN counts as the largest of all."""
    errors = [
        float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(found, expected, strict=True)
    ]
    return max(math.inf if math.isnan(each) else each for each in errors)


def attention(q: Any, k: Any, v: Any, bias: Any = 0.0) -> Any:
    return torch.softmax(q @ k.mT * 0.25 + bias, -1) @ v


def bare(
    inputs: Sequence[torch.Tensor], grad: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """cuDNN's forward and backward as they are."""
    q, k, v = (x.detach() for x in inputs)
    found = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, False, False, scale=0.25)
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = found
    return aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, 0.0, False, scale=0.25
    )


def low_scores(queries: int, keys: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Scores of about -122, as queries and keys that point away from each other have."""
    q, k, v = (torch.randn(1, 2, n, 64, device="cuda") * 0.5 for n in (queries, keys, keys))
    apart = (122 / 64 / 0.25) ** 0.5
    return [x.to(dtype).requires_grad_() for x in (q + apart, k - apart, v)]
