"""Gates whose halves are parts of one linear, one of which is overwritten in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .linear_form import forms

X = (2, 48, 64)


def _of_halves(function: Any) -> Any:
    def gate(x: Any, w: Any, v: Any) -> Any:
        y = x @ torch.cat((w, v), dim=1)
        return function(y[..., :128], y[..., 128:], y)

    return gate


forms(X, "frozen 64x128", "frozen 64x128", of=_of_halves, left=(0, 1), reasons=("", "used-elsewhere"))(
    silu_in_place=lambda a, b, y: F.silu(a, inplace=True) * b,
    halves_taken_again=lambda a, b, y: (F.silu(a, inplace=True), y[..., :128] * y[..., 128:])[1],
)
forms(X, "frozen 64x128", "frozen 64x128", of=_of_halves, left=(1, 1), reasons=("silu; add",) * 2)(
    one_added_in_place=lambda a, b, y: (b.add_(1), F.silu(a) * b)[1],
)
forms(X, "frozen 64x128", "frozen 64x128", of=_of_halves, left=(1, 1), reasons=("silu; mul",) * 2)(
    half_times_a_number_in_place=lambda a, b, y: (y[..., 128:].mul_(2), F.silu(a) * b)[1],
)
forms(X, "frozen 64x128", "frozen 64x128", of=_of_halves, left=(1, 1), reasons=("other tensors",) * 2)(
    # Columns of both halves.
    columns_of_both_in_place=lambda a, b, y: (y[..., 64:192].mul_(2), F.silu(a) * b)[1],
    # Some of the columns of a half.
    columns_of_a_half_in_place=lambda a, b, y: (y[..., :64].mul_(2), F.silu(a) * b)[1],
    rows_in_place=lambda a, b, y: (y[:, :8].mul_(2), F.silu(a) * b)[1],
)
