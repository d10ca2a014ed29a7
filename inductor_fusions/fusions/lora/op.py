"""The operations of adapters.

`inductor_fusions::lora_narrow_mm` is the product of one matrix with several narrow ones:

    y_i = scale_i * (kept_i * x) @ b_i

the down-projections of adapters on one input, and their gradients; `kept_i` is the mask of the dropout in
front of an adapter, where there is one. Each y_i has the dtype of b_i, which may be wider than that of x: x
is never widened, and never masked, in memory. Its outputs can be had in two more forms, which `further` and
`transposed` ask for.

`inductor_fusions::lora_linear` is linears with adapters as a whole, for few rows:

    y_g = x @ w_g + bias_g + sum over the adapters i of g of scale_i * (x @ a_i) @ b_i
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...block_mm.op import dtypes, exact_dtype
from ...graph.builder import KEPT_BITS
from ...lowering import define

#: The bits of a float32 that a bfloat16 has as well.
HIGH_BITS = KEPT_BITS[torch.bfloat16]


@dataclass(frozen=True)
class Narrow:
    """A call of `lora_narrow_mm`, with tensors, or with Inductor's values for them.

    Attributes:
        x: shape (M, K), any strides.
        b: shape (K, r) each, of the dtype of x or wider; or each of them as summands of the dtype of x, shape
            (count, K, r), that stand for their sum in float32.
        further: for each product, the factor of the form that a product of the dtype of x reads; 0: it is
            not wanted.
        transposed: whether the products are returned as (r, M), row-major.
        kept: bool, shape (M, K), for each product or none: multiplies x as 0 and 1, so that 0 times NaN is
            NaN.
    """

    x: Any
    b: Sequence[Any]
    scales: Sequence[float]
    further: Sequence[float]
    transposed: bool
    kept: Sequence[Any]


def check(call: Narrow) -> None:
    """Refuse arguments that do not fit together."""
    x, b, scales, further, kept = call.x, call.b, call.scales, call.further, call.kept
    if not b or not (len(b) == len(scales) == len(further)):
        raise ValueError("narrow_mm needs at least one matrix, and a scale and a form for each")
    if x.dim() != 2 or any(right.dim() not in (2, 3) for right in b):
        raise ValueError("the operands of narrow_mm must be matrices")
    counts = {int(right.shape[0]) if right.dim() == 3 else 0 for right in b}
    if len(counts) != 1 or counts == {1}:
        raise ValueError("either all low-rank matrices of narrow_mm are split into summands, or none")
    for right in b:
        torch._check(right.shape[-2] == x.shape[1], lambda: "inner sizes of narrow_mm differ")
        summands = right.dim() == 3
        if summands and (right.dtype != x.dtype or x.dtype.itemsize != 2):
            raise ValueError("the summands of narrow_mm need the dtype of x, which has to be a 16-bit dtype")
        if right.dtype != x.dtype and right.dtype.itemsize <= x.dtype.itemsize:
            raise ValueError(f"narrow_mm does not multiply {x.dtype} by {right.dtype}")
    if len(kept) not in (0, len(b)):
        raise ValueError("narrow_mm needs a mask for each product, or none")
    check_masks(kept, x, "narrow_mm")


def check_masks(kept: Sequence[Tensor], like: Tensor, name: str) -> None:
    """Refuse masks that are not those of the elements of a matrix."""
    for mask in kept:
        if mask.dim() != 2 or mask.dtype != torch.bool:
            raise ValueError(f"kept of {name} must be bool matrices")
        torch._check(mask.shape[0] == like.shape[0], lambda: "a mask in kept has other rows")
        torch._check(mask.shape[1] == like.shape[1], lambda: "a mask in kept has other columns")


def narrow_mm(*given: Any) -> list[Tensor]:
    """Every product, shape (M, r) and row-major, then the further forms: `parts`."""
    call = Narrow(*given)
    check(call)
    x, scales = call.x, call.scales
    b = [right.float().sum(0) if right.dim() == 3 else right for right in call.b]
    read = [x * mask for mask in call.kept] or [x] * len(b)
    outputs = [_product(left, right, scale) for left, right, scale in zip(read, b, scales, strict=True)]
    forms = [
        parts(_product(left, right, scale * factor), x.dtype)
        for left, right, scale, factor in zip(read, b, scales, call.further, strict=True)
        if factor
    ]
    return [(y.t() if call.transposed else y).contiguous() for y in outputs] + forms


def _product(x: Tensor, right: Tensor, scale: float) -> Tensor:
    dtype = exact_dtype(right.dtype, scale)
    y = x.to(dtype) @ right.to(dtype)
    return y if scale == 1 else (y * scale).to(right.dtype)


def parts(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in a dtype: as it is, or as two summands of a narrower one, (high | high | low), shape (M, 3r).

    The latter, multiplied by a matrix whose rows are (high; low; high), give the product of both but for
    that of the two low parts.
    """
    if y.dtype == dtype:
        return y
    # By bits where it can be: Inductor drops a cast to bfloat16 and back where both are in one loop.
    cut = y.dtype == torch.float32
    high = (y.view(torch.int32) & HIGH_BITS).view(torch.float32) if cut else y.to(dtype).to(y.dtype)
    low = (y - high).to(dtype)
    return torch.cat([high.to(dtype), high.to(dtype), low], dim=1)


def _empty(*given: Any) -> list[Tensor]:
    call = Narrow(*given)
    check(call)
    x, b = call.x, call.b
    rows = x.shape[0]
    shapes = [(right.shape[-1], rows) if call.transposed else (rows, right.shape[-1]) for right in b]
    kinds = [torch.float32 if right.dim() == 3 else right.dtype for right in b]
    found = [x.new_empty(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
    forms = [
        right.shape[-1] * (1 if kind == x.dtype else 3)
        for right, kind, factor in zip(b, kinds, call.further, strict=True)
        if factor
    ]
    return found + [x.new_empty((rows, columns)) for columns in forms]


# -- gradient -------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, b, ctx.scales, further, transposed, kept = inputs
    if any(further) or transposed:
        raise NotImplementedError("lora_narrow_mm is differentiable only in its plain form")
    if any(right.dim() == 3 for right in b):
        raise NotImplementedError("lora_narrow_mm has no gradient for split matrices")
    ctx.products = len(b)
    # The narrow matrices are read for the gradient of x alone; of all inputs it is the first.
    ctx.save_for_backward(x, *(b if ctx.needs_input_grad[0] else [None] * len(b)), *kept)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """The gradients of the narrow matrices are skinny GEMMs as well: x is kept, and read, as it is."""
    x, *others = ctx.saved_tensors
    b, kept = others[: ctx.products], others[ctx.products :]
    dx: Tensor | None = None
    db: list[Tensor | None] = []
    right: Any
    for i, (right, dy, scale) in enumerate(zip(b, grads, ctx.scales, strict=True)):
        if dy is None:
            db.append(None)
            continue
        if ctx.needs_input_grad[0]:
            # A mask is a loop over the product in any case: the factor is in it, and not in a wider product.
            part = (dy @ right.t()) * kept[i] * scale if kept else _product(dy, right.t(), scale)
            dx = part if dx is None else dx + part
        masks = [kept[i].t()] if kept else []
        db.append(NARROW_MM(x.t(), [dy], [scale], [0.0], True, masks)[0].t())
    return None if dx is None else dx.to(x.dtype), db, None, None, None, [None] * len(kept)


NARROW_MM = define(
    "lora_narrow_mm", narrow_mm, _empty, setup=_setup, backward=_backward,
    flops=lambda x, b, *_: sum(2 * x[0] * right[-2] * right[-1] for right in b),
    schema="(Tensor x, Tensor[] b, float[] scales, float[] further, bool transposed, Tensor[] kept) -> "
    "Tensor[]",
)  # fmt: skip

_library = torch.library.Library("inductor_fusions", "FRAGMENT")
_library.define("lora_down(Tensor x, Tensor a, Tensor? kept=None, float scale=1) -> Tensor")


@torch.library.impl(_library, "lora_down", "CompositeImplicitAutograd")
def _lora_down(x: Tensor, a: Tensor, kept: Tensor | None = None, scale: float = 1.0) -> Tensor:
    masks = [] if kept is None else [kept.reshape(-1, x.shape[-1])]
    made: list[Tensor] = NARROW_MM(x.reshape(-1, x.shape[-1]), [a.t()], [scale], [0.0], False, masks)
    return made[0].reshape(*x.shape[:-1], a.shape[0])


#: `scale * (kept * x) @ a.T` in the dtype of a, for x of any number of dims, with a bool mask of its shape or
#: None; what it is made of is what graphs have.
LORA_DOWN: Any = torch.ops.inductor_fusions.lora_down.default


def _rounded(y: Tensor) -> Tensor:
    """y. Casts on both sides of it, and on both sides of its gradient, are not simplified together."""
    return y.clone()


ROUNDED: Any = define("lora_rounded", _rounded, torch.empty_like, backward=lambda ctx, dy: ROUNDED(dy))


# -- whole linears ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linears:
    """A call of `lora_linear`, with tensors, or with Inductor's values for them.

    Attributes:
        x: shape (M, K).
        w: shape (K, N_g) for each linear.
        bias: shape (N_g,) each.
        bias_groups: which linear each bias belongs to.
        a, b: of each adapter, shapes (K, r) and (r, N_g), of the dtype of x or float32.
        groups: which linear each adapter belongs to.
        early: whether the weights are there before the down-projections start, so that the kernel that
            reads them need not wait for their end.
        wide: the numbers of the linears whose output is float32 instead, with commas between.
    """

    x: Any
    w: Sequence[Any]
    bias: Sequence[Any]
    bias_groups: Sequence[int]
    a: Sequence[Any]
    b: Sequence[Any]
    groups: Sequence[int]
    scales: Sequence[float]
    early: bool
    dtype: torch.dtype
    wide: str = ""

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtype of each output."""
        return dtypes(len(self.w), self.dtype, self.wide)


def lora_linear(*given: Any) -> list[Tensor]:
    call = Linears(*given)
    outputs = [call.x @ right for right in call.w]
    for down, up, group, scale in zip(call.a, call.b, call.groups, call.scales, strict=True):
        outputs[group] = outputs[group] + _product(_product(call.x, down, 1.0), up, scale)
    for offset, group in zip(call.bias, call.bias_groups, strict=True):
        outputs[group] = outputs[group] + offset
    return [y.to(kind).contiguous() for y, kind in zip(outputs, call.dtypes, strict=True)]


def _empty_linear(*given: Any) -> list[Tensor]:
    call = Linears(*given)
    shapes = [(call.x.shape[0], right.shape[1]) for right in call.w]
    return [call.x.new_empty(shape, dtype=kind) for shape, kind in zip(shapes, call.dtypes, strict=True)]


LORA_LINEAR = define(
    "lora_linear", lora_linear, _empty_linear,
    flops=lambda x, w, bias, bias_groups, a, b, *_: sum(2 * x[0] * y[0] * y[1] for y in (*w, *a, *b)),
    schema="(Tensor x, Tensor[] w, Tensor[] bias, SymInt[] bias_groups, Tensor[] a, Tensor[] b, "
    'SymInt[] groups, float[] scales, bool early, ScalarType dtype, str wide="") -> Tensor[]',
)  # fmt: skip
