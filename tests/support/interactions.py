"""What the benchmarks of both interactions of features make of their rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

#: Of a row in microseconds: the worse clock and the better stock say that it gains 1.5.
TIMES = {
    "times_us": {"stock": 6.0, "max_autotune": 4.0, "fused": 2.0},
    "device_us": {"stock": 6.0, "max_autotune": 3.0, "fused": 2.0},
}


def table_of(bench: ModuleType, row: dict[str, Any], section: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a table that a benchmark writes: the gain counts by the worse clock and the better stock, a
    wrong row never pays, and whole models are no rows."""
    path = folder / "a_device.json"
    path.write_text('{"schema": 1, "device": "A device", "attention": []}')
    bench.table(path, [row, {**row, "train": True, "correct": False}, {**row, "kind": "dlrm"}])
    data = json.loads(path.read_text())
    found: list[dict[str, Any]] = data[section]
    assert [each["gain"] for each in found] == [1.5, 0.0] and data["device"] == "A device"
    return found
