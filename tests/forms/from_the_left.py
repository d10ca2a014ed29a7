"""Adapters whose matrices multiply columns, from the left of the input."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from .linear_form import form

LONG = (2, 48, 64)


@form(LONG, "frozen 128x64", "frozen 8x64", "frozen 128x8", (8,), left=(1, 1), reasons=("layout", "layout"))
def adapter_from_the_left(x: Any, w: Any, a: Any, b: Any, d: Any) -> Any:
    """VeRA as papers write it, on columns."""
    return F.linear(x, w) + (b @ (d[:, None] * (a @ x.mT))).mT


@form(LONG, "frozen 128x64", (8, 64), (128, 8), (8, 1), left=(0, 0))
def trained_adapter_from_the_left(x: Any, w: Any, a: Any, b: Any, d: Any) -> Any:
    """Of trained matrices torch makes products of matrices, with permutations and copies around them."""
    return F.linear(x, w) + (b @ (d * (a @ x.mT))).mT


@form(LONG, "frozen 128x64", (8, 64), (128, 8), left=(0, 0))
def trained_adapter_from_the_left_without_a_vector(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + (b @ (a @ x.mT)).mT


@form((2, 24, 24), "frozen 24x24", (8, 24), (24, 8), left=(1, 1), silent="lora")
def products_from_the_left_and_the_right(x: Any, w: Any, a: Any, b: Any) -> Any:
    """What one gives is not put back: the other mixes tokens."""
    return F.linear(x, w) + F.linear((a @ x.mT).mT.contiguous().view(2, 8, 24).mT, b)


@form((24, 64), "frozen 128x64", (8, 64), (128, 8), (8, 1), left=(2, 2), reasons=("transposed", "transposed"))
def adapter_of_a_transposed_matrix(x: Any, w: Any, a: Any, b: Any, d: Any) -> Any:
    return F.linear(x, w) + (b @ (d * (a @ x.mT))).mT


@form((24, 64), "frozen 24x64", "frozen 128x64", "frozen 8x64", "frozen 128x8", left=(2, 2), silent="lora")
def products_of_another_transposed_matrix(x: Any, y: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + (b @ (a @ y.mT)).mT
