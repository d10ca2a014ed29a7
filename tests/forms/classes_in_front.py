"""Losses of logits (N, C, d1), whose classes are in front of other dims."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .linear_form import form
from .losses import HEAD


def labels_of_rows() -> Any:
    """As many as there are classes, for each sample."""
    return torch.arange(160).view(2, 80) % 80


_NOT_LAST: dict[str, Any] = {"left": (1, 1), "reasons": ("class dim is not the last",) * 2}


@form(*HEAD)
def transposed_in_front_of_a_cast(h: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(F.linear(h, w).transpose(1, 2).float(), y)


@form(*HEAD)
def transposed_in_front_of_a_cap(h: Any, w: Any, y: Any) -> Any:
    logits = F.linear(h, w)[:, 1:].permute(0, 2, 1).contiguous() + 5
    return F.cross_entropy(23 * torch.sigmoid(logits.float() * 0.5), y[:, 1:], reduction="none")


@form(*HEAD)
def a_transposed_log_softmax(h: Any, w: Any, y: Any) -> Any:
    return F.nll_loss(F.log_softmax(F.linear(h, w), 2).permute(0, 2, 1).contiguous(), y)


@form(*HEAD)
def transposed_in_front_of_a_log_softmax(h: Any, w: Any, y: Any) -> Any:
    return F.nll_loss(F.log_softmax(F.linear(h, w).mT / 0.7, 1), y, reduction="sum")


@form((2, 3, 5, 32), (80, 32), lambda: torch.arange(30).view(2, 3, 5))
def classes_in_front_of_two_dims(h: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(F.linear(h, w).movedim(-1, 1).float(), y)


@form((2, 3, 5, 32), (80, 32), lambda: torch.arange(30).view(2, 5, 3), **_NOT_LAST)
def rows_in_another_order(h: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(F.linear(h, w).transpose(1, 3).float(), y)


@form((2, 80, 32), (80, 32), labels_of_rows, **_NOT_LAST)
def as_many_rows_as_classes(h: Any, w: Any, y: Any) -> Any:
    """The classes are the rows of the linear."""
    return F.cross_entropy(F.linear(h, w).float(), y)


@form((2, 80, 32), (80, 32), labels_of_rows, (80,), **_NOT_LAST)
def number_of_each_row_behind_a_transpose(h: Any, w: Any, y: Any, c: Any) -> Any:
    """Not a bias, though there are as many rows as classes."""
    return F.cross_entropy(F.linear(h, w).mT + c, y)


@form((2, 80, 32), (80, 32), labels_of_rows, left=(1, 1), reasons=("over the class dim",) * 2)
def a_softmax_of_the_rows(h: Any, w: Any, y: Any) -> Any:
    return F.nll_loss(F.log_softmax(F.linear(h, w), 1).mT, y)


@form(*HEAD, **_NOT_LAST)
def sliced_behind_a_transpose(h: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(F.linear(h, w).mT[..., :-1], y[:, 1:])


_CONVOLUTION: dict[str, Any] = {"reasons": ("computed by a convolution",) * 2}


@form((2, 8, 4, 4), (80, 8, 1, 1), lambda: torch.arange(32).view(2, 4, 4), (80,), **_CONVOLUTION)
def classes_of_each_pixel(x: Any, w: Any, y: Any, c: Any) -> Any:
    """A segmentation."""
    return F.cross_entropy(F.conv2d(x, w, c), y)


@form((2, 8, 16), (80, 8, 1), lambda: torch.arange(32).view(2, 16), **_CONVOLUTION)
def classes_of_each_step(x: Any, w: Any, y: Any) -> Any:
    return F.nll_loss(F.log_softmax(F.conv1d(x, w), 1), y)


@form((24, 32), (80, 32), lambda: torch.arange(24), (80,))
def weight_times_hidden_states(h: Any, w: Any, y: Any, c: Any) -> Any:
    return F.cross_entropy((w @ h.t()).t() + c, y)


@form((32, 24), (80, 32), lambda: torch.arange(24), left=(1, 1), reasons=(".T is between", ".T is between"))
def hidden_states_that_are_columns(h: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy((w @ h).T, y)


@form((24, 32), (80, 32), lambda: torch.arange(24), left=(1, 1), reasons=("also read by amax",) * 2)
def a_product_that_is_read_as_well(h: Any, w: Any, y: Any) -> Any:
    logits = torch.mm(w, h.T)
    return F.cross_entropy(logits.mT, y) + logits.amax()
