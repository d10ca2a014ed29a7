"""Masks that are made by overwriting them, as transformers 4.57 does for OPT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.attention.support import LOWEST, capture, check, qkv
from tests.attention.triangles import LENGTH, attend, triangle


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
