"""The harness that writes and compiles CUDA code without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from devtools import cuda_codegen
from devtools.cuda_codegen import hazards


def mlp() -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()
    return model, torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)


def test_forward_and_backward() -> None:
    model, x = mlp()
    code = cuda_codegen.generate(model, (x,), train=True)
    assert [module.is_backward for module in code.modules] == [False, True]
    assert code.forward.extern_calls == ["extern_kernels.addmm"] * 2
    assert code.backward.extern_calls == ["extern_kernels.mm"] * 4
    assert "empty_strided_cuda" in code.forward.wrapper
    assert [kernel.name for kernel in code.forward.kernels] == code.forward.launches
    assert not any(kernel.is_template for kernel in code.kernels)
    torch.testing.assert_close(code.outputs, model(x))
    targets = {node.target for node in code.backward.graph.nodes}
    assert torch.ops.aten.mm.default in targets


def test_inference_of_a_function_that_makes_tensors() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[-1], dtype=x.dtype)

    (module,) = cuda_codegen.generate(fn, (torch.randn(4, 1000),), arch=80).modules
    assert not module.is_backward and len(module.kernels) == 1
    assert "cc=80" in module.kernels[0].source


def test_autotuning_takes_what_is_preferred() -> None:
    model, x = mlp()
    config = {"max_autotune": True}
    with torch.no_grad():
        ours = cuda_codegen.generate(
            model, (x,), config=config, prefer=lambda name: 1.0 if "triton" in name else 2.0
        )
        stock = cuda_codegen.generate(
            model, (x,), config=config, prefer=lambda name: 2.0 if "triton" in name else 1.0
        )
    assert all(kernel.is_template for kernel in ours.kernels) and len(ours.kernels) == 2
    assert ours.forward.extern_calls == [] and len(stock.forward.extern_calls) == 2


@pytest.mark.parametrize("arch", cuda_codegen.DEVICES)
def test_machine_code(arch: int) -> None:
    model, x = mlp()
    with torch.no_grad():
        code = cuda_codegen.generate(model, (x,))
    found = cuda_codegen.compile_kernel(code.kernels[0].source, arch)
    assert found and all(config.fits and config.registers > 0 for config in found)
    assert f".target sm_{arch}" in found[0].ptx
    assert not found[0].uses_mma and not found[0].uses_tma


def test_wgmma_spills_and_shared_memory_are_seen() -> None:
    from tests.support import kernels

    signature = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "SIZE": "constexpr"}
    pointers = ("a", "b", "out")
    small = cuda_codegen.compile_function(kernels.product, signature, {"SIZE": 64}, 90, aligned=pointers)
    assert small.fits and small.uses_wgmma
    assert not cuda_codegen.compile_function(kernels.product, signature, {"SIZE": 64}, 80).uses_wgmma
    large = cuda_codegen.compile_function(
        kernels.product, signature, {"SIZE": 256}, 90, aligned=pointers, num_warps=4
    )
    assert large.spill_bytes > 0 and not large.fits
    deep = cuda_codegen.compile_function(
        kernels.product, signature, {"SIZE": 256}, 80, aligned=pointers, num_warps=16
    )
    assert deep.shared_bytes > deep.shared_limit and not deep.fits


@pytest.mark.parametrize("wait", [False, True])
def test_operands_that_change_while_they_are_read_are_seen(wait: bool) -> None:
    from tests.support import kernels

    signature = dict.fromkeys(("a", "factors", "b"), "*bf16") | {"out": "*fp32", "COUNT": "i32"}
    signature |= dict.fromkeys(("SIZE", "WAIT"), "constexpr")
    found = cuda_codegen.compile_function(
        kernels.scaled_products, signature, {"SIZE": 64, "WAIT": wait}, aligned=("a", "b", "out")
    )
    assert found.uses_wgmma and bool(found.overwritten) is not wait and found.fits is wait


#: A loop of Triton's GPU dialect: the product reads what the iteration before has made.
CARRIED = """
%r:2 = scf.for %i = %a to %b step %c iter_args(%acc = %zero, %left = %first) -> (T) : i32 {
  %d = ttng.warp_group_dot %left, %y, %acc {isAsync = true} : tensor<#ttg.dot_op<{opIdx = 0}>> * !y -> T
  %w = ttng.warp_group_dot_wait %d {pendings = PENDING : i32} : T
  %next = arith.mulf %left, %two : T
  scf.yield %w, %next : T
}
"""


@pytest.mark.parametrize("pending", [0, 1])
def test_operands_that_a_loop_carries(pending: int) -> None:
    found = hazards.overwritten(CARRIED.replace("PENDING", str(pending)))
    assert len(found) == pending and all("%left" in line for line in found)
