"""The situations that the fuzzer draws are programs, and what is wrong in one is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis.errors import UnsatisfiedAssumption

from inductor_fusions import config, testing
from tests.fuzz.calls import Call, Calls, judge_calls
from tests.fuzz.judge import runs
from tests.fuzz.programs import Input
from tests.fuzz.situations import SITUATIONS, Situated, judge_situation

ATTENTION = "torch.softmax(x0 @ x1.mT * 0.5, -1) @ x2"
LEAVES = tuple(Input(f"x{i}", "leaf", (2, 3, 4, 8)) for i in range(3))


def situated(situation: str) -> Situated:
    return Situated(LEAVES, (), ATTENTION, situation=situation)


def called(*calls: Call, line: str = "", trained: bool = True, dynamic: bool | None = None) -> Calls:
    """An attention whose scores `line` changes, which may read the indices `rows` and `columns`."""
    inputs = tuple(Input(f"x{i}", "leaf", ()) for i in range(3))
    shapes = ("b", 3, "q", 8), ("b", 3, "k", 8), ("b", 3, "k", 8)
    indices = "rows, columns = torch.arange(x0.shape[-2])[:, None], torch.arange(x1.shape[-2])"
    lines = ("scores = x0 @ x1.mT * 0.5", indices, line or "scores = scores * number")
    return Calls(
        inputs, lines, "torch.softmax(scores, -1) @ x2", shapes=shapes, leaves=(trained,) * 3, calls=calls,
        dynamic=dynamic,
    )  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situations_are_programs(situation: str) -> None:
    assert runs(situated(situation).plain()) is not None


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("line", ["", "scores = scores.masked_fill(columns > rows, -1e9)"])
def test_sizes_that_become_one_or_none(line: str, dynamic: bool | None, trained: bool) -> None:
    sizes = [(5, 7), (1, 7), (5, 1), (1, 1), (6, 6), (0, 7), (5, 7)]
    calls = [Call(2, q, k, 3, "", 0) for q, k in sizes]
    judge_calls(called(*calls, line=line, trained=trained, dynamic=dynamic))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("line", [
    "scores = scores.masked_fill((rows - columns).abs() > number, -1e9)", "scores = scores * number / 3",
    "scores = scores / number**0.5", "scores = scores.masked_fill(columns >= number, -1000.0 * number)",
])  # fmt: skip
def test_numbers_that_become_symbols(line: str, trained: bool) -> None:
    calls = [Call(2, 5, 7, number, "", 0) for number in (2, 3, 5, 1)]
    judge_calls(called(*calls, line=line, trained=trained))


@pytest.mark.parametrize("situation", ["jvp", "no grad", "autocast", "cond", "checkpoint", "turned"])
def test_right(situation: str) -> None:
    judged = judge_situation(situated(situation))
    assert not judged.stock_wrong and ("attention" in judged.fused) == (situation != "jvp")


def test_sizes_and_numbers_that_change() -> None:
    calls = [Call(2, 5, 4, 2, "", 0), Call(3, 7, 9, 3, "", 2), Call(2, 5, 4, 2, "", 1)]
    assert "attention" in judge_calls(called(*calls)).fused


def test_what_eager_mode_refuses_is_no_program() -> None:
    """It keeps the keys for the gradient of the queries."""
    with pytest.raises(UnsatisfiedAssumption):
        judge_calls(called(Call(2, 5, 4, 2, "x1", 0)))


@pytest.mark.parametrize("which", ["second call", "strides"])
def test_wrong_is_found(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stock is right."""
    count = 0

    def wrong(function: Any, **_: Any) -> Any:
        def run(*args: Any) -> Any:
            nonlocal count
            count += config.enabled
            found = function(*args)
            if which == "strides":
                return found.mT.contiguous().mT if config.enabled else found
            return found * 1.01 if count == 2 and config.enabled else found

        return run

    monkeypatch.setattr(torch, "compile", wrong)
    program = called(Call(2, 5, 4, 2, "", 0), Call(2, 6, 4, 2, "", 0))
    with pytest.raises(AssertionError, match="call 1" if which == "second call" else "strides"):
        judge_calls(program, code=which == "strides")


def test_what_stock_raises_too_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    both = True

    def fails(*_: Any, **__: Any) -> Any:
        if config.enabled or both:
            raise RuntimeError("not supported")

    monkeypatch.setattr(testing, "capture", fails)
    assert "not supported" in judge_situation(situated("turned")).stock_wrong
    both = False
    with pytest.raises(RuntimeError, match="not supported"):
        judge_situation(situated("turned"))


def test_scripts_run() -> None:
    program = called(Call(2, 5, 4, 2, "", 0))
    exec(compile(program.script(), "script", "exec"), {})
    exec(compile(situated("cond").script(), "script", "exec"), {})
