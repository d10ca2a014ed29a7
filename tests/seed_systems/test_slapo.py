"""Rows S1 to S9: what Slapo did with schedules over modules."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint

import inductor_fusions
from inductor_fusions import config, fusions, testing
from inductor_fusions.decisions import tables
from inductor_fusions.fusions.linear_epilogue import MOST_ROWS
from tests import blocks
from tests.seed_systems.support import QUICK, check, launched, leaf, qkv
from tests.support.devices import on
from tests.support.processes import start

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


# -- S1: what is scheduled, and nothing else ----------------------------------------------------------


@pytest.mark.parametrize("name", sorted(fusion.name for fusion in fusions.ALL))
def test_S1_each_fusion_alone(name: str) -> None:
    """Every fusion has a switch, which turns it off and no other; that of `lora` has both of its stages."""
    switch = {"skip": name} if name == "lora_input" else {name: False}
    with config.patch(**switch):
        off = {other.name for other in fusions.ALL if not config.is_on(other.name)}
    assert off == ({"lora", "lora_input"} if name == "lora" else {name})


def test_S1_regions_and_modules(device: torch.device) -> None:
    """One module of a model is compiled, or one region has another setting."""
    model, x = blocks.model(2).to(device), blocks.batch().to(device)
    expected = model(x)
    inductor_fusions.clear()
    with config.patch(policy="always"):
        compiled = copy.deepcopy(model)
        compiled.blocks[0].compile(backend=testing.AfterPasses([]))
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
        assert inductor_fusions.report().count("fused", "attention") == 1
        with config.patch(attention=False):
            assert testing.capture(model, x, backend=QUICK).fused == []
        assert len(testing.capture(model, x, backend=QUICK).fused) == 2


# -- S2 to S5: modules --------------------------------------------------------------------------------


class Projections(nn.Module):
    """Linears whose names say nothing; grouped keys, and a bias for some."""

    def __init__(self, bias: tuple[bool, bool, bool] = (True, False, True)) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(64, n, bias=has) for n, has in zip((64, 16, 16), bias, strict=True)
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x), self.b(x), self.c(x)


def test_S2_qkv() -> None:
    """Found by structure; equal and unequal widths, mixed bias; the weights stay where they are."""
    pytest.importorskip("triton")
    from tests.block_mm import support

    model, x = Projections().bfloat16(), support.rand(2, 16, 64)
    before = {name: (p, p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    seen = support.check(model, (x,), train=True)
    # Forward; and the gradients of the input, and of the weights.
    assert seen.fused("qkv") == 3 and seen.products() == 0 and seen.products(1) == 0
    for name, p in model.named_parameters():
        held, address, value = before[name]
        assert p is held and p.data_ptr() == address and torch.equal(p, value)
    with config.patch(policy="always", strict=True):
        kernels, calls = launched(model, (x,))
    assert len(kernels) == 1 and not calls


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 512])
def test_S2_qkv_on_a_gpu(rows: int) -> None:
    model, x, device = Projections(), leaf(rows, 64), torch.device("cuda")
    seen = check(model, (x,), device, dtype=torch.bfloat16, fused=None)
    assert sum(site.fusion == "qkv" for site in seen.ours.fused) >= 1
    with config.patch(policy="always", strict=True):
        kernels, calls = launched(model.bfloat16(), (x.bfloat16(),), device)
    assert len(kernels) == 1 and not calls


class Core(nn.Module):
    """Slapo's core attention: a quotient by sqrt(d), a softmax, dropout of 0.1."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        weights = self.dropout(nn.functional.softmax(scores, dim=-1))
        return torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous()


@pytest.mark.parametrize(("q_len", "dim"), [(24, 16), (9, 40)], ids=str)
def test_S3_core_attention(q_len: int, dim: int, device: torch.device) -> None:
    """Tied to no shape."""
    check(Core().eval(), qkv(q_len, dim=dim), device, backend="inductor" if dim == 16 else QUICK)


def test_S3_dropout_in_training(device: torch.device) -> None:
    """The probability is kept: mean and spread are those of the unfused module."""
    q, k, v = (t.detach() for t in qkv(400, batch=1, heads=2))
    inputs = [t.to(device).requires_grad_() for t in (q * 0.01, k, v * 0.1 + 1.0)]
    model = Core().train()
    found = testing.capture(model, *inputs, train=True, backend=QUICK)
    (call,) = found.calls("scaled_dot_product_attention")
    assert call.kwargs["dropout_p"] == 0.1
    stock = model(*inputs)
    torch.testing.assert_close(found.outputs.mean(), stock.mean(), rtol=1e-2, atol=0.0)
    torch.testing.assert_close(found.outputs.std(), stock.std(), rtol=0.2, atol=0.0)
    assert len(found.grads) == 3
    assert all(grad is not None and grad.isfinite().all() for grad in found.grads.values())


def tail(y: Any, residual: Any, w: Any, b: Any, train: bool) -> Any:
    return F.layer_norm(F.dropout(y, 0.1, train) + residual, (256,), w, b)


def bias_outside(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """As Slapo's decomposed linear has it."""
    return tail(F.linear(x, weight) + bias, *rest)


def bias_inside(x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    return tail(F.linear(x, weight, bias), *rest)


def operands_of_the_tail() -> list[torch.Tensor]:
    shapes = ((64, 256), (256, 256), (256,), (64, 256), (256,), (256,))
    return [torch.randn(*shape).half() for shape in shapes]


@pytest.mark.parametrize(("fn", "product"), [(bias_outside, "mm"), (bias_inside, "addmm")])
def test_S4_bias_dropout_residual_norm(fn: Callable[..., Any], product: str, device: torch.device) -> None:
    """What follows a linear is one kernel of stock Inductor, with the bias taken out of it or not."""
    pytest.importorskip("triton")
    args = (*operands_of_the_tail(), False)
    kernels, calls = launched(fn, args, device)
    assert len(kernels) == 1 and calls == [f"extern_kernels.{product}"]
    if device.type == "cuda":  # elsewhere nothing was run
        testing.assert_close_to_eager(fn, on(device, args), train=False)


@pytest.mark.parametrize("fn", [bias_outside, bias_inside])
def test_S4_with_dropout_in_training(fn: Callable[..., Any], device: torch.device) -> None:
    """Dropout, residual and norm are one kernel; on a GPU it draws the random numbers as well."""
    from torch._inductor.utils import run_and_get_code

    on_gpu = device.type == "cuda"
    args = [t.to(device) if on_gpu else t.float() for t in operands_of_the_tail()]
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, (code,) = run_and_get_code(torch.compile(fn), *args, True)
    body = code.split("def call(", 1)[1].split("\ndef ")[0]
    kernels = re.findall(r"^\s*((?:cpp|triton)_\w*fused_\w+)(?:\.run)?\(", body, re.MULTILINE)
    assert sum("layer_norm" in name for name in kernels) == 1, kernels
    assert len(kernels) == (1 if on_gpu else 2), kernels


class MLP(nn.Module):
    """Slapo's FusedMLP: a linear, bias and GELU, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


def test_S5_fused_mlp() -> None:
    """Bias and GELU are the epilogue of the first product."""
    pytest.importorskip("triton")
    from tests.block_mm import support

    model, x = MLP().bfloat16(), support.rand(2, 16, 64)
    assert support.check(model, (x,), train=True, budget=3.0).fused("linear_epilogue") == 1
    with config.patch(policy="always", strict=True):
        kernels, calls = launched(model, (support.rand(32, 64),))
    assert len(kernels) == 1 and calls == ["extern_kernels.addmm"]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 512])
def test_S5_fused_mlp_on_a_gpu(rows: int) -> None:
    model, x, device = MLP(), leaf(rows, 64), torch.device("cuda")
    seen = check(model, (x,), device, dtype=torch.bfloat16, fused=None)
    few = rows <= MOST_ROWS  # then the second linear is a site as well
    assert sum(site.fusion == "linear_epilogue" for site in seen.ours.fused) == 1 + few
    with config.patch(policy="always", strict=True):
        kernels, calls = launched(model.bfloat16(), (x.bfloat16(),), device)
    assert len(kernels) == 1 + few and calls == ([] if few else ["extern_kernels.addmm"])


# -- S6, S7: tools ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_S6_verify(device: torch.device) -> None:
    """Outputs and gradients of a whole model, against float64."""
    model, x = blocks.model(1).to(device), blocks.batch().to(device)
    with config.patch(policy="always"):
        found = inductor_fusions.verify(model, x)
    assert found.ok and found.rows[0].fused == 1, str(found)
    names = {error.name for error in found.rows[0].errors}
    assert {"output[0]", "blocks.0.attention.q_proj.weight"} <= names


@pytest.mark.slow
def test_S7_autotuner(own_tables: Path, tmp_path: Path) -> None:
    """A search writes a table, and the table decides: what is faster there is fused, what is not is left."""
    from bench import device_table

    key, results = "float32 pad b2 h12/12 q128 k128 d64 infer", tmp_path / "measured.json"
    command = ("-m", "bench.tune_attention", "--quick", "--device", "cpu", "--jobs", "1")
    done = start(*command, "--only", f"^{key}$", "--out", str(results))
    assert done.returncode == 0, done.stderr
    measured = json.loads(results.read_text())
    (row,) = measured["rows"]
    assert row["key"] == key and row["times_us"]["sdpa"] > 0

    inputs = (*qkv(128, batch=2, heads=12, dim=64, grad=False), padding_of(128))
    for factor, verdict in ((2.0, "fused"), (0.5, "left to stock")):
        row["times_us"]["unfused"] = factor * row["times_us"]["sdpa"]
        device_table.write(own_tables / "cpu.json", device_table.table(measured))
        tables.load.cache_clear()
        (site,) = testing.capture(attention, *inputs, policy="profitable", backend=QUICK).sites
        assert site.verdict == verdict, site


def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.125 + mask, -1) @ v


def padding_of(length: int) -> torch.Tensor:
    mask = torch.zeros(2, 1, 1, length)
    mask[0, ..., -length // 4 :] = torch.finfo(torch.float32).min
    return mask


# -- S8, S9: engines of torch -------------------------------------------------------------------------


def sharded(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        block.compile(backend=testing.AfterPasses([]))
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split_by_heads(model: Any, mesh: Any) -> Any:
    from tests.distributed_worker import tensor_parallel

    model = tensor_parallel(model, mesh)
    for block in model.blocks:
        block.compile(backend=testing.AfterPasses([]))
    return model


def replicated(model: Any, mesh: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(torch.compile(model, backend=testing.AfterPasses([])))


ENGINES: dict[str, Callable[[Any, Any], Any]] = {
    "FSDP2": sharded,
    "tensor parallel": split_by_heads,
    "DDP": replicated,
}


@pytest.mark.parametrize("engine", ENGINES)
def test_S8_engines(engine: str, mesh: Any, device: torch.device) -> None:
    """torch's engines instead of schedules of one's own: outputs, gradients, and each attention fused."""
    model, alone = blocks.model(2).to(device), blocks.model(2).to(device)
    x = blocks.batch().to(device)
    inductor_fusions.clear()
    with config.patch(policy="always"):
        wrapped = ENGINES[engine](model, mesh)
        out = wrapped(x)
        out.square().mean().backward()
    assert inductor_fusions.report().count("fused", "attention") == 2
    expected = alone(x)
    expected.square().mean().backward()
    torch.testing.assert_close(whole(out), expected, rtol=1e-4, atol=1e-5)
    grads = {name.replace("_orig_mod.", ""): whole(p.grad) for name, p in model.named_parameters()}
    for name, p in alone.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-5)


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


@pytest.mark.parametrize("options", [{}, {"context_fn": blocks.save_products}], ids=["full", "selective"])
def test_S9_checkpoint(options: dict[str, Any], device: torch.device) -> None:
    """torch.utils.checkpoint keeps the fusions, and the gradients."""
    count = 1 if options else 2
    ours, theirs = blocks.model(count).to(device), blocks.model(count).to(device)
    x = blocks.batch().to(device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in ours.blocks:
            x = checkpoint.checkpoint(block, x, use_reentrant=False, **options)
        return x

    inductor_fusions.clear()
    backend: Any = "inductor" if options else testing.AfterPasses([])  # the partitioner reads the policy
    with config.patch(policy="always"):
        torch.compile(forward, backend=backend)(x).square().mean().backward()
    assert inductor_fusions.report().count("fused", "attention") == count
    theirs(x).square().mean().backward()
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)
