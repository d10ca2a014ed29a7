"""The kernels that flex attention becomes on a GPU: they are written and compiled without one."""

from __future__ import annotations

import pytest
import torch

from devtools import cuda_codegen
from tests.attention.support import cases, flex_everywhere

pytest.importorskip("triton")

B, H, S, D = 1, 2, 256, 128
LOWEST = torch.finfo(torch.float16).min


def indices() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(S)[:, None], torch.arange(S)[None, :]


def documents(q, k, v, data):
    i, j = indices()
    seen = (j <= i) & (data[:, None, :, None] == data[:, None, None, :])
    return torch.softmax((q @ k.mT * 0.1).masked_fill(~seen, LOWEST), -1) @ v


def softcap(q, k, v, data):
    i, j = indices()
    scores = torch.tanh(q @ k.mT * 0.002) * 50.0
    return torch.softmax(scores.masked_fill((j > i) | (j <= i - 100), LOWEST), -1) @ v


def sink(q, k, v, data):
    i, j = indices()
    scores = (q @ k.mT * 0.1).masked_fill((j > i) | (j <= i - 100), LOWEST)
    column = data[:, :H].half().view(B, H, 1, 1).expand(-1, -1, S, -1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v


CASES = {"documents": documents, "softcap and window": softcap, "sink and window": sink}


@cases(CASES)
def test_forward(case) -> None:
    """One template, tensor cores, no spill; the block mask costs a few small kernels and no extern call."""
    q, k, v = (torch.randn(B, S, H, D).transpose(1, 2) for _ in range(3))
    data = torch.randint(0, 3, (B, S)).sort(-1).values
    with flex_everywhere("flex"), torch.no_grad():
        code = cuda_codegen.generate(case, (q.half(), k.half(), v.half(), data), run=False)
    assert code.forward.extern_calls == []
    (template,) = [kernel for kernel in code.forward.kernels if kernel.is_template]
    assert "flex_attention" in template.name
    for arch in (80, 90):
        (found,) = cuda_codegen.compile_kernel(template.source, arch)
        assert found.fits
        assert found.uses_wgmma if arch == 90 else found.uses_mma
