"""verify(): the errors of a model with the fusions and without."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import fx, nn

import inductor_fusions
from inductor_fusions import config, verify
from inductor_fusions.checking import budget, runs
from inductor_fusions.checking.runs import Float64Mode
from inductor_fusions.fusion import Candidate, Fusion


def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return {"out": attention(q, k, v) * torch.sigmoid(x), "length": torch.tensor(x.shape[-1])}


def inputs() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]


class Scaled(Candidate):
    """A rewrite of sigmoid that is wrong by a factor."""

    def __init__(self, anchor: fx.Node, factor: float) -> None:
        self.anchor, self.factor = anchor, factor

    def guard(self) -> None: ...

    def rewrite(self) -> str:
        graph = self.anchor.graph
        with graph.inserting_before(self.anchor):
            call = graph.call_function(torch.sigmoid, self.anchor.args)
            call.meta["example_value"] = self.anchor.meta["example_value"]
            scaled = graph.call_function(torch.mul, (call, self.factor))
            scaled.meta["example_value"] = self.anchor.meta["example_value"]
        self.anchor.replace_all_uses_with(scaled)
        graph.erase_node(self.anchor)
        return "scaled"


def scaling(factor: float) -> Fusion:
    found = Fusion("scaling", "pre_grad", "sigmoid to a multiple of it")
    found.anchor(lambda: [torch.sigmoid])(lambda scope, match: Scaled(match.output_node(), factor))
    return found


def test_another_default_device() -> None:
    """Cotangents are on the device of the outputs."""
    model, x = nn.Linear(8, 4), torch.randn(2, 8, requires_grad=True)
    with torch.device("meta"):
        found = verify(model, x)
    assert found.ok and len(found.rows[0].errors) == 4


def test_right() -> None:
    model = Model()
    found = verify(model, torch.randn(2, 5, 8, requires_grad=True), policy="always")
    assert found.ok and found.verdict() == "Model: ok; sites fused: 1"
    (row,) = found.rows
    assert row.fusions == ("attention",) and row.fused == 1 and row.problems == []
    assert {error.name for error in row.errors} == {"output[0]", "0", "qkv.weight", "qkv.bias"}
    assert all(0 < error.ours <= error.budget < 1e-5 for error in row.errors)
    assert model.calls == 0
    text = str(found)
    assert "attention" in text and "gradient of" in text and text.endswith(found.verdict())


def test_inference() -> None:
    found = verify(attention, *inputs(), train=False, policy="always")
    assert {error.name for error in found.rows[0].errors} == {"output[0]"}
    assert found.rows[0].worst(gradient=True) is None


def test_nothing_fused() -> None:
    with config.patch(attention=False):
        found = verify(attention, *inputs(), policy="always")
    assert found.ok and "nothing was fused" in found.verdict()


def test_wrong_fusion_is_found(also_run: Callable[[Fusion], None]) -> None:
    """With both on it is wrong; with each alone one sees which it is."""
    also_run(scaling(1.001))
    found = verify(Model(), torch.randn(2, 5, 8), policy="always")
    assert not found.ok and "WRONG" in found.verdict()
    both, alone, wrong = found.rows
    assert both.fusions == ("attention", "scaling") and both.problems
    assert alone.fusions == ("attention",) and not alone.problems
    assert wrong.fusions == ("scaling",) and wrong.problems
    assert wrong.worst(gradient=False).ours == pytest.approx(1e-3, rel=0.05)
    assert "over budget" in str(found) and "output[0]: error" in str(found)


def test_budget() -> None:
    """A budget that not even rounding keeps."""
    found = verify(attention, *inputs(), policy="always", factor=0.0, slack=0.0)
    assert not found.ok and len(found.rows[0].problems) == 4


def test_json() -> None:
    data = json.loads(verify(attention, *inputs(), policy="always").to_json())
    assert (data["schema"], data["ok"], data["title"]) == (1, True, "attention")
    (row,) = data["rows"]
    assert row["fusions"] == ["attention"] and row["fused"] == 1
    assert {"name", "gradient", "ours", "stock", "budget", "problem"} == set(row["errors"][0])


def test_random_numbers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        verify(model, torch.randn(2, 4))
    assert verify(model.eval(), torch.randn(2, 4)).ok


def test_leaves_no_trace() -> None:
    given = inputs()
    known, state = inductor_fusions.report().sites, torch.get_rng_state()
    verify(attention, *given, policy="always")
    assert inductor_fusions.report().sites == known
    assert torch.equal(torch.get_rng_state(), state)
    assert config.policy == "profitable" and config.enabled


def test_an_error_that_is_no_number_is_the_worst() -> None:
    for errors in ([0.1, float("nan"), 0.2], [float("nan"), 0.1], [0.1, float("nan")]):
        assert math.isnan(budget.worst(errors))
    assert budget.worst([0.1, 0.3, 0.2]) == 0.3


class Experts(nn.Module):
    """As mixtures of experts compute them: rows sorted by expert, and one product for each."""

    def __init__(self, ends: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(len(ends), 8, 16) / 4)
        self.register_buffer("ends", torch.tensor(ends, dtype=torch.int32))

    def forward(self, x):
        hidden = torch.nn.functional.grouped_mm(x.flatten(0, -2), self.weight, offs=self.ends)
        return attention(*[hidden.view(*x.shape[:-1], 16)] * 3)


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_grouped_products(train: bool) -> None:
    """torch has none of float64, which the reference is computed in."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    x = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    found = verify(Experts((3, 3, 10)).bfloat16(), x, train=train)
    assert found.ok, found


@pytest.mark.parametrize("kind", ["rows", "columns", "inner", "stacks"])
def test_grouped_products_in_float64(kind: str) -> None:
    """The same as in float32, of which torch has one."""
    ends = torch.tensor([4, 4, 12], dtype=torch.int32)
    a, b = {
        "rows": ((12, 8), (3, 8, 16)), "columns": ((3, 16, 8), (8, 12)), "inner": ((16, 12), (12, 8)),
        "stacks": ((3, 16, 8), (3, 8, 16)),
    }[kind]  # fmt: skip
    a, b, offs = torch.randn(a), torch.randn(b), None if kind == "stacks" else ends
    narrow = torch._grouped_mm(a, b, offs=offs)
    with Float64Mode():
        wide = torch._grouped_mm(a.double(), b.double(), offs)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), narrow, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpoints_run_again_in_float64(early_stop: bool) -> None:
    """What the backward runs again casts to the dtypes of the forward."""

    def inner(q, k, v):
        return attention(q.float(), k.float(), v.float()).to(torch.bfloat16)

    def checkpointed(q, k, v):
        with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            return torch.utils.checkpoint.checkpoint(inner, q, k, v, use_reentrant=False)

    given = [x.detach().bfloat16().requires_grad_() for x in inputs()]
    plain = runs.exact(inner, given, {}, True, [torch.ones(1, 2, 5, 8)])[1]
    found = runs.exact(checkpointed, given, {}, True, [torch.ones(1, 2, 5, 8)])[1]
    assert all(torch.equal(plain[name], found[name]) for name in ("0", "1", "2"))
    assert verify(checkpointed, *given, policy="always").ok
