"""The demonstration on tiny models, and the parts that decide its verdict."""

from __future__ import annotations

import copy
import json
import math
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from inductor_fusions import demo
from inductor_fusions.checking.budget import Values, compare
from inductor_fusions.demo import runner
from inductor_fusions.demo.models import Case, build, make_inputs
from inductor_fusions.demo.reference import run_reference, shown
from tests.support.processes import start

pytest.importorskip("transformers")


def run(report: Path, *arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The tiny demo in a process of its own, on the CPU: what it printed, and its JSON."""
    command = ("-m", "inductor_fusions", "demo", "--quick", "--device", "cpu", "--json", str(report))
    done = start(*command, *arguments, timeout=900, **environment)
    return done, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.slow
def test_quick_demo(tmp_path: Path) -> None:
    # Whether tiny models pay is not what is tested here.
    done, found = run(tmp_path / "demo.json", INDUCTOR_FUSIONS_POLICY="always")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["schema"] == 1 and found["ok"] is True and found["dtype"] == "float32"
    assert [row["verdict"] for row in found["rows"]] == ["ok"] * 4
    assert [row["fused"] for row in found["rows"]] == [row["sites"] for row in found["rows"]] == [2, 2, 2, 3]
    assert [row["train"] for row in found["rows"]] == [False, False, True, False]
    for row in found["rows"]:
        assert row["stock_ms"] > 0 and row["fused_ms"] > 0
        assert row["errors"].keys() == ({"output", "gradient"} if row["train"] else {"output"})
        assert all(0 <= error < 1e-5 for error in [*row["errors"].values(), *row["stock_errors"].values()])
        assert row["model"] in done.stdout
    assert "the times are not valid" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr


@pytest.mark.slow
def test_exit_status_where_a_site_is_not_fused(tmp_path: Path) -> None:
    done, found = run(tmp_path / "demo.json", "--only", "bert", INDUCTOR_FUSIONS_ATTENTION="0")
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = found["rows"]
    assert found["ok"] is False
    assert (row["sites"], row["fused"], row["verdict"]) == (2, 0, "2 not fused")
    assert "2 not fused" in done.stdout


def test_only_unknown_is_a_mistake(tmp_path: Path) -> None:
    done, found = run(tmp_path / "demo.json", "--only", "no such model")
    assert (done.returncode, found) == (2, None)
    assert done.stderr.count("\n") == 1 and "no such model" in done.stderr


def test_each_size_has_four_models() -> None:
    for size in ("full", "small", "tiny"):
        assert [case.architecture for case in demo.cases(size)] == [
            "BertModel", "LlamaModel", "LlamaModel", "T5Model",
        ]  # fmt: skip


def test_a_failure_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(runner, "build", fail)
    monkeypatch.setattr(demo, "gc", mock.Mock())  # a collection takes seconds where many tests have run
    result = demo.run(torch.device("cpu"), quick=True)
    assert len(result.rows) == 4 and not result.ok and result.quick
    assert result.rows[0].verdict == "failed: RuntimeError: out of memory"


def test_worst_gradient_and_nan_count() -> None:
    one = torch.ones(1, 2, 3, dtype=torch.float64)
    exact = Values(one, {"a": one, "b": one, "never used": None})
    ours = Values(one.float(), {"a": one.float(), "b": 1.5 * one.float(), "never used": None})
    errors = compare(ours, Values(one.float(), exact.grads), exact)
    assert shown(errors, "ours") == {"output": 0.0, "gradient": 0.5}
    assert shown(errors, "stock") == {"output": 0.0, "gradient": 0.0}
    errors = compare(Values(one.float(), {**ours.grads, "a": one * math.nan}), ours, exact)
    assert math.isnan(shown(errors, "ours")["gradient"])


@pytest.mark.parametrize("case", demo.cases("tiny"), ids=lambda case: case.title)
def test_reference_is_float64(case: Case) -> None:
    """The reference of a model that is float64 itself is exact, whatever casts to float32 it spells out."""
    device = torch.device("cpu")
    model: Any = build(case, device, torch.float32)
    inputs = make_inputs(case, model.config.vocab_size, device)
    cotangent = torch.randn(case.batch, case.seq, model.config.hidden_size) if case.train else None
    reference = run_reference(case, model, inputs, cotangent)
    assert reference.outputs.dtype == torch.float64
    assert all(p.dtype == torch.float32 for p in model.parameters())

    # A step of half of float32's precision in one weight shows at its own size, and is not rounded away.
    nudged: Any = copy.deepcopy(model)
    with torch.no_grad():
        next(p for p in nudged.parameters() if p.dim() == 2).mul_(1 + 2**-20)
    moved = run_reference(case, nudged, inputs, cotangent)
    change = float((moved.outputs - reference.outputs).norm() / reference.outputs.norm())
    assert 0 < change < 1e-4
    again = run_reference(case, model, inputs, cotangent)
    assert torch.equal(again.outputs, reference.outputs)
    assert bool(reference.grads) == case.train
