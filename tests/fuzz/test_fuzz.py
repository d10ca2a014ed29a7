"""Random programs, a few hundred of them; `make fuzz` runs as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz import programs
from tests.fuzz.__main__ import fuzz, written
from tests.fuzz.judge import judge, judge_mask

quick = settings(max_examples=80, suppress_health_check=list(HealthCheck), print_blob=False)


@quick
@given(programs.attentions())
def test_attentions(program: programs.Program) -> None:
    judge(program)


@settings(quick, max_examples=100)
@given(programs.masked())
def test_masks(pair: tuple[programs.Program, programs.Program]) -> None:
    judge_mask(*pair)


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
