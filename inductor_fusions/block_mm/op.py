"""The operation `inductor_fusions::block_mm`: kernel for eager mode, fake kernel, gradient and FLOPs.

`lowering` makes one kernel of it. The outputs are separate dense tensors. Views of one packed buffer would
keep all of it in memory as long as one of them is used. If one is saved for the backward, that takes more
memory than the unfused products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lowering import define

#: The slope of the sigmoid in CLIP's GELU.
QUICK = 1.702
#: Activations by name; each is computed in float32.
ACTIVATIONS: dict[str, Any] = {
    "": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(QUICK * x),
    "relu_squared": lambda x: F.relu(x).square(),
}


#: Gradient of the input of each, from that of its output and the input.
_BACKWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "": lambda dy, x: dy,
    "relu": lambda dy, x: torch.ops.aten.threshold_backward(dy, x, 0),
    "sigmoid": lambda dy, x: torch.ops.aten.sigmoid_backward(dy, torch.sigmoid(x)),
    "silu": lambda dy, x: torch.ops.aten.silu_backward(dy, x),
    "gelu": lambda dy, x: torch.ops.aten.gelu_backward(dy, x),
    "gelu_tanh": lambda dy, x: torch.ops.aten.gelu_backward(dy, x, approximate="tanh"),
    "gelu_quick": lambda dy, x: torch.ops.aten.silu_backward(dy, QUICK * x),
    "relu_squared": lambda dy, x: dy * 2 * F.relu(x),
}


@dataclass
class Call:
    """One call of the operation, with tensors, or with Inductor's values for them.

    Attributes:
        a, b: the operands of each product, matrices.
        bias, bias_groups: vectors or matrices, and the group of each.
        groups, scales: the group of each product, 0, 1, ... in order, and its factor.
        activations: the name of that of each group, with commas between: a schema has no list of strings.
        gated: whether the two groups are multiplied, and are one output.
        wide: the numbers of the outputs that are float32 instead, with commas between.
        decided: for how many rows a kernel was decided on, whose gain is not asked for again; 0: it was not.
        eps: of the RMSNorm (arXiv:1910.07467) that the input of each group's first product still has to go
            through: x * rsqrt(mean(x * x) + eps), times `gain + shift`. None: there is no norm. With one, the
            operation has no gradient: graphs get it after autograd.
        gain: a vector of K elements, or None.
        clamps: whether the root is that of the larger one of the mean and eps, and not of their sum.
    """

    a: Sequence[Any]
    b: Sequence[Any]
    bias: Sequence[Any]
    bias_groups: Sequence[int]
    groups: Sequence[int]
    scales: Sequence[float]
    activations: str
    gated: bool
    dtype: torch.dtype
    wide: str = ""
    decided: int = 0
    eps: float | None = None
    gain: Any = None
    shift: float = 0.0
    clamps: bool = False

    def __post_init__(self) -> None:
        self.names = self.activations.split(",")
        self.dtypes = dtypes(1 if self.gated else len(self.names), self.dtype, self.wide)

    def offsets(self) -> dict[int, Any]:
        """The bias of each group that has one."""
        return dict(zip(self.bias_groups, self.bias, strict=True))

    def first(self) -> list[int]:
        """The first product of each group."""
        return [self.groups.index(group) for group in range(self.groups[-1] + 1)]

    def inputs(self) -> list[Any]:
        """The left operands, after the norm, which is computed in float32 and rounded once."""
        found = list(self.a)
        if self.eps is not None:
            for p in self.first():
                x = _wide(found[p])
                mean = x.square().mean(1, keepdim=True)
                x = x * torch.rsqrt(mean.clamp(min=self.eps) if self.clamps else mean + self.eps)
                if self.gain is not None:
                    x = x * (_wide(self.gain) + self.shift)
                found[p] = x.to(found[p].dtype)
        return found


def check(call: Call) -> None:
    """Refuse arguments that do not fit together.

    Raises:
        ValueError: says which.
        RuntimeError: says which, of symbolic sizes.
    """
    _check_counts(call)
    _check_matrices(call)
    for offset, group in zip(call.bias, call.bias_groups, strict=True):
        first = call.groups.index(group)
        if offset.dim() not in (1, 2):
            raise ValueError(f"bias[{group}] of block_mm must be a vector or a matrix, not {offset.dim()}-D")
        columns = call.b[first].shape[1]
        _check_size(f"bias[{group}]", "columns", offset.shape[-1], columns, f"b[{first}] has")
        if offset.dim() == 2:
            rows = call.a[first].shape[0]
            _check_size(f"bias[{group}]", "rows", offset.shape[0], rows, f"a[{first}] has")
    if call.gain is not None:
        if call.gain.dim() != 1:
            raise ValueError(f"gain of block_mm must be a vector, not {call.gain.dim()}-D")
        for p in call.first():
            _check_size("gain", "elements", call.gain.shape[0], call.a[p].shape[1], f"a[{p}] has columns")


def _check_counts(call: Call) -> None:
    """Refuse lists of lengths, or numbers of groups, that do not fit together."""
    a, b, bias, bias_groups, groups = call.a, call.b, call.bias, call.bias_groups, call.groups
    scales, activations = call.scales, call.names
    if not (len(a) == len(b) == len(groups) == len(scales)) or not a:
        raise ValueError(
            f"block_mm needs at least one product, and an a, b, group and scale for each: got {len(a)} in a, "
            f"{len(b)} in b, {len(groups)} in groups, {len(scales)} in scales"
        )
    if list(groups) != sorted(groups) or set(groups) != set(range(groups[-1] + 1)):
        raise ValueError(f"groups of block_mm must be 0, 1, ... in ascending order, not {list(groups)}")
    count = groups[-1] + 1
    if len(activations) != count:
        raise ValueError(f"block_mm needs one activation for each of its {count} groups")
    if len(bias) != len(bias_groups) or not set(bias_groups) <= set(groups):
        raise ValueError("block_mm needs a group for each bias")
    if len(set(bias_groups)) != len(bias_groups):
        raise ValueError("a group of block_mm can have only one bias")
    if call.gated and count != 2:
        raise ValueError(f"a gated block_mm needs two groups, not {count}")
    unknown = set(activations) - set(ACTIVATIONS)
    if unknown:
        raise ValueError(f"block_mm has no activation {unknown.pop()!r}; it supports {sorted(ACTIVATIONS)}")


def _check_matrices(call: Call) -> None:
    """Refuse operands of products whose shapes or dtypes do not fit together."""
    a, b = call.a, call.b
    for p, (left, right) in enumerate(zip(a, b, strict=True)):
        for name, operand in (("a", left), ("b", right)):
            if operand.dim() != 2:
                raise ValueError(f"{name}[{p}] of block_mm must be a matrix, not {operand.dim()}-D")
        if not (left.is_floating_point() and left.dtype == right.dtype):
            raise ValueError(
                f"a[{p}] and b[{p}] of block_mm need one floating dtype, not {left.dtype} and {right.dtype}"
            )
        _check_size(f"b[{p}]", "rows", right.shape[0], left.shape[1], f"a[{p}] has columns")
    # Kernels read as many rows and columns everywhere as the first product of a group has.
    for p, (left, right, group) in enumerate(zip(a, b, call.groups, strict=True)):
        first = call.groups.index(0 if call.gated else group)
        _check_size(f"a[{p}]", "rows", left.shape[0], a[first].shape[0], f"a[{first}] has")
        _check_size(f"b[{p}]", "columns", right.shape[1], b[first].shape[1], f"b[{first}] has")


def _check_size(name: str, what: str, size: Any, wanted: Any, other: str) -> None:
    """Refuse an operand that has other rows or columns than another one wants."""
    says = f"{name} of block_mm has {size} {what}, not the {wanted} that {other}"
    if isinstance(size, int) and isinstance(wanted, int):
        if size != wanted:
            raise ValueError(says)
    else:
        # Says of a symbolic size that it is as wanted, where an `if` would add a guard.
        torch._check(size == wanted, lambda: says)


def composite(call: Call, as_stock: bool = False) -> list[Tensor]:
    """The outputs of a call, computed by torch operations.

    As many roundings as those have in the graph: a product and its bias are one `addmm`.

    Args:
        as_stock: compute each product in the dtype of its operands, also for a float32 result: a float32
            GEMM of 16-bit operands takes many times as long.
    """
    outputs, kinds = [], dtypes(len(call.names), call.dtype, call.wide)
    offsets, inputs = call.offsets(), call.inputs()
    for group, activation in enumerate(call.names):
        total: Tensor | None = None
        offset = offsets.get(group)
        for left, right, owner, scale in zip(inputs, call.b, call.groups, call.scales, strict=True):
            if owner != group:
                continue
            # A float32 result has nothing rounded in it.
            kind = right.dtype if as_stock else torch.promote_types(kinds[group], left.dtype)
            kind = exact_dtype(kind, scale)
            left, right = left.to(kind), right.to(kind)
            fine = torch.promote_types(kind, kinds[group]) == kind  # rounds no more than the result
            if scale == 1 and total is None and fine and offset is not None and offset.dtype == kind:
                product, offset = torch.addmm(offset, left, right), None
            else:
                product = left @ right
            product = product if scale == 1 else product * scale
            total = product if total is None else total + product
        assert total is not None
        if offset is not None:
            total = _wide(total) + _wide(offset)
        if activation or call.gated:
            total = ACTIVATIONS[activation](_wide(total))
        outputs.append(total)
    if call.gated:
        outputs = [outputs[0] * outputs[1]]
    return [y.to(kind).contiguous() for y, kind in zip(outputs, kinds, strict=False)]


def exact_dtype(dtype: torch.dtype, scale: float) -> torch.dtype:
    """The dtype in which a product is computed before it is multiplied by a factor.

    In float16 it may overflow without the factor, with which kernels round it.
    """
    return torch.float32 if dtype == torch.float16 and scale != 1 else dtype


def dtypes(count: int, dtype: torch.dtype, wide: str) -> list[torch.dtype]:
    """The dtype of each output."""
    found = wide.split(",")
    return [torch.float32 if str(group) in found else dtype for group in range(count)]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _compute(*given: Any) -> list[Tensor]:
    call = Call(*given)
    check(call)
    return composite(call)


def _empty(*given: Any) -> list[Tensor]:
    call = Call(*given)
    check(call)
    shapes = [(call.a[p].shape[0], call.b[p].shape[1]) for p in call.first()]
    # A gated pair is one output.
    return [call.a[0].new_empty(shape, dtype=kind) for shape, kind in zip(shapes, call.dtypes, strict=False)]


# -- gradient -------------------------------------------------------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, bias, ctx.bias_groups, ctx.groups, ctx.scales, activations, ctx.gated, ctx.dtype = inputs[:9]
    if len(inputs) > 11 and inputs[11] is not None:
        raise NotImplementedError("block_mm with a norm has no gradient")
    ctx.activations = activations.split(",")
    ctx.products = len(a)
    ctx.save_for_backward(*a, *b, *bias)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    saved, count = list(ctx.saved_tensors), ctx.products
    a, b, bias = saved[:count], saved[count : 2 * count], saved[2 * count :]
    outer = _outer_grads(ctx, a, b, bias, grads)
    da: list[Tensor | None] = [None] * count
    db: list[Tensor | None] = [None] * count
    for p, (group, scale) in enumerate(zip(ctx.groups, ctx.scales, strict=True)):
        dy = outer[group]
        if dy is None:
            continue
        dy = (dy if scale == 1 else dy * scale).to(a[p].dtype)
        da[p], db[p] = dy @ b[p].t(), a[p].t() @ dy
    dbias: list[Tensor | None] = []
    for offset, group in zip(bias, ctx.bias_groups, strict=True):
        dy = outer[group]
        dbias.append(None if dy is None else (dy.sum(0) if offset.dim() == 1 else dy).to(offset.dtype))
    # An empty list of numbers looks like a list of tensors, which wants a list of gradients.
    no_offsets: list[Any] | None = None if ctx.bias_groups else []
    # One for each argument that was given: not for those that have a default.
    return da, db, dbias, no_offsets, *[None] * (len(ctx.needs_input_grad) - 4)


def _outer_grads(
    ctx: Any, a: list[Tensor], b: list[Tensor], bias: list[Tensor], grads: list[Tensor | None]
) -> list[Tensor | None]:
    """The gradient of each group before its activation."""
    if not ctx.gated and not any(ctx.activations):
        return list(grads)
    if ctx.gated and grads[0] is None:
        return [None, None]
    plain = "," * (len(ctx.activations) - 1)
    inner = BLOCK_MM(a, b, bias, ctx.bias_groups, ctx.groups, ctx.scales, plain, False, ctx.dtype, "")
    inner = [_wide(y) for y in inner]
    if not ctx.gated:
        return [
            None if dy is None else _BACKWARDS[name](_wide(dy), y)
            for name, dy, y in zip(ctx.activations, grads, inner, strict=True)
        ]
    assert grads[0] is not None
    dy = _wide(grads[0])
    first, second = (ACTIVATIONS[name](y) for name, y in zip(ctx.activations, inner, strict=True))
    return [
        _BACKWARDS[ctx.activations[0]](dy * second, inner[0]),
        _BACKWARDS[ctx.activations[1]](dy * first, inner[1]),
    ]


def _flops(a: Any, b: Any, *_: Any) -> int:
    """Two for each multiplication and addition of the products."""
    return sum(2 * left[0] * left[1] * right[1] for left, right in zip(a, b, strict=True))


BLOCK_MM = define(
    "block_mm", _compute, _empty, flops=_flops, setup=_setup, backward=_backward,
    schema="(Tensor[] a, Tensor[] b, Tensor[] bias, SymInt[] bias_groups, SymInt[] groups, float[] scales, "
    "str activations, bool gated, ScalarType dtype, str wide, SymInt decided=0, float? eps=None, "
    "Tensor? gain=None, float shift=0, bool clamps=False) -> Tensor[]",
)  # fmt: skip
