"""The whole-model benchmark: what its cases compare, and what it does with a variant that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import models
from bench.common import Json
from bench.model_cases import (
    CASES,
    REFERENCE_TOKENS,
    Case,
    compared_inputs,
    make_inputs,
    model_config,
    reference_tokens,
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
    variant = models.Variant("stock", NoModel(), lambda: None, CASES[0], {})  # type: ignore[arg-type]
    variants, failed = {"stock": variant}, {}

    def action() -> None:
        raise error

    models.attempt("stock", action, variants, failed, "cpu")
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
    assert models.is_correct(case, {"fused": fused, "uncompiled": {"out": 0.04}}) is True
    assert models.is_correct(case, {"fused": fused, "uncompiled": {"out": 0.01}}) is False
    assert (
        models.is_correct(case, {"fused": fused, "stock": {"out": 0.01}, "uncompiled": {"out": 1.0}}) is False
    )


def test_only_attentions_are_counted_as_attentions() -> None:
    what = {
        "attention: fused: flex -> flex": 3,
        "attention: rejected: weights are returned": 1,
        "qkv: left to stock: not measured": 8,
    }
    row = {"sites": {"what": what}}
    assert models.attentions(row) == "3/4"
    assert models.kernels(row) == {"flex -> flex": 3}


@pytest.mark.parametrize("setting", ["attention_kernel", "no_such_toggle=1"])
def test_setting_that_is_not_one(setting: str) -> None:
    with pytest.raises(SystemExit, match=setting):
        models.apply_settings([setting])
