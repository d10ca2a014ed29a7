"""The cases of `inductor_fusions bench`: what is measured, beside which limit, and how it is timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench import cases, common, layers, models_lora, modules, recommendation, suites
from bench.attention import inputs
from bench.attention.rows import rows_of
from inductor_fusions import testing
from inductor_fusions.worker import clock


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases(device: str) -> None:
    found = suites.entries(device)
    assert len({entry.name for entry in found}) == len(found)
    assert {entry.suite for entry in found} == set(suites.SUITES)
    assert {entry.suite for entry in found if entry.quick} == set(suites.SUITES)
    assert {entry.train for entry in found} == {True, False}
    lines = [case.line for case in cases.cases(device) if case.line]
    assert all(lines.count(line) > 1 for line in lines)


FAMILIES = (
    "bert-base", "roberta-base", "gpt2", "llama-1b", "llama-8b-8l", "qwen3-8l", "gemma2-8l", "t5-base",
    "whisper-small", "vit-base", "swin-tiny", "dlrm outer product", "dlrm dot products", "llama-1b lora",
)  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_in_both_modes(family: str, device: str) -> None:
    if "lora" in family:
        pytest.importorskip("peft")
    found = [e for e in suites.select(["models"], None, False, device) if e.name.startswith(f"{family} ")]
    assert {entry.train for entry in found} == {False, True}


@pytest.mark.parametrize("name", ["qkv", "gated_mlp", "linear_gelu", "lora", "attention"])
def test_operations_have_their_limit(name: str) -> None:
    """Beside stock stands what the products take alone, or what someone writes by hand."""
    found = [case for case in cases.cases("cpu") if case.name.startswith(f"{name} ") and not case.train]
    assert found and all("limit" in case.make("cpu").hands for case in found)


def test_causal_mask_is_made_in_the_graph() -> None:
    """As models do: then it is proved, and gone."""
    (case,) = rows_of([(1, 4, 48, 16)], ["causal"], dtype="float32", trains=[False], kv_heads=2)
    work = cases.AttentionWork(case, "cpu")
    given = inputs.allocate(case, "cpu")
    inputs.fill(case, given, 0)
    seen = testing.capture(work.function("fused"), *given.arguments("unfused"))
    assert [site.kernel for site in seen.sites] == ["sdpa, is_causal, enable_gqa"]
    exact = work.function("limit")(*given.arguments("sdpa"))
    torch.testing.assert_close(seen.tensors[0], exact, rtol=1e-5, atol=1e-5)


def test_limit_of_a_pair_is_its_products() -> None:
    x = torch.randn(5, 8)
    pair, first = layers.GatedMLP(8, 12, down=False), layers.MLP(8, 12, down=False)
    gate, up = layers.bare_pair(pair)(x)
    torch.testing.assert_close(F.silu(gate) * up, pair(x))
    torch.testing.assert_close(F.gelu(layers.bare(first)(x) + first.up.bias), first(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "train", [False, pytest.param(True, marks=pytest.mark.long)], ids=["inference", "training"]
)
@pytest.mark.parametrize("interaction", recommendation.MODELS)
def test_model_of_recommendation(interaction: str, train: bool) -> None:
    """Compiled, compared and timed; on a CPU its interaction is left to stock, and counted."""
    (case,) = (c for c in recommendation.cases("cpu") if c.train is train and interaction in c.name)
    before = torch.get_float32_matmul_precision()
    measured = suites.measure(case, suites.Settings("cpu", quick=True), lambda text: None)
    assert measured["correct"] is True and not measured["failed"] and measured["ratio"]["stock/fused"] > 0
    assert ("grad" in measured["error"]["fused"]) is train
    (site,) = (what for what in measured["sites"]["what"] if what.startswith(interaction.split()[0]))
    assert "left to stock" in site
    assert torch.get_float32_matmul_precision() == before


def test_float32_is_multiplied_as_tf32_where_a_case_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the time of that case, also where it fails."""
    seen: list[str] = []

    def measured(*_: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        raise ValueError

    monkeypatch.setattr(suites, "_measured", measured)
    before = torch.get_float32_matmul_precision()
    for tf32 in (True, False):
        case = cases.Case("models", "a", "float32", False, lambda device: None, tf32=tf32)
        with pytest.raises(ValueError):
            suites.measure(case, suites.Settings("cpu"), lambda text: None)
    assert seen == ["high", before] and torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("correct", [True, False])
def test_frozen_model_is_the_limit_of_adapters(correct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = {"fused/frozen": 2.0} if correct else {}
    rows = [
        {
            "failed": {}, "compile_s": {"stock": 2.0}, "correct": correct, "error": {},
            "median_ms": {"stock": 4.0, "fused": 2.0, "frozen": 1.0}, "spread": {"stock": 0.0, "fused": 0.0},
            "peak_gib": {}, "ratio": {"stock/fused": ratio, **ratios} if correct else {},
        }
        for ratio in (2.0, 2.2)
    ]  # fmt: skip
    left = iter(rows)
    monkeypatch.setattr(suites.whole_models, "measure", lambda *_: next(left))
    monkeypatch.setattr(suites, "free", lambda device: None)
    row = suites.measure_model(models_lora.CASES[0], suites.Settings("cpu", repeats=2), lambda text: None)
    assert row["median_ms"] == {"stock": 4.0, "fused": 2.0, "limit": 1.0}
    assert row["ratio"] == ({"stock/fused": 2.1, "fused/limit": 2.0} if correct else {})


@pytest.mark.slow
@pytest.mark.long
def test_model_with_adapters() -> None:
    pytest.importorskip("peft")
    (entry,) = (e for e in suites.entries("cpu") if e.name == "llama-1b lora decode b1 s1 reduce-overhead")
    row = entry.measure(suites.Settings("cpu", quick=True), lambda text: None)
    assert row["correct"] is True and not row["failed"]
    assert {"stock", "fused", "limit"} == set(row["median_ms"]) and row["ratio"]["fused/limit"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["attention", "projections", "lora", "blocks"])
def test_quick_case_is_right(suite: str) -> None:
    """Each variant of a suite's smallest case runs, and what is timed is within its budget."""
    found = [case for case in cases.cases("cpu") if case.quick and case.suite == suite]
    case = min(found, key=lambda case: case.make("cpu").flops)
    measured = suites.measure(case, suites.Settings("cpu", quick=True, repeats=2), lambda text: None)
    assert measured["correct"] is True and not measured["failed"]
    assert {"stock", "fused"} <= set(measured["median_ms"])
    assert len(measured["runs"]) == 2 and measured["noise"] >= 0
    assert measured["flops"] > measured["bytes"] > 0
    assert measured["sites"]["total"] > 0


ATTENTIONS = [
    name
    for name, each in modules.MODULES.items()
    if not isinstance(each.make, type) or not issubclass(each.make, modules.Adapted)
]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_of_a_module_is_fused(name: str) -> None:
    module = modules.MODULES[name]
    arguments, shapes = module.small
    run = testing.capture(
        module.make(*arguments), *module.draw(shapes), train=True, backend=testing.EAGER_AFTER_PASSES
    )
    verdicts = {site.verdict for site in run.sites if site.fusion == "attention"}
    # The kernel for a CPU takes no tanh of the scores here.
    assert verdicts == {"left to stock" if name == "capped" else "fused"}


def test_wrong_result_is_seen() -> None:
    """A function that is not the one that was asked for is out of the budget, and its ratios are left out."""
    case = next(case for case in cases.cases("cpu") if case.suite == "lora" and not case.train)
    work = case.make("cpu")
    good, bad = work.function("stock"), work.function("limit")  # the limit has no adapter
    exact = {"out": 1e-7}
    errors = {
        name: work.errors(lambda f=f: work.step("stock", f, 0)) for name, f in (("good", good), ("bad", bad))
    }
    assert suites.within_budget({"stock": errors["good"], "fused": errors["good"]}, "float32") is True
    assert suites.within_budget({"stock": exact, "fused": errors["bad"]}, "float32") is False
    assert suites.within_budget({"stock": exact}, "float32") is None
    run = {"wall": {"stock": suites.Timing(2.0, 0.0), "fused": suites.Timing(1.0, 0.0)}}
    assert suites.summary([run], True)["ratio"] == {"stock/fused": 2.0}
    assert suites.summary([run], False)["ratio"] == {}


def test_ratio_is_the_worse_one_of_both_clocks() -> None:
    times = {"stock": suites.Timing(2.0, 0.0), "fused": suites.Timing(1.0, 0.0)}
    alone = {"stock": suites.Timing(3.0, 0.0), "fused": suites.Timing(2.0, 0.0)}
    assert suites.summary([{"wall": times, "device": alone}], True)["ratio"] == {"stock/fused": 1.5}


@pytest.mark.parametrize("cold", [False, True])
def test_cache_is_emptied_outside_of_the_time(cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In front of each call, and between no pair of events but that of the call."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, last: Any) -> float:
            return 2.0

    class Waste:
        def zero_(self) -> None:
            log.append("empty")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clock, "_waste", Waste)
    ticks = itertools.count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(ticks)))
    call = {"a": lambda: log.append("call")}
    found = clock.interleave(call, "cuda", 1, 2.0, max_calls=2, run_ahead=True, cold=cold)["a"]
    timed = log[log.index("sleep") :]
    if cold:
        assert timed == ["sleep", *["empty", "event", "call", "event"] * 2, "wait"]
    else:
        assert timed == ["sleep", "event", "call", "call", "event", "wait"]
    assert found.median == pytest.approx(2e-3 if cold else 1e-3)


def test_variants_do_not_share_compiled_code() -> None:
    """The same function twice is compiled twice; what is timed is not compiled again."""
    torch._dynamo.reset()
    seen: list[int] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def same(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(0)
        return gm.forward

    calls = [torch.compile(common.apart(double, name), backend=same) for name in ("stock", "fused")]
    for call in calls:
        call(torch.ones(3))
    assert seen == [0, 0]
    with common.compiled_only():
        for call in calls:
            assert call(torch.ones(3)).sum() == 6
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="compile"):
            calls[0](torch.ones(3))
