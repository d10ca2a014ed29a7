"""Where the kernel of an operation cannot be had, Inductor's own operations take its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench import cuda_codegen
from inductor_fusions import config, ops
from inductor_fusions.fusion import Rejected
from inductor_fusions.lowering import kernel_or


def test_kernel_or(caplog: pytest.LogCaptureFixture) -> None:
    """Rejected and None are no news; anything else is a warning, or raised in strict mode."""

    def raising(error: Exception) -> Callable[[], int]:
        def kernel() -> int:
            raise error

        return kernel

    with config.patch(strict=False), caplog.at_level("WARNING", logger="inductor_fusions"):
        assert kernel_or("this", lambda: 1, lambda: 2) == 1
        assert kernel_or("this", lambda: None, lambda: 2) == 2
        assert kernel_or("this", raising(Rejected("not for this")), lambda: 2) == 2
        assert not caplog.records
        assert kernel_or("this", raising(TypeError("another torch")), lambda: 2) == 2
    assert "the kernel of this raised TypeError('another torch')" in caplog.text
    with config.patch(strict=True), pytest.raises(TypeError, match="another torch"):
        kernel_or("this", raising(TypeError("another torch")), lambda: 2)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def with_adapter(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0


def with_wide_adapter(x: Any, w: Any, a: Any, b: Any) -> Any:
    return (F.linear(x, w) + F.linear(F.linear(x.float(), a), b) * 2.0).bfloat16()


def attention(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return ops.short_attention(q, k, v, [bias])


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "narrow_mm": (with_adapter, (rand(96, 64), rand(128, 64), rand(16, 64), rand(128, 16))),
    "lora_split": (
        with_wide_adapter,
        (rand(96, 64), rand(128, 64), torch.randn(16, 64), torch.randn(128, 16)),
    ),
    "lora_linear": (with_adapter, (rand(4, 64), rand(128, 64), rand(16, 64), rand(128, 16))),
    "short_attention": (
        attention,
        (rand(2, 4, 49, 32), rand(2, 4, 49, 32), rand(2, 4, 49, 32), rand(1, 4, 49, 49)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_template_that_raises(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A torch whose templates take other arguments: compiled all the same, with a warning."""

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
