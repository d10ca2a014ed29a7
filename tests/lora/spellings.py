"""Spellings of a linear with an adapter, as a function and as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.block_mm.support import Run, rand

WHOLE = torch.float32


class Adapted(nn.Module):
    """A base that is frozen, with an adapter, as PEFT spells it.

    Args:
        base: a module that gives `outer` features for `inner` ones.
        dtype: of the adapter.
    """

    def __init__(
        self, base: nn.Module, inner: int, outer: int, rank: int, dtype: torch.dtype = WHOLE
    ) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(inner, rank, bias=False, dtype=dtype)
        self.b = nn.Linear(rank, outer, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        return (result + self.b(self.a(x.to(self.a.weight.dtype))) * 2.0).to(result.dtype)


def targets(seen: Run, target: Any, graph: int = 0) -> list[Any]:
    """The calls of an operation in a graph."""
    return [node for node in seen.graphs[graph].nodes if node.target is target]


def operands(rank: int = 16, dtype: torch.dtype = torch.bfloat16, rows: int = 96) -> tuple[Any, ...]:
    """x, w, a, b: so many rows that it is two kernels, and not the operation for few."""
    return rand(rows, 64), rand(128, 64), rand(rank, 64, dtype=dtype), rand(128, rank, dtype=dtype)


def linear(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0


def peft_in_float32(x: Any, w: Any, a: Any, b: Any) -> Any:
    base = F.linear(x, w)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * 2.0).to(base.dtype)


def with_a_tail(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.sigmoid(linear(x, w, a, b) * 0.3 + 1)


def padded(x: Any, w: Any) -> Any:
    """A product whose rows Inductor pads, as those that are aligned badly."""
    return (F.pad(x, (0, 0, 0, 5)) @ w.t())[:-5]


#: All but the base is a number times the adapter, whatever it is written with.
SCALES: dict[str, Callable[..., Any]] = {
    "divided": lambda x, w, a, b: F.linear(x, w) + F.linear(F.linear(x / 4, a), b) * 16 / 3,
    "subtracted": lambda x, w, a, b: F.linear(x, w) - F.linear(F.linear(x, a), b) * 2.0,
    "subtracted_from": lambda x, w, a, b: torch.sub(
        F.linear(F.linear(x, a), b), F.linear(x, w, w[:, 0]), alpha=0.5
    ),
    "negated": lambda x, w, a, b: -F.linear(-F.linear(x, a), b) + F.linear(x, w),
    "added_by_addmm": lambda x, w, a, b: torch.addmm(x @ w.t(), x @ a.t(), b.t(), alpha=2.0),
    "added_in_place": lambda x, w, a, b: (x @ w.t()).addmm_(x @ a.t(), b.t(), alpha=2.0),
    "base_added_by_addmm": lambda x, w, a, b: torch.addmm(((x @ a.t()) @ b.t()) * 0.5, x, w.t()),
    "added_to_an_addmm": lambda x, w, a, b: torch.addmm(
        F.linear(x, w, w[:, 0]), x @ a.t(), b.t(), alpha=-2.0
    ),
}
SPELLINGS: dict[str, Callable[..., Any]] = {
    "plain": lambda x, w, a, b: x @ w.t() + 0.25 * ((x @ a.t()) @ b.t()),
    "padded_rows": lambda x, w, a, b: padded(x, w) + padded(padded(x, a), b) * 2.0,
    "linear": linear,
    "scaled_first": lambda x, w, a, b: F.linear(F.linear(2.0 * x, a) * 0.5, b) + F.linear(x, w),
    "addition_with_alpha": lambda x, w, a, b: torch.add(x @ w.t(), (x @ a.t()) @ b.t(), alpha=3.0),
    "several_dims": lambda x, w, a, b: linear(x.view(2, 3, 16, 64), w, a, b),
    "with_a_tail": with_a_tail,
    "with_a_residual": lambda x, w, a, b: linear(x, w, a, b) + torch.cat([x, x], dim=1),
    **SCALES,
}
