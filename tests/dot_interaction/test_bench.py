"""bench.dot_interaction: a row on the CPU, and the table that is made of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import dot_interaction as bench
from tests.support.interactions import TIMES, table_of


@pytest.mark.slow
@pytest.mark.parametrize("kind", bench.ALONE)
@pytest.mark.parametrize("train", [False, True])
def test_row(kind: str, train: bool) -> None:
    """Correct against float64, and fused."""
    row = bench.measure(bench.Row(kind, 8, train, 8, 5), "cpu", quick=True)
    assert row["correct"] and row["fused"] == 1
    assert set(row["times_us"]) == {"stock", "fused"}


def test_table(tmp_path: Path) -> None:
    row = {
        "kind": "interaction", "samples": 8192, "train": False, "width": 64, "features": 27, "dense": True,
        "dtype": "bfloat16", "fused": 1, "tiles": [2, 1, 2, 1], "correct": True, **TIMES,
    }  # fmt: skip
    first, _ = table_of(bench, row, "dot_interaction", tmp_path)
    assert first["tiles"] == [2, 1, 2, 1] and first["pairs"] == "triangle"
