"""Parts of the logits, or of what is computed of them, that are constants for autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions import testing
from tests.linear_cross_entropy.forms import H, V, entropy

ROWS = 12


def picked(logits: Any, labels: Any) -> Any:
    return logits.log_softmax(-1).gather(-1, labels[:, None])


def operands(trained: str = "h w bias") -> tuple[torch.Tensor, ...]:
    shapes = {"h": (ROWS, H), "w": (V, H), "bias": (V,)}
    made = (torch.randn(shape, requires_grad=name in trained.split()) for name, shape in shapes.items())
    return (*made, torch.randint(V, (ROWS,)))


def loss_of(h: Any, w: Any, bias: Any, labels: Any) -> Any:
    return F.cross_entropy(F.linear(h, w).detach() + bias, labels)


def entropy_of(h: Any, w: Any, bias: Any, labels: Any) -> Any:
    return entropy(F.linear(h, w).detach() + bias)


def entropy_beside(h: Any, w: Any, bias: Any, labels: Any) -> Any:
    product = F.linear(h, w)
    return picked(product + bias, labels), entropy(product.detach() + bias)


@pytest.mark.parametrize("fn", [loss_of, entropy_of, entropy_beside])
def test_a_trained_bias_behind_detached_logits(fn: Callable[..., Any]) -> None:
    """The operation would give h and w gradients."""
    found = testing.check(fn, operands(), backend=testing.EAGER_AFTER_PASSES, fused=0)
    assert "loss" in {site.code for site in found.sites if site.fusion == "linear_cross_entropy"}


def smoothed_beside_entropy(h: Any, w: Any, bias: Any, labels: Any) -> Any:
    logits = F.linear(h, w, bias)
    return F.cross_entropy(logits, labels, label_smoothing=0.1), entropy(logits.detach())


def parts(h: Any, w: Any, bias: Any, labels: Any) -> Any:
    first, second = F.linear(h, w, bias).split(ROWS // 2)
    return entropy(first), entropy(second.detach())


@pytest.mark.parametrize("trained", ["h w bias", "h", "bias"])
@pytest.mark.parametrize("fn", [smoothed_beside_entropy, parts])
def test_a_constant_beside_what_is_differentiated(fn: Callable[..., Any], trained: str) -> None:
    """Its own gradient stays out, also where operands are copied for the backward."""
    testing.check(fn, operands(trained), backend=testing.EAGER_AFTER_PASSES, fused=1, slack=4.0)
