"""Gates of one linear, whose parts a permutation moves: to the front, or behind the columns."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from .linear_form import forms

PACKED = ((2, 48, 64), "frozen 256x64")


def _gated(parts: Any) -> Any:
    """A gate of what a linear returns, whose two parts `parts` takes."""

    def gated(x: Any, w: Any) -> Any:
        gate, up = parts(F.linear(x, w))
        return F.silu(gate) * up

    return gated


forms(*PACKED, of=_gated, left=(0, 1), reasons=("", "used-elsewhere"))(
    parts_permuted_to_the_front=lambda h: h.view(2, 48, 2, 128).permute(2, 0, 1, 3),
    parts_permuted_by_dims_from_the_end=lambda h: h.view(2, 48, 2, 128).permute(-2, 0, 1, -1),
    columns_permuted_by_dims_from_the_end=lambda h: h.view(96, 128, 2).permute(-1, 0, 1),
    parts_moved_to_the_front=lambda h: h.view(2, 48, 2, 128).movedim(-2, 0),
    parts_in_front_of_rows=lambda h: h.view(96, 2, 128).transpose(0, 1),
    every_second_column_to_the_front=lambda h: h.view(96, 128, 2).permute(2, 0, 1),
    parts_behind_the_batch=lambda h: h.view(2, 48, 2, 128).permute(0, 2, 1, 3).unbind(1),
    parts_behind_the_columns=lambda h: h.view(2, 48, 2, 128).movedim(2, -1).unbind(-1),
)
forms(*PACKED, of=_gated, left=(1, 1), reasons=("parts of heads", "parts of heads"))(
    halves_of_heads_in_front=lambda h: h.view(2, 48, 4, 2, 32).permute(3, 0, 1, 2, 4),
    batches_in_front=lambda h: h.view(2, 48, 256).unbind(0),
    permuted_heads_in_front=lambda h: h.view(2, 48, 2, 4, 32).permute(2, 0, 3, 1, 4),
)
forms(*PACKED, of=_gated, left=(1, 1), reasons=("another order", "another order"))(
    parts_in_front_of_turned_rows=lambda h: h.view(2, 48, 2, 128).permute(2, 0, 3, 1),
)
