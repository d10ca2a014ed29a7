"""Masks that are made by overwriting them, as transformers 4.57 does for OPT, and near misses of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.attention.support import LOWEST, capture, check, qkv

LENGTH = 9


def triangle(length: int = LENGTH) -> torch.Tensor:
    mask = torch.full((length, length), LOWEST)
    mask = torch.triu(mask, diagonal=1)
    mask *= torch.arange(length) > torch.arange(length).reshape(-1, 1)
    return mask


def opt(padding: Any = None) -> torch.Tensor:
    """The mask of a decoder with a static cache; `padding` is 1 where a key is seen."""
    mask = triangle()[None, None].expand(2, 1, -1, -1).clone()
    padding = torch.ones(2, LENGTH) if padding is None else padding
    hidden = (mask[:, :, :, :LENGTH] + padding[:, None, None, :]) == 0
    mask[:, :, :, :LENGTH] = mask[:, :, :, :LENGTH].masked_fill(hidden, LOWEST)
    return mask[:, :, :, :LENGTH]


def assigned_whole() -> torch.Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    mask[...] = triangle()
    return mask


def assigned_by_a_number() -> torch.Tensor:
    mask = torch.empty(LENGTH, LENGTH)
    mask[:] = LOWEST
    return torch.triu(mask, diagonal=1)


def boolean() -> torch.Tensor:
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    seen &= torch.arange(LENGTH) <= torch.arange(LENGTH)[:, None]
    return torch.zeros(LENGTH, LENGTH).masked_fill_(~seen, LOWEST)


def filled() -> torch.Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    mask.masked_fill_(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), LOWEST)
    return mask


def assigned_by_a_mask() -> torch.Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    mask[torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)] = LOWEST
    return mask


def triangle_in_place() -> torch.Tensor:
    """As DeepSeek-V3 has it."""
    return torch.full((LENGTH, LENGTH), -torch.inf).triu_(1)


def filled_with_a_number() -> torch.Tensor:
    """As CLIP, Whisper and fairseq have it."""
    mask = torch.empty(LENGTH, LENGTH)
    mask.fill_(LOWEST)
    mask.triu_(1)
    return mask


def negated() -> torch.Tensor:
    return torch.full((LENGTH, LENGTH), 1e9).triu_(1).neg_()


def inverted() -> torch.Tensor:
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu_(1)
    seen.logical_not_()
    return torch.zeros(LENGTH, LENGTH).masked_fill_(seen.bitwise_not_(), LOWEST)


def inverted_numbers() -> torch.Tensor:
    """Numbers other than 0 become 0, and 0 becomes 1."""
    return torch.full((LENGTH, LENGTH), 7.0).tril_().logical_not_().mul_(LOWEST)


def logarithm() -> torch.Tensor:
    return torch.ones(LENGTH, LENGTH).tril_().log_()


def other_triangle() -> torch.Tensor:
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu_(1)
    seen ^= torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return torch.zeros(LENGTH, LENGTH).masked_fill(~seen, LOWEST)


def attend(make: Any, late: bool = False) -> Any:
    """Attention with a mask.

    Args:
        late: whether it is made behind the scores.
    """

    def attention(q: Any, k: Any, v: Any, *given: Any) -> Any:
        mask = None if late else make(*given)
        scores = q @ k.mT * 0.3
        return torch.softmax(scores + (make(*given) if late else mask), -1) @ v

    return attention


CAUSAL = [
    triangle, opt, assigned_whole, assigned_by_a_number, assigned_by_a_mask, boolean, filled,
    triangle_in_place, filled_with_a_number, negated, inverted, inverted_numbers, logarithm, other_triangle,
]  # fmt: skip


@pytest.mark.parametrize("late", [False, True], ids=["first", "late"])
@pytest.mark.parametrize("make", CAUSAL, ids=lambda make: make.__name__)
def test_causal(make: Any, late: bool) -> None:
    check(attend(make, late), qkv(LENGTH, LENGTH), kernel="is_causal")


@pytest.mark.parametrize("make", [opt, filled], ids=lambda make: make.__name__)
def test_call_of_sdpa(make: Any) -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=make())

    check(attention, qkv(LENGTH, LENGTH), kernel="is_causal")


def test_padding_is_kept() -> None:
    padding = torch.ones(2, LENGTH)
    padding[0, 5:] = 0
    seen = check(attend(opt), (*qkv(LENGTH, LENGTH), padding))
    assert "is_causal" not in seen.ours.fused[0].kernel


def test_last_keys_that_are_assigned() -> None:
    """They are padding, of no sample."""

    def attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
        scores, mask = q @ k.mT * 0.3, torch.zeros(1, LENGTH)
        mask[..., -3:] = -torch.inf
        return torch.softmax(scores + mask + bias, -1) @ v

    seen = check(attention, (*qkv(LENGTH, LENGTH), torch.zeros(LENGTH, LENGTH)), kernel="bias")
    assert len(seen.sites) == 1


# Near misses: none of them is causal -----------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["bias", "triangle"])
def test_overwritten_between_two_layers(kind: str) -> None:
    """Layers share a mask only where they read the same."""

    def layers(q: Any, k: Any, v: Any, bias: Any) -> Any:
        mask = triangle() if kind == "triangle" else bias * 1.0
        first = torch.softmax(q @ k.mT * 0.3 + mask, -1) @ v
        mask[:] = mask.mT.clone()
        second = torch.softmax(q @ k.mT * 0.3 + mask, -1) @ v
        third = torch.softmax(q @ k.mT * 0.2 + mask, -1) @ v
        return first, second, third

    seen = check(layers, (*qkv(LENGTH, LENGTH), torch.randn(LENGTH, LENGTH) * 3), fused=3)
    causal = [site for site in seen.ours.fused if "is_causal" in site.kernel]
    assert len(causal) == (1 if kind == "triangle" else 0)


def test_a_condition_that_was_overwritten_is_another_one() -> None:
    def attention(q: Any, k: Any, v: Any, x: Any) -> Any:
        seen = x > 0
        old = torch.where(seen, 0.0, 1.0)
        seen[:] = True
        mask = torch.where(seen, old, 5.0) * -1e9
        return torch.softmax(q @ k.mT * 0.3 + mask, -1) @ v

    x = torch.randn(LENGTH, LENGTH)
    x[:, 0] = 1
    check(attention, (*qkv(LENGTH, LENGTH), x), fused=None)


def test_shared_where_nothing_is_overwritten_in_between() -> None:
    """A mask that was overwritten before the first layer is built once."""

    def layers(q: Any, k: Any, v: Any, bias: Any) -> Any:
        mask = bias.clone()
        mask *= 2.0
        for _ in range(3):
            q = torch.softmax(q @ k.mT * 0.3 + mask, -1) @ v
        return q

    inputs = (*qkv(LENGTH, LENGTH), torch.randn(LENGTH, LENGTH))
    seen = capture(layers, *inputs)
    masks = {call.kwargs["attn_mask"] for call in seen.calls("scaled_dot_product_attention")}
    assert len(seen.fused) == 3 and len(masks) == 1


@pytest.mark.parametrize("how", ["whole", "row", "view"])
def test_fully_masked_rows_because_a_mask_was_overwritten(how: str) -> None:
    """They keep their value and their gradients."""

    def attention(q: Any, k: Any, v: Any, low: Any) -> Any:
        mask = torch.zeros(LENGTH, LENGTH)
        if how == "whole":
            mask[:] = low[:, None] * -1e9
        elif how == "row":
            mask[4] = -1e9
        else:
            mask.view(-1)[36:45].fill_(-1e9)
        return torch.softmax(q @ k.mT * 0.3 + mask, -1) @ v

    low = torch.zeros(LENGTH)
    low[4] = 1
    check(attention, (*qkv(LENGTH, LENGTH), low), fused=None)
