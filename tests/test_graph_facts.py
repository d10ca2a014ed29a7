"""What is known of a graph while a fusion works on it: up to date, at a cost that grows with the graph."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import fx

pytest.importorskip("triton")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import inductor_fusions
from bench import pass_time
from inductor_fusions.graph import memory
from inductor_fusions.graph.memory import Memory

PACKAGE = str(Path(inductor_fusions.__file__).parent)


@pytest.mark.parametrize("case", pass_time.CASES)
def test_memory_is_kept_up_to_date(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """After each rewrite it is what one finds who looks at the whole graph again."""
    check = Memory.check
    compared = []

    def compare(self: Memory, products: Sequence[Any], position: fx.Node, *rest: Any) -> None:
        fresh = Memory(position.graph)
        assert self.intervals() == fresh.intervals()
        assert self.peak() == fresh.peak()
        compared.append(position)
        check(self, products, position, *rest)

    monkeypatch.setattr(Memory, "check", compare)
    pass_time.compile_case(case, 2, lambda call, graph: call(graph))
    assert len(compared) >= 4


def calls(case: str, layers: int) -> list[int]:
    """How often functions of the package are called, for each graph of a case."""
    found: list[int] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found[-1] += 1

    def run(call: Any, graph: fx.Graph) -> None:
        found.append(0)
        sys.setprofile(count)
        try:
            call(graph)
        finally:
            sys.setprofile(None)

    pass_time.compile_case(case, layers, run)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", pass_time.CASES)
def test_cost_is_linear(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many layers are about twice as many calls; they are four times as many if each site reads all.

    Through how many values that are in no memory a site looks is a constant. It is smaller here, so that four
    layers have as many: with 16, calls grow 2.65 times from 4 to 8 layers and 2.25 times from 16 to 32.
    """
    monkeypatch.setattr(memory, "_DEPTH", 4)
    few, many = calls(case, 4), calls(case, 8)
    assert len(few) == len(many) >= 2
    for before, now in zip(few, many, strict=True):
        assert now < 2.3 * before
