"""The four models of the demonstration in three sizes, and their inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..decisions import tables


@dataclass(frozen=True)
class Case:
    """One model under one load.

    Attributes:
        title: how the table names it.
        model: file in configs/models.
        architecture: class in transformers.
        attn: "eager" or "sdpa".
        batch, seq: size of the input.
        sites: the number of attentions in a configuration.
        overrides: values of the configuration that differ from the file's.
        padded: whether the input comes with a padding mask.
        train: whether a step is forward and backward.
        causal: whether a token depends on earlier ones alone.
    """

    title: str
    model: str
    architecture: str
    attn: str
    batch: int
    seq: int
    sites: Callable[[Any], int]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    padded: bool = False
    train: bool = False
    causal: bool = False


def _one_a_layer(config: Any) -> int:
    return int(config.num_hidden_layers)


def _encoder_and_decoder(config: Any) -> int:
    """One in each layer of the encoder; in each of the decoder, one on itself and one on the encoder."""
    return int(config.num_layers + 2 * config.num_decoder_layers)


_BERT = Case(
    "BERT-base, eager, padded", "bert-base", "BertModel", "eager", 32, 512, _one_a_layer, padded=True
)
_LLAMA = Case("Llama, sdpa, no mask", "llama-1b", "LlamaModel", "sdpa", 1, 8192, _one_a_layer, causal=True)
_T5 = Case("T5-base, eager", "t5-base-encoder", "T5Model", "eager", 16, 512, _encoder_and_decoder)

# Llama-3.2-1B with everything divided by four, but the head dim and the number of layers.
_LLAMA_QUARTER = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32064,
    "bos_token_id": 32062,
    "eos_token_id": 32063,
    "num_hidden_layers": 2,
}
_TINY_VOCABULARY = {"vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2}
_TINY_T5 = {"d_model": 64, "d_kv": 32, "d_ff": 128, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}


def cases(size: str) -> list[Case]:
    """The four models in one of three sizes.

    Args:
        size: "full" for a large GPU; "small": fewer layers and tokens, for a few CPU cores; "tiny", to try.
    """
    if size == "full":
        return [_BERT, _LLAMA, replace(_LLAMA, title="Llama, training step", train=True), _T5]
    if size == "small":
        bert = replace(_BERT, batch=2, seq=512, overrides={"num_hidden_layers": 3})
        llama = replace(_LLAMA, seq=2048, overrides=_LLAMA_QUARTER)
        t5 = replace(_T5, batch=1, seq=512, overrides={"num_layers": 2, "num_decoder_layers": 2})
        train = replace(llama, title="Llama, training step", seq=1024, train=True)
    else:
        bert = replace(_BERT, batch=2, seq=64, overrides={**_TINY, "vocab_size": 1000})
        tiny_llama = {**_TINY, "num_key_value_heads": 1, "head_dim": 32, **_TINY_VOCABULARY}
        llama = replace(_LLAMA, seq=64, overrides=tiny_llama)
        t5 = replace(_T5, batch=2, seq=48, overrides={**_TINY_T5, "vocab_size": 1000})
        train = replace(llama, title="Llama, training step", train=True)
    return [bert, llama, train, t5]


def build(case: Case, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The model with random weights, and with every dropout at 0."""
    import transformers

    file = tables.folder() / "models" / f"{case.model}.json"
    values: dict[str, Any] = {**json.loads(file.read_text("utf-8")), **case.overrides}
    values |= {name: 0.0 for name, value in values.items() if "drop" in name and isinstance(value, float)}
    del values["architectures"]
    model_config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(device):
        made = getattr(transformers, case.architecture)._from_config(
            model_config, attn_implementation=case.attn, dtype=dtype
        )
    model: torch.nn.Module = made.train(case.train)
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases start at 0 and norms at 1, where a mistake in one would not show.
            if parameter.dim() == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def make_inputs(case: Case, vocabulary: int, device: torch.device, sample: int = 0) -> dict[str, Any]:
    """Keyword arguments of the model's forward; each sample has other tokens."""
    generator = torch.Generator(device).manual_seed(1 + sample)

    def tokens(length: int) -> torch.Tensor:
        shape = (case.batch, length)
        return torch.randint(3, vocabulary, shape, generator=generator, device=device)

    inputs: dict[str, Any] = {"input_ids": tokens(case.seq)}
    if case.architecture == "T5Model":
        inputs["decoder_input_ids"] = tokens(case.seq)
    if case.padded:
        lengths = torch.linspace(case.seq // 2, case.seq, case.batch, device=device).long()
        inputs["attention_mask"] = (torch.arange(case.seq, device=device) < lengths[:, None]).long()
    if case.architecture != "BertModel":
        inputs["use_cache"] = False
    return inputs
