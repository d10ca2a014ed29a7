"""torch.use_deterministic_algorithms(True): a kernel that is not deterministic is not used, the others are.

Decisions are made as on a GPU. What runs there is written without one, and must hold no atomic addition: the
only thing in Triton code whose result depends on the order in which blocks run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import inductor_fusions
from devtools import cuda_codegen
from inductor_fusions import config, reporting, testing
from tests.attention.support import flex_everywhere, qkv, rand
from tests.cases.fusions import CASES
from tests.support import on_a_gpu as support

PACKAGE = Path(inductor_fusions.__file__).parent
ATOMIC = re.compile(r"\batomic_\w+\(")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def on_a_gpu(kernel: str = "auto") -> Iterator[list[reporting.Site]]:
    """Every fusion decides as on a GPU; gives what is reported."""
    decided = config.patch(policy="always", strict=True)
    with support.on_a_gpu(), flex_everywhere(kernel), decided, reporting.isolated() as sites:
        yield sites


def fused(sites: list[reporting.Site]) -> set[str]:
    return {site.fusion for site in sites if site.verdict == "fused"}


def adds_atomically(code: cuda_codegen.Generated) -> bool:
    return any(ATOMIC.search(kernel.source) for kernel in code.kernels)


@pytest.mark.parametrize("name", ["shared", "gated", "epilogue", "in_float32"])
def test_linears(name: str) -> None:
    """Grouped GEMMs and skinny GEMMs are used: each output is summed by one block of threads."""
    case = CASES[name]
    values = case.inputs()
    with on_a_gpu() as sites:
        code = cuda_codegen.generate(case.function, values, train=any(x.requires_grad for x in values))
    assert case.fusion in fused(sites)
    assert any(kernel.is_template for kernel in code.kernels)
    assert not adds_atomically(code)


def test_no_kernel_of_ours_adds_atomically() -> None:
    """One that did would have to ask whether it may."""
    sources = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".jinja")]
    assert any("template" in path.name for path in sources)
    found = [path.name for path in sources if ATOMIC.search(path.read_text())]
    assert not found


def softcap(q: Any, k: Any, v: Any, bias: Any) -> Any:
    scores = torch.tanh((q @ k.mT * 0.1 + bias) / 5.0) * 5.0
    return torch.softmax(scores, -1) @ v


def flex_inputs(bias: bool) -> list[torch.Tensor]:
    """q, k, v, and a bias that takes a gradient, or none."""
    return [*qkv(64, 64, batch=1, heads=2, dim=16), rand(2, 64, 64, grad=bias)]


def test_flex_attention() -> None:
    """Its gradients of q, k and v are deterministic."""
    with on_a_gpu() as sites:
        code = cuda_codegen.generate(softcap, flex_inputs(bias=False), train=True, run=False)
    assert fused(sites) == {"attention"}
    templates = [kernel for kernel in code.kernels if kernel.is_template]
    assert len(code.modules) == 2 and len(templates) >= 2
    assert not adds_atomically(code)


def test_flex_attention_with_a_gradient_of_its_bias() -> None:
    """That one is added up atomically, in no order."""
    torch.use_deterministic_algorithms(False)
    with on_a_gpu() as sites:
        code = cuda_codegen.generate(softcap, flex_inputs(bias=True), train=True, run=False)
    assert fused(sites) == {"attention"}
    assert adds_atomically(code)

    torch.use_deterministic_algorithms(True)
    with on_a_gpu("flex") as sites:
        code = cuda_codegen.generate(softcap, flex_inputs(bias=True), train=True, run=False)
    assert "attention" not in fused(sites)
    assert any("not deterministic" in site.reason for site in sites)
    assert not adds_atomically(code)
    with on_a_gpu(), torch.no_grad():  # there is no gradient to add up
        inputs = flex_inputs(bias=True)
        run = testing.capture(softcap, *inputs, backend=testing.EAGER_AFTER_PASSES)
    assert [site.kernel.split(",")[0] for site in run.fused] == ["flex"]


def test_a_bias_without_flex_attention() -> None:
    """A bias that takes a gradient, and no function of the scores: another kernel takes it."""

    def biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return torch.softmax(q @ k.mT * 0.1 + bias, -1) @ v

    with on_a_gpu("flex"):
        run = testing.capture(biased, *flex_inputs(bias=True), train=True, backend=testing.EAGER_AFTER_PASSES)
    assert all(not site.kernel.startswith("flex") for site in run.sites)
