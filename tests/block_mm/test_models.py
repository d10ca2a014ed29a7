"""Whole Hugging Face models: which of their linears become one, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers

from tests.block_mm.support import Run, check
from tests.support.arguments import named

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
VIT = {"image_size": 32, "patch_size": 8, "hidden_act": "gelu"}
T5 = {
    "vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2, "num_heads": 4,
    "feed_forward_proj": "gated-gelu", "pad_token_id": 0,
}  # fmt: skip


class Last(nn.Module):
    """A model that returns its last hidden state alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        values: dict[str, Any] = {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if name in ("Llama", "Qwen2"):
            values["num_key_value_heads"] = 2
        values = {**SIZES, **VIT} if name == "ViT" else T5 if name == "T5" else values
        config = getattr(transformers, f"{name}Config")(**values)
        self.name, self.model = name, getattr(transformers, f"{name}Model")(config)

    def forward(self, x: Any) -> Any:
        if self.name == "ViT":
            return self.model(pixel_values=x).last_hidden_state
        extra = {"decoder_input_ids": x} if self.name == "T5" else {}
        return self.model(input_ids=x, use_cache=False, **extra).last_hidden_state


def seen(name: str, train: bool) -> Run:
    model = Last(name).eval().bfloat16()
    x = torch.randn(2, 3, 32, 32).bfloat16() if name == "ViT" else torch.randint(3, 128, (2, 32))
    # Embeddings and norms get the sums of many roundings: their gradients differ by luck.
    return check(model, (x,), train=train, budget=3.0)


def shapes(run: Run, graph: int = 0) -> Counter[str]:
    """How many calls there are: of n groups ("3"), of a gate ("gate"), of a sum of n products ("sum 3")."""
    found: Counter[str] = Counter()
    for call in run.calls(graph):
        groups = list(named(call).groups)
        sums = len(groups) > 1 and groups[-1] == 0
        found["gate" if named(call).gated else f"sum {len(groups)}" if sums else str(len(groups))] += 1
    return found


@pytest.mark.parametrize(("name", "calls", "left"), [
    ("Llama", {"3": 2, "gate": 2}, 4),
    ("Qwen2", {"3": 2, "gate": 2}, 4),
    ("Bert", {"3": 2, "1": 2}, 4),
    ("ViT", {"3": 2, "1": 2}, 4),
])  # fmt: skip
def test_inference(name: str, calls: dict[str, int], left: int) -> None:
    """Each layer's projections are one; what is left are the output and the down projections."""
    run = seen(name, train=False)
    assert shapes(run) == calls and run.products() == left
    assert not run.reasons("qkv") and not run.reasons("gated_mlp") and not run.reasons("linear_epilogue")


def test_training_of_a_decoder() -> None:
    """Forward: QKV, and gate and up. Backward: their gradients, of the input and of the weights."""
    run = seen("Llama", train=True)
    assert shapes(run) == {"3": 2, "2": 2}
    assert shapes(run, 1) == {"sum 3": 2, "3": 2, "sum 2": 2, "2": 2}


@pytest.mark.slow
def test_keys_and_values_of_a_decoder_are_one() -> None:
    """T5 in training: the cross-attention of both decoder layers reads one memory."""
    run = seen("T5", train=True)
    assert shapes(run)["4"] == 1 and shapes(run, 1)["sum 4"] == 1
