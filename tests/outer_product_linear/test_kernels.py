"""The kernels: numbers in Triton's interpreter, and machine code without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.outer_product_linear import launched
from tests.outer_product_linear.interpreted import CASES
from tests.support.hopper import Hopper
from tests.support.interpreter import errors_of

#: Within half an ulp or so; one for rounding the product of u and v as well.
#: float32 is multiplied as TF32, of which three operands are rounded.
LIMITS = {"float16": 6e-4, "float32": 6e-4}


errors = errors_of("tests.outer_product_linear.interpreted")
errors_in_a_graph = errors_of("tests.outer_product_linear.launched")


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, errors: Callable[[str], float]) -> None:
    assert errors(name) < LIMITS[name.split()[-1]]


#: Integers that are no multiple of 16.
ODD = ("per_part",)
MATRICES = ("u", "v", "w", "f")


@pytest.mark.parametrize(
    ("name", "dtype", "arch"),
    [(name, dtype, 90) for name in ("linear", "pack") for dtype in ("bf16", "fp32")]
    + [("linear", "bf16", 80)],
)
def test_machine_code(name: str, dtype: str, arch: int) -> None:
    """Tensor cores, no spill, and shared memory that the device has."""
    from devtools import cuda_codegen
    from inductor_fusions.fusions.outer_product_linear import kernels, launch

    fn, size = getattr(kernels, f"{name}_kernel"), {"bf16": 2, "fp32": 4}[dtype]
    tile = dict(launch.LINEAR if name == "linear" else launch.PACK[size])
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages", 3)
    tile.update(BLOCK_Q=launch.BLOCK_Q[size], ONE=True, TF32=size == 4)
    tile = {key: value for key, value in tile.items() if key in fn.arg_names}
    # What is contiguous, as the launchers hand it over: a stride of 1 is a constant to Triton.
    ones = ["w_columns", "u_rows", "v_columns", "f_columns"]
    signature, constants, aligned = {}, dict(tile), []
    for argument in fn.arg_names:
        if argument in tile:
            signature[argument] = "constexpr"
        elif argument in ones:
            signature[argument], constants[argument] = "constexpr", 1
        elif argument in ("out", *MATRICES):
            signature[argument] = "*fp32" if argument == "out" else f"*{dtype}"
            aligned.append(argument)
        else:
            signature[argument] = "i32"
            aligned += [argument] if argument not in ODD else []
    found = cuda_codegen.compile_function(
        fn, signature, constants, arch, aligned=aligned, num_warps=warps, num_stages=stages
    )
    print(name, dtype, arch, found.registers, found.spill_bytes, found.shared_bytes, found.uses_wgmma)
    assert found.spill_bytes == 0, found
    if arch == 90 or size == 2:
        assert found.fits, found
    if name == "linear":
        assert found.uses_wgmma if arch == 90 else found.uses_mma


def test_launched_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of ours in the code that Inductor writes; what adds up the parts has the activation in it."""
    import triton

    from devtools import cuda_codegen
    from inductor_fusions.fusions.outer_product_linear import launch, op

    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    monkeypatch.setattr(op, "_has_kernel", lambda u: True)
    u, w = torch.randn(256, 48).bfloat16(), torch.randn(64, 48 * 48).bfloat16()

    def fn(u: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (op.OUTER_PRODUCT_LINEAR(u, u, w) + 1).relu()

    code = cuda_codegen.generate(fn, (u.requires_grad_(), w.requires_grad_()), train=True, run=False)
    forward, backward = code.modules
    ours = [name.rsplit("_", 1)[0] for name in forward.launches if not name.startswith("triton_")]
    assert ours == ["pack_kernel", "linear_kernel"]
    assert len(forward.launches) == 4 and "add" in forward.launches[-1], forward.launches
    ours = [name.rsplit("_", 1)[0] for name in backward.launches if not name.startswith("triton_")]
    assert not ours and not forward.extern_calls
    # The gradients are operations, which make them for some features at a time.
    assert sum("outer_product_linear_" in call for call in backward.extern_calls) == 2, backward.extern_calls
    assert 256 * 48 * 48 not in backward.buffers
    # One matrix: the blocks of its square that are needed.
    assert 64 * launch.number_of_pairs(48, 48, 64, True) * 64 in forward.buffers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "dtype"), [(True, torch.float32), (False, torch.float32), (False, torch.float16)], ids=str
)
def test_numbers_in_a_graph(
    one: bool, dtype: torch.dtype, errors_in_a_graph: Callable[[Any], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What Inductor launches gives the result."""
    import triton

    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    found = errors_in_a_graph((one, dtype, launched.written(one, dtype)))
    assert found < LIMITS[str(dtype).removeprefix("torch.")]


@pytest.mark.parametrize("symbolic", [False, True])
def test_symbolic_samples_keep_the_operation(symbolic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends.common import aot_autograd

    from inductor_fusions.fusions.outer_product_linear import op

    monkeypatch.setattr(op, "_has_kernel", lambda u: True)
    found: list[Any] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(node.target for node in graph.graph.nodes)
        raise RuntimeError("recorded")

    def fn(u: torch.Tensor, w: torch.Tensor) -> Any:
        return op.OUTER_PRODUCT_LINEAR(u, u, w)

    u, w = torch.randn(9, 4), torch.randn(5, 16)
    if symbolic:
        torch._dynamo.mark_dynamic(u, 0)
    with torch.no_grad(), pytest.raises(Exception, match="recorded"):
        torch.compile(fn, backend=aot_autograd(fw_compiler=record))(u, w)
    assert (op.OUTER_PRODUCT_LINEAR in found) is symbolic
