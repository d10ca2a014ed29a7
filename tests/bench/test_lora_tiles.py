"""Times of all configurations of adapters' kernels: what keeps them, and what judges the chosen ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config

from bench import lora_tiles, tune_lora
from bench.lora import candidates
from bench.lora.candidates import Choice, Seen
from bench.lora.rows import ODD_WIDTHS, Row, odd_grid
from bench.pool import FileLock
from inductor_fusions.block_mm import configurations
from inductor_fusions.block_mm.problem import Problem
from inductor_fusions.decisions import tables
from inductor_fusions.fusions.lora import accumulate_kernel, narrow

HALF = torch.bfloat16
NAME = "nvidia_h100_80gb_hbm3"


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
    """As bench.tune_lora has it: what is chosen without rows of this width takes half of all others' time."""
    kind = MAIN[row.kind]
    posed, seen = shape(kind, row), Seen()
    getattr(seen, kind).append(posed)
    chosen = lora_tiles.chosen(lora_tiles.KERNELS[kind], posed, NAME)
    first, before = {"stock": 100.0, "defaults": DOWN}, 0.0 if kind == "narrow" else DOWN
    for choice in candidates.first_choices(row, seen, 90, False, every=True)[1:]:
        first[choice.name] = before + (10.0 if getattr(choice, kind) == chosen else 20.0)
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


def test_choices_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By how much longer they take than the fastest ones."""
    rows = [measured(row) for row in odd_grid()]
    results, out = tmp_path / "times.json", tmp_path / "judged.json"
    results.write_text(json.dumps({"device": "NVIDIA H100 80GB HBM3", "rows": rows}))
    monkeypatch.setattr("sys.argv", ["lora_tiles", str(results), "--json", str(out)])
    lora_tiles.main()
    judged = json.loads(out.read_text())
    assert set(judged["devices"]) == {NAME} and set(judged["devices"][NAME]) == set(lora_tiles.KERNELS)
    for kind, found in judged["devices"][NAME].items():
        assert found["problems"] >= 15, kind
        chosen, without, tried = (found["ways"][way] for way in ("chosen", "without tables", "measured"))
        assert chosen["most"] == 0 and chosen["kept"] == 1 and tried["mean"] <= without["mean"], kind
        if kind == "block":
            assert 0 < without["mean"] < 1 and without["kept"] < 1
        else:  # by a rule, which no table changes
            assert without == tried == chosen
    assert "narrow: 47 of 47" in capsys.readouterr().out


#: How much longer than the fastest configuration, in the mean: what is chosen, and the fastest that is tried.
BARS = {"narrow": (0.07, 0.03), "added": (0.05, 0.01), "block": (0.05, 0.01)}


def test_judgement_of_the_package() -> None:
    """The file is what the package chooses now, and no kernel loses more than this."""
    results = Path(lora_tiles.__file__).parent / "results"
    written = json.loads((results / "tile_model_lora.json").read_text())["devices"]
    for path in (results / "tiles_lora_h100.json", results / "tiles_lora_h200.json"):
        measured = json.loads(path.read_text())
        name = tables.slug(measured["device"])
        for kind, kernel in lora_tiles.KERNELS.items():
            found = lora_tiles.judge(kernel, list(lora_tiles.cases(measured["rows"], kind, kernel)), name)
            assert found == written[name][kind], f"{name}, {kind}: run python -m bench.lora_tiles"
            means = (found["ways"]["chosen"]["mean"], found["ways"]["measured"]["mean"])
            assert means[0] <= BARS[kind][0] and means[1] <= BARS[kind][1], (name, kind, means)


def test_first_times_are_kept(tmp_path: Path) -> None:
    """On the CPU there are no kernels to choose from."""
    options = argparse.Namespace(device="cpu", quick=True, odd=True, no_autotune=True)
    row = Row("accumulate", 128, 64, (48,), 16, "bfloat16")
    # Set by `measure`, for a process of its own, and restored for the tests behind this one.
    settings = torch._inductor.config.patch(force_disable_caches=False)
    with settings, torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):
        result = tune_lora.measure(row, options, FileLock(tmp_path / "lock"))
    assert set(result["first_us"]) == {"stock", "defaults"} and result["shapes"] == {}
