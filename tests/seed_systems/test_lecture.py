"""Rows L1 to L6: the lecture "Fused kernels", from DLRM to LoRA."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import nn

from bench import dot_interaction as dot_products
from bench.outer_product import DLRM
from inductor_fusions import config
from tests import blocks
from tests.seed_systems.support import QUICK, check, fused_on, launched, written
from tests.support.processes import quick_rows, start

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


# -- L1: DLRM ------------------------------------------------------------------------------------------


def dlrm(rows: int = 10) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model of the lecture with narrower tables and layers: 13 dense features, 26 sparse ones."""
    model = DLRM(width=2, entries=50, hidden=(24, 16))
    return model, (torch.rand(rows, 13), torch.randint(0, 2**31, (rows, 26)))


def test_L1_dlrm(device: torch.device, any_device: None) -> None:
    """The outer product is made inside of the linear that reads it; gradients of tables and of both MLPs."""
    model, inputs = dlrm()
    run = check(model, inputs, device, fused=None, backend=QUICK, slack=16.0)
    (site,) = [site for site in run.ours.fused if site.fusion == "outer_product_linear"]
    assert site.details["u"] == site.details["v"] == "float32[10, 54]"
    assert "tables.25.weight" in run.errors and "top.0.weight" in run.errors


@pytest.mark.slow
def test_L1_dlrm_in_full(device: torch.device) -> None:
    """Compiles with its embeddings, in training; on a CPU the library's product is left, with that reason."""
    model, inputs = dlrm()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    run = check(model, inputs, device, fused=None, dtype=dtype, slack=16.0)
    (site,) = [site for site in run.sites if site.fusion == "outer_product_linear"]
    assert site.verdict == ("fused" if device.type == "cuda" else "left to stock")
    assert device.type == "cuda" or "on the CPU" in site.reason


@pytest.mark.gpu
@pytest.mark.slow
def test_L1_memory_of_a_training_step() -> None:
    """The model of the lecture at its own size: the rows of 186,624 products are never there."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()  # by other tests
    model = DLRM().to("cuda", torch.bfloat16)
    inputs = (
        torch.rand(2048, 13, device="cuda").bfloat16(),
        torch.randint(0, 2**31, (2048, 26), device="cuda"),
    )
    with config.patch(policy="always"):
        compiled = torch.compile(model)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            compiled(*inputs).sum().backward()
            model.zero_grad()
    assert torch.cuda.max_memory_allocated() - before < 0.5 * 2**30


def test_L1_dot_products(device: torch.device, any_device: None) -> None:
    """The usual interaction: pairs of 27 features behind the dense ones, with gradients of all tables."""
    model = dot_products.DLRM(width=4, entries=50, hidden=(16, 8))
    inputs = (torch.rand(10, 13), torch.randint(0, 2**31, (10, 26)))
    run = check(model, inputs, device, fused=None, backend=QUICK, slack=16.0)
    (site,) = [site for site in run.ours.fused if site.fusion == "dot_interaction"]
    assert site.details == {"features": "float32[10, 27, 4]", "dense": "float32[10, 4]"}
    assert "tables.25.weight" in run.errors and "bottom.0.weight" in run.errors


@pytest.mark.gpu
@pytest.mark.slow
def test_L1_memory_of_dot_products() -> None:
    """Neither the matrix of all products nor its gradient is ever there."""
    model = dot_products.Interaction().cuda()
    shapes = (8192, 64), (8192, 27, 64)
    inputs = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    with config.patch(policy="always"):
        compiled = torch.compile(model)
        for _ in range(2):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = compiled(*inputs)
            torch.autograd.grad(out, inputs, torch.ones_like(out))
    # The result, what comes in for it, and the gradients.
    bytes_needed = 2 * 2 * out.numel() + 2 * sum(t.numel() for t in inputs)
    assert torch.cuda.max_memory_allocated() - before < bytes_needed + 2 * 8192 * 27 * 27


# -- L2: the tail of a linear ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(16, 64, 32), (48, 72, 136)], ids=str)
def test_L2_add_bias_relu(shape: tuple[int, int, int], device: torch.device) -> None:
    """relu(x @ W + bias) is one kernel, of any shape; so is a sum that is added before."""
    pytest.importorskip("triton")
    from tests.block_mm import support

    rows, inner, columns = shape
    args = (
        support.rand(rows, inner),
        support.rand(columns, inner),
        support.rand(columns),
        support.rand(rows, columns),
    )

    def fn(x: Any, w: Any, b: Any, y: Any) -> Any:
        return F.relu(F.linear(x, w) + y + b)

    assert fused_on(device, fn, args, train=True, factor=2.0)["linear_epilogue"] == 1
    with config.patch(policy="always", strict=True):
        kernels, calls = launched(fn, args, device)
    assert len(kernels) == 1 and not calls


# -- L3, L4: LoRA ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [torch.relu, torch.sigmoid], ids=["relu", "sigmoid"])
def test_L3_tail_of_an_adapter(tail: Any, device: torch.device) -> None:
    """relu and sigmoid of x + m * y + bias, where y is the adapter: the epilogue of the grouped GEMM."""
    pytest.importorskip("triton")
    from tests.block_mm import support

    def fn(x: Any, w: Any, a: Any, b: Any, bias: Any) -> Any:
        return tail(x @ w.t() + 0.5 * ((x @ a) @ b) + bias)

    args = (*adapter(support.rand), support.rand(128))
    assert fused_on(device, fn, args, factor=2.0)["lora"] == 1
    with config.patch(policy="always", strict=True):
        kernels, calls = launched(fn, args, device)
    # The skinny GEMM, and the rest.
    assert sum("_tem_" in name for name in kernels) == 2 and not calls


def adapter(rand: Any, rank: int = 5) -> tuple[Any, ...]:
    """x, w, a, b with more rows than the operation for few takes."""
    return rand(96, 64), rand(128, 64), rand(64, rank), rand(rank, 128)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_L4_adapter_of_an_mlp(rank: int, train: bool, device: torch.device) -> None:
    """linear(x) + alpha * (x @ A @ B) with alpha 0.5 and rank 5, and other ranks."""
    pytest.importorskip("triton")
    from tests.block_mm import support

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        return F.linear(x, w) + 0.5 * (x @ a @ b)

    args = adapter(support.rand, rank)
    assert fused_on(device, fn, args, train=train, factor=3.0)["lora"] >= 1
    with config.patch(policy="always", strict=True):
        _, calls = launched(fn, args, device, train=train)
    assert not calls  # the linear and both products of the adapter are kernels of ours


# -- L5: one kernel for an MLP? ------------------------------------------------------------------------------


def test_L5_measurement(tmp_path: Path) -> None:
    """bench.whole_mlp runs: the kernel of a whole MLP is right, in Triton's interpreter."""
    pytest.importorskip("triton")
    whole, first = quick_rows("whole_mlp", tmp_path)
    assert whole["error"]["whole"] < 1e-6 and not whole["wrong"] and not whole["skipped"]
    # One kernel moves the hidden layer never, an epilogue twice, two kernels four times.
    layer = 4 * whole["tokens"] * whole["hidden"]
    moved = whole["bytes"]
    assert moved["unfused"] - moved["epilogue"] == moved["epilogue"] - moved["whole"] == 2 * layer
    assert whole["flops"] == 2 * first["flops"] and set(first["times_us"]) == {"stock", "bare"}


@pytest.mark.parametrize(
    ("width", "tile"), [(64, (128, 64, 8, 3)), (256, (64, 64, 8, 2)), (512, (64, 32, 8, 2))]
)
def test_L5_machine_code(width: int, tile: tuple[int, int, int, int]) -> None:
    """The kernel of a whole MLP compiles for a GPU, with tensor cores and without spills."""
    triton = pytest.importorskip("triton")
    if width == 512 and Version(triton.__version__) >= Version("3.9"):
        pytest.skip("Triton 3.9 spills 160 bytes where 3.6 and 3.7 spill none")
    from bench import whole_mlp
    from devtools import cuda_codegen

    assert tile in whole_mlp.TILES
    tokens, hidden, warps, stages = tile
    constants = {"WIDTH": width, "BLOCK_T": tokens, "BLOCK_H": hidden}
    names = whole_mlp.mlp_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else "i32" if name in ("tokens", "hidden") else "*bf16"
        for name in names
    }
    aligned = [name for name, kind in signature.items() if kind != "constexpr"]
    found = cuda_codegen.compile_function(
        whole_mlp.mlp_kernel, signature, constants, 90, aligned=aligned, num_warps=warps, num_stages=stages
    )
    print(width, found)
    assert found.uses_wgmma and found.shared_bytes <= found.shared_limit and found.spill_bytes == 0


def test_L5_first_half(device: torch.device) -> None:
    """Bias and activation are the epilogue of the first product; the second is a product of its own."""
    pytest.importorskip("triton")
    from tests.block_mm import support

    def fn(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)

    args = (
        support.rand(48, 64), support.rand(256, 64), support.rand(256), support.rand(64, 256),
        support.rand(64),
    )  # fmt: skip
    assert fused_on(device, fn, args, factor=2.0)["linear_epilogue"] == 1
    with config.patch(policy="always", strict=True):
        kernels, calls = launched(fn, args, device)
    assert len(kernels) == 1 and len(calls) == 1


# -- L6: looking at what was compiled ----------------------------------------------------------------------


def test_L6_names_in_the_generated_code(device: torch.device) -> None:
    """TORCH_LOGS=output_code: attention by its name; on a GPU the kernels of linears by theirs."""
    from torch._inductor.utils import run_and_get_code

    model, x = blocks.Attention().to(device), blocks.batch().to(device)
    with (
        config.patch(policy="always"),
        torch.no_grad(),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        _, (code,) = run_and_get_code(torch.compile(model), x)
    assert "_scaled_dot_product" in code


def test_L6_names_of_kernels(device: torch.device) -> None:
    pytest.importorskip("triton")
    from tests.block_mm import support

    model = support.Linears(64, (64, 32, 32)).bfloat16()
    with config.patch(policy="always", strict=True):
        module = written(model, (support.rand(16, 64),), device)
    assert "block_mm" in module.wrapper and module.kernels[0].is_template


def test_L6_profile(device: torch.device) -> None:
    """A profile of a compiled model names the fused attention."""
    model, x = blocks.Attention().to(device), blocks.batch().to(device)
    with config.patch(policy="always"), torch.no_grad():
        compiled = torch.compile(model)
        compiled(x)
        with torch.profiler.profile() as profile:
            compiled(x)
    assert any("scaled_dot_product" in event.key for event in profile.key_averages())


def test_L6_trace(tmp_path: Path) -> None:
    """An artifact for tlparse in TORCH_TRACE: the sites of each graph."""
    code = "import inductor_fusions, torch\nfrom tests import blocks\n"
    code += "torch.compile(blocks.Attention())(blocks.batch())\n"
    done = start("-c", code, TORCH_TRACE=str(tmp_path), INDUCTOR_FUSIONS_POLICY="always")
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("*.log")
    text = log.read_text()
    assert '"name": "inductor_fusions"' in text
    payload = text.split('"name": "inductor_fusions"', 1)[1].split("\n", 1)[1]
    lines = []
    for line in payload.splitlines():
        if not line.startswith("\t"):
            break
        lines.append(line[1:])
    sites = json.loads("\n".join(lines))["sites"]
    assert any(site["fusion"] == "attention" and site["verdict"] == "fused" for site in sites)
