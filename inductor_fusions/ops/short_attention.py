"""`short_attention` with keyword arguments and defaults."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from ..fusions.attention.short.op import SHORT_ATTENTION
from . import sharding
from .arguments import check_one_device, check_tensors


def short_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masks: Sequence[torch.Tensor] = (),
    *,
    numbers: Sequence[float] | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """softmax(scale * q @ k^T, masked) @ v, for up to 128 queries and keys.

    Compiled for a CUDA device of compute capability 8.0 or later, forward and backward are one Triton kernel
    each: in float16 and bfloat16 for head dims up to 128, in float32 for up to 64 keys and head dims up to
    64. Otherwise it is computed by torch operations.

    Args:
        q: queries, shape (B, H, Sq, D), any strides; Sq is at most 128.
        k: keys, shape (B, Hk, Sk, D), in the dtype of q; Sk is at most 128. Hk divides H: each head of k
            serves H / Hk consecutive heads of q.
        v: values, shape (B, Hk, Sk, Dv), in the dtype of q.
        masks: applied to the scores one after the other, in float32. Each is 4-D and broadcastable to
            (B, H, Sq, Sk), except that its first size may be any n that divides B: sample b has the mask b %
            n, as windows of an image have. If several masks have different n, the largest is a multiple of
            the others. A floating-point mask is added. A boolean mask replaces the scores where it is False.
            A floating-point mask may require a gradient, which is deterministic.
        numbers: one for each mask: the factor of a floating-point mask, or the fill of a boolean mask.
            Default: 1 and -inf.
        scale: default D ** -0.5.
        causal: query i sees the keys j <= i only.

    All of q, k, v and the masks may be DTensors on one mesh. If q is sharded evenly over the batch or the
    heads, every rank computes its part; other placements are replicated first.

    Returns:
        Shape (B, H, Sq, Dv) in the dtype of q, in memory as (B, Sq, H, Dv): `.transpose(1, 2).flatten(2)` is
        a view. A fully masked row is NaN if the fill is -inf, as after `torch.softmax`, and the mean of v if
        the fill is finite.

    Raises:
        TypeError: masks is not a list of tensors.
        ValueError: shapes, dtypes, devices or lengths do not match. The message names the arguments.
    """
    check_tensors("masks of short_attention", masks)
    check_one_device("short_attention", [q, k, v, *masks])
    if numbers is None:
        numbers = [-math.inf if mask.dtype == torch.bool else 1.0 for mask in masks]
    if any(hasattr(tensor, "device_mesh") for tensor in (q, k, v, *masks)):  # a DTensor
        compute = functools.partial(short_attention, numbers=numbers, scale=scale, causal=causal)
        return sharding.attention(compute, q, k, v, masks)
    groups = _groups(q, k, v)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    result: torch.Tensor = SHORT_ATTENTION(
        q,
        k,
        v,
        list(masks),
        [float(n) for n in numbers],
        float(q.shape[-1]) ** -0.5 if scale is None else float(scale),
        causal,
    )
    return result


def _groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """How many heads of q share one of k and v; 1 where the operation is to say what does not fit."""
    if not all(x.dim() == 4 for x in (q, k, v)) or k.shape[1] != v.shape[1] or not k.shape[1]:
        return 1
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the number of heads of k, {k.shape[1]}, does not divide that of q, {q.shape[1]} "
            "(short_attention)"
        )
    return q.shape[1] // k.shape[1]
