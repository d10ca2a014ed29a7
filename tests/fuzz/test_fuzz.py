"""Random programs, a few hundred of them; `make fuzz` runs as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.fuzz import products, programs
from tests.fuzz.__main__ import fuzz, written
from tests.fuzz.judge import is_rounding, judge, judge_mask, judge_products

quick = settings(max_examples=80, suppress_health_check=list(HealthCheck), print_blob=False)


@quick
@given(programs.attentions())
def test_attentions(program: programs.Program) -> None:
    judge(program)


@settings(quick, max_examples=100)
@given(programs.masked())
def test_masks(pair: tuple[programs.Program, programs.Program]) -> None:
    judge_mask(*pair)


@pytest.mark.slow
@settings(quick, max_examples=15)
@given(products.projections())
def test_projections(program: programs.Program) -> None:
    judge_products(program)


@pytest.mark.slow
@settings(quick, max_examples=15)
@given(products.adapters())
def test_adapters(program: programs.Program) -> None:
    judge_products(program)


def test_a_wrong_gradient_is_no_rounding() -> None:
    """Even a small one; and what eager mode gives on other inputs is allowed."""
    x = torch.randn(4, 8).requires_grad_()
    y = torch.randn(4, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 3, -1)

    found = function(x)
    (grad,) = torch.autograd.grad(found, x, y)
    right = [found.detach(), grad]
    assert is_rounding(function, [x], right, 1, [y], 64.0)
    assert not is_rounding(function, [x], [right[0], grad * 1.001], 1, [y], 64.0)
    assert not is_rounding(function, [x], [right[0], None], 1, [y], 64.0)
    assert not is_rounding(function, [x], [right[0] + 1e-4, grad], 1, [y], 64.0)


def test_a_failure_is_found_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is judged wrong ends minimised in a file, as a script that runs."""

    def wrong(program: programs.Program) -> None:
        assert "masked_fill" not in program.source

    monkeypatch.setattr("tests.fuzz.__main__.judge", wrong)
    report = tmp_path / "failures.py"
    failures = fuzz(examples=200, seed=3, kinds=["attentions"], out=report, batch=200)
    assert failures == 1
    text = report.read_text()
    assert "masked_fill" in text and "seed 3" in text
    compile(text, str(report), "exec")


def test_script_runs() -> None:
    program = programs.Program(
        (programs.Input("x0", "leaf", (2, 2, 4, 4)),), ("scores = x0 @ x0.mT",), "scores.softmax(-1) @ x0"
    )
    exec(compile(written(program, "seed 0", AssertionError("why")), "script", "exec"), {})
