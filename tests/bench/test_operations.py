"""Benchmarks of operations: rows on the CPU; tables that are made of rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench import dot_interaction, lora_merged, loss_head, outer_product
from inductor_fusions.decisions.problems import SECTIONS

ROWS = [
    *((dot_interaction, kind, 8, train, 8, 5) for kind in dot_interaction.ALONE for train in (False, True)),
    *((loss_head, kind, 48, 16, 96) for kind in ("head", "rows", "policy")),
    *((lora_merged, 96, 64, 4, 32, base, train) for base in (True, False) for train in (True, False)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ROWS, ids=lambda case: " ".join(map(str, case[1:])))
def test_row(case: Any) -> None:
    """Correct against float64, and fused."""
    bench, *columns = case
    row = bench.measure(bench.Row(*columns), "cpu", quick=True)
    assert row["correct"] and row["fused"] == 1
    assert set(row["times_us"]) == {"stock", "fused"}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_step(checkpointed: bool) -> None:
    """A whole step, against float32 one sequence at a time."""
    row = loss_head.measure(loss_head.Row("step", 64, 256, 512, checkpointed=checkpointed), "cpu", quick=True)
    assert row["correct"] and row["fused"] == 1
    assert set(row["times_us"]) == {"stock", "before", "fused"}


#: The worse clock and the better stock say that it gains 1.5.
TIMES = {
    "times_us": {"stock": 6.0, "max_autotune": 4.0, "fused": 2.0},
    "device_us": {"stock": 6.0, "max_autotune": 3.0, "fused": 2.0},
}
#: Rows of each benchmark, and the kind that is no row of a table.
TABLES: dict[str, tuple[ModuleType, dict[str, Any], str]] = {
    "dot_interaction": (
        dot_interaction,
        {
            "kind": "interaction", "samples": 8192, "train": False, "width": 64, "features": 27,
            "dense": True, "dtype": "bfloat16", "tiles": [2, 1, 2, 1],
        }, "dlrm",
    ),
    "outer_product_linear": (
        outer_product,
        {"kind": "linear", "rows": 2048, "train": False, "p": 432, "q": 432, "columns": 512,
         "dtype": "float32"}, "dlrm",
    ),
    "linear_cross_entropy": (
        loss_head,
        {
            "kind": "head", "dtype": "bfloat16", "train": False, "frozen": False, "reduced": True,
            "width": 4096, "classes": 128256, "tokens": 16384,
        }, "step",
    ),
    "lora_merged": (
        lora_merged,
        {
            "inner": 64, "outer": 96, "rank": 8, "base": True, "train": False, "dtype": "bfloat16",
            "tokens": 48,
        }, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("section", TABLES)
def test_table(section: str, tmp_path: Path) -> None:
    """A wrong row never pays, and what is no operation alone is no row."""
    bench, row, other = TABLES[section]
    row = {**row, "fused": 1, "correct": True, **TIMES}
    path = tmp_path / "a_device.json"
    path.write_text('{"schema": 1, "device": "A device", "attention": []}')
    rows = [row, {**row, "train": True, "correct": False}, *([{**row, "kind": other}] if other else [])]
    bench.table(path, rows)
    data = json.loads(path.read_text())
    assert [each["gain"] for each in data[section]] == [1.5, 0.0] and data["device"] == "A device"
    for each in data[section]:
        SECTIONS[section].check(each)
    if section == "dot_interaction":
        assert data[section][0]["tiles"] == [2, 1, 2, 1] and data[section][0]["pairs"] == "triangle"


def test_grid_has_what_the_documentation_states() -> None:
    """The linear alone and the whole model, at both numbers of samples, in both dtypes, with a backward."""
    rows = outer_product.grid(quick=False)
    assert len({row.key for row in rows}) == len(rows)
    for kind in ("linear", "dlrm"):
        found = {(row.rows, row.dtype, row.train) for row in rows if row.kind == kind}
        wanted = {(n, d, t) for n in (2048, 128) for d in ("float32", "bfloat16") for t in (False, True)}
        assert wanted <= found
