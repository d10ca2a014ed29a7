"""Scores that are clamped from below after a mask was added, in fully masked rows."""

from __future__ import annotations

import pytest
import torch

from tests.attention.support import INF, LOWEST, TRAIN, check, qkv, scored


@TRAIN
def test_clamp_that_makes_scores_equal(train: bool) -> None:
    """A row whose scores are all raised to one number, which would not absorb them."""
    hidden = torch.where(torch.rand(2, 1, 7, 1) > 0.5, -1e9, 0.0)
    fn = scored(lambda s, m: torch.max(s + m, torch.tensor(-3e4)))
    check(fn, [*qkv(grad=train), hidden], fused=None, train=train)


def test_clamp_in_half_precision() -> None:
    """As OPT has it: what a mask hides by -inf becomes the least number."""
    hidden = torch.where(torch.rand(2, 1, 7, 1) > 0.5, -INF, 0.0)
    hidden[:, :, 0] = -INF
    fn = scored(lambda s, m: torch.max(s + m, torch.tensor(torch.finfo(torch.float16).min, dtype=s.dtype)))
    check(fn, [*qkv(grad=False), hidden], dtype=torch.float16, train=False)


@pytest.mark.parametrize("floor", [LOWEST, -1e20], ids=["below the mask", "above the mask"])
def test_gradients_beside_a_clamp(floor: float) -> None:
    """Only scores that the clamp replaces send no gradient into q and k."""
    hidden = torch.where(torch.rand(2, 1, 7, 13) > 0.5, -1e15, 0.0)
    hidden[:, :, 0] = -1e15
    hidden[:, :, 1] = -1e30
    check(scored(lambda s, m: (s + m).clamp(min=floor)), [*qkv(), hidden])
