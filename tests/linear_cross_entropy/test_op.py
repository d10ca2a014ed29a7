"""The operations themselves: arguments that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inductor_fusions.fusions.linear_cross_entropy.op import LINEAR_CROSS_ENTROPY, SOFTMAX_ROWS

FITS: dict[str, torch.Tensor | None] = {
    "h": torch.ones(5, 8), "w": torch.ones(6, 8), "bias": torch.ones(6), "labels": torch.arange(5),
}  # fmt: skip
#: What does not fit, and what is said of it.
WRONG: list[tuple[dict[str, torch.Tensor], str]] = [
    ({"h": torch.ones(1, 5, 8)}, "needs h"),
    ({"w": torch.ones(8)}, "needs h"),
    ({"labels": torch.zeros(5, 1, dtype=torch.int64)}, "needs h"),
    ({"h": torch.ones(5, 8).double()}, "one floating dtype"),
    ({"h": torch.ones(5, 8).int(), "w": torch.ones(6, 8).int()}, "one floating dtype"),
    ({"labels": torch.arange(5).int()}, "labels int64"),
    ({"bias": torch.ones(6).double()}, "bias of a loss head"),
    ({"bias": torch.ones(6, 1)}, "bias of a loss head"),
    ({"labels": torch.arange(4)}, "numbers of rows"),
    ({"w": torch.ones(6, 7)}, "numbers of columns"),
]


def loss(**given: Any) -> Any:
    return LINEAR_CROSS_ENTROPY(*given.values(), None, None, 1.0, 0.0, -100, 0.0, True, [False, False, False])


def rows(**given: Any) -> Any:
    return SOFTMAX_ROWS(*given.values(), None, 1.0, 0.0, False, True, False)


@pytest.mark.parametrize("call", [loss, rows])
@pytest.mark.parametrize("wrong, said", WRONG)
def test_arguments_that_do_not_fit(call: Any, wrong: dict[str, torch.Tensor], said: str) -> None:
    call(**FITS)
    with pytest.raises((ValueError, RuntimeError), match=said):
        call(**FITS | wrong)
