"""Models with PEFT's own adapters: what is fused, and that nothing else changes."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import transformers

from inductor_fusions import config
from inductor_fusions.decisions import tables
from inductor_fusions.fusions.lora import inputs
from inductor_fusions.fusions.lora.accumulate import LORA_ACCUMULATE
from inductor_fusions.fusions.lora.op import LORA_LINEAR, NARROW_MM
from tests.block_mm.support import Run, check, run
from tests.support.arguments import named

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
T5 = {
    "vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 1, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
VIT = {"image_size": 64, "patch_size": 8}


class Adapted(nn.Module):
    """The last hidden state of a Hugging Face model with PEFT's adapters.

    Args:
        targets: names of the linears that get one.
        whole: whether the adapters are float32, as PEFT has them by default.
        options: further ones of `LoraConfig`; and `num_key_value_heads` of a Llama or Qwen.
    """

    def __init__(self, name: str, targets: Any = "all-linear", whole: bool = True, **options: Any) -> None:
        super().__init__()
        values: dict[str, Any] = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if name in ("Llama", "Qwen2"):
            values["num_key_value_heads"] = options.pop("num_key_value_heads", 2)
        values = {"T5": T5, "GPT2": GPT2, "ViT": {**SIZES, **VIT}}.get(name, values)
        if name == "GPT2":
            values = {**values, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        config = getattr(transformers, f"{name}Config")(**values)
        model = getattr(transformers, f"{name}Model")(config).bfloat16().eval()
        options = {"r": 8, "lora_alpha": 16, "init_lora_weights": False, **options}
        adapters = peft.LoraConfig(target_modules=targets, **options)
        self.name = name
        self.model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=whole)

    def forward(self, x: Any) -> Any:
        if self.name == "ViT":
            return self.model(pixel_values=x).last_hidden_state
        extra = {"decoder_input_ids": x} if self.name == "T5" else {"use_cache": False}
        return self.model(input_ids=x, **extra).last_hidden_state


def ids(name: str, tokens: int = 48) -> torch.Tensor:
    """Tokens, or images."""
    return torch.randn(2, 3, 64, 64).bfloat16() if name == "ViT" else torch.randint(3, 128, (2, tokens))


def ops(seen: Run, graph: int = 0) -> Counter[str]:
    """How many calls there are: skinny GEMMs, grouped GEMMs by groups and products, pairs of kernels."""
    found: Counter[str] = Counter()
    for node in seen.graphs[graph].nodes:
        if node.target is NARROW_MM:
            found["narrow"] += 1
        elif node.target is LORA_LINEAR:
            found[f"pair of {len(named(node).w)}"] += 1
    for call in seen.calls(graph):
        groups = list(named(call).groups)
        found[f"{groups[-1] + 1} of {len(groups)}"] += 1
    return found


@pytest.mark.parametrize(("tokens", "whole"), [(48, True), (48, False), (2, True)])
def test_llama_inference(tokens: int, whole: bool) -> None:
    """QKV, output, gate and up, down: a skinny GEMM and a grouped GEMM each; of few tokens two kernels."""
    seen = check(Adapted("Llama", whole=whole), (ids("Llama", tokens),), budget=3.0)
    many = {"narrow": 8, "3 of 6": 2, "1 of 2": 4, "2 of 4": 2}
    assert ops(seen) == (many if tokens == 48 else {"pair of 3": 2, "pair of 1": 4, "pair of 2": 2})
    assert not seen.products() and not seen.reasons("lora")


def test_decoding_of_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the residual stream is: no linear is refused for the memory of the sums in it."""
    monkeypatch.setitem(SIZES, "num_hidden_layers", 16)
    seen = run(Adapted("Llama"), (ids("Llama", 1)[:1],))
    assert ops(seen) == {"pair of 3": 16, "pair of 1": 32, "pair of 2": 16}
    assert not seen.products() and not seen.reasons("lora")


def test_decoding_with_the_measured_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of a device has every linear of a layer of Llama 3.2 1B on one token."""
    monkeypatch.setattr(tables, "device_name", lambda device: "nvidia_h200")
    sizes = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_hidden_layers=1)
    for name, size in sizes.items():
        monkeypatch.setitem(SIZES, name, size)
    model = Adapted("Llama", r=16, num_key_value_heads=8)
    seen = run(model, (ids("Llama", 1)[:1],), policy="profitable")
    assert ops(seen) == {"pair of 3": 1, "pair of 1": 2, "pair of 2": 1}
    assert not seen.reasons("lora")
    assert all("measured" in site.kernel for site in seen.sites if site.fusion == "lora")


@pytest.mark.parametrize("whole", [True, False], ids=["float32", "bfloat16"])
def test_llama_training(whole: bool) -> None:
    seen = check(Adapted("Llama", whole=whole), (ids("Llama"),), train=True, budget=3.0)
    assert ops(seen) == {"narrow": 8, "3 of 6": 2, "1 of 2": 4, "2 of 4": 2}
    backward = ops(seen, 1)
    # The first layer's input has no gradient.
    assert backward["1 of 6"] == 1 and backward["1 of 4"] == 2 and backward["1 of 2"] == 4
    assert not seen.products()


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj"], ["gate_proj", "down_proj"]], ids=str)
def test_some_linears(targets: list[str]) -> None:
    seen = check(Adapted("Llama", targets), (ids("Llama"),), budget=3.0)
    assert seen.fused("lora") == {3: 0, 2: 2, 1: 2}[len(targets)] * (2 if "down_proj" in targets else 1)
    if "q_proj" in targets:
        assert ops(seen)[f"3 of {3 + len(targets)}"] == 2


OTHER_MODELS = {
    "Bert": ["query", "value", "dense"], "GPT2": ["c_attn", "c_proj", "c_fc"], "ViT": "all-linear",
    "T5": "all-linear",
}  # fmt: skip


@pytest.mark.parametrize(("name", "train"), [
    ("Bert", False), ("ViT", False), ("GPT2", False), *(
        pytest.param(name, True, marks=pytest.mark.slow) for name in ("Bert", "GPT2", "T5")
    ),
])  # fmt: skip
def test_other_models(name: str, train: bool) -> None:
    extra = {"fan_in_fan_out": True} if name == "GPT2" else {}
    seen = check(Adapted(name, OTHER_MODELS[name], **extra), (ids(name),), train=train, budget=3.0)
    assert seen.fused("lora") > 8 if train else seen.fused("lora") and not seen.reasons("lora")


def test_merged_is_the_same_model() -> None:
    """The fused adapters give what PEFT's own merge gives, but for its rounding of the weights."""
    model = Adapted("Llama")
    x = ids("Llama")
    merged = copy.deepcopy(model).double()
    merged.model.merge_adapter()
    with torch.no_grad():
        exact = merged(x)
    found = run(model, (x,)).outputs[0].double()
    assert float((found - exact).norm() / exact.norm()) < 2e-2


def test_several_adapters() -> None:
    """Two active adapters on one linear are summed."""
    model = Adapted("Llama", ["q_proj"])
    other = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model.model.add_adapter("other", other)
    model.model.base_model.set_adapter(["default", "other"])
    seen = check(model, (ids("Llama"),), budget=3.0)
    assert seen.fused("lora") == 2 and ops(seen)["3 of 5"] == 2


@pytest.mark.parametrize("whole", [True, False], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_bias_of_the_adapters(name: str, whole: bool) -> None:
    """Of Qwen2 the base has one as well."""
    model = Adapted(name, ["q_proj", "v_proj"], whole=whole, lora_bias=True)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key and key.endswith("bias"):
                parameter.normal_()
    seen = check(model, (ids(name),), budget=3.0)
    assert seen.fused("lora") == 2 and ops(seen)["3 of 5"] == 2
    seen = check(model, (ids(name, 4),), budget=3.0)
    assert ops(seen)["pair of 3"] == 2
    assert check(model, (ids(name),), train=True, budget=3.0).fused("lora") > 2


def test_dora_is_left_to_stock() -> None:
    seen = check(Adapted("Llama", ["q_proj"], use_dora=True), (ids("Llama"),), budget=3.0)
    assert not seen.fused("lora")
    assert seen.reasons("lora")


@pytest.mark.parametrize("whole", [True, False], ids=["float32", "bfloat16"])
def test_embedding_is_left_to_stock(whole: bool) -> None:
    """An adapter of an embedding looks its A up: there is no product to add to."""
    seen = check(Adapted("Llama", ["embed_tokens"], whole=whole), (ids("Llama"),), budget=3.0)
    assert not seen.fused("lora")
    assert seen.codes("lora") == ["no-matrix"]


@pytest.mark.parametrize("whole", [True, False], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("base", "shape"), [
    (nn.Conv2d(8, 64, 3, padding=1), (2, 8, 8, 8)),
    (nn.Conv2d(16, 64, 1), (2, 16, 8, 8)),
    (nn.Conv1d(16, 64, 3, stride=2), (2, 16, 9)),
], ids=["3 x 3", "1 x 1", "1-D"])  # fmt: skip
def test_convolution_is_left_to_stock(base: nn.Module, shape: tuple[int, ...], whole: bool) -> None:
    model = nn.Sequential(copy.deepcopy(base), nn.ReLU()).bfloat16()
    adapters = peft.LoraConfig(r=8, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=whole)
    seen = check(model, (torch.randn(shape).bfloat16(),), budget=3.0)
    assert not seen.fused("lora")
    assert seen.codes("lora") == ["no-matrix"]


@pytest.mark.parametrize("kind", ["other indices", "other input", "wide kernel"])
def test_sums_that_are_no_adapters(kind: str) -> None:
    """Towers: nothing is reported."""

    def looked_up(x: Any, y: Any) -> Any:
        return F.embedding(x, w) + F.embedding(y, a) @ b

    def convolved(x: Any, y: Any) -> Any:
        h = F.conv2d(y, down, padding=1)
        wide = kind == "wide kernel"
        return F.conv2d(x, base, padding=1) + F.conv2d(h, up3 if wide else up, padding=int(wide))

    w, a, b = torch.randn(128, 64), torch.randn(128, 8), torch.randn(8, 64)
    base, down, up, up3 = (
        torch.randn(shape) for shape in ((64, 8, 3, 3), (4, 8, 3, 3), (64, 4, 1, 1), (64, 4, 3, 3))
    )
    if kind == "other indices":
        seen = run(looked_up, (torch.randint(0, 128, (48,)), torch.randint(0, 128, (48,))))
    else:
        x = torch.randn(2, 8, 8, 8)
        seen = run(convolved, (x, torch.randn(2, 8, 8, 8) if kind == "other input" else x))
    assert not seen.reasons("lora")


@pytest.mark.parametrize("whole", [True, False], ids=["float32", "bfloat16"])
def test_masks_of_dropouts(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each linear has its own: q, k and v are one product that reads three, gate and up two."""
    monkeypatch.setattr(inputs, "check_device", lambda value: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    model = Adapted("Llama", whole=whole, lora_dropout=0.1).train()
    x = ids("Llama")
    torch.manual_seed(1)
    ours = run(model, (x,), train=True)
    with config.patch(lora=False):
        torch.manual_seed(1)
        stock = run(model, (x,), train=True, policy="profitable")
        torch.manual_seed(2)
        other = run(model, (x,), train=True, policy="profitable")
    layers = SIZES["num_hidden_layers"]
    read = [len(named(node).kept) for node in ours.graphs[0].nodes if node.target is NARROW_MM]
    assert sorted(read) == sorted([3, 1, 2, 1] * layers)
    assert ours.fused("lora_input") == 7 * layers and not stock.fused("lora")
    added = [len(named(node).kept) for node in ours.graphs[1].nodes if node.target is LORA_ACCUMULATE]
    # The input of the first layer takes no gradient.
    assert sorted(added) == sorted([3, 1, 2, 1] * layers)[:-1]
    # Another mask is another value.
    for y, z, w in zip(*((*r.outputs, *r.grads) for r in (ours, stock, other)), strict=True):
        assert y is not None and z is not None and w is not None
        assert float((y - z).float().norm()) < 0.05 * float((w - z).float().norm())
