"""Gates, vectors and noise behind adapters on inputs of symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.block_mm.support import check, rand


def of_tokens(x: Any, w: Any, a: Any, b: Any, g: Any, v: Any) -> Any:
    return F.linear(x, w) + F.linear(x, g).sigmoid() * F.linear(F.linear(x, a), b) * 2.0


def of_samples(x: Any, w: Any, a: Any, b: Any, g: Any, v: Any) -> Any:
    """It is broadcast over tokens, whose number becomes a node of the graph."""
    return F.linear(x, w) + F.linear(x.mean(1), g).sigmoid()[:, :, None] * F.linear(F.linear(x, a), b)


def of_columns(x: Any, w: Any, a: Any, b: Any, g: Any, v: Any) -> Any:
    """PVeRA with its vectors."""
    return F.linear(x, w) + v * F.linear((g[0, :8] + 1) * F.linear(x, a), b)


pytestmark = pytest.mark.usefixtures("any_device")


@pytest.mark.parametrize("fn", [of_tokens, of_samples, of_columns])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_symbolic_sizes(fn: Callable[..., Any], train: bool) -> None:
    torch.manual_seed(0)
    args = [rand(*shape) for shape in ((4, 48, 64), (128, 64), (8, 64), (128, 8), (1, 64), (128,))]
    for dim in range(2):
        torch._dynamo.mark_dynamic(args[0], dim)
    seen = check(fn, args, train=train, budget=2.0)
    assert seen.fused("lora") >= 1
    assert not [site for site in seen.sites if site.code in ("behind-adapter", "used-elsewhere")], seen.sites
