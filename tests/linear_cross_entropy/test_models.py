"""Models of transformers, untouched, with labels; and what a step has in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from inductor_fusions import config, testing

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "vocab_size": 101,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 101,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {}, "gemma2": {}, "granite": {"logits_scaling": 4.0}, "cohere": {},
    "qwen2": {"tie_word_embeddings": True},
}  # fmt: skip


class Loss(nn.Module):
    """The loss alone of a model, which is differentiated with respect to all parameters."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model.eval(), options  # dropouts are off

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=labels, **self.options).loss
        return loss


def causal(name: str) -> nn.Module:
    found = transformers.AutoConfig.for_model(name, **{**SMALL, **CAUSAL[name]})
    return transformers.AutoModelForCausalLM.from_config(found, attn_implementation="eager")  # type: ignore[no-any-return]


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 101, (2, 12))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def check(model: nn.Module, **options: Any) -> testing.Checked:
    with config.patch(attention=False, qkv=False, lora=False):
        return testing.check(
            model, tokens(), **{"backend": testing.EAGER_AFTER_PASSES, "slack": 8.0, "fused": 1, **options}
        )


@pytest.mark.parametrize("name", CAUSAL)
def test_causal(name: str) -> None:
    """The loss of the next tokens: labels are shifted, logits cast, scaled or capped."""
    run = check(Loss(causal(name), use_cache=False))
    assert run.ours.fused[0].fusion == "linear_cross_entropy"


def test_number_of_items() -> None:
    """As Trainer gives it where gradients are accumulated: a sum that is divided."""
    check(Loss(causal("llama"), use_cache=False, num_items_in_batch=torch.tensor(17)))


def test_gpt2() -> None:
    found = transformers.AutoConfig.for_model("gpt2", **GPT2)
    model = transformers.AutoModelForCausalLM.from_config(found)
    model.loss_type = "ForCausalLM"  # which transformers leaves open, with a warning that breaks the graph
    check(Loss(model, use_cache=False))


def test_masked() -> None:
    """BERT, whose head has a bias."""
    found = transformers.AutoConfig.for_model(
        "bert",
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        vocab_size=101,
    )
    check(Loss(transformers.AutoModelForMaskedLM.from_config(found)))


@pytest.mark.slow
def test_whole_step() -> None:
    """Compiled by Inductor, in bfloat16."""
    check(Loss(causal("llama"), use_cache=False), backend="inductor", dtype=torch.bfloat16, slack=1.0)


def test_returned_logits() -> None:
    """The model itself returns them, and its caller may differentiate them."""

    class Both(Loss):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            found = self.model(input_ids=ids, labels=labels, **self.options)
            return found.loss, found.logits

    check(Both(causal("llama"), use_cache=False), fused=0, reason="used-elsewhere")
