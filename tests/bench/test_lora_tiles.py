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
from inductor_fusions.decisions import tables
from inductor_fusions.decisions.tables import Table
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


def measured(row: Row) -> dict[str, Any]:
    """As bench.tune_lora has it, by times of the model."""
    main = {"forward": "block", "accumulate": "added", "gradient": "narrow"}[row.kind]
    seen, first = Seen(), {"stock": 100.0, "defaults": 50.0}
    for kind in {main, "narrow"}:
        getattr(seen, kind).append(shape(kind, row))
    tried = candidates.first_choices(row, seen, 90, False, every=True)[1:]
    for choice in [*tried, *candidates.second_choices(tried[0], seen, False, every=True)]:
        kind = "narrow" if choice.narrow else main
        work = lora_tiles.KERNELS[kind].work(getattr(choice, kind), shape(kind, row), 132)
        first[choice.name] = work.microseconds(HIDDEN[kind])
    shapes = {kind: candidates.plain(shape(kind, row)) for kind in {main, "narrow"}}
    return {
        **vars(row),
        "outer": list(row.outer),
        "first_us": first,
        "shapes": json.loads(json.dumps(shapes)),
    }


def test_grid() -> None:
    rows = odd_grid()
    assert len({row.key for row in rows}) == len(rows) == 63
    assert {(row.inner, *row.outer) for row in rows if row.kind == "forward"} == set(ODD_WIDTHS)
    assert {row.rank for row in rows} == {4, 8, 16, 32, 64}
    # A DoRA of this size was slower than stock.
    assert "forward 2048->1024 r16 float32 m4100" in {row.key for row in rows}


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


@pytest.mark.parametrize("kind", ["forward", "accumulate", "gradient"])
def test_nearly_all_are_tried(kind: str) -> None:
    """All of the first kernel, and those of the skinny GEMM beside its best one, in place of a few."""
    row = next(row for row in odd_grid() if (row.kind, row.tokens) == (kind, 1000))
    times = measured(row)["first_us"]
    main = {"forward": "block", "accumulate": "tile", "gradient": "narrow"}[kind]
    shape_of, made = {
        "forward": ("block", lambda posed: configurations.candidates(posed, 90)),
        "accumulate": ("added", accumulate_kernel.candidates),
        "gradient": ("narrow", narrow.candidates),
    }[kind]
    alone = [name for name in times if name.startswith(main) and ", " not in name]
    assert len(alone) == len(made(shape(shape_of, row)))
    beside = [name for name in times if "narrow" in name and ", " in name]
    assert (len(beside) >= 4) == (kind != "gradient")


def test_shapes_are_read_again() -> None:
    for row in odd_grid()[::10]:
        for kind in {"forward": ("block", "narrow"), "accumulate": ("added",), "gradient": ("narrow",)}[
            row.kind
        ]:
            wanted = shape(kind, row)
            found = json.loads(json.dumps(candidates.plain(wanted)))
            assert candidates.shape_of(type(wanted), found) == wanted


def test_waves_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where times are those of the model, it loses nearly nothing, without the width of a problem."""
    name = "nvidia_h100_80gb_hbm3"
    monkeypatch.setattr(tables, "load", lambda device: Table({}))
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
    assert "narrow: " in capsys.readouterr().out


def test_first_times_are_kept(tmp_path: Path) -> None:
    """On the CPU there are no kernels to choose from."""
    options = argparse.Namespace(device="cpu", quick=True, odd=True, no_autotune=True)
    row = Row("accumulate", 128, 64, (48,), 16, "bfloat16")
    result = tune_lora.measure(row, options, FileLock(tmp_path / "lock"))
    assert set(result["first_us"]) == {"stock", "defaults"} and result["shapes"] == {}
