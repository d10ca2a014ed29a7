"""`torch._inductor.config.cpp_wrapper`: C++ in place of Python calls the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config as inductor_config

from inductor_fusions import config, ops, reporting


def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Rows of the mask may be fully masked, and the result leaves the graph."""
    return ((q @ k.mT) * 0.25 + mask).softmax(-1) @ v


def loss(x: Any, w: Any, y: Any) -> Any:
    return F.cross_entropy(F.linear(x, w).float(), y)


def diagonal(x: Any, y: Any) -> Any:
    return (x @ y.mT).diagonal(dim1=-2, dim2=-1).sum()


def gated(x: Any, w: Any, v: Any) -> Any:
    """An operation of the package without a kernel for the device."""
    return ops.block_mm([x, x], [w, v], activations=["silu", ""], gated=True)[0].sin()


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[str]]] = {
    "attention": (attention, ((2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16), (2, 1, 9, 9)), ["attention"]),
    "loss": (loss, ((24, 32), (96, 32), lambda: torch.arange(24)), ["linear_cross_entropy"]),
    "diagonal": (diagonal, ((3, 8, 5), (3, 8, 5)), ["product_diagonal"]),
    "operation": (gated, ((8, 16), (16, 24), (16, 24)), []),
}


@pytest.mark.parametrize("name", CASES)
def test_training(name: str) -> None:
    fn, shapes, fusions = CASES[name]
    torch.manual_seed(0)
    args = [made() if callable(made) else torch.randn(made).requires_grad_() for made in shapes]
    leaves = [each for each in args if each.requires_grad]
    with (
        config.patch(policy="always", strict=True),
        reporting.isolated() as sites,
        inductor_config.patch(cpp_wrapper=True, force_disable_caches=True),
    ):
        found = torch.compile(fn, fullgraph=True)(*args)
        ours = torch.autograd.grad(found.square().sum(), leaves)
    assert [site.fusion for site in sites if site.verdict == "fused"] == fusions
    wanted = fn(*args)
    torch.testing.assert_close(found, wanted)
    for mine, eager in zip(ours, torch.autograd.grad(wanted.square().sum(), leaves), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)
