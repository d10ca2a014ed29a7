"""The models that `bench.models` measures: which, under which load, with which inputs.

Models have the real configurations of `configs/models/` and random weights.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.common import Json

CONFIGS = Path(__file__).parent.parent / "configs" / "models"
CAUSAL = ("llama", "gpt2", "opt", "bloom", "gemma2", "gpt_oss", "mistral", "qwen3")
#: Encoders with decoders: architecture -> tokens that the decoder is given.
DECODED = {"T5Model": 128, "WhisperModel": 128}
#: A causal model is compared with float64 on so many tokens, or on twice its window where that is more.
REFERENCE_TOKENS = 1024
BY_HAND = "causal_by_hand"
WITHOUT = "without_attention"


# Cases -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapters:
    """PEFT's adapters on a frozen model, none of which is zero.

    Attributes:
        rank: of each.
        dtype: PEFT makes them float32 by default.
        dropout: in front of each.
        targets: names of the linears that have one; "default" are those of PEFT for the model.
    """

    rank: int = 16
    dtype: str = "float32"
    dropout: float = 0.0
    targets: str = "all-linear"


@dataclass(frozen=True)
class Case:
    """One model under one load.

    Attributes:
        name: names the row.
        model: file in `configs/models`, without the ending.
        attn: the model's `attn_implementation`.
        batch: samples.
        seq: tokens of a sample, those of the encoder where there is a decoder too; 0 for images and sound.
        train: a forward and a backward, instead of a forward.
        padded: the batch has a padding mask: to the right, lengths spread from half of `seq` to `seq`, so
            that three quarters of all tokens are real.
        documents: so many documents of equal length are packed into each sample, as `position_ids` that
            start again; 0: one, and no `position_ids`.
        mode: mode of torch.compile.
        dropout: rate of every dropout.
        use_cache: the model returns a KV cache.
        dtype: of weights and activations.
        by_hand: the attention of the `limit` variant: "causal" (SDPA with is_causal and enable_gqa, and no
            mask), "flex_attention" (that of Hugging Face), or "" for none.
        autotuned: it is measured under max-autotune too.
        bounded: it is measured without its attentions too: no fusion of them can gain more.
        adapters: they are trained, in place of the weights; None: the model has none.
    """

    name: str
    model: str
    attn: str
    batch: int
    seq: int = 0
    train: bool = False
    padded: bool = False
    documents: int = 0
    mode: str = "default"
    dropout: float = 0.0
    use_cache: bool = False
    dtype: str = "bfloat16"
    by_hand: str = ""
    autotuned: bool = False
    bounded: bool = False
    adapters: Adapters | None = None

    @property
    def key(self) -> str:
        """Its name."""
        return self.name

    @property
    def draws(self) -> bool:
        """Whether it has a dropout, which may draw other numbers in each variant."""
        return self.dropout > 0 or (self.adapters is not None and self.adapters.dropout > 0)


def named(name: str, **others: Any) -> Case:
    """The case that a name says: the model first, `bN` samples, `sN` tokens; eager attention unless it has
    another."""
    words = name.split()
    size = {word[0]: int(word[1:]) for word in words if re.fullmatch(r"[bs]\d+", word)}
    told: Json = {
        "model": words[0], "attn": "sdpa" if "sdpa" in words else "eager", "batch": size.get("b", 1),
        "seq": size.get("s", 0), "train": "train" in words, "padded": "padded" in words,
        "use_cache": "cache" in words, "mode": "reduce-overhead" if "reduce-overhead" in words else "default",
    }  # fmt: skip
    return Case(name, **(told | others))


CASES = [
    # Masks, scores and biases that SDPA alone cannot tell.
    named("llama-1b sdpa padded b4 s2048", by_hand="causal"),
    named("gemma2-8l eager b2 s4096", by_hand="flex_attention", bounded=True),
    named("gpt-oss-8l eager b2 s4096", by_hand="flex_attention"),
    named("mistral-8l sdpa b1 s8192", by_hand="flex_attention"),
    named("mistral-8l sdpa b1 s32768", by_hand="flex_attention"),
    named("llama-1b sdpa packed b1 s8192 train", documents=16, by_hand="flex_attention", bounded=True),
    named("llama-1b sdpa padded b4 s2048 train", by_hand="causal"),
    named("gemma2-8l eager b2 s4096 train", by_hand="flex_attention", bounded=True),
    named("llama-1b sdpa padded b2 s8192", by_hand="causal"),
    named("llama-1b sdpa padded b2 s8192 train", by_hand="causal"),
    named("mistral-8l eager b1 s32768"),
    named("mistral-8l eager b1 s8192"),
    named("swinv2-tiny b64"),
    named("gpt-oss-8l eager b2 s4096 train", by_hand="flex_attention"),
    named("t5-base encoder b16 s512 train", model="t5-base-encoder"),
    named("swin-tiny b64 train"),
    named("mistral-8l sdpa b1 s8192 train", by_hand="flex_attention"),
    # Plain ones.
    named("llama-1b sdpa b1 s8192", by_hand="causal"),
    named("llama-1b sdpa b1 s8192 train", by_hand="causal"),
    named("bert-base eager padded b32 s512", autotuned=True),
    named("bert-base eager b32 s512 train", autotuned=True),
    named("gpt2 eager b16 s1024", autotuned=True),
    named("llama-1b eager b4 s2048", by_hand="causal"),
    named("bloom padded b8 s1024"),
    named("mpnet-base b32 s384"),
    named("mpnet-base padded b32 s384"),
    named("opt eager padded b8 s1024"),
    named("vit-base eager b64", autotuned=True),
    named("deberta-v2-base b8 s384"),
    named("deberta-v2-base padded b8 s384"),
    named("t5-base encoder b16 s512", model="t5-base-encoder"),
    named("t5-base encoder padded b16 s512", model="t5-base-encoder"),
    named("swin-tiny b64"),
    named("llama-1b sdpa b4 s2048", by_hand="causal", autotuned=True),
    named("llama-1b sdpa b2 s2048 train", by_hand="causal", autotuned=True),
    named("bert-base eager b1 s128"),
    named("bert-base eager b1 s128 reduce-overhead"),
    named("llama-1b sdpa b1 s1 reduce-overhead"),
    named("bert-base eager padded dropout b32 s512 train", dropout=0.1),
    named("llama-1b sdpa cache b4 s2048", by_hand="causal"),
    # Further families, and training of those above that are measured in inference alone.
    named("roberta-base eager padded b32 s512"),
    named("roberta-base eager b32 s512 train"),
    named("gpt2 eager b16 s1024 train"),
    named("llama-8b-8l sdpa b1 s4096", by_hand="causal"),
    named("llama-8b-8l sdpa b1 s4096 train", by_hand="causal"),
    named("qwen3-8l sdpa b1 s4096", by_hand="causal"),
    named("qwen3-8l sdpa b1 s4096 train", by_hand="causal"),
    named("t5-base padded b16 s512"),
    named("t5-base b16 s512 train"),
    named("whisper-small eager b8"),
    named("whisper-small eager b8 train"),
    named("t5-base padded b16 s512 reduce-overhead"),
    named("whisper-small eager b8 reduce-overhead"),
    named("vit-base eager b64 train"),
]

#: Two layers of models, most of whose widths no table has.
MODELS_OF_WIDTHS = (
    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-4b", "llama-3b", "phi3-mini", "gemma2",
    "olmo2-7b", "mistral-nemo", "smollm-360m", "starcoder2-3b",
)  # fmt: skip
#: From one token to 8,192, in inference and in training.
LOADS = (
    "b1 s1", "b2 s1024 train", "b1 s128", "b16 s1", "b1 s8192", "b8 s127 train", "b3 s333", "b1 s2048 train",
    "b4 s4", "b2 s2048", "b1 s64", "b1 s4096 train",
)  # fmt: skip
#: Each model under three of the loads, with attentions in turn.
WIDTHS = [
    named(f"widths {model} {attn} {load}", model=f"{model}-2l")
    for i, model in enumerate(MODELS_OF_WIDTHS)
    for attn, load in zip(("sdpa", "eager", "sdpa"), LOADS[i % 4 :: 4], strict=True)
]


def quick_case(case: Case) -> Case:
    """The case in a size that a CPU runs in seconds."""
    return replace(case, batch=min(case.batch, 2), seq=min(case.seq, 64))


QUICK = {"num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "vocab_size": 1000, "image_size": 112}
QUICK |= {"sliding_window": 16, "intermediate_size": 512}
QUICK |= {"num_decoder_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 64}
QUICK_SWIN = {"depths": [2, 2], "num_heads": [3, 6]}


# Models ------------------------------------------------------------------------------------------------


def model_config(case: Case, quick: bool) -> tuple[str, Json]:
    """Class name and configuration values; every dropout is the case's."""
    values: Json = json.loads((CONFIGS / f"{case.model}.json").read_text())
    architecture = str(values.pop("architectures")[0])
    for name, value in values.items():
        if "drop" in name and isinstance(value, float):
            values[name] = case.dropout
    if quick:
        values |= {name: value for name, value in QUICK.items() if name in values}
        if "depths" in values:
            values |= QUICK_SWIN
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            if values.get(name) is not None:
                values[name] %= 3
    return architecture, values


def build(
    case: Case, attn: str, device: str, quick: bool, experts: str | None = None, auto: str = "AutoModel"
) -> torch.nn.Module:
    """The model with random weights, the same at each call; `experts` names the implementation of a mixture
    of experts, instead of the default, and `auto` the class of transformers that gives it its head."""
    import transformers

    architecture, values = model_config(case, quick)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    options = {"attn_implementation": attn, "dtype": getattr(torch, case.dtype)}
    if experts is not None and "num_local_experts" in values:
        options["experts_implementation"] = experts
    torch.manual_seed(0)
    with torch.device(device):
        if architecture == "T5EncoderModel":  # AutoModel would add the decoder
            model = transformers.T5EncoderModel._from_config(config, **options)
        else:
            model = getattr(transformers, auto).from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start at zero and norms at one: a mistake in a bias would not show.
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.02 * torch.randn_like(parameter))
    if case.adapters is not None:
        import peft

        own = case.adapters
        targets = {"all-linear": "all-linear", "default": None}.get(own.targets, own.targets.split(","))
        wanted = peft.LoraConfig(
            r=own.rank, lora_alpha=2 * own.rank, lora_dropout=own.dropout, target_modules=targets,
            init_lora_weights=False,
        )  # fmt: skip
        model = peft.get_peft_model(model, wanted, autocast_adapter_dtype=own.dtype == "float32")
    built: torch.nn.Module = model.train(case.train)
    return built


def supports_sdpa(model: torch.nn.Module) -> bool:
    """Whether Hugging Face has this model on F.scaled_dot_product_attention."""
    return bool(getattr(model, "_supports_sdpa", False))


def share_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Make `target` use the parameters and buffers of `source`, a model of the same structure."""
    for name, module in target.named_modules():
        twin = source.get_submodule(name)
        module._parameters, module._buffers = twin._parameters, twin._buffers


def register_attentions() -> None:
    """Register the causal attention that someone would write by hand, without padding, and none at all."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    def without(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        # All three are read, so that their projections and gradients are still computed.
        groups = query.shape[1] // key.shape[1]
        out = query + (key + value).repeat_interleave(groups, dim=1)
        return out.transpose(1, 2).contiguous(), None

    def no_mask(*_: Any, **__: Any) -> None:
        return None

    for name, function in ((BY_HAND, attention), (WITHOUT, without)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, no_mask)


def make_inputs(case: Case, values: Json, device: str) -> dict[str, Any]:
    """Keyword arguments of the model."""
    generator = torch.Generator(device).manual_seed(1)
    decoded = DECODED.get(model_config(case, False)[0], 0)
    if values["model_type"] == "whisper":
        shape = (case.batch, values["num_mel_bins"], 2 * values["max_source_positions"])
        sound = torch.randn(shape, generator=generator, device=device).to(getattr(torch, case.dtype))
        return {"input_features": sound, **_decoder_inputs(case, decoded, values, generator)}
    if not case.seq:
        size = values["image_size"]
        shape = (case.batch, values["num_channels"], size, size)
        pixels = torch.randn(shape, generator=generator, device=device)
        return {"pixel_values": pixels.to(getattr(torch, case.dtype))}
    ids = torch.randint(3, values["vocab_size"], (case.batch, case.seq), generator=generator, device=device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if decoded:
        inputs |= _decoder_inputs(case, min(decoded, case.seq), values, generator)
    if case.padded:
        lengths = torch.linspace(case.seq // 2, case.seq, case.batch, device=device).long()
        keys = torch.arange(case.seq, device=device)
        inputs["attention_mask"] = (keys < lengths[:, None]).long()
    if case.documents:
        positions = torch.arange(case.seq, device=device) % (case.seq // case.documents)
        inputs["position_ids"] = positions.expand(case.batch, -1).contiguous()
    if values["model_type"] in CAUSAL:
        inputs["use_cache"] = case.use_cache
    return inputs


def _decoder_inputs(case: Case, tokens: int, values: Json, generator: torch.Generator) -> dict[str, Any]:
    """Tokens of the decoder of an encoder with a decoder."""
    shape = (case.batch, tokens)
    ids = torch.randint(3, values["vocab_size"], shape, generator=generator, device=generator.device)
    return {"decoder_input_ids": ids, "use_cache": False}


def first_tokens(inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The inputs of the first sample, and of its first tokens where there are tokens."""
    return {
        name: x if not isinstance(x, torch.Tensor) else x[:1] if x.ndim != 2 else x[:1, :tokens]
        for name, x in inputs.items()
    }


def reference_tokens(case: Case, values: Json) -> int:
    """How many tokens of the first sample are compared with float64: for causal models, which do not see
    what comes after them, the first ones."""
    if values["model_type"] == "whisper":
        return DECODED["WhisperModel"]
    if values["model_type"] not in CAUSAL:
        return max(1, case.seq)
    window = values.get("sliding_window") or 0
    return min(case.seq, max(REFERENCE_TOKENS, 2 * window if window < case.seq else 0))


def compared_inputs(case: Case, values: Json, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of the same shapes whose first sample has padding among the tokens that are compared."""
    if not case.padded:
        return inputs
    mask = inputs["attention_mask"].clone()
    mask[0, 3 * reference_tokens(case, values) // 4 :] = 0
    return {**inputs, "attention_mask": mask}
