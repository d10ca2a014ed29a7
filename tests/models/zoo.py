"""Tiny, randomly initialised models of Hugging Face architectures, with inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BATCH, LENGTH, TARGET, VOCABULARY = 2, 11, 6, 96
WIDTH, HEADS, SHARED = 32, 4, 2


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        model: class of the model, by its name in transformers.
        config: class of its configuration.
        options: arguments of the configuration.
        inputs: makes the inputs of one call.
        sites: number of attentions.
    """

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    sites: int = 2

    def build(self, attention: str = "eager", **options: Any) -> nn.Module:
        """The model in evaluation mode, with random weights."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**{**self.options, **options})
        config.use_cache = False
        model = getattr(transformers, self.model)._from_config(config, attn_implementation=attention)
        return model.eval()


def tokens(**more: Any) -> dict[str, Any]:
    """A batch of which one sample is padded at its end."""
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[0, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask, **more}


def left_padded() -> dict[str, Any]:
    inputs = tokens()
    inputs["attention_mask"] = inputs["attention_mask"].flip(-1)
    return inputs


def seq2seq() -> dict[str, Any]:
    return tokens(decoder_input_ids=torch.randint(3, VOCABULARY, (BATCH, TARGET)))


def pixels(size: int = 16) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(BATCH, 3, size, size)}


SPECIAL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
ENCODER = dict(
    vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
    intermediate_size=48, max_position_embeddings=32, pad_token_id=0,
)  # fmt: skip
DECODER = {**ENCODER, **SPECIAL}
GROUPED = {**DECODER, "num_key_value_heads": SHARED}
VISION = dict(
    hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48,
    image_size=16, patch_size=4,
)  # fmt: skip
BOTH = dict(
    vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32,
    **SPECIAL,
)  # fmt: skip
