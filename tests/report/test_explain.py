"""explain(): every candidate with its verdict, and nothing of the caller's changed."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import inductor_fusions
from inductor_fusions import Explanation, Site, config, explain


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


def keeps_weights(q, k, v):
    weights = torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1)
    return weights @ v, weights


def sdpa(q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k, v)


def inputs(length: int = 5) -> list[torch.Tensor]:
    return [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]


class Layer(nn.Module):
    def __init__(self, keeps: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.keeps = nn.Linear(16, 48), nn.Linear(16, 16), keeps

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        result = keeps_weights(q, k, v) if self.keeps else (attention(q, k, v), 0.0)
        return x + self.out(result[0].transpose(1, 2).flatten(2)) + torch.as_tensor(result[1]).mean()


class Model(nn.Module):
    def __init__(self, count: int = 3, keeps: int = -1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i == keeps) for i in range(count))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@pytest.fixture(autouse=True)
def always() -> object:
    with config.patch(policy="always"):
        yield


def test_verdicts() -> None:
    found = explain(Model(keeps=1), torch.randn(2, 5, 16))
    assert [site.verdict for site in found] == ["fused", "rejected", "fused"]
    assert (found.count(), found.count("rejected"), len(found)) == (2, 1, 3)
    with pytest.raises(ValueError, match="verdict must be fused or"):
        found.count("refused")
    fused, rejected, _ = found.sites
    line = attention.__code__.co_firstlineno + 1
    assert fused.source.startswith(f"{__file__}:{line} in attention: return torch.softmax(")
    assert (fused.module, rejected.module) == ("layers.0", "layers.1")
    assert fused.kernel == "sdpa" and fused.backend and not fused.reason
    assert rejected.reason and "need_weights=False" in rejected.hint and not rejected.kernel
    assert fused.details["scores"] == "float32[2, 2, 5, 5]"
    scores = 2 * 2 * 5 * 5
    assert fused.saved == {"bytes": 4 * 4 * scores, "flops": 0}
    assert rejected.saved == {}


def test_causal_saves_half() -> None:
    def causal(q, k, v):
        hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(hidden, float("-inf"))
        return torch.softmax(scores, dim=-1) @ v

    (site,) = explain(causal, *inputs()).sites
    assert "is_causal" in site.kernel
    assert site.saved["flops"] == (4 * 2 * 5 * 5 * 8) // 2


def test_left_to_stock() -> None:
    (site,) = explain(sdpa, *inputs()).sites
    assert site.verdict == "left to stock" and "already" in site.reason


def test_policy_in_force() -> None:
    with config.patch(policy="profitable"):
        found = explain(attention, *inputs())
    assert [site.verdict for site in found] == ["left to stock"]
    assert "INDUCTOR_FUSIONS_POLICY=always" in found.sites[0].hint
    assert found.facts["policy"] == "profitable"


@pytest.mark.parametrize("train", [False, True])
def test_graphs(train: bool) -> None:
    """The graph with candidates, before and after."""
    found = explain(Model(1), torch.randn(2, 5, 16), train=train)
    (pair,) = found.graphs
    assert pair.stage == "pre_grad" and pair.sites == found.sites
    operations = [[line.operation for line in lines] for lines in (pair.before, pair.after)]
    assert "softmax" in operations[0] and "scaled_dot_product_attention" not in operations[0]
    assert "softmax" not in operations[1] and "scaled_dot_product_attention" in operations[1]
    region = [line for line in pair.before if line.site == 0]
    assert {line.operation for line in region} >= {"matmul", "softmax"}
    (call,) = [line for line in pair.after if line.operation == "scaled_dot_product_attention"]
    assert call.site == 0 and call.module == "layers.0"
    assert call.name.startswith("inductor_fusions_attention_")


def test_nested_body() -> None:
    """A checkpointed region is part of the graph."""

    def fn(q, k, v):
        return torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False)

    found = explain(fn, *inputs(), train=True)
    assert [site.verdict for site in found] == ["fused"]
    (line,) = [line for line in found.graphs[0].after if line.operation == "scaled_dot_product_attention"]
    assert line.depth == 1 and line.site == 0


def test_graph_break() -> None:
    def fn(q, k, v):
        x = attention(q, k, v)
        torch._dynamo.graph_break()
        return attention(x, k, v)

    found = explain(fn, *inputs())
    assert [site.verdict for site in found] == ["fused", "fused"]
    assert len(found.graphs) == 2


def test_dynamic() -> None:
    found = explain(attention, *inputs(), dynamic=True)
    assert found.count() == 1
    assert "s" in found.sites[0].details["scores"]


def test_compiled_module() -> None:
    """What is given may be compiled already: it is explained anew."""
    for compiled in (torch.compile(Model(1)), torch.compile(attention)):
        args = [torch.randn(2, 5, 16)] if isinstance(compiled, nn.Module) else inputs()
        assert explain(compiled, *args).count() == 1


def test_raises_what_the_model_raises() -> None:
    with pytest.raises(Exception, match=r"shape|size|broadcast"):
        explain(attention, torch.randn(2, 3), torch.randn(4, 5), torch.randn(1, 1))


# -- isolation ------------------------------------------------------------------------------------


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph, example_inputs):
        self.count += 1
        return graph.forward


def breaks(q, k, v):
    x = attention(q, k, v)
    torch._dynamo.graph_break()
    return x * 2


@pytest.mark.parametrize("fn", [attention, breaks])
def test_compiled_code_stays(fn) -> None:
    """More often than Dynamo's limit of recompiles, with other shapes, and in between."""
    backend = Counting()
    compiled = torch.compile(fn, backend=backend)
    compiled(*inputs())
    before = backend.count
    for length in range(3, 13):
        assert explain(fn, *inputs(length)).count() == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(*inputs())
    assert backend.count == before
    compiled(*inputs(7))  # is still allowed to recompile, and knows of two lengths alone
    assert backend.count == 2 * before


def test_sizes_are_not_remembered() -> None:
    """Dynamo makes a size dynamic that changes; those of explain() do not count."""
    explain(attention, *inputs(5))
    explain(attention, *inputs(6))
    shapes = []

    def backend(graph, example_inputs):
        shapes.extend(tuple(x.shape) for x in example_inputs if isinstance(x, torch.Tensor))
        return graph.forward

    torch.compile(attention, backend=backend)(*inputs(7))
    assert shapes == [(1, 2, 7, 8)] * 3


def test_nothing_else_changes() -> None:
    model, x = Model(1), torch.randn(2, 5, 16, requires_grad=True)
    model(x).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    buffers = {name: (b, b.clone()) for name, b in model.named_buffers()}
    counters["inductor"]["mine"] = 3
    counted = {name: Counter(values) for name, values in counters.items()}
    state = torch.get_rng_state()
    known = inductor_fusions.report().sites
    files = sorted(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.json"))
    assert explain(model, x, train=True).count() == 1
    assert {name: Counter(values) for name, values in counters.items()} == counted
    assert torch.equal(torch.get_rng_state(), state)
    assert inductor_fusions.report().sites == known
    assert sorted(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.json")) == files
    for name, buffer in model.named_buffers():
        assert buffer is buffers[name][0] and torch.equal(buffer, buffers[name][1])
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


def test_inputs_stay() -> None:
    x = torch.ones(3, 3)
    explain(lambda x: x.add_(1.0) @ x.mT, x)
    assert torch.equal(x, torch.ones(3, 3))


# -- forms ----------------------------------------------------------------------------------------


def test_text() -> None:
    text = str(explain(Model(4, keeps=2), torch.randn(2, 5, 16)))
    rows = [line.split() for line in text.splitlines()]
    assert ["3", "attention", "fused", "sdpa", "->"] in [row[:5] for row in rows]
    assert ["1", "attention", "rejected"] in [row[:3] for row in rows]
    for shown in ("layers.0", "layers.3", "layers.2", "need_weights=False", "float32[2, 2, 5, 5]"):
        assert shown in text
    assert text.endswith("Model: 3 fused, 1 rejected")


def test_no_candidate() -> None:
    found = explain(torch.relu, torch.randn(3))
    assert found.sites == [] and found.graphs == []
    assert "no candidate was found" in str(found) and "are off" not in str(found)
    with config.patch(enabled=False):
        found = explain(nn.Linear(4, 4), torch.randn(2, 4))
        assert str(found).endswith("no candidate was found: the fusions are off")
    inductor_fusions.disable()
    try:
        inductor_fusions.clear()
        assert str(inductor_fusions.report()).endswith("the fusions are off")
    finally:
        inductor_fusions.enable()
    assert "No candidate was seen" in found.to_html()


#: What to_json() has in schema 1: fields may be added, none may go or change its type.
SITE_FIELDS = {
    "fusion": str, "verdict": str, "node": str, "reason": str, "hint": str, "kernel": str, "source": str,
    "details": dict, "module": str, "backend": str, "saved": dict, "code": str,
}  # fmt: skip


def test_json() -> None:
    found = explain(Model(2), torch.randn(2, 5, 16), train=True)
    data = json.loads(found.to_json())
    assert data["schema"] == 1 and data["title"] == "Model" and data["train"] is True
    assert {"torch", "device", "policy"} <= data["facts"].keys() and data["seconds"] > 0
    for site in data["sites"]:
        assert {name: type(site[name]) for name in SITE_FIELDS} == SITE_FIELDS
    assert [Site.from_dict(site) for site in data["sites"]] == found.sites


def test_later_fields_are_left_out() -> None:
    """A file of a later version can be read."""
    site = explain(attention, *inputs()).to_dict()["sites"][0]
    assert Site.from_dict({**site, "later": 1}) == Site.from_dict(site)


def test_public_name() -> None:
    assert inductor_fusions.explain is explain and inductor_fusions.Explanation is Explanation
    with pytest.raises(AttributeError):
        inductor_fusions.nothing  # noqa: B018


def forces(x, w):
    """As a potential gives them, in inference too."""
    with torch.enable_grad():
        energy = torch.tanh(x @ w).sum()
        return torch.autograd.grad(energy, x)[0]


@pytest.mark.parametrize("gpu", [None, "nvidia_h200"])
@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_an_input_that_requires_a_gradient(gpu, train):
    """Inference or not, the copy that is run requires one where the input does."""
    x = torch.randn(64, 128, requires_grad=True)
    explained = explain(forces, x, torch.randn(128, 256), train=train, gpu=gpu)
    assert [site.fusion for site in explained.sites] == ["linear_epilogue"]
    assert x.grad is None


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_the_gradient_of_an_input_alone(train):
    """All weights are frozen: in training there is a backward for the sake of the input."""

    def adapted(x, w, a, b):
        return x @ w + x @ a @ b

    weights = [torch.randn(s).bfloat16() for s in ((128, 256), (128, 8), (8, 256))]
    x = torch.randn(64, 128).bfloat16()
    counts = [
        sum(site.fusion == "lora" for site in explain(adapted, each, *weights, train=train).sites)
        for each in (x, x.clone().requires_grad_())
    ]
    assert counts == [1, 1 + train]
