"""`inductor_fusions::lora_accumulate`: adds low-rank products to a matrix in memory.

    out = base + sum over i of scale_i * kept_i * (a_i @ b_i)

where the base is no product of a kernel of ours: that of a quantised weight, or gradients of inputs whose
adapters have a dropout each. `kept_i` is the mask of the dropout, or nothing. The sum is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...lowering import define
from .op import check_masks


@dataclass(frozen=True)
class Sum:
    """A call of the operation, with tensors, or with Inductor's values for them.

    Attributes:
        base: shape (M, N), any strides.
        a: shape (M, K_i) each, all of one dtype with b.
        b: shape (K_i, N) each.
        kept: bool, shape (M, N) each: multiplies a product as 0 and 1, so that 0 times NaN is NaN.
        kept_products: which product each of them belongs to.
    """

    base: Any
    a: Sequence[Any]
    b: Sequence[Any]
    scales: Sequence[float]
    kept: Sequence[Any]
    kept_products: Sequence[int]
    dtype: torch.dtype

    def masks(self) -> dict[int, Any]:
        """The mask of each product that has one."""
        return dict(zip(self.kept_products, self.kept, strict=True))


def check(call: Sum) -> None:
    """Refuse arguments that do not fit together."""
    base, a, b, scales = call.base, call.a, call.b, call.scales
    kept, kept_products = call.kept, call.kept_products
    if base.dim() != 2 or not base.is_floating_point():
        raise ValueError("base of lora_accumulate must be a matrix of floating dtype")
    if not a or not (len(a) == len(b) == len(scales)):
        raise ValueError("lora_accumulate needs at least one product, and an a, b and scale for each")
    if any(x.dim() != 2 for x in (*a, *b)):
        raise ValueError("the operands a and b of lora_accumulate must be matrices")
    if len({x.dtype for x in (*a, *b)}) > 1 or not a[0].is_floating_point():
        raise ValueError("the operands a and b of lora_accumulate need one floating dtype")
    for left, right in zip(a, b, strict=True):
        torch._check(left.shape[1] == right.shape[0], lambda: "inner sizes of a and b differ")
        torch._check(left.shape[0] == base.shape[0], lambda: "a has other rows than base")
        torch._check(right.shape[1] == base.shape[1], lambda: "b has other columns than base")
    if len(kept) != len(kept_products) or len(set(kept_products)) != len(kept_products):
        raise ValueError("kept_products of lora_accumulate needs one product for each mask")
    if any(not 0 <= p < len(a) for p in kept_products):
        raise ValueError("kept_products of lora_accumulate names a product that does not exist")
    check_masks(kept, base, "lora_accumulate")


def accumulate(*given: Any) -> Tensor:
    """The sum, shape (M, N), row-major, computed in float32 (float64 where an operand is)."""
    call = Sum(*given)
    check(call)
    wide, masks = _wide(call.base, call.a[0]), call.masks()
    total = call.base.to(wide)
    for i, (left, right, scale) in enumerate(zip(call.a, call.b, call.scales, strict=True)):
        part = left.to(wide) @ right.to(wide)
        if i in masks:
            part = part * masks[i]
        total = total + part * scale
    found: Tensor = total.to(call.dtype).contiguous()
    return found.clone() if found is call.base else found


def _wide(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _empty(*given: Any) -> Tensor:
    call = Sum(*given)
    check(call)
    found: Tensor = call.base.new_empty(call.base.shape, dtype=call.dtype)
    return found


def _flops(base: Any, a: Any, *_: Any) -> int:
    """Two for each multiplication and addition of the products."""
    return sum(2 * base[0] * base[1] * left[1] for left in a)


LORA_ACCUMULATE = define(
    "lora_accumulate", accumulate, _empty, flops=_flops,
    schema="(Tensor base, Tensor[] a, Tensor[] b, float[] scales, Tensor[] kept, SymInt[] kept_products, "
    "ScalarType dtype) -> Tensor",
)  # fmt: skip
