"""bench.dot_interaction: a row on the CPU, and the table that is made of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import dot_interaction as bench


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_row(train: bool) -> None:
    """Correct against float64, and fused."""
    row = bench.measure(bench.Row("interaction", 8, train, 8, 5), "cpu", quick=True)
    assert row["correct"] and row["fused"] == 1
    assert set(row["times_us"]) == {"stock", "fused"}


ROW = {
    "kind": "interaction", "samples": 8192, "train": False, "width": 64, "features": 27, "dense": True,
    "dtype": "bfloat16", "fused": 1, "tiles": [2, 1, 2, 1], "correct": True,
    "times_us": {"stock": 6.0, "max_autotune": 4.0, "fused": 2.0},
    "device_us": {"stock": 6.0, "max_autotune": 3.0, "fused": 2.0},
}  # fmt: skip


def test_table(tmp_path: Path) -> None:
    """The worse clock and the better stock count; a wrong row never pays; whole models are no rows."""
    path = tmp_path / "a_device.json"
    path.write_text('{"schema": 1, "device": "A device", "attention": []}')
    bench.table(path, [ROW, {**ROW, "train": True, "correct": False}, {**ROW, "kind": "dlrm"}])
    data = json.loads(path.read_text())
    assert [row["gain"] for row in data["dot_interaction"]] == [1.5, 0.0]
    assert data["dot_interaction"][0]["tiles"] == [2, 1, 2, 1] and data["device"] == "A device"
