"""bench.loss_head: a row on the CPU, and the table that is made of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import loss_head as bench
from inductor_fusions.decisions.problems import SECTIONS
from tests.support.interactions import TIMES


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "rows"])
def test_row(kind: str) -> None:
    """Correct against float64, and fused."""
    row = bench.measure(bench.Row(kind, 48, 16, 96), "cpu", quick=True)
    assert row["correct"] and row["fused"] == 1
    assert set(row["times_us"]) == {"stock", "fused"}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_step(checkpointed: bool) -> None:
    """A whole step, against float32 one sequence at a time."""
    row = bench.measure(bench.Row("step", 64, 256, 512, checkpointed=checkpointed), "cpu", quick=True)
    assert row["correct"] and row["fused"] == 1
    assert set(row["times_us"]) == {"stock", "before", "fused"}


def test_table(tmp_path: Path) -> None:
    """Heads alone are rows, with their gain on the device over the better stock; a wrong one never pays."""
    row = {
        "kind": "head", "dtype": "bfloat16", "train": True, "frozen": False, "reduced": True, "width": 4096,
        "classes": 128256, "tokens": 16384, "fused": 1, "correct": True, **TIMES,
    }  # fmt: skip
    path = tmp_path / "a_device.json"
    path.write_text('{"schema": 1, "device": "A device", "attention": []}')
    bench.table(path, [row, {**row, "correct": False}, {**row, "kind": "step"}])
    found = json.loads(path.read_text())["linear_cross_entropy"]
    assert [each["gain"] for each in found] == [1.5, 0.0]
    for each in found:
        SECTIONS["linear_cross_entropy"].check(each)
