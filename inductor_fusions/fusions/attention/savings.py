"""Estimates the bytes and FLOPs that a fused attention saves."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from ..._inductor import hint
from ...graph import torch_ops
from .problem import Problem


def of_hand_written(problem: Problem, product: fx.Node) -> dict[str, int]:
    """Scores and weights that are not written and read again, and what causality leaves out."""
    scores = torch_ops.value(product)
    return {"bytes": 4 * _bytes(scores), "flops": _hidden_flops(problem)}


def of_sdpa_call(problem: Problem, mask: Any) -> dict[str, int]:
    """A mask that is not read, keys and values that are not repeated, and what causality leaves out.

    Args:
        mask: the mask of the call, or None.
    """
    gone = torch_ops.tensor(mask) if problem.attn_mask is None else None
    saved = _bytes(gone) if gone is not None else 0
    for few, full in ((problem.k, problem.full_k), (problem.v, problem.full_v)):
        saved += 2 * (full.numel - few.numel) * problem.dtype.itemsize
    return {"bytes": saved, "flops": _hidden_flops(problem) if gone is not None else 0}


def _hidden_flops(problem: Problem) -> int:
    """A causal kernel leaves out half of both products: 2 * n * (d + d_v) operations a score."""
    if not problem.causal:
        return 0
    batch, heads, rows, dim = (hint(size) for size in problem.q.shape)
    return batch * heads * rows * hint(problem.k.shape[2]) * (dim + hint(problem.v.shape[3]))


def _bytes(tensor: torch.Tensor) -> int:
    return prod(hint(size) for size in tensor.shape) * tensor.dtype.itemsize
