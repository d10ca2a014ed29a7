"""Indices that many gathers read are computed once."""

from __future__ import annotations

import math

import torch

from devtools import cuda_codegen
from inductor_fusions import explain

S, BUCKETS = 40, 16


def buckets(relative: torch.Tensor) -> torch.Tensor:
    far = (BUCKETS // 2 * torch.log(relative.abs() + 1.0) / math.log(S)).ceil()
    return torch.where(relative.abs() < 4, relative, far * relative.sign()).to(torch.long)


def layers(x: torch.Tensor, count: int = 2) -> torch.Tensor:
    """Relative scores in several layers, as DeBERTa has them."""
    i = torch.arange(S, device=x.device)
    position = (buckets(i[:, None] - i[None, :]) + BUCKETS // 2).clamp(0, BUCKETS - 1)
    for _ in range(count):
        scores = torch.gather(x @ x.mT[..., :BUCKETS], -1, position.expand(x.shape[0], -1, -1))
        x = torch.softmax(scores, -1) @ x
    return x


def sites(fn, *args, **kwargs):
    return [site for site in explain(fn, *args, **kwargs).sites if site.fusion == "stored_indices"]


def test_one_kernel_computes_it() -> None:
    """On a GPU the logarithm is taken in one kernel, whatever the number of layers."""
    code = cuda_codegen.generate(layers, (torch.randn(8, S, 24), 4))
    assert sum("log" in kernel.source for kernel in code.forward.kernels) == 1


def test_one_operation_that_reads_it_twice() -> None:
    """Two indices of one operation are read in one loop."""

    def fn(x):
        i = torch.arange(S)
        position = (buckets(i[:, None] - i[None, :]) + BUCKETS // 2).clamp(0, BUCKETS - 1)
        return x[:, position, position]

    assert sites(fn, torch.randn(8, S, 24)) == []


def test_few_elements_are_left_to_stock() -> None:
    """An index as large as what it gathers is not worth the memory."""
    (site,) = sites(layers, torch.randn(1, S, 24))
    assert site.verdict == "left to stock" and "for each of its own" in site.reason


def test_cheap_indices_are_left_alone() -> None:
    """An index without costly operations is computed again faster than it is read."""

    def fn(x):
        i = torch.arange(S)
        position = (i[:, None] - i[None, :]).clamp(0, BUCKETS - 1).expand(x.shape[0], -1, -1)
        return torch.gather(x, -1, position) + torch.gather(x * 2, -1, position)

    assert sites(fn, torch.randn(8, S, 24)) == []
