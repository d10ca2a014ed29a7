"""`short_attention` with keyword arguments and defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..fusions.attention.short.op import SHORT_ATTENTION


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
        k: keys, shape (B, H, Sk, D), in the dtype of q; Sk is at most 128.
        v: values, shape (B, H, Sk, Dv), in the dtype of q.
        masks: applied to the scores one after the other, in float32. Each is 4-D and broadcastable to
            (B, H, Sq, Sk), except that its first size may be any n that divides B: sample b has the mask b %
            n, as windows of an image have. Where several have an n of their own, the largest is a multiple of
            the others. A floating mask is added. A boolean one replaces the scores where it is False.
            Floating ones may take gradients, which are computed in the same order at each call.
        numbers: one for each mask: the factor of a floating one, what a boolean one puts in the place of a
        score.
            Default: 1 and -inf.
        scale: default D ** -0.5.
        causal: query i sees the keys j <= i only.

    Returns:
        Shape (B, H, Sq, Dv) in the dtype of q, laid out (B, Sq, H, Dv): `.transpose(1, 2).flatten(2)` is a
        view. A row whose scores are all -inf is NaN, as after `torch.softmax`; one whose scores are all one
        finite number is the mean of v.

    Raises:
        ValueError: the arguments do not fit together; says which.
    """
    if numbers is None:
        numbers = [-math.inf if mask.dtype == torch.bool else 1.0 for mask in masks]
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
