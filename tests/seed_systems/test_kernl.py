"""Rows K1 to K8, K12 and K13: what Kernl did for Hugging Face models with a backend of its own."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import inductor_fusions
from inductor_fusions import config, testing
from inductor_fusions.fusions.linear_epilogue import MOST_ROWS
from tests import blocks
from tests.gpu import templates
from tests.models import zoo
from tests.seed_systems.support import LOWEST, QUICK, check, launched, leaf, padding, qkv
from tests.support.devices import on
from tests.support.errors import assert_within_budget

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


# -- K1 to K5: attention ----------------------------------------------------------------------------


def bert(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    weights = F.softmax(scores + mask, dim=-1)
    return torch.matmul(F.dropout(weights, 0.1, training=False), v)


def test_K1_bert_attention(device: torch.device) -> None:
    """Any head size, scale and dtype; training too."""
    inputs = (*qkv(dim=64), padding(2, 24))
    check(lambda q, k, v, m: torch.softmax(q @ k.transpose(-1, -2) / 8.0 + m, -1) @ v, inputs, device)
    for dim in (16, 40, 80, 128):
        check(bert, (*qkv(dim=dim), padding(2, 24)), device, backend=QUICK)
    for dtype in (torch.float16, torch.bfloat16):
        mask = padding(2, 24, torch.finfo(dtype).min)
        check(bert, (*qkv(dim=32), mask), device, dtype=dtype, backend=QUICK)


def t5(q: Any, k: Any, v: Any, bias: Any) -> Any:
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += bias
    weights = F.softmax(scores.float(), dim=-1).type_as(scores)
    return torch.matmul(weights, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_K2_t5_attention(dtype: torch.dtype, device: torch.device) -> None:
    """The bias of positions is kept, and has its gradient."""
    seen = check(t5, (*qkv(), leaf(1, 3, 24, 24)), device, dtype=dtype)
    assert "3" in seen.errors  # the gradient of the bias


def whisper(q: Any, k: Any, v: Any) -> Any:
    """(batch * heads, length, dim), as Whisper has them."""
    weights = F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
    return torch.bmm(F.dropout(weights, p=0.0, training=False), v)


@pytest.mark.parametrize(("q_len", "kv_len"), [(24, 24), (24, 37), (1, 37)], ids=["self", "cross", "skinny"])
def test_K3_whisper_attention(q_len: int, kv_len: int, device: torch.device) -> None:
    """3-D products and 4-D ones; one query."""
    q, k, v = qkv(q_len, kv_len)
    flat = [t.detach().flatten(0, 1).requires_grad_() for t in (q, k, v)]
    check(whisper, flat, device, backend="inductor" if q_len == 1 else QUICK)
    check(lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, (q, k, v), device, backend=QUICK)


SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)


def speech_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    configuration = transformers.WhisperConfig(
        vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=16,
        max_source_positions=20, max_target_positions=32, **SPECIAL,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration._from_config(
        configuration, attn_implementation="eager"
    )
    return model.eval(), {"input_features": torch.randn(2, 16, 40)}


def text_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    configuration = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration._from_config(configuration, attn_implementation="eager")
    return model.eval(), {"input_ids": torch.randint(3, 96, (2, 11))}


def decoded(model: nn.Module, step: Callable[..., Any], inputs: dict[str, Any], ids: Any) -> torch.Tensor:
    """Logits of a decoder that is given its tokens one by one, with a static cache of keys and values.

    The first step is eager, as a prefill is: it makes the caches, which no CUDA graph may own.
    """
    from transformers.cache_utils import EncoderDecoderCache, StaticCache

    sizes = model.config.get_text_config(decoder=True)
    memory = model.get_encoder()(**inputs)
    cache = EncoderDecoderCache(
        StaticCache(config=sizes, max_cache_len=8),
        StaticCache(config=sizes, max_cache_len=memory[0].shape[1]),
    )
    logits = []
    for place in range(ids.shape[1]):
        found = (step if place else model)(
            encoder_outputs=memory, decoder_input_ids=ids[:, place : place + 1], past_key_values=cache,
            use_cache=True, return_dict=True,
        )  # fmt: skip
        logits.append(found.logits.clone())
    return torch.cat(logits, 1)


@pytest.mark.slow
@pytest.mark.parametrize("make", [speech_model, text_model], ids=["whisper", "t5"])
def test_K3_decoding_step_by_step(make: Callable[[], Any], device: torch.device) -> None:
    """A static cache under reduce-overhead: self- and cross-attention of each step are fused."""
    model, inputs = make()
    model, inputs = on(device, model), on(device, inputs)
    ids = torch.randint(3, 96, (2, 4)).to(device)
    with torch.no_grad(), config.patch(policy="always"):
        wide = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
        exact = copy.deepcopy(model).double()(**wide, decoder_input_ids=ids).logits
        eager = decoded(model, model, inputs, ids)
        inductor_fusions.clear()
        found = decoded(model, torch.compile(model, mode="reduce-overhead"), inputs, ids)
    # Each step is as exact as in eager mode: the cache holds what the steps before it wrote.
    assert_within_budget(*(t.unbind(1) for t in (found, eager, exact)))
    sites = [site for site in inductor_fusions.report() if site.fusion == "attention"]
    assert sites and all(site.verdict == "fused" for site in sites), sites
    lengths = {site.details["scores"].split(", ")[2] for site in sites}
    assert lengths == {"1"}  # one query
    keys = {site.details["scores"].split(", ")[3].rstrip("]") for site in sites}
    assert len(keys) == 2  # of the cache, and of the memory


def test_K4_causal(device: torch.device) -> None:
    """Proved from the mask: its nearest relatives are not taken for it."""

    def attention(hidden: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def fn(q: Any, k: Any, v: Any) -> Any:
            i = torch.arange(q.shape[-2], device=q.device)[:, None]
            j = torch.arange(k.shape[-2], device=q.device)
            scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(hidden(i, j), LOWEST)
            return torch.softmax(scores, -1) @ v

        return fn

    check(attention(lambda i, j: j > i), qkv(), device, kernel="is_causal")
    for hidden in (lambda i, j: j >= i + 2, lambda i, j: j < i, lambda i, j: (j > i) & (j != 5)):
        seen = check(attention(hidden), qkv(), device, backend=QUICK)
        assert "is_causal" not in seen.ours.fused[0].kernel
    seen = check(attention(lambda i, j: j > i), qkv(24, 30), device, backend=QUICK)
    assert "is_causal" not in seen.ours.fused[0].kernel


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_K5_autocast(dtype: torch.dtype, device: torch.device) -> None:
    """torch.autocast around a compiled module in float32."""
    torch.manual_seed(0)
    model, x = blocks.Attention(), leaf(2, 12, blocks.WIDTH, grad=False)
    exact = model.double()(x.double()).to(device)
    model, x = model.float().to(device), x.to(device)

    def result(fn: Callable[..., Any]) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(device.type, dtype=dtype):
            out: torch.Tensor = fn(x)
        assert out.dtype == dtype
        return out

    inductor_fusions.clear()
    with config.patch(policy="always"):
        ours = result(torch.compile(model))
    assert inductor_fusions.report().count("fused", "attention") == 1
    assert_within_budget(ours, result(model), exact)


# -- K6 to K8: norms, linears, CUDA graphs -----------------------------------------------------------


NORMS = {
    "LayerNorm": lambda x, y, w, b: F.layer_norm(x, (256,), w, b, 1e-5),
    "LayerNorm and residual": lambda x, y, w, b: F.layer_norm(x + y, (256,), w, b, 1e-12),
    "residual that goes on": lambda x, y, w, b: (x + y, F.layer_norm(x + y, (256,), w, b, 1e-5)),
    "RMSNorm": lambda x, y, w, b: F.rms_norm(x, (256,), w, 1e-6),
    "RMSNorm written out, and residual": lambda x, y, w, b: rms_norm(x + y, w, 1e-6),
}


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@pytest.mark.parametrize("name", NORMS)
def test_K6_norms(name: str, device: torch.device) -> None:
    """Stock Inductor already makes one kernel of a norm, with its residual too."""
    pytest.importorskip("triton")
    tensors = [torch.randn(*shape).half() for shape in ((4, 16, 256), (4, 16, 256), (256,), (256,))]
    kernels, calls = launched(NORMS[name], tensors, device)
    assert len(kernels) == 1 and not calls, (kernels, calls)
    if device.type == "cuda":  # elsewhere nothing was run
        testing.assert_close_to_eager(NORMS[name], on(device, tensors), train=False)


ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "none": lambda y: y,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_K7_linear_and_activation(name: str) -> None:
    """One kernel; without an activation the library's product is one already."""
    pytest.importorskip("triton")
    from tests.block_mm import support

    def fn(x: Any, w: Any, b: Any) -> Any:
        return ACTIVATIONS[name](F.linear(x, w, b))

    args = (support.rand(2, 16, 64), support.rand(32, 64), support.rand(32))
    seen = support.check(fn, args, train=True, budget=2.0)
    assert seen.fused("linear_epilogue") == (name != "none")
    # On rows: behind the view of a batch, torch 2.11 leaves any template's activation to a second kernel.
    with config.patch(policy="always", strict=True):
        kernels, calls = launched(fn, (support.rand(32, 64), *args[1:]))
    assert (kernels and not calls) if name != "none" else calls == ["extern_kernels.addmm"]
    assert len(kernels) + len(calls) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 512])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_K7_linear_and_activation_on_a_gpu(name: str, rows: int) -> None:
    fn = nn.Sequential(nn.Linear(256, 512), *([] if name == "none" else [Activation(name)]))
    x = leaf(rows, 256)
    found = check(fn, (x,), torch.device("cuda"), dtype=torch.bfloat16, fused=None)
    fused = name != "none" or rows <= MOST_ROWS
    assert len([s for s in found.ours.fused if s.fusion == "linear_epilogue"]) == fused


class Activation(nn.Module):
    """One of `ACTIVATIONS`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.name](x)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_K8_cuda_graphs(train: bool, device: torch.device) -> None:
    """mode="reduce-overhead" with every fusion: right at each replay; on a GPU nothing stops the graph."""
    from torch._dynamo.utils import counters

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = blocks.model(1).to(device, dtype)
    xs = [blocks.batch(seed=seed).to(device, dtype) for seed in range(1 if device.type == "cpu" else 4)]
    inductor_fusions.clear()
    with config.patch(policy="always"), torch.set_grad_enabled(train):
        compiled = torch.compile(model, mode="reduce-overhead")
        for x in xs:
            torch.compiler.cudagraph_mark_step_begin()
            found = results(compiled, model, x, train)
            limit = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
            torch.testing.assert_close(found, results(model, model, x, train), **limit)
    assert inductor_fusions.report().count("fused", "attention") == 1
    if device.type == "cuda":
        assert counters["inductor"]["cudagraph_skips"] == 0
        for fusion in ("qkv",) if train else ("qkv", "gated_mlp"):
            assert inductor_fusions.report().count("fused", fusion) >= 1, fusion


def results(fn: Callable[..., Any], model: nn.Module, x: torch.Tensor, train: bool) -> list[torch.Tensor]:
    """The output, and the gradients of the parameters."""
    model.zero_grad()
    out = fn(x)
    if train:
        out.float().square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [out.detach().clone(), *grads]


@pytest.mark.gpu
@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_K8_every_template(name: str) -> None:
    """Each kernel of the package is captured, and right at each replay: as without a graph, on new inputs."""
    from torch._dynamo.utils import counters

    template = templates.TEMPLATES[name]
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < template.least:
        pytest.skip(f"needs compute capability {template.least / 10}")
    before = counters["inductor"]["cudagraph_skips"]
    with template.active():
        run = templates.compiled(template)
        replayed = templates.compiled(template, mode="reduce-overhead")
        for seed in range(4):
            inputs = template.inputs("cuda", seed)
            torch.compiler.cudagraph_mark_step_begin()
            found = [t.clone() for t in replayed(inputs)]
            for ours, expected in zip(found, run(inputs), strict=True):
                limit = 1e-4 if expected.dtype == torch.float32 else 2e-2
                torch.testing.assert_close(ours, expected, rtol=limit, atol=limit)
    assert counters["inductor"]["cudagraph_skips"] == before


# -- K12, K13: models ---------------------------------------------------------------------------------


def test_K12_llama_layer(device: torch.device) -> None:
    """Kernels of a whole layer on a GPU, named, before and after."""
    pytest.importorskip("triton")
    model = blocks.model(1).bfloat16().eval()
    x = blocks.batch(4).bfloat16()
    with config.patch(enabled=False):
        stock, stock_calls = launched(model, (x,), device)
    with config.patch(policy="always", strict=True):
        ours, our_calls = launched(model, (x,), device)
    # Seven linears, the two products of attention, and a softmax between them.
    assert sorted(stock_calls) == ["extern_kernels.bmm"] * 2 + ["extern_kernels.mm"] * 7
    assert sum("softmax" in name for name in stock) == 1, stock
    assert not any("_tem_" in name for name in stock)
    # QKV with its three outputs, and the gated MLP; attention; the output and the down projection.
    assert sum("_tem_" in name for name in ours) == 2 and not any("softmax" in name for name in ours)
    (attention, *products) = our_calls
    assert "_scaled_dot_product" in attention and products == ["extern_kernels.mm"] * 2
    # Around them Inductor's: both norms with their residuals, and RoPE.
    norms = [name for name in ours if re.search("rsqrt|rms_norm", name) and "_tem_" not in name]
    assert len(norms) == 2, ours
    assert len(ours) + len(our_calls) <= len(stock) + len(stock_calls) - 7
    if device.type == "cuda":
        run = check(model, (x,), device, fused=None, train=False, dtype=torch.bfloat16, slack=4.0)
        fused = Counter(site.fusion for site in run.ours.fused)
        assert fused == {"attention": 1, "qkv": 1, "gated_mlp": 1}


def speech() -> dict[str, Any]:
    ids = torch.randint(3, zoo.VOCABULARY, (2, 6))
    return {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": ids}


T5 = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
SPEECH = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
SPEECH |= {name: value for name, value in zoo.BOTH.items() if name != "max_position_embeddings"}
FAMILIES = {
    "bert": zoo.Architecture("BertModel", "BertConfig", zoo.ENCODER, zoo.tokens),
    "roberta": zoo.Architecture("RobertaModel", "RobertaConfig", zoo.ENCODER, zoo.tokens),
    "t5": zoo.Architecture("T5Model", "T5Config", T5, zoo.seq2seq, 6),
    "whisper": zoo.Architecture("WhisperModel", "WhisperConfig", SPEECH, speech, 6),
    "llama": zoo.Architecture("LlamaModel", "LlamaConfig", zoo.GROUPED, zoo.tokens),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_K13_models(name: str, device: torch.device) -> None:
    """Every attention of a whole model, in inference and in training."""
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    check(family.build(), family.inputs(), device, fused=family.sites, train=True, backend=QUICK, slack=8.0)


@pytest.mark.slow
def test_K13_model_in_full(device: torch.device) -> None:
    """As Inductor compiles it."""
    pytest.importorskip("transformers")
    family = FAMILIES["roberta"]
    found = check(family.build(), family.inputs(), device, fused=None, train=False, slack=8.0)
    assert sum(site.fusion == "attention" for site in found.ours.fused) == 2
