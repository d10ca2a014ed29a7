"""The tuning script: its grid, its candidates, and the tables that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from bench import device_table, projections, tune_projections
from bench.projections import Row
from inductor_fusions import config
from inductor_fusions.block_mm import configurations, heuristics
from inductor_fusions.block_mm.problem import Problem, tiles
from inductor_fusions.decisions import tables
from inductor_fusions.fusion import LeftToStock
from inductor_fusions.operands import profitable

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    Row("shared_a", 12, (32,), (32, 16, 16)),
    Row("gated", 12, (32,), (48, 48), activation="silu"),
    Row("sum", 12, (32, 16), (48,)),
    Row("shared_b", 24, (32,), (48, 16)),
    Row("linear", 12, (32,), (48,), activation="gelu"),
    Row("linear", 12, (32,), (48,), activation="gelu_tanh", conv1d=True),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_candidates_mean_the_same(row: Row) -> None:
    operands = projections.make(row, "cpu", 0)
    wanted = [y.float() for y in projections.unfused(row, operands.a, operands.b)]
    ours = projections.fused(row, operands.a, operands.b)
    for x, y in zip(ours, wanted, strict=True):
        torch.testing.assert_close(x.float(), y, rtol=2e-2, atol=2e-2)
    expected, cut = tune_projections.reference(row, operands)
    for x, y in zip(expected, cut(wanted), strict=True):
        torch.testing.assert_close(x.float(), y, rtol=2e-2, atol=2e-2)
    limit = projections.limit(row, [operands])(operands)
    assert limit[0].numel() == sum((x @ w).numel() for x, w in zip(operands.a, operands.b, strict=True)) or (
        row.kind == "sum" and limit[0].shape == ours[0].shape
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_kind_is_that_of_the_lowering(row: Row) -> None:
    posed = projections.problem(row, projections.make(row, "cpu", 0))
    assert posed.kind == row.kind and posed.tokens == row.tokens


def test_grid() -> None:
    keys = [row.key for row in projections.grid()]
    assert len(keys) == len(set(keys)) and {row.kind for row in projections.grid()} >= {"gated", "sum"}


def test_each_candidate_is_compiled() -> None:
    """Dynamo must not hand the kernel of one configuration to the next, nor compile one again later."""
    row, calls = ROWS[0], []
    operands = projections.make(row, "cpu", 0)
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for _ in range(3):
        calls.append(projections.compiled(row, projections.unfused, operands, backend="eager"))
    assert counters["stats"]["unique_graphs"] == before + 3
    for call in calls:
        call(operands)
    assert counters["stats"]["unique_graphs"] == before + 3


def measured(row: Row, stock: float, autotuned: float, ours: float) -> dict[str, Any]:
    posed = projections.problem(row, projections.make(row, "cpu", 0))
    chosen = configurations.default(posed, 90)
    return {
        "key": row.key, "tokens": row.tokens, "problem": posed.key, "best": "ours", "capability": [9, 0],
        "config": asdict(chosen), "times_us": {"stock": stock, "max_autotune": autotuned, "ours": ours},
    }  # fmt: skip


def test_number_of_rows_of_a_configuration(
    shelf: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tensor cores one is for no more rows than it was measured with; beyond the table is none."""

    def posed(rows: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
        return Problem((rows,) * 2, (64, 32), (64,) * 2, (0, 1), ("nt",) * 2, dtype, shared="a")

    one, four, tile = (configurations.default(posed(m), 90) for m in (1, 4, 16))
    assert (one.template, four.template, tile.template) == ("row", "row", "tiled")
    found = [
        {**posed(m).key, "tokens": m, "gain": 2.0, "config": asdict(c)}
        for m, c in ((1, one), (4, four), (16, tile))
    ]
    shelf(on="any", any={"block_mm": found})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def chosen(rows: int) -> configurations.Config:
        device = torch.device("cuda")
        assert profitable(heuristics.decided(posed(rows), device)).kernel == "block_mm"
        return heuristics.choose(posed(rows), device)

    assert [chosen(m) for m in (1, 2, 3, 4, 5, 8, 16)] == [one, *[four] * 3, *[tile] * 3]
    with config.patch(estimate=False):
        with pytest.raises(LeftToStock, match="not measured on"):
            chosen(17)
        found[1:] = []
        with pytest.raises(LeftToStock, match="not measured on"):
            chosen(2)
    for rows in (1, 2, 3, 4, 5, 16):
        tried = configurations.candidates(posed(rows), 90)
        assert any(c.template == "row" for c in tried) == (rows <= 4)
        assert all(configurations.suits(c, posed(rows)) for c in tried)


@pytest.mark.parametrize("tokens, kept", [(2048, True), (1024, False), (1000, False), (4096, True)])
def test_tiles_that_fill_the_device(
    tokens: int, kept: bool, shelf: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only row is of 2,048 tokens: half of them have 64 of its tiles, for 132 multiprocessors."""

    def posed(rows: int) -> Problem:
        return Problem((rows,) * 2, (1024,) * 2, (1024,) * 2, (0, 1), ("nt",) * 2, torch.bfloat16, shared="a")

    wide = configurations.Config("persistent", 128, 256, 64, 8, 3, subtiles=2)
    row = {**posed(2048).key, "tokens": 2048, "gain": 2.0, "config": asdict(wide)}
    shelf(nvidia_h100_80gb_hbm3={"block_mm": [row]})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    chosen = heuristics.choose(posed(tokens), torch.device("cuda"))
    assert (chosen == wide) == kept
    if not kept:
        assert tiles(posed(tokens), chosen.block_m, chosen.block_n) > 64


def test_table(own_tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is found again, beside what was there; stock without autotuning is the baseline."""
    target = own_tables / "nvidia_h200.json"
    shipped = json.loads((ROOT / "configs" / "devices" / "nvidia_h200.json").read_text())
    other = {n: found for n, found in shipped.items() if n == "attention" or not isinstance(found, list)}
    target.write_text(json.dumps(other))
    rows = [measured(ROWS[0], 30.0, 20.0, 10.0), measured(ROWS[1], 9.0, 20.0, 10.0)]
    tune_projections.write_table(target, rows)
    tune_projections.write_table(target, [measured(ROWS[0], 30.0, 30.0, 10.0)])
    data = json.loads(target.read_text())
    assert data["attention"] == shipped["attention"]
    gains = {row["kind"]: (row["gain"], row["config"] is not None) for row in data["block_mm"]}
    assert gains == {"shared_a": (3.0, True), "gated": (0.9, False)}
    assert device_table.kept(target) == {"block_mm": data["block_mm"]}

    monkeypatch.setattr(tables, "device_name", lambda device: "nvidia_h200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    posed = projections.problem(ROWS[0], projections.make(ROWS[0], "cpu", 0))
    device = torch.device("cuda")
    assert heuristics.choose(posed, device) == configurations.default(posed, 90)
    assert heuristics.decided(posed, device).note == "3.00x measured"


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_defaults_fit_every_architecture(arch: int) -> None:
    """In shared memory, 99 KiB on the smaller chips; without bulk copies where there are none."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (1, 4, 16, 64, 128, 300, 4096):
            for gated in (False, True):
                posed = Problem(
                    (rows,) * 2, (768, 768), (896,) * 2, (0, 1), ("nt",) * 2, dtype, gated, shared="a"
                )
                chosen = configurations.default(posed, arch)
                assert configurations.suits(chosen, posed)
                assert configurations.shared_bytes(chosen, posed) <= configurations.shared_limit(arch)
                assert chosen.template != "persistent" or arch in (90, 100)
                tried = configurations.candidates(posed, arch)
                assert all(configurations.fits(c, posed, arch) for c in tried)
