"""The picture of the README and the plots of the documentation."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import docs_plots, picture
from tests.docs.test_docs import ROOT, copied


def test_picture_fits_on_a_screen() -> None:
    """Many cases stand in two columns, on one scale, the largest gains on the left."""

    def drawn(count: int) -> tuple[int, int, list[ElementTree.Element]]:
        rows = [{"name": f"case {i}", "median_ms": {"stock": 1 + i / 9, "fused": 1.0}} for i in range(count)]
        root = ElementTree.fromstring(picture.draw({"device": "a device", "rows": rows}))
        bars = [e for e in root.iter() if e.get("stroke") == picture.FASTER]
        return int(root.get("width", "")), int(root.get("height", "")), bars

    width, height, bars = drawn(47)
    assert height < 480 and len(bars) == 46  # one is level: it has no colour of a gain
    right = [bar for bar in bars if float(bar.get("x", "")) > width / 2]
    assert 20 < len(right) < 24
    assert max(float(b.get("width", "")) for b in right) < min(
        float(b.get("width", "")) for b in bars if b not in right
    )
    assert all(float(b.get("x", "")) + float(b.get("width", "")) < width for b in bars)
    assert drawn(20)[0] < width  # one column


def test_picture() -> None:
    """Every case with both times, the largest gain first; those that are slower go to the other side."""
    rows = [
        {"name": "slow <1>", "median_ms": {"stock": 1.0, "fused": 1.25}},
        {"name": "fast", "median_ms": {"stock": 3.0, "fused": 1.0}},
        {"name": "unknown", "median_ms": {"stock": 3.0}},
    ]
    root = ElementTree.fromstring(picture.draw({"device": "a device", "rows": rows}))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert texts.index("fast") < texts.index("slow <1>") and "unknown" not in texts
    assert {"3.00", "0.80"} < set(texts)
    bars = [element for element in root.iter() if element.get("stroke") in (picture.FASTER, picture.OTHER)]
    fast, slow = (float(bar.get("x", "")) for bar in bars)
    assert slow < fast == float(bars[1].get("x", "")) + float(bars[1].get("width", ""))


def test_work_of_a_row() -> None:
    """FLOPs, and bytes that are moved once: by hand, for each kind of row."""
    row = {"kind": "shared_a", "tokens": 2, "inner": [3], "outer": [5, 7], "dtype": "bfloat16"}
    assert docs_plots.work_of_linears(row) == (2 * 2 * 3 * 12, 2 * (2 * 3 + 3 * 12 + 2 * 12))
    gated = {**row, "kind": "gated", "outer": [5, 5]}
    assert docs_plots.work_of_linears(gated) == (2 * 2 * 3 * 10, 2 * (2 * 3 + 3 * 10 + 2 * 5))
    terms = {**row, "kind": "sum", "inner": [3, 4], "outer": [5], "dtype": "float32"}
    assert docs_plots.work_of_linears(terms) == (2 * 2 * 7 * 5, 4 * (2 * 7 + 7 * 5 + 2 * 5))
    assert docs_plots.work_of_linears({**row, "kind": "shared_b"}) is None
    attention = {
        "batch": 2, "heads": 4, "kv_heads": 2, "q_len": 8, "kv_len": 16, "head_dim": 32, "mask": "none",
        "dtype": "bfloat16",
    }  # fmt: skip
    flops, moved = docs_plots.work_of_attention(attention)
    assert flops == 2 * (2 * 2 * 4 * 8 * 16 * 32) and moved == 2 * 2 * 32 * (2 * 4 * 8 + 2 * 2 * 16)
    assert docs_plots.work_of_attention({**attention, "mask": "causal"}) == (flops / 2, moved)


def test_roofline(tmp_path: Path) -> None:
    """What a device was measured at, by kernel; nothing without its rates, and nothing that was wrong."""
    folder = copied(tmp_path) / "bench" / "results"
    data = docs_plots.roofline(folder, "h200")
    kernels = {row["kernel"] for row in data["rows"]}
    assert {"attention", *(f"grouped GEMM, {name}" for name in ("row", "tiled", "persistent"))} <= kernels
    peak = 1.02 * data["peak"]["tflops"]["bfloat16"]
    rates = [r["flops"] / r["device_ms"]["fused"] / 1e9 for r in data["rows"] if "fused" in r["device_ms"]]
    assert len(rates) > 50 and all(0 < rate <= peak for rate in rates)
    assert docs_plots.times({"times_us": {"unfused": 2.0, "cudnn": 1.0}, "wrong": {"cudnn": "0.5"}}) == {
        "stock": 0.002
    }
    (folder / "whole_mlp_h200.json").unlink()
    assert not docs_plots.roofline(folder, "h200")["rows"]


def test_time_over_size(tmp_path: Path) -> None:
    """A curve has the rows that differ in one size alone."""
    folder = tmp_path / "results"
    folder.mkdir()
    assert not docs_plots.lengths(folder, "h200")["rows"] and not docs_plots.wanted(folder, "h200")
    rows = [
        {"key": f"gated 4096->14336+14336 silu m{m} bfloat16", "best": "ours",
         "times_us": {"stock": 3e3 * m, "max_autotune": 2e3 * m, "ours": 1e3 * m, "limit": 5e2 * m}}
        for m in (64, 1, 512)
    ]  # fmt: skip
    rows.append({**rows[0], "key": "gated 4096->14336+14336 gelu m64 bfloat16"})
    (folder / "projections_h200.json").write_text(json.dumps({"device": "a device", "rows": rows}))
    data = docs_plots.lengths(folder, "h200")
    assert data["device"] == "a device" and {row["line"] for row in data["rows"]} == {
        "gated MLP, 4096 to 14336"
    }
    assert [(row["length"], row["device_ms"]) for row in data["rows"]] == [
        (m, {"stock": 2.0 * m, "fused": 1.0 * m, "limit": 0.5 * m}) for m in (64, 1, 512)
    ]


def test_plot_of_other_data_is_stale(tmp_path: Path) -> None:
    """Told by what the file says that it was drawn from; what is drawn says so."""
    data = docs_plots.lengths(ROOT / "bench" / "results", "h200")
    assert not docs_plots.stale(ROOT / "docs" / "lengths.svg", data)
    assert docs_plots.stale(ROOT / "docs" / "lengths.svg", {**data, "rows": data["rows"][1:]})
    assert docs_plots.stale(tmp_path / "lengths.svg", data)
    pytest.importorskip("matplotlib")
    docs_plots.write(tmp_path / "lengths.svg", docs_plots.PLOTS["lengths.svg"], data)
    assert not docs_plots.stale(tmp_path / "lengths.svg", data)
    ElementTree.parse(tmp_path / "lengths.svg")
