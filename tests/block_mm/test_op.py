"""The operation itself: meaning, fake kernel, gradient, FLOPs, and arguments that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch.utils.flop_counter import FlopCounterMode

from inductor_fusions import ops
from inductor_fusions.block_mm.op import BLOCK_MM
from tests.support.processes import start


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def arguments(kind: str) -> tuple[Any, ...]:
    """One call of each kind."""
    x, y, w, v = leaf(5, 8), leaf(5, 4), leaf(6, 8), leaf(4, 6)
    a, b, bias, bias_groups, groups, scales, activations = {
        "two groups": ([x, x], [w.t(), leaf(8, 3)], [leaf(6)], [0], [0, 1], [1.0, 2.0], ",silu"),
        "gated": ([x, x], [w.t(), leaf(8, 6)], [leaf(6)], [1], [0, 1], [1.0, 1.0], "gelu_tanh,"),
        "sum": ([x, y], [w.t(), v], [leaf(5, 6)], [0], [0, 0], [1.0, 0.5], "relu"),
        "rows differ": ([x, y.t()], [w.t(), leaf(5, 2)], [], [], [0, 1], [1.0, 1.0], ","),
    }.get(kind) or ([x], [w.t()], [], [], [0], [1.0], kind)
    return a, b, bias, bias_groups, groups, scales, activations, kind == "gated", torch.float64, ""


#: The last ones are one product with this activation.
KINDS = ["two groups", "gated", "sum", "rows differ", "sigmoid", "gelu", "gelu_quick", "relu_squared"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradient(kind: str) -> None:
    a, b, bias, *rest = arguments(kind)
    flat = [t.detach().clone().requires_grad_() for t in (*a, *b, *bias)]

    def call(*tensors: torch.Tensor) -> Any:
        n = len(a)
        return BLOCK_MM(list(tensors[:n]), list(tensors[n : 2 * n]), list(tensors[2 * n :]), *rest)

    assert torch.autograd.gradcheck(call, flat)


def test_meaning() -> None:
    x, y, w, v, u, c = leaf(5, 8), leaf(5, 4), leaf(8, 6), leaf(4, 6), leaf(8, 3), leaf(6)
    first, second = ops.block_mm(
        [x, y, x], [w, v, u], [c, None], groups=[0, 0, 1], scales=[1.0, 0.5, 2.0], activations=["relu", ""]
    )
    torch.testing.assert_close(first, torch.relu(x @ w + 0.5 * (y @ v) + c))
    torch.testing.assert_close(second, 2.0 * (x @ u))


def test_outputs_are_dense_and_separate() -> None:
    """Where one is kept for a backward, the others are not kept with it."""
    x = torch.randn(5, 8)
    outputs = ops.block_mm([x, x], [torch.randn(6, 8).t(), torch.randn(3, 8).t()])
    assert [t.stride() for t in outputs] == [(6, 1), (3, 1)]
    assert outputs[0].untyped_storage().data_ptr() != outputs[1].untyped_storage().data_ptr()


def test_dtype() -> None:
    x, w = torch.randn(5, 8), torch.randn(8, 6)
    (y,) = ops.block_mm([x], [w], dtype=torch.bfloat16)
    torch.testing.assert_close(y, (x @ w).bfloat16())


def test_a_bias_is_added_before_rounding() -> None:
    """As `addmm` does: rounding twice can cross a boundary that a later cast to float8 has."""
    x, w, c = torch.randn(64, 32).bfloat16(), torch.randn(32, 48).bfloat16(), torch.randn(48).bfloat16()
    (y,) = ops.block_mm([x], [w], [c])
    assert torch.equal(y, torch.addmm(c, x, w))
    assert not torch.equal(y, x @ w + c)


def test_flops() -> None:
    x = torch.randn(5, 8)
    with FlopCounterMode(display=False) as counter:
        ops.block_mm([x, x], [torch.randn(8, 6), torch.randn(8, 3)])
    assert counter.get_total_flops() == 2 * 5 * 8 * 9


def test_compiled_on_the_cpu() -> None:
    """Without a kernel for the device, it is computed product by product."""
    x, w, v, c = (torch.randn(s) for s in ((5, 8), (8, 6), (8, 6), (6,)))

    def fn(x: Any, w: Any, v: Any, c: Any) -> Any:
        return [
            *ops.block_mm([x, x], [w, v], [c, None], activations=["gelu_tanh", ""], gated=True),
            *ops.block_mm([x, x], [w, v], [None, c], groups=[0, 1], scales=[2.0, 1.0]),
            *ops.block_mm([x, x], [w, v], groups=[0, 0], activations=["gelu"]),
        ]

    for ours, eager in zip(torch.compile(fn)(x, w, v, c), fn(x, w, v, c), strict=True):
        torch.testing.assert_close(ours, eager)


def test_strides_of_a_view_without_a_kernel() -> None:
    """Of products in the kernel's place, whose rows Inductor may pad where nobody sees them."""

    def fn(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.block_mm([x, x], [w, v], activations=["silu", ""], gated=True)[0].view(2, 4, 1030)

    args = torch.randn(8, 64), torch.randn(64, 1030), torch.randn(64, 1030)
    with inductor_config.patch(disable_padding_cpu=False, force_disable_caches=True):
        found = torch.compile(fn)(*args)
    assert found.stride() == fn(*args).stride() == (4120, 1030, 1)
    torch.testing.assert_close(found, fn(*args))


@pytest.mark.parametrize("first", [
    "import inductor_fusions, torch._inductor.lowering",
    "import torch._inductor.lowering, inductor_fusions.ops",
    "from inductor_fusions import ops; import torch; torch.compile(torch.sin)(torch.ones(3))",
    "import inductor_fusions.ops, torch._inductor.graph",
])  # fmt: skip
def test_lowering_is_registered_whatever_is_imported_first(first: str) -> None:
    code = f"{first}\n" + (
        "import torch, sys\n"
        "from torch._inductor import lowering\n"
        "print(torch.ops.inductor_fusions.block_mm.default in lowering.lowerings)"
    )
    done = start("-c", code)
    assert done.stdout.split()[-1:] == ["True"], done.stderr


@pytest.mark.parametrize(("change", "says"), [
    ({"groups": [0, 2]}, "in ascending order"),
    ({"groups": [1, 0]}, "in ascending order"),
    ({"groups": [0]}, "for each: got"),
    ({"activations": ["softmax", ""]}, "no activation 'softmax'"),
    ({"activations": ["relu"]}, "one activation for each"),
    ({"bias": [None]}, "one bias"),
    ({"gated": True, "groups": [0, 0]}, "needs two groups"),
    ({"a": [], "b": []}, "at least one product"),
    ({"b": [torch.randn(8, 6), torch.randn(7, 6)]}, r"b\[1\] .* has 7 rows, not the 8 that a\[1\]"),
    ({"b": [torch.randn(8, 6), torch.randn(8)]}, r"b\[1\] .* must be a matrix, not 1-D"),
    ({"b": [torch.randn(8, 6), torch.randn(8, 6).double()]}, r"a\[1\] and b\[1\] .* one floating dtype"),
    ({"b": [torch.randn(8, 6)]}, "2 in a, 1 in b"),
    ({"bias": [torch.ones(()), None]}, r"bias\[0\] .* a vector or a matrix"),
    ({"bias": [None, torch.ones(7)]}, r"bias\[1\] .* has 7 columns, not the 6 that b\[1\]"),
    ({"b": [torch.randn(8, 6, device="meta")] * 2}, "on one device, not on cpu and meta"),
    # Nothing is broadcast: kernels would read past the end.
    ({"bias": [torch.ones(1), None]}, "columns"),
    ({"bias": [torch.ones(1, 6), None]}, "rows"),
    ({"bias": [None, torch.ones(5, 1)]}, "columns"),
    ({"a": [torch.ones(5, 8), torch.ones(1, 8)], "groups": [0, 0]}, "rows"),
    ({"b": [torch.ones(8, 6), torch.ones(8, 1)], "groups": [0, 0]}, "columns"),
    ({"b": [torch.ones(8, 6), torch.ones(8, 1)], "gated": True}, "columns"),
])  # fmt: skip
def test_arguments_that_do_not_fit(change: dict[str, Any], says: str) -> None:
    x, w = torch.randn(5, 8), torch.randn(8, 6)
    with pytest.raises(ValueError, match=says):
        ops.block_mm(**{"a": [x, x], "b": [w, w], **change})


@pytest.mark.parametrize(("change", "says"), [
    ({"a": torch.randn(5, 8)}, "a of block_mm must be a list of tensors, not a Tensor"),
    ({"b": torch.randn(8, 6)}, "b of block_mm must be a list of tensors, not a Tensor"),
    ({"bias": torch.randn(6)}, "bias of block_mm must be a list of tensors or None, not a Tensor"),
    ({"a": [torch.randn(5, 8), None]}, r"a of block_mm .* element 1 is a NoneType"),
    ({"activations": "relu"}, "activations of block_mm must be a list of strings, not 'relu'"),
])  # fmt: skip
def test_arguments_of_other_types(change: dict[str, Any], says: str) -> None:
    x, w = torch.randn(5, 8), torch.randn(8, 6)
    with pytest.raises(TypeError, match=says):
        ops.block_mm(**{"a": [x, x], "b": [w, w], **change})


def test_a_wide_result_without_a_kernel() -> None:
    """Compiled for a device without a kernel, its product is one of 16-bit operands, as in stock."""
    from torch._inductor.utils import run_and_get_code

    x, w = torch.randn(64, 32).bfloat16(), torch.randn(32, 48).bfloat16()

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (y,) = BLOCK_MM([x], [w], [], [], [0], [1.0], "", False, torch.bfloat16, "0")
        return y

    with torch._inductor.config.patch(force_disable_caches=True):
        found, (code,) = run_and_get_code(torch.compile(fn), x, w)
    assert found.dtype == torch.float32
    assert "extern_kernels.mm(arg0_1, arg1_1" in code, code
    torch.testing.assert_close(found, (x @ w).float(), rtol=1e-2, atol=1e-2)
