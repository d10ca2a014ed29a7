"""`short_attention` with keyword arguments and defaults."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from ..fusions.attention.short.op import SHORT_ATTENTION
from . import sharding


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
    """softmax(scale * q @ k^T, masked) @ v, where the keys of a head are few.

    Compiled for a CUDA device of compute capability 8.0 or later, it is one Triton kernel, and its backward
    another: for float16 and bfloat16 with head dims up to 128, and for float32 with up to 64 keys and head
    dims. Elsewhere it is computed by operations of torch.

    Args:
        q: queries, shape (B, H, Sq, D), any strides; Sq is at most 128.
        k: keys, shape (B, Hk, Sk, D), in the dtype of q; Sk is at most 128. Hk divides H; where it is less,
            H / Hk heads of q in a row share one of k, which is repeated for them.
        v: values, shape (B, Hk, Sk, Dv), in the dtype of q.
        masks: applied to the scores one after the other, in float32. Each is 4-D and broadcastable to
            (B, H, Sq, Sk), except that its first size may be any n that divides B: sample b has the mask b %
            n, as windows of an image have. Where several have an n of their own, the largest is a multiple of
            the others. A floating mask is added. A boolean one replaces the scores where it is False.
            Floating ones may take gradients, which are computed in the same order at each call.
        numbers: one for each mask: the factor of a floating one, and what a boolean one puts in the place of
            a score. Default: 1 and -inf.
        scale: default D ** -0.5.
        causal: query i sees the keys j <= i only.

    All of q, k, v and the masks may be DTensors instead, on one mesh: where q is sharded over the batch or
    the heads (which its ranks divide), every rank computes its part; other placements are replicated first.

    Returns:
        Shape (B, H, Sq, Dv) in the dtype of q, laid out (B, Sq, H, Dv): `.transpose(1, 2).flatten(2)` is a
        view. A row whose scores are all -inf is NaN, as after `torch.softmax`; one whose scores are all one
        finite number is the mean of v.

    Raises:
        ValueError: the arguments do not fit together; says which.
    """
    if numbers is None:
        numbers = [-math.inf if mask.dtype == torch.bool else 1.0 for mask in masks]
    if sharding.is_sharded(q, k, v, *masks):
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
