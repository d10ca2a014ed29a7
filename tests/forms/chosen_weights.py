"""Some of the weights, or more than them, in front of the product with values."""

from __future__ import annotations

from typing import Any

import torch

from .form import QKV, forms, scored


def two() -> torch.Tensor:
    return torch.tensor([0, 2])


def all_keys() -> torch.Tensor:
    return torch.arange(9)


def of(choose: Any) -> Any:
    """Attention with what is made of the weights, and as many values."""

    def attention(q: Any, k: Any, v: Any, *more: Any) -> Any:
        chosen = choose(scored(q, k).softmax(-1), *more)
        return chosen @ torch.cat([v, v], -2)[..., : chosen.shape[-1], :]

    return attention


forms(*QKV, of=of, fused=0, reasons=("in-between",))(
    weights_selected_by_index=(lambda w, at: w.index_select(-1, at), two),
    weights_taken_along_a_dim=(lambda w, at: w.take_along_dim(at.expand(2, 4, 9, 2), -1), two),
    weights_gathered=(lambda w, at: w.gather(-1, at.expand(2, 4, 9, 2)), two),
    weights_taken_by_flat_index=(lambda w, at: w.take(at.expand(2, 4, 9, 2)), two),
    weights_narrowed_in_a_copy=lambda w: torch.narrow_copy(w, -1, 1, 4),
    weights_split_by_tensor_split=lambda w: w.tensor_split(2, -1)[0],
    weights_turned=lambda w: torch.rot90(w, 1, (-2, -1)),
    weights_on_the_diagonal=lambda w: w.diagonal(dim1=-2, dim2=-1)[..., None, :],
    weights_of_the_smallest=lambda w: w.amin(-1, keepdim=True),
    weights_in_frequencies=lambda w: torch.fft.rfft(w).real,
    weights_copied_by_index=(lambda w, at: w.new_zeros(2, 4, 9, 12).index_copy(-1, at, w), all_keys),
    weights_scattered_and_added=(
        lambda w, at: w.new_zeros(2, 4, 9, 12).scatter_add(-1, at.expand(2, 4, 9, 9), w), all_keys,
    ),
    weights_in_a_slice=lambda w: w.new_zeros(2, 4, 9, 12).slice_scatter(w, -1, 0, 9),
)  # fmt: skip
