"""explain(gpu=...): what would be fused on a GPU that is not in this machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from inductor_fusions import cli, config, explain, explaining
from inductor_fusions.cli import models
from inductor_fusions.decisions import target
from inductor_fusions.decisions.devices import KNOWN

absent = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def attention(q, k, v):
    assert q.device.type == "cuda"
    return torch.softmax(q @ k.transpose(-2, -1) * 0.125, dim=-1) @ v


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(768, 3072).bfloat16()
        self.register_buffer("scale", torch.ones((), dtype=torch.bfloat16))

    def forward(self, x):
        return nn.functional.gelu(self.up(x)) * self.scale


def inputs(length: int, heads: int = 12) -> list[torch.Tensor]:
    return [torch.empty(8, heads, length, 64, dtype=torch.bfloat16) for _ in range(3)]


def test_attention_by_the_table_of_the_target():
    found = explain(attention, *inputs(512), gpu="nvidia_h200")
    (site,) = found
    assert site.verdict == "fused"
    assert "measured" in site.kernel or "measurements nearby" in site.kernel
    assert found.facts["device"].startswith("nvidia_h200")


@absent
def test_a_torch_that_is_built_with_cuda(monkeypatch):
    """It names an accelerator, also without a driver, and Dynamo reads the stream of an available one."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
    (site,) = explain(attention, *inputs(512), gpu="nvidia_h200")
    assert site.verdict == "fused"


def scaled(number):
    """Attention whose scores are divided by what is made of the queries."""

    def fn(q, k, v):
        divisor = number(q)  # a graph may end here
        return torch.softmax(q @ k.mT / divisor, dim=-1) @ v

    return fn


def filled(q, k, v):
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    fill = torch.asarray(-1e9, dtype=q.dtype, device=q.device)
    return torch.softmax(torch.where(seen, q @ k.mT, fill), dim=-1) @ v


def of_some_queries(q, k, v):
    """As Informer's attention, which looks at some keys first, and takes some queries."""
    count = 8 * np.ceil(np.log(k.shape[2])).astype("int").item()
    some = k[:, :, torch.randint(k.shape[2], (q.shape[2], count))]
    top = (q[:, :, :, None] @ some.mT).squeeze(-2).amax(-1).topk(count, sorted=False).indices
    return attention(q.gather(2, top[..., None].expand(-1, -1, -1, q.shape[3])), k, v)


CONSTANTS = {
    "on the device": scaled(lambda q: torch.tensor(8.0, device=q.device)),
    "moved there": lambda q, k, v: attention(q, k, v) * torch.tensor([8.0]).to(q.device),
    "moved as another": lambda q, k, v: torch.cat([attention(q, k, v), torch.zeros(1).expand_as(q).to(q)], 1),
    "of another": lambda q, k, v: attention(q, k, v) * q.new_tensor(8.0),
    "a fill": filled,
    "times an integer": lambda q, k, v: attention(q, k, v) + q * 0 + q.int() * 0,
    "read on the CPU": scaled(lambda q: torch.tensor(64.0).sqrt().item()),
    "read of NumPy": scaled(lambda q: np.ceil(np.sqrt(q.shape[3])).astype("int").item()),
    "random on the CPU": of_some_queries,
}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("fn", CONSTANTS.values(), ids=CONSTANTS)
def test_constants(fn, train):
    """Passes fold constants as on the device, and what is on the CPU has values."""
    with config.patch(policy="always"):
        found = explain(fn, *(t.requires_grad_() for t in inputs(128, 2)), train=train, gpu="nvidia_h200")
    assert [site.verdict for site in found if site.fusion == "attention"] == ["fused"]


def test_a_target_without_a_table_is_estimated_from_another_device():
    (site,) = explain(attention, *inputs(1024), gpu="l4")
    assert site.verdict == "fused"
    assert "measurements on nvidia_h" in site.kernel


@pytest.mark.parametrize(("fn", "reason"), [
    (attention, ""),
    (lambda q, k, v: torch.tanh(q @ k.mT).softmax(-1) @ v, "flex attention needs constant head dims"),
], ids=["sdpa", "flex"])  # fmt: skip
def test_symbolic_head_dims(fn, reason):
    with config.patch(policy="always"):
        (site,) = explain(fn, *inputs(128), gpu="nvidia_h200", dynamic=True)
    assert site.verdict == ("left to stock" if reason else "fused") and site.reason.endswith(reason)


def test_a_linear_where_nothing_carries_over():
    (site,) = explain(Linear(), torch.empty(4096, 768, dtype=torch.bfloat16), gpu="l4")
    assert site.verdict == "left to stock"
    assert "nvidia_l4" in site.reason


def test_a_head_dim_that_no_fused_kernel_of_sdpa_takes():
    qkv = [torch.empty(8, 12, 512, 60, dtype=torch.bfloat16) for _ in range(3)]
    (site,) = explain(attention, *qkv, gpu="nvidia_h200")
    assert site.verdict != "fused" or site.kernel.startswith("flex")


def capped(q, k, v):
    return torch.softmax(30 * torch.tanh(q @ k.transpose(-2, -1) / 240), dim=-1) @ v


def capped_by_a_call(q, k, v):
    def cap(score, batch, head, q_index, k_index):
        return 30 * torch.tanh(score / 30)

    return flex_attention(q, k, v, score_mod=cap)


@pytest.mark.parametrize("fn", [capped, capped_by_a_call], ids=["fused", "the user's own"])
def test_an_operator_of_higher_order(fn):
    found = explain(fn, *inputs(512), gpu="nvidia_h200")
    assert [site.kernel.split(",")[0] for site in found] == ["flex"] * (fn is capped)


def of_a_gradient(q, k, v):
    return torch.func.grad(lambda a: attention(a, k, v).sum())(q)


def of_a_gradient_in_a_checkpoint(q, k, v):
    return checkpoint(of_a_gradient, q, k, v, use_reentrant=False)


def of_a_gradient_of_a_gradient(q, k, v):
    def norm(a):
        return torch.func.grad(lambda b: attention(b, k, v).sum())(a).square().sum()

    return torch.func.grad(norm)(q)


def of_a_jacobian(q, k, v):
    return torch.func.jacrev(lambda a: attention(a, k, v).sum((0, 1, 2)))(q)


@absent
@pytest.mark.parametrize(
    ("fn", "verdict", "reason"),
    [
        (of_a_gradient, "fused", ""),
        (of_a_gradient_in_a_checkpoint, "fused", ""),
        (of_a_gradient_of_a_gradient, "rejected", "a second derivative"),
        (of_a_jacobian, "rejected", "batched gradients"),
    ],
)
def test_a_function_that_differentiates(fn, verdict, reason):
    """torch's engine asks for the streams of the device: its backward is traced on the CPU."""
    with config.patch(policy="always"):
        (site,) = explain(fn, *inputs(128, heads=2), gpu="nvidia_h200")
    assert site.verdict == verdict and site.reason.startswith(reason)


def test_a_linear_on_a_copy_of_the_module():
    model, x = Linear(), torch.empty(4096, 768, dtype=torch.bfloat16)
    (site,) = explain(model, x, gpu="nvidia_h200")
    assert site.verdict == "fused"
    assert site.kernel.startswith("block_mm")
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cpu"}
    assert type(model.up.weight) is nn.Parameter and model.up.weight.isfinite().all()
    (here,) = explain(model, x)
    assert here.verdict == "left to stock"
    assert "CPU" in here.reason


@absent
def test_nothing_is_left_behind():
    explain(attention, *inputs(128, 2), gpu="nvidia_h200")
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    with pytest.raises((AssertionError, RuntimeError)):
        torch.empty(1, device="cuda")


class Adapted(nn.Module):
    """A frozen linear with an adapter in float32, as PEFT adds one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2048, 2048, bias=False).bfloat16().requires_grad_(False)
        self.a = nn.Linear(2048, 16, bias=False)
        self.b = nn.Linear(16, 2048, bias=False)

    def forward(self, x):
        assert x.device.type == "cuda"
        return self.base(x) + 2.0 * self.b(self.a(x.float())).to(x.dtype)


class Quantised(nn.Parameter):
    """Eight bits a weight, with scales in an attribute, as bitsandbytes keeps them."""


class Dequantising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Quantised(torch.ones(2048, 2048, dtype=torch.int8), requires_grad=False)
        self.weight.scales = torch.ones(2048, 1)
        self.weight.module = self
        self.a, self.b = (nn.Parameter(torch.ones(shape)) for shape in [(16, 2048), (2048, 16)])

    def forward(self, x):
        assert self.weight.module is self
        base = x @ (self.weight * self.weight.scales).to(x.dtype).mT
        return base + (x.float() @ self.a.mT @ self.b.mT).to(x.dtype)


def test_what_a_parameter_has_beside_it():
    model = Dequantising()
    found = explain(model, torch.empty(4096, 2048, dtype=torch.bfloat16), gpu="nvidia_h200")
    assert {site.verdict for site in found} == {"fused"}
    assert model.weight.scales.device.type == "cpu" and model.weight.module is model


def under_autocast(x, w):
    with torch.autocast(x.device.type, torch.bfloat16):
        return nn.functional.gelu(x @ w) + torch.arange(8192, device=x.device)


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.gpu), False], ids=["on a GPU", "on the CPU"])
def autograd(request, monkeypatch):
    """Where autograd is traced."""
    monkeypatch.setattr(explaining, "_differentiates_cuda", lambda: request.param)


@pytest.mark.usefixtures("autograd")
def test_a_training_step():
    """Both gradients of the adapter and that of the input are judged for the GPU; none is computed."""
    model, x = Adapted(), torch.empty(4096, 2048, dtype=torch.bfloat16, requires_grad=True)
    found = [site for site in explain(model, x, train=True, gpu="nvidia_h200") if site.fusion == "lora"]
    assert [site.verdict for site in found].count("fused") >= 3
    assert all("nvidia_h200" in site.reason or "measure" in site.kernel + site.reason for site in found)
    assert x.grad is None and all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


@pytest.mark.usefixtures("autograd")
def test_a_training_step_of_an_attention():
    """Where autograd is traced on the GPU, a site of `kernel_defects` may stand beside it."""
    q, k, v = (t.requires_grad_() for t in inputs(1024))
    found = explain(attention, q, k, v, train=True, gpu="nvidia_h200")
    (site,) = [site for site in found if site.fusion == "attention"]
    assert site.verdict == "fused" and "measure" in site.kernel


@pytest.mark.usefixtures("autograd")
def test_a_training_step_behind_a_graph_break():
    """Each graph has its sites, also in modes and with tensors that are made on the device."""

    def broken(x, w):
        once = under_autocast(x, w)
        torch._dynamo.graph_break()
        return under_autocast(once, w)

    x, w = torch.empty(64, 8192, requires_grad=True), torch.empty(8192, 8192, requires_grad=True)
    found = explain(broken, x, w, train=True, gpu="nvidia_h200")
    assert [site.fusion for site in found].count("linear_epilogue") == 2


@pytest.mark.parametrize("train", [False, True])
def test_what_is_selected_by_value(train):
    """All of it is taken, in the graph behind the selection too."""

    def selected(q, k, v, which):
        return attention(q, k, v)[which].softmax(-1) @ v[0, 0].mT

    q, k, v = (t.requires_grad_() for t in inputs(1024))
    which = torch.ones(q.shape[:3], dtype=torch.bool)
    found = explain(selected, q, k, v, which, train=train, gpu="nvidia_h200")
    assert "fused" in {site.verdict for site in found if site.fusion == "attention"}


def written(x):
    """A number on the CPU that is overwritten by one of the GPU."""
    number = torch.zeros(2)
    number[:1].copy_(x.sum())
    return number.max()


@torch.compiler.disable
def written_in_a_list(x):
    number = torch.zeros(2)
    torch._foreach_add_([number[:1]], [x.sum().cpu()[None]])
    return number.max()


READ = {
    "on the GPU": torch.sum,
    "written from it": written,
    "outside of graphs": torch.compiler.disable(written),
    "in a list": written_in_a_list,
}


@pytest.mark.parametrize("number", READ.values(), ids=READ)
def test_a_value_that_is_read_is_named_by_its_line(number):
    def branches(x, w):
        return (x @ w).relu() if number(x) > 0 else x @ w

    with pytest.raises(ValueError, match=r"have no values, but .*test_explain_target\.py:\d+ reads one"):
        explain(branches, torch.ones(8, 8), torch.ones(8, 8), gpu="nvidia_h200")


def test_a_model_that_makes_its_cache():
    """Transformers begins a cache with an empty tensor on the device."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 32}
    model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_attention_heads=2)).bfloat16()
    found = explain(model, torch.zeros(1, 8, dtype=torch.int64), gpu="nvidia_h200")
    assert "attention" in {site.fusion for site in found}


def test_a_model_may_have_a_target():
    """As a loss has: only `gpu`, `train` and `dynamic` are not the model's."""
    explained = explain(lambda x, target: (x - target).square().mean(), torch.ones(3), target=torch.zeros(3))
    assert explained.facts["device"]


def test_an_unknown_target_lists_those_known():
    with pytest.raises(ValueError, match=r"unknown device 'h201'; known devices: a100, .*h200"):
        explain(attention, *inputs(128, 2), gpu="h201")
    with pytest.raises(ValueError, match="a GPU is given by its name, such as 'nvidia_h200', not by 5"):
        explain(attention, *inputs(128, 2), gpu=5)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_known_device_is_a_target(name):
    table, found = target(name)  # the H100 that was measured is the only one with a table
    assert table == {"nvidia_h100": "nvidia_h100_80gb_hbm3"}.get(name, name)
    assert target(name.removeprefix("nvidia_").replace("_", " ").upper()) == (table, found)
    assert target(name.removeprefix("nvidia_").removeprefix("geforce_rtx_")) == (table, found)
    assert found.shared_bytes // 1024 == {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}[
        10 * found.capability[0] + found.capability[1]
    ]  # fmt: skip


def explained(command: str, code: int = 0) -> str:
    """What `explain` prints, or says on stderr."""
    done = CliRunner().invoke(cli.app, ["explain", *command.split()])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.output + done.stderr


@absent
@pytest.mark.parametrize(("options", "message"), [
    ("--target h201", "unknown device"), ("--target h200 --device cpu", "exclude each other"),
])  # fmt: skip
def test_mistakes_on_the_command_line(options, message):
    assert message in explained(f"bert {options}", code=2)


def test_on_the_command_line():
    pytest.importorskip("transformers")
    said = explained("bert --layers 1 --seq 128 --attn eager --target h200")
    assert "nvidia_h200" in said or "measure" in said


def test_a_model_that_takes_few_tokens():
    """Its text model has the limit, which is less than the default."""
    pytest.importorskip("transformers")
    assert "fused" in explained("clip --layers 1 --target h200")
    assert "at most 77 tokens" in explained("clip --layers 1 --target h200 --seq 78", code=2)


def test_weights_take_no_memory(monkeypatch):
    """A whole training step of a model that this machine cannot hold is explained for another one."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(models.os, "sysconf", lambda name: 1)
    command = "gpt2 --layers 1 --seq 64 --attn eager --train"
    assert "billion parameters" in explained(command, code=2)
    assert "attention" in explained(f"{command} --target h200")
