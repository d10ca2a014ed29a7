"""The kernels that flex attention becomes on a GPU: they are written and compiled without one."""

from __future__ import annotations

import pytest
import torch

from devtools import cuda_codegen
from tests.attention.interpreted_flex import CASES
from tests.attention.support import flex_everywhere

pytest.importorskip("triton")

B, H, S, D = 1, 2, 256, 128


@pytest.mark.parametrize("name", ["documents", "softcap", "sink"])
def test_forward(name: str) -> None:
    """One template, tensor cores, no spill; the block mask costs a few small kernels and no extern call."""
    q, k, v = (torch.randn(B, S, H, D).transpose(1, 2).half() for _ in range(3))
    data, sinks = torch.randint(0, 3, (B, S)).sort(-1).values, torch.randn(H).half()
    with flex_everywhere("flex"), torch.no_grad():
        code = cuda_codegen.generate(CASES[name], (q, k, v, data, sinks), run=False)
    assert code.forward.extern_calls == []
    (template,) = [kernel for kernel in code.forward.kernels if kernel.is_template]
    assert "flex_attention" in template.name
    for arch in (80, 90):
        (found,) = cuda_codegen.compile_kernel(template.source, arch)
        assert found.fits
        assert found.uses_wgmma if arch == 90 else found.uses_mma
