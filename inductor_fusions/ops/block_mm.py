"""`block_mm` with keyword arguments and defaults."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..block_mm.op import BLOCK_MM
from .arguments import check_one_device, check_tensors


def block_mm(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor | None] | None = None,
    *,
    groups: Sequence[int] | None = None,
    scales: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Several sums of matrix products as one operation.

        y[g] = activation_g(sum of scale_p * a[p] @ b[p] over the products p of group g, + bias[g])

    Args:
        a: left operand of each product, shape (M, K). Operands of a group have the same M.
        b: right operand of each product, shape (K, N).
        bias: one for each group: None, shape (N,), or shape (M, N). Default: none has one.
        groups: group of each product: 0, 1, ..., in order. Default: each product is a group of its own.
        scales: factor of each product. Default 1.
        activations: one for each group: "", "relu", "sigmoid", "silu", "gelu" (erf),
            "gelu_tanh", "gelu_quick" (x * sigmoid(1.702 x)) or "relu_squared".
            Default: none.
        gated: multiply two groups of the same shape to one output, y[0] * y[1].
        dtype: floating dtype of the outputs. Default: that of the first operand.

    Returns:
        The outputs, shape (M, N), row-major: one for each group, or a single one if `gated`.

    Raises:
        TypeError: a, b or bias is not a list of tensors, or activations is not a list.
        ValueError: shapes, dtypes, devices or lengths do not match. The message names the arguments.
    """
    check_tensors("a of block_mm", a)
    check_tensors("b of block_mm", b)
    if bias is not None:
        check_tensors("bias of block_mm", bias, or_none=True)
    if isinstance(activations, str):
        raise TypeError(f"activations of block_mm must be a list of strings, not {activations!r}")
    if not a:
        raise ValueError("block_mm needs at least one product")
    # Dynamo may have made them symbolic.
    groups = list(range(len(a))) if groups is None else [int(g) for g in groups]
    count = groups[-1] + 1 if groups else 0
    given = {} if bias is None else {g: t for g, t in enumerate(bias) if t is not None}
    check_one_device("block_mm", [*a, *b, *given.values()])
    if bias is not None and len(bias) != count:
        raise ValueError(f"block_mm needs one bias (or None) for each of its {count} groups, not {len(bias)}")
    return list(
        BLOCK_MM(
            list(a),
            list(b),
            list(given.values()),
            list(given),
            groups,
            [1.0] * len(a) if scales is None else [float(s) for s in scales],
            "," * (count - 1) if activations is None else ",".join(activations),
            gated,
            a[0].dtype if dtype is None else dtype,
            "",
        )
    )
