"""What the estimates lose on the shipped tables: the file of it is current, and the bars hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import regret
from inductor_fusions.decisions import tables
from inductor_fusions.decisions.tables import Table

ROOT = Path(__file__).resolve().parents[2]
#: Of each section of the H200's table, one width left out: the share of the gain that is kept at least.
#: Of linears 3% of each gain are taken off, because their configurations are not measured.
KEPT = {
    "attention": 0.96, "block_mm": 0.965, "lora": 0.97, "lora_sums": 0.97, "lora_dropout": 0.96,
    "narrow_mm": 0.97,
}  # fmt: skip


@pytest.fixture(scope="module")
def left_out() -> dict[str, dict[str, Any]]:
    """Of each section, as the file has it."""
    table = tables.load("nvidia_h200")
    assert table is not None
    found = regret.widths_left_out(table, "nvidia_h200", {})
    return {name: loss.to_json() for name, loss in found.items()}


def test_widths_left_out(left_out: dict[str, dict[str, Any]]) -> None:
    for section, least in KEPT.items():
        assert left_out[section]["kept"] >= least, section
        # In training of small attentions times are those of launches, and vary.
        slow, slower = (3, 1) if section == "attention" else (left_out[section]["rows"] // 100, 0)
        assert left_out[section]["below_0.98"] <= slow, section
        assert left_out[section]["below_0.95"] <= slower, section


def test_file_is_current(left_out: dict[str, dict[str, Any]]) -> None:
    """python -m bench.regret --json bench/results/regret_tables.json"""
    known = json.loads((ROOT / "bench" / "results" / "regret_tables.json").read_text())
    assert known["left_out"]["nvidia_h200, one width left out"] == left_out


def test_rows_of_the_other_gpu_help(left_out: dict[str, dict[str, Any]]) -> None:
    """The shape of an attention that is left out: with the H100's rows beside its own, an H200 keeps more."""
    found = {name: tables.load(name) or Table({}) for name in tables.names()}
    others = regret.other_gpus(found, "nvidia_h200")
    beside = regret.widths_left_out(found["nvidia_h200"], "nvidia_h200", others)["attention"].to_json()
    alone = left_out["attention"]
    assert beside["kept"] > max(0.97, alone["kept"] + 0.005) and beside["below_0.95"] <= alone["below_0.95"]


def test_same_capability_keeps_nearly_all() -> None:
    """An H100's problems, decided from the H200's rows alone and judged by its own."""
    found = {name: tables.load(name) or Table({}) for name in tables.names()}
    loss = regret.devices_left_out(found, "nvidia_h100_80gb_hbm3")["block_mm"].to_json()
    assert loss["rows"] >= 300 and loss["kept"] >= 0.94 and loss["worst"] > 0.98


def test_a_row_that_loses_counts() -> None:
    """The only neighbour gains, and the row that is left out loses."""
    row = {
        "inner": [4096], "outer": [4096], "ranks": [[16]], "dtype": "bfloat16", "adapters": "bfloat16",
        "layout": "t", "tokens": 4096, "gain": 2.0,
    }  # fmt: skip
    table = Table({"lora": [row, {**row, "inner": [3584], "gain": 0.5}, {**row, "inner": [2048]}]})
    loss = regret.widths_left_out(table, "nvidia_h200", {})["lora"]
    assert (loss.rows, loss.slow, loss.slower, loss.worst) == (3, 1, 1, 0.5)
    assert loss.to_json()["kept"] < 0.5
