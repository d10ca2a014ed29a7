"""The survey of architectures: what it says of one that is right, wrong, or cannot be made."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from inductor_fusions import config
from tests.models import survey


def test_right() -> None:
    row = survey.survey("bert", "eager", train=False)
    assert (row["state"], row["sizes"], row["fused"], row["left"]) == ("right", "small", {"attention": 2}, {})


def test_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every error is over a budget below 0."""
    monkeypatch.setattr(survey, "SLACK", -1e9)
    row = survey.survey("bert", "eager", train=False)
    assert row["state"] == "wrong" and "budget" in row["reason"]


def test_not_made() -> None:
    """GroupViT takes no SDPA, in whatever size."""
    row = survey.survey("groupvit", "sdpa", train=False)
    assert (
        row["state"] == "not made" and "small: ValueError" in row["reason"] and "few heads: " in row["reason"]
    )


def test_fails_without_the_fusions() -> None:
    """What Dynamo cannot trace says nothing of them."""
    model, inputs, _ = survey.make("bert", "eager")
    with config.patch(enabled=True):
        assert survey._runs_without(model, inputs, False)
        assert not survey._runs_without(model, {"input_ids": "no tensor"}, False)


def test_draws() -> None:
    model, inputs, _ = survey.make("bert", "eager")
    assert not survey._draws(model, inputs) and survey._draws(model.train(), inputs)


def test_few_heads() -> None:
    """They are as wide as they were: GPT-J rotates 64 of the 256 elements of each."""
    values = {"n_embd": 4096, "n_head": 16, "rotary_dim": 64, "vocab_size": 50400, "n_inner": None}
    inner = {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": None, "head_dim": 64}
    found = survey.few_heads({**values, "text_config": {**inner, "model_type": "b"}})
    assert found == {
        "n_embd": 1024, "n_head": 4, "rotary_dim": 64, "vocab_size": 96, "n_inner": None,
        "text_config": {"model_type": "b", "hidden_size": 256, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "head_dim": 64},
    }  # fmt: skip


def test_small() -> None:
    """Numbers fit each other, in a configuration inside as well."""
    found = survey.small(
        {"model_type": "a", "hidden_size": 768, "eos_token_id": [5, 9], "pad_token_id": 50000, "scale": 0.5,
         "text_config": {"model_type": "b", "num_attention_heads": 12, "vocab_size": 320, "use_cache": True}}
    )  # fmt: skip
    assert found == {
        "hidden_size": 32, "eos_token_id": 2, "pad_token_id": 0, "scale": 0.5,
        "text_config": {"model_type": "b", "num_attention_heads": 4, "vocab_size": 96, "use_cache": True},
    }  # fmt: skip
    assert {"bert", "llama", "t5", "vit"} <= set(survey.architectures())
