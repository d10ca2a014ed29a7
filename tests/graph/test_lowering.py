"""Where the kernel of an operation cannot be had, Inductor's own operations take its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from devtools import cuda_codegen
from inductor_fusions import config, ops
from inductor_fusions._inductor import templates
from inductor_fusions.block_mm.op import BLOCK_MM
from inductor_fusions.fusions.lora.accumulate import LORA_ACCUMULATE
from inductor_fusions.fusions.lora.op import LORA_LINEAR, NARROW_MM


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def with_adapter(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0


def added_to_what_is_in_memory(x: Any, w: Any, a: Any, b: Any) -> Any:
    kept = [torch.ones(96, 128, dtype=torch.bool, device=x.device)]
    h = F.linear(x, a)
    return LORA_ACCUMULATE(F.linear(x, w), [h, h], [b.t(), b.t()], [1.0, 2.0], kept, [1], x.dtype)


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "narrow_mm": (with_adapter, (rand(96, 64), rand(128, 64), rand(16, 64), rand(128, 16))),
    "lora_split": (
        lambda x, w, a, b: (F.linear(x, w) + F.linear(F.linear(x.float(), a), b) * 2.0).bfloat16(),
        (rand(96, 64), rand(128, 64), torch.randn(16, 64), torch.randn(128, 16)),
    ),
    "lora_linear": (with_adapter, (rand(4, 64), rand(128, 64), rand(16, 64), rand(128, 16))),
    "lora_accumulate": (
        added_to_what_is_in_memory,
        (rand(96, 64), rand(128, 64), rand(16, 64), rand(128, 16)),
    ),
    "short_attention": (
        lambda q, k, v, bias: ops.short_attention(q, k, v, [bias]),
        (rand(2, 4, 49, 32), rand(2, 4, 49, 32), rand(2, 4, 49, 32), rand(1, 4, 49, 49)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_template_that_raises(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torch whose templates take other arguments: compiled all the same, with a warning; or raised."""

    def broken(**_: Any) -> None:
        raise TypeError("generate() takes no such argument")

    for function in ("lower_to_template", "lower_to_kernel"):
        monkeypatch.setattr(f"inductor_fusions._inductor.{function}", broken)
    fn, args = CASES[name]
    with (
        torch.no_grad(),
        caplog.at_level("WARNING", logger="inductor_fusions"),
        config.patch(policy="always", strict=False),
    ):
        module = cuda_codegen.generate(fn, args).forward
    assert not any(kernel.is_template for kernel in module.kernels)
    assert f"kernel of {name} raised TypeError" in caplog.text
    strict = config.patch(policy="always", strict=True)
    with torch.no_grad(), strict, pytest.raises(Exception, match="no such argument"):
        cuda_codegen.generate(fn, args)


def test_package_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called in Python where there is no kernel is not in a package: the compile raises instead."""

    def missing(**_: Any) -> None:
        raise templates.NoKernel("none fits")

    for function in ("lower_to_template", "lower_to_kernel"):
        monkeypatch.setattr(f"inductor_fusions._inductor.{function}", missing)
    fn, args = CASES["lora_split"]
    monkeypatch.setattr("inductor_fusions._inductor.makes_a_package", lambda: True)
    raised = pytest.raises(Exception, match="lora_split has no kernel, and a package")
    with torch.no_grad(), config.patch(policy="always", strict=True), raised:
        cuda_codegen.generate(fn, args, run=False)


def rendered(
    monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any], args: tuple[torch.Tensor, ...], **options: Any
) -> tuple[list[str], int]:
    """The sources of templates in the code, and how often templates are rendered for it."""
    from torch._inductor.select_algorithm import TritonTemplate, TritonTemplateKernel

    for owner, held in ((templates, "_templates"), (TritonTemplate, "all_templates")):
        monkeypatch.setattr(owner, held, {})
    render = mock.Mock(wraps=TritonTemplateKernel.render)
    with monkeypatch.context() as patch:
        patch.setattr(TritonTemplateKernel, "render", lambda *given, **more: render(*given, **more))
        with torch.no_grad(), config.patch(policy="always", strict=True):
            kernels = cuda_codegen.generate(fn, args, run=False, config=options).forward.kernels
    return [each.source for each in kernels if each.is_template], render.call_count


@pytest.mark.parametrize("name", CASES)
def test_calls_alike_are_rendered_once_for_autotuning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once where each is written. The code is that of torch without its cache of rendered templates."""
    fn, args = CASES[name]

    def layers(*given: Any) -> Any:
        return [fn(given[0] + i, *given[1:]) for i in range(3)]

    sources, count = rendered(monkeypatch, layers, args)
    before, twice = rendered(monkeypatch, layers, args, enable_caching_generated_triton_templates=False)
    calls = twice // 2
    assert before == sources and twice == 2 * calls
    assert 0 < count - calls <= len(sources) < calls


def narrow_mm(x: Any, w: Any, a: Any, b: Any) -> Any:
    return NARROW_MM(x, [16 * a], [0.001], [0.0], False, [])[0]


def block_mm(x: Any, w: Any, a: Any, b: Any) -> Any:
    sizes = [0, 0], [1.0, 0.001]
    return BLOCK_MM([x, x[:, :16]], [w, b], [], [], *sizes, "", False, x.dtype, "")[0]


def lora_linear(x: Any, w: Any, a: Any, b: Any) -> Any:
    return LORA_LINEAR(x, [w], [], [], [a], [b / 4], [0], [0.001], False, x.dtype)[0]


def lora_accumulate(x: Any, w: Any, a: Any, b: Any) -> Any:
    return LORA_ACCUMULATE(0 * (x @ w), [x], [16 * a[:, :1].expand(-1, 32)], [0.001], [], [], x.dtype)


@pytest.mark.parametrize(
    "fn", [narrow_mm, block_mm, lora_linear, lora_accumulate], ids=lambda fn: fn.__name__
)
@pytest.mark.parametrize("compiled", [False, True])
def test_factors_of_float16(fn: Callable[..., Any], compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A product is in the range of float16 with its factor, and not without; here without the kernels.

    That a device has no kernel is no news.
    """
    shapes = {(8, 64): 16.0, (64, 32): 0.25, (64, 16): 16.0, (16, 32): 512.0}
    args = [torch.full(shape, fill, dtype=torch.float16) for shape, fill in shapes.items()]
    with caplog.at_level("WARNING", logger="inductor_fusions"):
        found = (torch.compile(fn) if compiled else fn)(*args)
    assert not caplog.records
    torch.testing.assert_close(found.double(), fn(*(t.double() for t in args)), rtol=2e-3, atol=0.0)
