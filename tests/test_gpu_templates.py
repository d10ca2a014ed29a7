"""What the tests of races run is the kernel that it is named after; looked at without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bench import cuda_codegen
from tests.gpu.templates import TEMPLATES


@pytest.mark.parametrize("name", [name for name, each in TEMPLATES.items() if each.kernels])
def test_template(name: str) -> None:
    template = TEMPLATES[name]
    with template.active():
        made = cuda_codegen.generate(
            template.function, template.inputs("cpu"), train=template.train, run=False
        )
    kernels = [kernel for kernel in made.kernels if kernel.is_template]
    for wanted in template.kernels:
        assert any(wanted in kernel.name for kernel in kernels), [kernel.name for kernel in kernels]
    assert len(kernels) >= len(template.kernels)
    for mark in template.marks:
        assert any(mark in kernel.source for kernel in kernels), mark
    assert len({module.is_backward for module in made.modules}) == 1 + template.train


def test_inputs_are_finite_and_differ() -> None:
    for template in TEMPLATES.values():
        first, again, other = (template.inputs("cpu", seed) for seed in (0, 0, 1))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
        assert not torch.equal(first[0], other[0]) and all(x.isfinite().all() for x in first)
