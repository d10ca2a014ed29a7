"""Times of all configurations of adapters' kernels: what keeps them, and what judges a choice by waves."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import lora_tiles, tune_lora
from bench.lora import candidates
from bench.lora.candidates import Choice, Seen
from bench.lora.rows import ODD_WIDTHS, Row, odd_grid
from bench.pool import FileLock
from bench.tile_model import constants_of
from inductor_fusions.block_mm import configurations, cost
from inductor_fusions.block_mm.problem import Problem
from inductor_fusions.fusions.lora import accumulate_kernel, narrow

HALF = torch.bfloat16
#: What fills the device makes nearly all of the time.
HIDDEN = {
    "narrow": constants_of({**lora_tiles.START, "latency": 0.02, "launch parts": 9.0}),
    "added": constants_of({**lora_tiles.START, "launch whole": 1.0, "store whole": 6.0}),
    "block": cost.CONSTANTS,
}


def shape(kind: str, row: Row) -> Any:
    """Of a kernel of a row."""
    if kind == "added":
        return accumulate_kernel.Shape(row.tokens, row.outer[0], (row.rank,), 0, HALF, HALF)
    if kind == "block":
        sizes = (row.tokens,), (row.outer[0],), (row.inner, row.rank)
        return Problem(*sizes, (0, 0), ("nt", "nt"), HALF, lefts=(0, 1))
    if row.kind == "gradient":
        return narrow.Shape(row.inner, row.tokens, (row.rank,), "t", HALF, HALF)
    return narrow.Shape(row.tokens, row.inner, (row.rank,), "n", HALF, HALF)


MAIN = {"forward": "block", "accumulate": "added", "gradient": "narrow", "down": "narrow"}
#: Microseconds of the skinny GEMM in front of a kernel.
DOWN = 7.0


def measured(row: Row) -> dict[str, Any]:
    """As bench.tune_lora has it, by times of the model."""
    kind = MAIN[row.kind]
    posed, seen = shape(kind, row), Seen()
    getattr(seen, kind).append(posed)
    first, before = {"stock": 100.0, "defaults": DOWN}, 0.0 if kind == "narrow" else DOWN
    for choice in candidates.first_choices(row, seen, 90, False, every=True)[1:]:
        work = lora_tiles.KERNELS[kind].work(getattr(choice, kind), posed, 132)
        first[choice.name] = before + work.microseconds(HIDDEN[kind])
    shapes = json.loads(json.dumps({kind: candidates.plain(posed)}))
    return {**vars(row), "outer": list(row.outer), "first_us": first, "shapes": shapes}


def test_grid() -> None:
    rows = odd_grid()
    assert len({row.key for row in rows}) == len(rows) == 94
    assert {(row.inner, *row.outer) for row in rows if row.kind == "forward"} == set(ODD_WIDTHS)
    assert {row.rank for row in rows} == {4, 8, 16, 32, 64}
    assert sum((row.kind, row.inner, row.rank) == ("forward", 2048, 16) for row in rows) == 6


@pytest.mark.parametrize(
    "choice",
    [
        Choice(),
        Choice(block=configurations.Config("tiled", 64, 96, 128, 4, 5, across=True)),
        Choice(added=accumulate_kernel.Config(32, 128, 8), narrow=narrow.Config(16, 64, 2, 4, 3)),
    ],
    ids=lambda choice: choice.name,
)
def test_names_of_choices(choice: Choice) -> None:
    assert Choice.named(choice.name) == choice


@pytest.mark.parametrize("kind", MAIN)
def test_nearly_all_are_tried(kind: str) -> None:
    """In place of a few."""
    row = next(row for row in odd_grid() if (row.kind, row.tokens) == (kind, 1000))
    posed = shape(MAIN[kind], row)
    wanted = {
        "block": lambda: configurations.candidates(posed, 90),
        "added": lambda: accumulate_kernel.candidates(posed),
        "narrow": lambda: narrow.candidates(posed),
    }[MAIN[kind]]()
    times = measured(row)["first_us"]
    assert len(times) == 2 + len(wanted)
    (case,) = lora_tiles.cases([{**measured(row), "key": ""}], MAIN[kind], lora_tiles.KERNELS[MAIN[kind]])
    assert set(case.times) == set(wanted) and case.shape == posed


def test_waves_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where times are those of the model, it loses nearly nothing, without the width of a problem."""
    name = "nvidia_h100_80gb_hbm3"
    thin = lora_tiles.KERNELS["narrow"]
    monkeypatch.setattr(candidates, "usual", lambda posed: [lora_tiles.usual_of(thin, posed, name)])
    rows = [measured(row) for row in odd_grid()]
    results, out = tmp_path / "times.json", tmp_path / "judged.json"
    results.write_text(json.dumps({"device": "NVIDIA H100 80GB HBM3", "rows": rows}))
    monkeypatch.setattr("sys.argv", ["lora_tiles", str(results), "--json", str(out)])
    monkeypatch.setattr("bench.tile_model.STEPS", (0.8, 0.2, 0.05))
    lora_tiles.main()
    judged = json.loads(out.read_text())
    assert judged["of"] == name and set(judged["kernels"]) == set(lora_tiles.KERNELS)
    for kind, found in judged["kernels"].items():
        assert found["problems"] >= 15, kind
        ways = found["ways"]
        assert ways["held out, doubt 1.0"]["mean"] < 0.02 < ways["usual"]["mean"], kind
        assert ways["held out, doubt 1.25"]["mean"] <= ways["usual"]["mean"], kind
    assert "narrow: 47 of 47" in capsys.readouterr().out


def test_first_times_are_kept(tmp_path: Path) -> None:
    """On the CPU there are no kernels to choose from."""
    options = argparse.Namespace(device="cpu", quick=True, odd=True, no_autotune=True)
    row = Row("accumulate", 128, 64, (48,), 16, "bfloat16")
    result = tune_lora.measure(row, options, FileLock(tmp_path / "lock"))
    assert set(result["first_us"]) == {"stock", "defaults"} and result["shapes"] == {}
