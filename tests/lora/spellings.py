"""Spellings of a linear with an adapter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.block_mm.support import Run, rand

WHOLE = torch.float32


def targets(seen: Run, target: Any, graph: int = 0) -> list[Any]:
    """The calls of an operation in a graph."""
    return [node for node in seen.graphs[graph].nodes if node.target is target]


def operands(rank: int = 16, dtype: torch.dtype = torch.bfloat16, rows: int = 96) -> tuple[Any, ...]:
    """x, w, a, b: so many rows that it is two kernels, and not the operation for few."""
    return rand(rows, 64), rand(128, 64), rand(rank, 64, dtype=dtype), rand(128, rank, dtype=dtype)


def plain(x: Any, w: Any, a: Any, b: Any) -> Any:
    return x @ w.t() + 0.25 * ((x @ a.t()) @ b.t())


def linear(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0


def scaled_first(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(F.linear(2.0 * x, a) * 0.5, b) + F.linear(x, w)


def addition_with_alpha(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.add(x @ w.t(), (x @ a.t()) @ b.t(), alpha=3.0)


def several_dims(x: Any, w: Any, a: Any, b: Any) -> Any:
    x = x.view(2, 3, 16, 64)
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0


def peft_in_float32(x: Any, w: Any, a: Any, b: Any) -> Any:
    base = F.linear(x, w)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * 2.0).to(base.dtype)


def with_a_tail(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.sigmoid(linear(x, w, a, b) * 0.3 + 1)


def with_a_residual(x: Any, w: Any, a: Any, b: Any) -> Any:
    return linear(x, w, a, b) + torch.cat([x, x], dim=1)


def padded_rows(x: Any, w: Any, a: Any, b: Any) -> Any:
    """As Inductor pads rows that are aligned badly: each product by itself."""

    def product(x: Any, w: Any) -> Any:
        return (F.pad(x, (0, 0, 0, 5)) @ w.t())[:-5]

    return product(x, w) + product(product(x, a), b) * 2.0


def divided(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x / 4, a), b) * 16 / 3


def subtracted(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) - F.linear(F.linear(x, a), b) * 2.0


def subtracted_from(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.sub(F.linear(F.linear(x, a), b), F.linear(x, w, w[:, 0]), alpha=0.5)


def negated(x: Any, w: Any, a: Any, b: Any) -> Any:
    return -F.linear(-F.linear(x, a), b) + F.linear(x, w)


def added_by_addmm(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.addmm(x @ w.t(), x @ a.t(), b.t(), alpha=2.0)


def added_in_place(x: Any, w: Any, a: Any, b: Any) -> Any:
    return (x @ w.t()).addmm_(x @ a.t(), b.t(), alpha=2.0)


def base_added_by_addmm(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.addmm(((x @ a.t()) @ b.t()) * 0.5, x, w.t())


def added_to_an_addmm(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.addmm(F.linear(x, w, w[:, 0]), x @ a.t(), b.t(), alpha=-2.0)


#: All but the base is a number times the adapter, whatever it is written with.
SCALES = [
    divided, subtracted, subtracted_from, negated, added_by_addmm, added_in_place, base_added_by_addmm,
    added_to_an_addmm,
]  # fmt: skip
SPELLINGS = [
    plain, padded_rows, linear, scaled_first, addition_with_alpha, several_dims, with_a_tail, with_a_residual,
    *SCALES,
]  # fmt: skip
