"""Errors of the kernels of short attention, for Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch._dynamo

from devtools import cuda_codegen
from inductor_fusions import config, ops
from inductor_fusions.fusions.attention.short import plan
from tests.support.errors import relative


@dataclass(frozen=True)
class Case:
    """One attention.

    Attributes:
        batch, heads, queries, keys, dim, v_dim: sizes.
        masks: shapes of masks; one that begins with "keep" is boolean, one that begins with "fixed" takes no
            gradient.
        numbers: of each mask; None for the default.
        merged: q, k and v are slices of one tensor.
        dynamic: the batch is symbolic.
    """

    batch: int = 4
    heads: int = 2
    queries: int = 7
    keys: int = 7
    dim: int = 16
    v_dim: int = 16
    masks: tuple[tuple[Any, ...], ...] = ()
    numbers: tuple[float, ...] | None = None
    causal: bool = False
    dtype: torch.dtype = torch.float16
    merged: bool = False
    dynamic: bool = False
    windows: int = 1


BASE = Case()
SWIN = Case(
    batch=12, queries=49, keys=49, dim=32, v_dim=32, masks=(("bias", 1, 2, 49, 49), ("fixed", 4, 1, 49, 49))
)
CASES: dict[str, Case] = {
    "plain": BASE,
    "one tile exactly": replace(BASE, queries=16, keys=16),
    "float32": replace(BASE, dtype=torch.float32, dim=17, v_dim=24),
    "odd sizes": replace(BASE, queries=5, keys=19, dim=24, v_dim=40),
    "causal": replace(BASE, causal=True),
    "slices of one tensor": replace(BASE, merged=True),
    "several blocks of queries": replace(
        BASE, batch=1, queries=100, keys=70, masks=(("bias", 1, 1, 100, 70),)
    ),
    "windows": SWIN,
    "windows, two at a time": replace(SWIN, windows=2),
    "windows, four at a time": replace(SWIN, batch=20, windows=4),
    "windows of float32": replace(SWIN, dtype=torch.float32, windows=2),
    "bias of each sample": replace(BASE, masks=(("bias", 4, 2, 7, 7),)),
    "bias of a row": replace(BASE, masks=(("bias", 1, 2, 1, 7), ("bias", 2, 1, 1, 7))),
    "bias of a column": replace(BASE, masks=(("fixed", 2, 1, 7, 1),)),  # a softmax does not see it
    "one number": replace(BASE, masks=(("fixed", 1, 1, 1, 1),), numbers=(3.0,)),
    "factor": replace(BASE, masks=(("bias", 1, 2, 7, 7),), numbers=(-0.5,)),
    "padding": replace(BASE, masks=(("keep", 4, 1, 1, 7),)),
    "dynamic padding": replace(BASE, masks=(("keep", 4, 1, 1, 7),), dynamic=True),
    "dynamic": replace(BASE, masks=(("bias", 1, 2, 7, 7),), dynamic=True),
    "fill between biases": replace(
        BASE,
        masks=(("bias", 1, 2, 7, 7), ("keep", 2, 1, 7, 7), ("bias", 1, 2, 7, 7)),
        numbers=(1.0, -3e4, 1.0),
    ),
    "fully masked rows": replace(BASE, masks=(("empty", 4, 1, 7, 7),), numbers=(-3.4028234663852886e38,)),
}  # fmt: skip


def inputs(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k and v, and the masks."""
    torch.manual_seed(0)

    def made(length: int, dim: int) -> torch.Tensor:
        return torch.randn(case.batch, length, case.heads, dim).to(case.dtype)

    if case.merged:
        merged = torch.randn(case.batch, case.queries, 3, case.heads, case.dim).to(case.dtype)
        tensors = [merged.requires_grad_()]
    else:
        tensors = [
            made(length, dim).requires_grad_()
            for length, dim in ((case.queries, case.dim), (case.keys, case.dim), (case.keys, case.v_dim))
        ]
    masks = []
    for kind, *shape in case.masks:
        if kind in ("keep", "empty"):
            keep = torch.rand(shape) < 0.6
            keep[..., 0] = True
            if kind == "empty":
                keep[:, :, 2] = False
            masks.append(keep)
        else:
            masks.append(torch.randn(shape).requires_grad_(kind == "bias"))
    return tensors, masks


def by_hand(case: Case, tensors: list[torch.Tensor], masks: list[torch.Tensor]) -> torch.Tensor:
    """The same by hand, in float64."""
    q, k, v = split(case, tensors)
    scores = q @ k.mT * 0.3
    for i, mask in enumerate(masks):
        given = mask.repeat(case.batch // mask.shape[0], 1, 1, 1)
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~given, case.numbers[i] if case.numbers else -math.inf)
        else:
            scores = scores + given * (case.numbers[i] if case.numbers else 1.0)
    if case.causal:
        scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1).to(scores.dtype)
    return torch.softmax(scores, -1) @ v


def split(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    parts = tensors[0].unbind(2) if case.merged else tensors
    return [x.transpose(1, 2) for x in parts]


def errors(name: str) -> dict[str, float]:
    """Relative errors of the result and of each gradient against float64."""
    case = CASES[name]
    tensors, masks = inputs(case)

    def fn(*given: torch.Tensor) -> torch.Tensor:
        q, k, v = split(case, list(given[: len(tensors)]))
        return ops.short_attention(
            q, k, v, given[len(tensors) :], numbers=case.numbers, scale=0.3, causal=case.causal
        )

    if case.dynamic:
        for x in (*tensors, *(m for m in masks if m.shape[0] == case.batch)):
            torch._dynamo.mark_dynamic(x, 0)
    several = mock.patch.object(plan, "windows_of", lambda *args: case.windows)
    with several, config.patch(strict=True):
        made = cuda_codegen.generate(fn, (*tensors, *masks), train=True, interpreted=True)
    for module in made.modules:
        assert not module.extern_calls, module.extern_calls
        assert sum(kernel.is_template for kernel in module.kernels) == 1
        assert case.dynamic == ("ks0" in next(k for k in module.kernels if k.is_template).source)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    wide_masks = [
        m if m.dtype == torch.bool else m.detach().double().requires_grad_(m.requires_grad) for m in masks
    ]
    exact = by_hand(case, wide, wide_masks)
    leaves = [*wide, *(m for m in wide_masks if m.requires_grad)]
    grads = torch.autograd.grad(exact, leaves, torch.ones_like(exact))
    found = {"out": relative(made.outputs, exact, 1e-3)}
    for i, (mine, right) in enumerate(zip(made.grads, grads, strict=True)):
        found[f"grad {i}"] = relative(mine, right, 1e-3)
    return found
