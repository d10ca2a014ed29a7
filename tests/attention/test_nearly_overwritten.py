"""Masks that are read nearly as those that are overwritten to become causal: none of them is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention.support import LOWEST, capture, check, qkv
from tests.attention.triangles import LENGTH, attend, triangle


def part_assigned() -> torch.Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    mask[:, 1:] = triangle()[:, 1:]
    mask[3:] = 0.0
    return mask


def assigned_in_a_box() -> torch.Tensor:
    """One number of a triangle is another one, and a row at the end."""
    mask = triangle()
    mask[0, 1:2] = 0.0
    mask[-1] = 0.5
    return mask


def assigned_by_a_mask_of_rows() -> torch.Tensor:
    mask = triangle()
    mask[torch.arange(LENGTH) < 2] = 0.0
    return mask


def every_other() -> torch.Tensor:
    mask = triangle()
    mask[::2] = torch.zeros(5, LENGTH)
    return mask


def overwritten_later() -> torch.Tensor:
    mask = triangle()
    seen = mask == 0
    mask[:] = 0.0
    mask[0, 1] = LOWEST
    return torch.zeros(LENGTH, LENGTH).masked_fill(~(seen | (mask == 0)), LOWEST)


def through_a_view() -> torch.Tensor:
    mask = triangle()
    row = mask[4]
    row.fill_(0.0)
    return mask


def view_is_read_later() -> torch.Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    view = mask.view(-1)
    mask += triangle()
    view.mul_(0.0)
    return mask


def read_before_and_after() -> torch.Tensor:
    mask = triangle()
    old = mask + 0.0
    mask.mul_(0.0)
    return torch.where(old == 0, mask, mask)


def alias_of_a_binary_mask() -> torch.Tensor:
    seen = torch.arange(LENGTH) <= torch.arange(LENGTH)[:, None]
    other = seen.mT
    other |= torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return torch.zeros(LENGTH, LENGTH).masked_fill(~seen, LOWEST)


def true_and_true() -> torch.Tensor:
    """Booleans: True + True is True, not 2."""
    both = torch.ones(LENGTH, LENGTH, dtype=torch.bool) + torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return torch.zeros(LENGTH, LENGTH).masked_fill(both.float() != 2, -1e5)


def rounded() -> torch.Tensor:
    """In float32, 2 ** 25 + 1 is 2 ** 25."""
    far = torch.full((LENGTH, LENGTH), 2.0**25) + torch.arange(LENGTH).clamp(max=1)
    near = torch.arange(LENGTH)[:, None] * 0 + 2.0**25 + torch.arange(LENGTH) * 0.0
    return torch.zeros(LENGTH, LENGTH).masked_fill(far > near, LOWEST)


def filled_after_all() -> torch.Tensor:
    mask = torch.full((LENGTH, LENGTH), LOWEST).triu_(1)
    mask.fill_(0.25)
    return mask


def zeroed() -> torch.Tensor:
    mask = torch.full((LENGTH, LENGTH), LOWEST).triu_(1)
    return mask.zero_()


def filled_diagonal() -> torch.Tensor:
    mask = torch.full((LENGTH, LENGTH), LOWEST).triu_(1)
    mask[1:].fill_diagonal_(LOWEST)
    return mask


def row_of_a_triangle() -> torch.Tensor:
    """The first row is written through a view."""
    mask = torch.full((LENGTH, LENGTH), LOWEST).triu_(1)
    mask[:1].triu_(2)
    return mask


def twice_inverted() -> torch.Tensor:
    hidden = torch.full((LENGTH, LENGTH), 7.0).triu_(1).logical_not_().logical_not_()
    return hidden * 0.5


def below(row: torch.Tensor) -> torch.Tensor:
    """The first query sees every key, and the others those of a row."""
    seen = row | (torch.arange(LENGTH)[:, None] < 1)
    return torch.zeros(LENGTH, LENGTH).masked_fill(~seen, LOWEST)


def past_the_only_row() -> torch.Tensor:
    """Nothing is written: a dim of size 1 has no second index."""
    row = torch.arange(LENGTH)[None] < 2
    row[1:] = True
    return below(row.expand(LENGTH, LENGTH))


def past_the_only_key() -> torch.Tensor:
    column = torch.arange(LENGTH)[:, None] >= 0
    column[:, 1:] = False
    return below(column.expand(LENGTH, LENGTH) & (torch.arange(LENGTH) < 3))


def rows_of_one_memory() -> torch.Tensor:
    """What is written into one row of an expanded tensor is in all of them."""
    rows = torch.ones(1, LENGTH, dtype=torch.bool).expand(LENGTH, LENGTH)
    rows[0, 3:] = False
    return below(rows)


def diagonal_of_one_memory() -> torch.Tensor:
    row, column = torch.meshgrid(torch.arange(LENGTH), torch.arange(LENGTH), indexing="ij")
    row.fill_diagonal_(1)
    return torch.zeros(LENGTH, LENGTH).masked_fill(row < column, LOWEST)


def beyond_the_dtype() -> torch.Tensor:
    """Twice the lowest number is minus infinity."""
    lowest = torch.finfo(torch.float32).min
    twice = torch.where(torch.arange(LENGTH)[:, None] >= torch.arange(LENGTH), 0.0, lowest) * 2
    return torch.zeros(LENGTH, LENGTH).masked_fill(twice == -torch.inf, LOWEST)


def zero_times_a_low_number() -> torch.Tensor:
    """The number is that of float32 beside half precision: the product is 0, not NaN."""
    zeros = torch.zeros(LENGTH, dtype=torch.float16) * torch.finfo(torch.float32).min
    return triangle().masked_fill((zeros == 0)[:, None] & (torch.arange(LENGTH) < 2), 0.0)


def places_from_two() -> torch.Tensor:
    places = torch.arange(2, end=LENGTH + 2)
    return torch.zeros(LENGTH, LENGTH).masked_fill(places[:, None] < torch.arange(LENGTH), LOWEST)


def running_sum_of_a_number() -> torch.Tensor:
    return triangle() * torch.tensor(1.0).cumsum(0).transpose(0, 0)


MISSES = [
    past_the_only_row, past_the_only_key, rows_of_one_memory, diagonal_of_one_memory, beyond_the_dtype,
    zero_times_a_low_number, places_from_two, running_sum_of_a_number,
    filled_after_all, zeroed, filled_diagonal, row_of_a_triangle, twice_inverted,
    part_assigned, assigned_in_a_box, assigned_by_a_mask_of_rows, every_other, overwritten_later,
    through_a_view, view_is_read_later, read_before_and_after,
    alias_of_a_binary_mask, true_and_true, rounded,
]  # fmt: skip


@pytest.mark.parametrize("make", MISSES, ids=lambda make: make.__name__)
def test_near_miss(make: Any) -> None:
    """Nothing but what evaluating the mask gives; and the result is right."""
    inputs = qkv(LENGTH, LENGTH)
    seen = check(attend(make), inputs, fused=None)
    mask = make()
    for site in seen.ours.fused:
        if "is_causal" in site.kernel:
            assert torch.equal(mask, triangle())
    calls = capture(attend(make), *inputs)
    for call in calls.calls("scaled_dot_product_attention"):
        if call.kwargs.get("attn_mask") is None and not call.kwargs.get("is_causal"):
            assert bool((mask == mask[..., :1]).all())
