"""Graphs that other matchers got wrong or missed, each named after its issue.

A fused result must be about as exact as the unfused one, forward and backward; a graph that is no attention
must be left alone, with a reason. Issues of pytorch/pytorch where no other project is named.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inductor_fusions import config, testing
from tests.attention.support import additive, check, qkv, rand, through_flex, visible
from tests.caches.machine import Machine
from tests.support.errors import relative
from tests.support.on_a_gpu import compiled

HALF_SLACK = 8.0  # a fused backward reads an output that was rounded


@dataclass(frozen=True)
class Case:
    """One graph: what it computes, on which inputs, and what must become of it."""

    function: Callable[..., Any]
    inputs: Callable[[], Any]
    fused: int = 1
    reason: str | None = None
    dynamic: bool | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def same(length: int = 8, heads: int = 8, dim: int = 8) -> list[torch.Tensor]:
    """q, k and v of sizes so equal that a wrong reading has the right shape."""
    return list(qkv(length, length, batch=8, heads=heads, dim=dim))


def softmax(scores: Any, dim: int = -1) -> Any:
    return torch.softmax(scores, dim=dim)


def scores_of(q: Any, k: Any) -> Any:
    return q @ k.transpose(-2, -1)


def with_tensor_scale(q: Any, k: Any, v: Any) -> Any:
    return softmax(scores_of(q, k) / torch.sqrt(torch.tensor(q.shape[-1] * 3.0))) @ v


def sliced_buffer(q: Any, k: Any, v: Any, buffer: Any) -> Any:
    """GPT-2: a triangle for the longest sequence, of which a part is taken."""
    q_len, kv_len = q.shape[-2], k.shape[-2]
    seen = buffer[:, :, kv_len - q_len : kv_len, :kv_len]
    lowest = torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype)
    return softmax(torch.where(seen, scores_of(q, k) / math.sqrt(q.shape[-1]), lowest)) @ v


def cloned(q: Any, k: Any, v: Any) -> Any:
    q, k, v = q.clone(), k.clone(), v.clone()
    return softmax((scores_of(q, k) * 0.3).clone()).clone().contiguous() @ v


def late_mask(q: Any, k: Any, v: Any, x: Any) -> Any:
    """The bias is computed after the product that it is added to."""
    scores = scores_of(q, k)
    bias = torch.tanh(x) * 2
    return softmax(scores + bias) @ v


def late_value(q: Any, k: Any, v: Any, x: Any) -> Any:
    """The values are computed after the softmax."""
    weights = softmax(scores_of(q, k) * 0.3)
    return weights @ (v * torch.sigmoid(x))


def merged(x: Any, weight: Any) -> Any:
    """q, k and v are slices of one product: they do not lie next to each other."""
    batch, length, width = x.shape
    q, k, v = (x @ weight).split(width, dim=-1)
    q, k, v = (t.view(batch, length, 4, -1).transpose(1, 2) for t in (q, k, v))
    out = softmax(scores_of(q, k) / math.sqrt(q.shape[-1])) @ v
    return out.transpose(1, 2).reshape(batch, length, width)


def mask_of(*shape: int) -> torch.Tensor:
    return additive(visible(*shape), -1e4)


CASES = {
    "196468 softmax over the queries": Case(
        lambda q, k, v: softmax(scores_of(q, k) / 3, -2) @ v, same, 0, "no-product"
    ),
    "196468 softmax over the heads": Case(
        lambda q, k, v: softmax(scores_of(q, k) / 3, 1) @ v, same, 0, "no-product"
    ),
    "195320 k permuted, not transposed": Case(
        lambda q, k, v: softmax(q @ k.permute(0, 1, 2, 3) / 3) @ v, same, 1
    ),
    "195282 k of a batch of one, heads and keys exchanged": Case(
        lambda q, k, v: softmax(q[:1] @ k[:1].permute(0, 2, 3, 1) / 3) @ v[:1], same, 1
    ),
    "191260 k permuted, three dims": Case(
        lambda q, k, v: torch.bmm(softmax(torch.bmm(q[0], k[0].permute(2, 0, 1))), v[0]), same, 1
    ),
    "195320 k permuted by (0, 2, 1, 3), not transposed": Case(
        lambda q, k, v: softmax(q @ k.permute(0, 2, 1, 3) / 3) @ v, same, 1
    ),
    "191260 k permuted by (1, 0, 2), three dims": Case(
        lambda q, k, v: torch.bmm(softmax(torch.bmm(q[0], k[0].permute(1, 0, 2))), v[0]), same, 1
    ),
    "174049 a scale that is not the default": Case(
        lambda q, k, v: softmax(scores_of(q, k) * 0.05) @ v, qkv
    ),
    "151098 a scale given to SDPA, whose mask goes away": Case(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool), scale=0.05
        ),
        qkv,
    ),
    "191203 a scale that is a tensor": Case(with_tensor_scale, qkv),
    "195782 the mask comes first": Case(
        lambda q, k, v, m: softmax(m + scores_of(q, k) * 0.3) @ v, lambda: [*qkv(), mask_of(2, 1, 7, 13)]
    ),
    "194444 the root of a symbolic head dim": Case(
        lambda q, k, v: softmax(scores_of(q, k) / q.shape[-1] ** 0.5) @ v, qkv, dynamic=True
    ),
    "111190 symbolic sizes": Case(
        lambda q, k, v, m: softmax(scores_of(q, k) * 0.3 + m) @ v,
        lambda: [*qkv(), mask_of(2, 1, 1, 13)], dynamic=True,
    ),
    "119911 clones on the way": Case(cloned, qkv),
    "119760 a sliced buffer as the mask": Case(
        sliced_buffer, lambda: [*qkv(5, 9), torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()]
    ),
    "137229 an argument named out": Case(
        lambda q, k, v, *, out: softmax(scores_of(q, k) + out) @ v,
        lambda: dict(zip("qkv", qkv(), strict=True)) | {"out": rand(1, 3, 7, 13)},
    ),
    "197832 a tuple of one": Case(lambda q, k, v: (softmax(scores_of(q, k) * 0.3) @ v,), qkv),
    "162019 a bias that is computed late": Case(late_mask, lambda: [*qkv(), rand(1, 3, 7, 13)]),
    "148751 values that are computed late": Case(late_value, lambda: [*qkv(), rand(2, 3, 13, 16)]),
    "194194 q, k and v split from one product": Case(merged, lambda: [rand(2, 9, 32), rand(32, 96)]),
    "unsloth 1265 a bias": Case(
        lambda q, k, v, b: softmax(scores_of(q, k) * 0.3 + b) @ v, lambda: [*qkv(), rand(1, 3, 7, 13)]
    ),
}  # fmt: skip


def test_tensorrt_llm_4789_softcap() -> None:
    """A softcap is fused where flex attention has a backward, and left with a reason where it has none."""
    through_flex(lambda q, k, v: softmax(torch.tanh(scores_of(q, k) / 50) * 50) @ v, qkv(), slack=4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_upstream(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    slack = 4.0 if dtype == torch.float32 else HALF_SLACK
    check(
        case.function, case.inputs(), fused=case.fused, reason=case.reason, dynamic=case.dynamic,
        dtype=dtype, slack=slack,
    )  # fmt: skip


#: Where what Inductor makes of the graph matters: layouts, the order of nodes, stock's own patterns.
COMPILED = ["151098", "194444", "162019", "194194"]
#: Where stock is wrong, or raises: test_stock_misfires.py has these compiled.
MISREAD = ("196468", "195320", "195282", "191260")


@pytest.mark.parametrize("name", [n for n in CASES if n.split()[0] in COMPILED])
def test_upstream_compiled(name: str) -> None:
    case = CASES[name]
    check(case.function, case.inputs(), fused=case.fused, dynamic=case.dynamic, backend="inductor", slack=4.0)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith(MISREAD)])
def test_upstream_compiled_all(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    check(
        case.function, case.inputs(), fused=case.fused, dynamic=case.dynamic, dtype=dtype,
        backend="inductor", slack=HALF_SLACK,
    )  # fmt: skip


def test_vllm_48324_integers() -> None:
    """Integers have no softmax and no fused kernel; the casts around them are a part of the graph."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        return softmax((q @ k.transpose(-2, -1)).float() * 0.1) @ v

    q, k = torch.randint(-3, 4, (2, 3, 7, 8)), torch.randint(-3, 4, (2, 3, 13, 8))
    check(attention, (q, k, rand(2, 3, 13, 8)), fused=0)


def test_195784_half_and_a_wide_mask() -> None:
    """float16 q, k and v, and a float32 mask: the sum of both is float32 in the unfused model."""

    def attention(q: Any, k: Any, v: Any, m: Any) -> Any:
        return softmax(scores_of(q, k) * 0.3 + m).to(v.dtype) @ v

    q, k, v = (t.detach().half().requires_grad_() for t in qkv())
    check(attention, (q, k, v, mask_of(2, 1, 7, 13)), fused=None, slack=HALF_SLACK)


def test_vllm_55720_a_pass_without_patterns() -> None:
    """After an import, something is fused: no pass is empty in silence."""
    testing.assert_fusions(
        lambda q, k, v: softmax(scores_of(q, k) * 0.3) @ v, qkv(), backend=testing.EAGER_AFTER_PASSES
    )


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_unsloth_2319_dropout(p: float) -> None:
    """Dropout on the weights switches nothing off in silence: it is fused, or left with a reason."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        return F.dropout(softmax(scores_of(q, k) * 0.3), p) @ v

    for policy in ("always", "profitable"):
        run = testing.capture(attention, *qkv(), backend=testing.EAGER_AFTER_PASSES, policy=policy)
        assert [bool(s.reason) or s.verdict == "fused" for s in run.sites] == [True]
    assert run.sites[0].verdict == "left to stock"


def test_192042_uuid_knows_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from inductor_fusions import fusions
    from inductor_fusions.driver import passes

    found = set()
    for rank in "0", "1":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        found.add(passes.FusionPass("pre_grad", fusions.ALL).uuid())
    assert len(found) == 1


def test_53366_toggles_are_in_the_key() -> None:
    from inductor_fusions import fusions
    from inductor_fusions.driver import passes

    before = passes.FusionPass("pre_grad", fusions.ALL).uuid()
    with config.patch(empty_rows="ignore"):
        assert passes.FusionPass("pre_grad", fusions.ALL).uuid() != before


#: An operation of the package, in a module of its own, and a program that calls it: no fusion knows it.
OPERATION = """
import torch

@torch.library.custom_op("inductor_fusions::extra", mutates_args={mutates})
def extra(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(x)
    return x.to(torch.bfloat16)

@extra.register_fake
def _(x, out):
    return torch.empty_like(x, dtype=torch.{dtype})
"""
CALLER = """
import torch, inductor_fusions, inductor_fusions.fusions.extra
from torch._dynamo.utils import counters

def call(x):
    out = torch.zeros_like(x)
    rounded = torch.ops.inductor_fusions.extra(x, out)
    return {result}

with torch.no_grad():
    try:
        print(torch.compile(call)(torch.full((8,), 3.0)).tolist()[:2], end=" ")
    except Exception as error:
        print(type(error).__name__, end=" ")
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
print("hit" if hits else "miss")
"""


#: What is read of it, and the declarations (what it overwrites, what it gives) that were wrong and are right.
MENDED = {
    "187319 schema": ("out + 1", ("()", "bfloat16"), ("('out',)", "bfloat16")),
    "160472 fake": ("rounded + 1", ("('out',)", "float16"), ("('out',)", "bfloat16")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MENDED)
def test_an_operation_that_was_mended(name: str, tmp_path: Path) -> None:
    """What an operation of the package says that it overwrites, or gives, is in the key of the caches."""
    result, wrong, right = MENDED[name]
    expected = "[4.0, 4.0]"
    machine = Machine(tmp_path)
    source = machine.root / "inductor_fusions" / "fusions" / "extra.py"

    def found(version: tuple[str, str]) -> str:
        source.write_text(OPERATION.format(mutates=version[0], dtype=version[1]))
        running = machine.start(CALLER.format(result=result))
        out, errors = running.communicate(timeout=300)
        assert running.returncode == 0, errors
        return out.strip()

    assert not found(wrong).startswith(expected)
    assert found(right) == f"{expected} miss"
    assert found(right) == f"{expected} hit"


@pytest.mark.slow
@pytest.mark.parametrize("target_rank", [None, 16], ids=["one rank", "several ranks"])
def test_diffusers_9279_another_adapter(target_rank: int | None, tmp_path: Path) -> None:
    """Adapters that are swapped as PEFT does it need no new code, and stay fused, also where ranks differ."""
    hotswap = pytest.importorskip("peft.utils.hotswap")
    from tests.lora.test_peft import Adapted, ids

    targets, x = ["q_proj", "v_proj"], ids("Llama")
    # Another rank or scale is other code, unless PEFT has padded the ranks and made tensors of the scales.
    saved = {"first": (4, 16), "second": (8, 4)} if target_rank else {"first": (8, 16), "second": (8, 16)}
    for name, (rank, alpha) in saved.items():
        Adapted("Llama", targets, r=rank, lora_alpha=alpha).model.save_pretrained(str(tmp_path / name))
    model = Adapted("Llama", targets)
    if target_rank:
        peft_config = model.model.peft_config
        hotswap.prepare_model_for_compiled_hotswap(model.model, target_rank=target_rank, config=peft_config)
    found = []
    with compiled(model, fullgraph=True) as (call, seen), torch.no_grad():
        for name in ("", "first", "second"):
            if name:
                where = str(tmp_path / name)
                hotswap.hotswap_adapter(model.model, where, adapter_name="default", torch_device="cpu")
            found.append(call(x))
            exact = copy.deepcopy(model).double()(x)
            assert relative(found[-1], exact) < 1e-2
    assert len(seen.graphs) == 1
    assert seen.fused("lora") == 2
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


@pytest.mark.slow
def test_unsloth_5865_biases_and_dropout() -> None:
    """Adapters on all linears of a Qwen, some with a bias, with dropout in training: none is left unsaid."""
    pytest.importorskip("peft")
    from tests.block_mm.support import run
    from tests.lora.test_peft import Adapted, ids

    model = Adapted("Qwen2", lora_dropout=0.05).train()
    biased = [name for name, _ in model.named_parameters() if name.endswith("base_layer.bias")]
    seen = run(model, (ids("Qwen2"),), train=True)
    assert len(biased) == 2 * 3
    assert not seen.products(graph=0)  # forward, every linear is fused with its adapter
    assert not seen.reasons("lora")


@pytest.mark.slow
def test_peft_1199_compiled_adapters() -> None:
    """A model with two adapters is one graph, and has fewer products than it is written with."""
    peft = pytest.importorskip("peft")
    from inductor_fusions.fusions.lora.op import NARROW_MM
    from tests.lora.test_peft import Adapted, ids

    model, x = Adapted("Llama"), ids("Llama")
    other = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    model.model.add_adapter("other", other)
    counts = {}
    for enabled in (False, True):
        toggles = dict.fromkeys(("enabled", "lora", "qkv", "gated_mlp"), enabled)
        with compiled(model, fullgraph=True, **toggles) as (call, seen), torch.no_grad():
            found = call(x)
        (graph,) = seen.graphs
        narrow = sum(node.target is NARROW_MM for node in graph.nodes)
        counts[enabled] = seen.products() + len(seen.calls()) + narrow
        exact = copy.deepcopy(model).double()(x).detach()
        assert relative(found, exact) < 1e-2
    # Two layers of seven linears: each is three products, and one without an adapter.
    assert counts[False] == 2 * 7 * 3
    assert counts[True] <= 2 * 8


@pytest.mark.parametrize("results", ["lora_models_*.json", "models_*.json"])
def test_liger_1330_kernl_232_peft_1199_is_measured(results: str) -> None:
    """No model, with adapters or without, is slower than stock where it was measured, by more than 2% and by
    more than half of both interquartile ranges."""
    folder = Path(__file__).resolve().parents[2] / "bench" / "results"
    rows = [row for path in folder.glob(results) for row in json.loads(path.read_text())["rows"]]
    rows = [row for row in rows if {"stock", "fused"} <= row["median_ms"].keys()]

    def is_slower(row: dict[str, Any]) -> bool:
        spread = math.hypot(*(row["spread"][name] for name in ("stock", "fused"))) / 2
        return bool(row["median_ms"]["fused"] / row["median_ms"]["stock"] - 1 > max(0.02, spread))

    assert rows and not [row["name"] for row in rows if is_slower(row)]
