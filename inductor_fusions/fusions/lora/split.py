"""`inductor_fusions::lora_split`: float32 matrices in parts of 16 bits, many of them in one kernel.

Adapters of float32 beside a base of 16 bits are multiplied in parts. Inputs of a graph are split up together
(`gather`), because each of the matrices by itself takes a launch and hardly more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _inductor
from ...fusion import Rejected
from ...lowering import check_templates, define
from . import elements
from .op import HIGH_BITS


def _split(
    matrices: list[Tensor], summands: list[int], along: list[int], sizes: list[int], dtype: torch.dtype
) -> list[Tensor]:
    """Split matrices into 16-bit parts, many in one kernel: the reference.

    Args:
        matrices: of float32, shape (R, C) each.
        summands: for each, how many matrices it becomes the sum of, each rounded from what those before it
            leave; 0: it becomes halves, of which the high one is cut off, not rounded.
        along: for each that becomes halves, the dim along which they lie, (high; low; high).
        sizes: for each that becomes halves, the size of that dim, with zeros at the end.
        dtype: of what they become, of 16 bits.

    Returns:
        For each matrix a tensor in order in memory: (summands, R, C), or a matrix of halves.
    """
    check(matrices, summands, along, sizes)
    return [
        _summands(matrix, count, dtype) if count else _halves(matrix, dim, size, dtype)
        for matrix, count, dim, size in zip(matrices, summands, along, sizes, strict=True)
    ]


def check(
    matrices: Sequence[Tensor], summands: Sequence[int], along: Sequence[int], sizes: Sequence[int]
) -> None:
    """Refuse arguments that do not fit together."""
    if not matrices or not (len(matrices) == len(summands) == len(along) == len(sizes)):
        raise ValueError("lora_split needs at least one matrix, and a form for each")
    for matrix, count, dim, size in zip(matrices, summands, along, sizes, strict=True):
        if matrix.dim() != 2 or matrix.dtype != torch.float32:
            raise ValueError("the matrices of lora_split must be float32")
        if count < 0 or dim not in (0, 1) or (not count and size < 3 * matrix.shape[dim]):
            raise ValueError("lora_split got an unknown form")


def _summands(matrix: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    found, left = [], matrix
    for _ in range(count):
        found.append(left.to(dtype))
        left = left - found[-1].float()
    return torch.stack(found).contiguous()


def _halves(matrix: Tensor, dim: int, size: int, dtype: torch.dtype) -> Tensor:
    high = (matrix.view(torch.int32) & HIGH_BITS).view(torch.float32)
    shape = list(matrix.shape)
    shape[dim] = size - 3 * shape[dim]
    low, high = (matrix - high).to(dtype), high.to(dtype)
    return torch.cat([high, low, high, high.new_zeros(shape)], dim).contiguous()


def _empty(
    matrices: list[Tensor], summands: list[int], along: list[int], sizes: list[int], dtype: torch.dtype
) -> list[Tensor]:
    check(matrices, summands, along, sizes)
    return [
        matrix.new_empty(_shape(matrix.shape, count, dim, size), dtype=dtype)
        for matrix, count, dim, size in zip(matrices, summands, along, sizes, strict=True)
    ]


def _shape(shape: Sequence[Any], count: int, dim: int, size: int) -> list[Any]:
    if count:
        return [count, *shape]
    return [size if d == dim else length for d, length in enumerate(shape)]


LORA_SPLIT = define("lora_split", _split, _empty, flops=lambda *_: 0)


# -- the kernel -----------------------------------------------------------------------------------


def kernel(
    matrices: list[Any], summands: list[int], along: list[int], sizes: list[int], dtype: torch.dtype
) -> list[Any]:
    """The outputs of one kernel.

    In its place the operation is called as it is: of a cast to 16 bits and back in one loop Inductor keeps
    nothing.
    """
    check_templates(matrices[0].get_device())
    matrices = _inductor.realize(matrices)
    factors: list[dict[str, Any]] = []
    outputs: list[tuple[str, tuple[Any, Any], torch.dtype]] = []
    shapes: list[list[int]] = []
    for i, (matrix, count, dim, size) in enumerate(zip(matrices, summands, along, sizes, strict=True)):
        found = _inductor.sizes(matrix)
        if not all(isinstance(length, int) for length in found):
            raise Rejected("a size is not known")
        shapes.append(_shape(found, count, dim, size))
        factor = elements.elements_of(i, matrix, 0)
        if count:
            factor["summands"] = count
            stored = (count, factor["size"])
        else:
            rows, columns = shapes[-1]
            factor |= {"rank": found[dim], "along": dim, "size": rows * columns, "width": columns}
            stored = rows, columns
        factors.append(factor)
        outputs.append((factor["output"], stored, dtype))
    made = elements.by_elements("split", matrices, factors, outputs, dtype, high_bits=HIGH_BITS)
    return [
        _inductor.call_lowering(torch.ops.aten.view.default, value, shape)
        for value, shape in zip(made, shapes, strict=True)
    ]
