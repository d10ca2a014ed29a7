"""bench.compile_cost: calls and CPU seconds of compiles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench import compile_cost
from bench.docs_steps import compile_section
from bench.provenance import environment
from devtools.ledger import compiling
from devtools.ledger.entries import entries


def attention(q, k, v):
    return torch.softmax(q @ k.mT * 0.125, -1) @ v


def test_calls_are_counted(monkeypatch):
    """They are nearly the same each time, and those of a backward are among them."""
    tensors = tuple(torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3))
    monkeypatch.setattr(compile_cost, "made", lambda name: (attention, tensors))
    monkeypatch.setattr(compiling, "set_up", lambda: None)
    found = {variant: compile_cost.measure("attention training", variant) for variant in ("stock", "fused")}
    again = compile_cost.measure("attention training", "fused")
    assert again["calls"] == pytest.approx(found["fused"]["calls"], rel=0.01)
    assert found["fused"]["launches"] != found["stock"]["launches"]
    assert compile_cost.measure("attention inference", "stock")["calls"] < found["stock"]["calls"]


def test_cases_are_those_of_the_ledger():
    assert set(compile_cost.CASES) - {entry.name for entry in entries()} == {compile_cost.CONVOLUTIONS}


def test_inputs_by_name():
    """Also a model whose output is not a tensor is a function of tensors."""

    class Model(nn.Module):
        def forward(self, ids, scale, use_cache):
            assert use_cache is False
            return type("Output", (), {"last_hidden_state": ids * scale})

    inputs = {"ids": torch.ones(2), "use_cache": False, "scale": torch.full((2,), 3.0)}
    model = compile_cost._Positional(Model(), inputs)
    assert model(inputs["ids"], inputs["scale"]).tolist() == [3.0, 3.0]


def test_page():
    row = {
        "key": "a", "calls": {"stock": 2e6, "fused": 3e6}, "ratio": 1.5,
        "cpu_s": {"stock": 1.0, "fused": 2.0}, "launches": {"stock": 4, "fused": 3},
    }  # fmt: skip
    text = compile_section({**environment("cpu", "bench.compile_cost"), "rows": [row]})
    assert "| a | 2.0 | 3.0 | 1.500 | 1.0 | 2.0 | 4 | 3 |" in text
