"""The whole-model benchmark: what its cases compare, and what it does with a variant that fails."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import models_lora
from bench.common import Json
from bench.model_cases import (
    CASES,
    REFERENCE_TOKENS,
    WITHOUT,
    Case,
    compared_inputs,
    make_inputs,
    model_config,
    quick_case,
    reference_tokens,
    register_attentions,
)
from bench.models import __main__ as command
from bench.models.correctness import is_correct
from bench.models.measure import Settings, measure, set_up
from bench.models.report import attentions, describe, kernels
from bench.models.variants import (
    AUTOTUNED,
    BASIC,
    MARKERS,
    Variant,
    attempt,
    compile_mode,
    make_variant,
    wanted_variants,
)

WINDOWED = [
    case for case in CASES if 0 < (model_config(case, False)[1].get("sliding_window") or 0) < case.seq
]
CAUSAL_PADDED = [case for case in CASES if case.padded and case.by_hand == "causal"]


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", WINDOWED, ids=lambda case: case.name)
def test_window_ends_among_the_compared_tokens(case: Case) -> None:
    values = model_config(case, quick=False)[1]
    assert values["sliding_window"] < reference_tokens(case, values) <= case.seq


@pytest.mark.parametrize("case", CAUSAL_PADDED, ids=lambda case: case.name)
def test_padding_is_among_the_compared_tokens(case: Case) -> None:
    """The timed batch has its padding behind the tokens that are compared, so another one is compared."""
    values = model_config(case, quick=False)[1]
    inputs = make_inputs(case, values, "cpu")
    assert inputs["attention_mask"].float().mean().item() == pytest.approx(0.75, abs=1e-3)
    compared = compared_inputs(case, values, inputs)
    tokens = reference_tokens(case, values)
    assert inputs["attention_mask"][0, :tokens].all()
    assert 0 < compared["attention_mask"][0, :tokens].sum() < tokens
    assert compared["attention_mask"].shape == inputs["attention_mask"].shape


def test_documents_start_again() -> None:
    case = next(case for case in CASES if case.documents)
    positions = make_inputs(case, model_config(case, quick=False)[1], "cpu")["position_ids"]
    assert positions.shape == (case.batch, case.seq)
    starts = (positions[0] == 0).nonzero().flatten()
    assert starts.tolist() == list(range(0, case.seq, case.seq // case.documents))
    assert starts[1] < REFERENCE_TOKENS  # two documents at least are compared


class NoModel:
    def zero_grad(self, set_to_none: bool) -> None:
        assert set_to_none


def failing(error: Exception) -> tuple[dict[str, Any], Json]:
    variant = Variant("stock", NoModel(), lambda: None, CASES[0], {})  # type: ignore[arg-type]
    variants, failed = {"stock": variant}, {}

    def action() -> None:
        raise error

    attempt("stock", action, variants, failed, "cpu")
    return variants, failed


def test_variant_without_memory_is_taken_out() -> None:
    variants, failed = failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB"))
    assert variants == {}
    assert "out of memory" in failed["stock"]


def test_broken_device_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        failing(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_budget_without_stock_is_that_of_the_uncompiled_model() -> None:
    case = CASES[0]
    fused: Json = {"out": 0.04}
    assert is_correct(case, {"fused": fused, "uncompiled": {"out": 0.04}}) is True
    assert is_correct(case, {"fused": fused, "uncompiled": {"out": 0.01}}) is False
    assert is_correct(case, {"fused": fused, "stock": {"out": 0.01}, "uncompiled": {"out": 1.0}}) is False


def test_fused_is_held_to_stock_in_its_own_mode() -> None:
    """Templates add up in another order than the library: neither excuses the other's error."""
    errors: Json = {"stock": {"out": 0.01}, "fused": {"out": 0.01}, "autotuned": {"out": 0.04}}
    assert is_correct(CASES[0], {**errors, "fused_autotuned": {"out": 0.04}}) is True
    assert is_correct(CASES[0], {**errors, "fused_autotuned": {"out": 0.08}}) is False
    assert is_correct(CASES[0], {**errors, "fused": {"out": 0.04}}) is False
    assert is_correct(CASES[0], {"autotuned": {"out": 0.04}}) is None


@pytest.mark.parametrize(("mode", "name", "expected"), [
    ("default", "stock", "default"),
    ("default", "autotuned", "max-autotune-no-cudagraphs"),
    ("reduce-overhead", "fused", "reduce-overhead"),
    ("reduce-overhead", "fused_autotuned", "max-autotune"),
])  # fmt: skip
def test_autotuned_keeps_cuda_graphs(mode: str, name: str, expected: str) -> None:
    assert compile_mode(name, replace(CASES[0], mode=mode)) == expected


def test_variants_share_no_compiled_code() -> None:
    """Dynamo takes what an equal backend compiled: the options of any two variants differ."""
    assert len(set(MARKERS.values())) == len(MARKERS)
    model = torch.nn.Linear(2, 2)
    for mode in ("default", "reduce-overhead"):
        case = replace(CASES[0], mode=mode)
        found = [make_variant(name, model, case, {}).compiled for name in MARKERS]
        backends = [torch._dynamo.eval_frame.innermost_backend(f.dynamo_ctx.callback) for f in found]
        assert all(a != b for i, a in enumerate(backends) for b in backends[:i])


def test_model_without_attention_keeps_its_projections() -> None:
    """What bounds the gain of a fused attention still computes queries, keys, values and their gradients."""
    from transformers import AttentionInterface

    register_attentions()
    heads = {"query": 4, "key": 2, "value": 2}
    made = {name: torch.randn(1, n, 3, 8, requires_grad=True) for name, n in heads.items()}
    out, _ = AttentionInterface()[WITHOUT](None, **made, attention_mask=None)
    assert out.shape == (1, 3, 4, 8)
    assert all(g.abs().min() > 0 for g in torch.autograd.grad(out.sum(), list(made.values())))


def test_headlines_are_autotuned() -> None:
    found = [case for case in CASES if case.autotuned]
    assert {case.train for case in found} == {False, True}
    assert all(wanted_variants(case) == (*BASIC, *AUTOTUNED) for case in found)
    assert wanted_variants(CASES[0]) == BASIC
    assert wanted_variants(CASES[0], ("stock", "autotuned")) == ("stock", "autotuned")


def test_autotuning_has_the_device_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several processes, cases without it go first; the others wait until no process is left."""
    chosen = [next(c for c in CASES if c.autotuned), *(c for c in CASES if not c.autotuned)][:3]
    said: list[tuple[str, int]] = []

    def measured(module: str, options: Any, groups: Any, *others: Any) -> Any:
        *_, jobs, _, _ = others
        said.extend((group[0].name, jobs) for group in groups)
        return None, [] if jobs == 1 else [groups[0][0].name]

    monkeypatch.setattr(command.tuning, "measure", measured)
    options = argparse.Namespace(
        device="cpu", variants=(), rounds=1, compiles=1, quick=False, budget=None, jobs=4
    )
    names = [case.name for case in chosen]
    assert command.run("bench.models", options, chosen) == [names[1]]
    assert said == [(names[1], 4), (names[2], 4), (names[0], 1)]


@pytest.mark.slow
def test_case_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line writes a row, which the next run finds; one that fails is named at the end."""
    pytest.importorskip("peft")
    case = replace(next(c for c in models_lora.CASES if c.name.startswith("decode b1")), seq=16)
    broken = replace(case, name="no such model", model="none")
    path = tmp_path / "rows.json"
    given = ["x", "--out", str(path), "--device", "cpu", "--quick", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit, match="1"):
        command.command("bench.models_lora", "Words.", [case, broken])
    (row,) = json.loads(path.read_text())["rows"]
    assert row["key"] == row["name"] == case.name and row["failed"] == {} and row["correct"] is True
    assert set(row["median_ms"]) == set(row["unguarded_ms"]) == {"stock", "fused", "frozen"}
    assert set(row["error"]) == {"stock", "fused"} and "fused/frozen" in row["ratio"]
    monkeypatch.setattr(command, "work", None)  # nothing is left to measure
    command.command("bench.models_lora", "Words.", [case])


@pytest.mark.slow
def test_adapters_are_compared_in_training() -> None:
    """Their gradients alone; the frozen model has that of the embedded tokens."""
    pytest.importorskip("peft")
    case = quick_case(replace(next(c for c in models_lora.CASES if c.name == "train b2 s2048"), seq=16))
    set_up()
    row = measure(case, Settings("cpu", True, rounds=2), False, lambda text: None)
    assert row["failed"] == {} and row["correct"] is True
    assert set(row["error"]["fused"]) == {"out", "grad", "worst_grad", "worst_grad_of"}
    assert "lora" in row["error"]["fused"]["worst_grad_of"] and row["median_ms"]["frozen"] > 0


@pytest.mark.slow
def test_row_with_autotuned_variants() -> None:
    """Both are compiled, held to float64 and timed beside the others."""
    case = replace(quick_case(next(c for c in CASES if c.name == "bert-base eager b1 s128")), seq=16)
    variants = ("stock", "fused", "autotuned", "fused_autotuned")
    set_up()
    row = measure(case, Settings("cpu", True, variants, rounds=2), False, lambda text: None)
    assert row["failed"] == {} and row["correct"] is True
    assert list(row["median_ms"]) == list(row["error"]) == list(variants)
    assert {"stock/fused", "autotuned/fused", "autotuned/fused_autotuned"} <= row["ratio"].keys()
    assert "device_ms" not in row  # there is no device beside the host
    assert describe({**row, "seconds": 1.0}).count("autotuned") >= 2


def test_only_attentions_are_counted_as_attentions() -> None:
    what = {
        "attention: fused: flex -> flex": 3,
        "attention: rejected: weights are returned": 1,
        "qkv: left to stock: not measured": 8,
    }
    row = {"sites": {"what": what}}
    assert attentions(row) == "3 of 4"
    assert kernels(row) == {"flex -> flex": 3}
