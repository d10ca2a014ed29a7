"""The tuning script: its grid, its candidates, and the tables that it writes and the package reads."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import device_table
from bench.lora import spellings
from bench.lora.rows import ALONE, Row, grid
from bench.lora.table import write_table
from inductor_fusions.block_mm import configurations, heuristics
from inductor_fusions.block_mm.problem import Problem
from inductor_fusions.decisions import tables
from inductor_fusions.fusion import LeftToStock
from inductor_fusions.fusions.lora import accumulate_kernel, decode, narrow, profit

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    Row("forward", 128, 64, (64, 32)),
    Row("backward", 128, 64, (64, 32), 16, "bfloat16"),
    Row("gradient", 128, 64, ()),
    Row("step", 128, 64, (48,)),
    Row("gradient", 128, 64, (16, 16)),
    Row("accumulate", 128, 64, (48,)),
    Row("accumulate", 128, 64, (48,), 16, "bfloat16"),
    Row("dropped", 128, 64, (64, 32, 32), 16, "bfloat16"),
    Row("gradient", 128, 64, (16, 16), 16, "bfloat16", 0.1),
    Row("down", 128, 64, ()),
    Row("down", 128, 64, (16, 16), 16, "bfloat16"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_reference(row: Row) -> None:
    """What float64 says is what the function computes; for a step, its gradients as well."""
    one = spellings.make(row, "cpu", 0)
    exact, cut = spellings.reference(row, one)
    x = one.x[:1] if row.kind == "step" else one.x
    found = spellings.FUNCTIONS[row.kind](row, x, one.w, one.a, one.b)
    if row.kind == "step":
        found += torch.autograd.grad(found, [one.x[0], *one.a, *one.b], [one.x[1]])
    for y, z in zip(cut(found), exact, strict=True):
        assert y.shape == z.shape
        assert float((y.double() - z).norm() / z.norm()) < 2e-2


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("outer", [(), (16, 16)])
def test_skinny_product_of_the_fusion(outer: tuple[int, ...], dropout: float) -> None:
    for kind in ("gradient",) if dropout else ALONE:
        row = Row(kind, 128, 64, outer, dropout=dropout)
        one = spellings.make(row, "cpu", 0)
        found = spellings.narrow_product(row, one.x, one.w, one.a, one.b)
        torch.testing.assert_close(found, spellings.FUNCTIONS[kind](row, one.x, one.w, one.a, one.b))


def test_grid() -> None:
    keys = [row.key for row in grid()]
    assert len(keys) == len(set(keys))
    for wanted in (
        "forward 4096->4096 r16 float32 m1",
        "forward 4096->14336 r16 bfloat16 m16",
        "forward 4096->4096 r16 float32 m8",
        "forward 4096->4096+1024+1024 r16 bfloat16 m4",
        "forward 14336->4096 r16 float32 m8192",
        "forward 5120->5120 r16 bfloat16 dropout0.1 m2048",
        "forward 4096->14336 r16 float32 dropout0.1 m4096",
        "step 14336->4096 r16 float32 dropout0.1 m8192",
        "gradient 4096->16+16+16 r16 float32 dropout0.1 bfloat16 m4096",
        "step 8192->8192 r16 float32 m2048",
        "step 4096->4096 r128 bfloat16 m4096",
        "backward 2048->2048+512+512 r16 float32 m4096",
        "accumulate 4096->14336 r64 bfloat16 m8192",
        "accumulate 14336->4096 r16 float32 m2048",
        "dropped 2048->2048+512+512 r16 bfloat16 m4096",
        "dropped 4096->14336+14336 r64 float32 m4096",
    ):
        assert wanted in keys


def measured(row: Row, stock: float, ours: float, **extra: Any) -> dict[str, Any]:
    return {
        "key": row.key, **vars(row), "outer": list(row.outer), "best": "ours", "capability": [9, 0],
        "times_us": {"stock": stock, "ours": ours}, **extra,
    }  # fmt: skip


def test_table(own_tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is found again, beside what was there."""
    target = own_tables / "nvidia_h200.json"
    shipped = json.loads((ROOT / "configs" / "devices" / "nvidia_h200.json").read_text())
    other = {n: found for n, found in shipped.items() if n == "attention" or not isinstance(found, list)}
    target.write_text(json.dumps(other))
    thin = narrow.Shape(64, 4096, (16,), "t", torch.bfloat16, torch.float32)
    masked = narrow.Shape(128, 64, (16,), "n", torch.bfloat16, torch.float32, masks=1)
    reading = narrow.Config(16, 64, 1, 4, 3)
    few = decode.Shape(4, 64, (64,), (16,), torch.bfloat16, torch.float32)
    chosen = narrow.Config(16, 64, 2, 4, 3)
    pair = decode.Config(16, 64, 4, 3, 2)
    posed = Problem((128,) * 2, (64, 32), (64, 48) * 2, (0, 0, 1, 1), ("nt",) * 4, torch.bfloat16, shared="")
    block = next(c for c in configurations.candidates(posed, 90) if c.template == "tiled")
    tile = accumulate_kernel.Shape(128, 48, (48,), 0, torch.bfloat16, torch.bfloat16)
    tiled = accumulate_kernel.Config(64, 64, 4)
    rows = [
        measured(ROWS[0], 30.0, 20.0, block={**posed.key, "config": asdict(block)}),
        measured(Row("forward", 4, 64, (64,)), 30.0, 31.0, decode={**few.key, "config": asdict(pair)}),
        measured(Row("gradient", 4096, 64, ()), 30.0, 10.0, narrow=[
            {**narrow.key(thin), "config": asdict(chosen)}
        ]),
        measured(ROWS[3], 30.0, 10.0),
        measured(ROWS[5], 30.0, 15.0, added={**accumulate_kernel.key(tile), "config": asdict(tiled)}),
        measured(ROWS[7], 30.0, 12.0),
        measured(Row("forward", 128, 64, (48,), 16, "float32", 0.1), 30.0, 15.0, narrow=[
            {**narrow.key(masked), "config": asdict(reading)},
            {**narrow.key(replace(masked, masks=0)), "config": asdict(chosen)},
        ]),
        measured(Row("step", 128, 64, (48,), 16, "float32", 0.1), 30.0, 20.0, masks=1),
        measured(Row("step", 128, 64, (48,), 16, "bfloat16", 0.1), 30.0, 31.0),
    ]  # fmt: skip
    write_table(target, rows)
    write_table(target, rows)
    data = json.loads(target.read_text())
    assert data["attention"] == shipped["attention"]
    assert {name: len(found) for name, found in device_table.kept(target).items()} == {
        "block_mm": 1, "lora": 2, "narrow_mm": 2, "lora_decode": 1, "lora_sums": 2, "lora_accumulate": 1,
        "lora_dropout": 2,
    }  # fmt: skip

    monkeypatch.setattr(tables, "device_name", lambda device: "nvidia_h200")
    monkeypatch.setattr(profit, "capability", lambda device: 90)
    monkeypatch.setattr(heuristics, "capability", lambda device: 90)
    monkeypatch.setattr(decode, "capability", lambda device: 90)
    device = torch.device("cuda")
    shape = profit.Shape(128, (64,), (64, 32), ((16,), (16,)), torch.bfloat16, torch.float32, "t")
    slow = profit.Shape(4, (64,), (64,), ((16,),), torch.bfloat16, torch.float32, "t")
    assert "1.50x measured" in profit.kernel(shape, device)
    assert heuristics.choose(posed, device) == block
    with pytest.raises(LeftToStock, match="no faster than stock"):
        profit.kernel(slow, device)
    with pytest.raises(LeftToStock, match="not measured on"):
        profit.kernel(replace(shape, adapters=torch.bfloat16), device)
    with pytest.raises(LeftToStock, match="symbolic"):
        profit.kernel(replace(shape, tokens=None), device)
    assert "3.00x measured" in profit.narrow_kernel(thin, 4096, device)
    assert narrow.measured(thin, device) == chosen
    assert decode.choose(few, device) == pair
    assert accumulate_kernel.choose(tile, device) == tiled
    base = profit.Accumulated(128, (64,), 48, (16,), 0, torch.bfloat16, torch.float32)
    assert "2.00x measured" in profit.kernel(base, device)
    masks = profit.Accumulated(128, (64, 32, 32), 64, (16,) * 3, 3, torch.bfloat16, torch.bfloat16)
    assert "2.50x measured" in profit.kernel(masks, device)
    assert narrow.measured(masked, device) == reading
    assert narrow.measured(replace(masked, masks=0), device) is None  # masks make another kernel
    dropped = profit.Dropped(128, 64, 48, 16, torch.bfloat16, torch.float32)
    assert "1.50x measured" in profit.kernel(dropped, device)
    # Measured of what the dropout had left in memory.
    slower = replace(dropped, adapters=torch.bfloat16)
    with pytest.raises(LeftToStock, match="not measured on"):
        profit.kernel(slower, device)
    with pytest.raises(LeftToStock, match="adapter with dropout: measured"):
        profit.check_dropped(slower, device)
    with pytest.raises(LeftToStock, match="adapter with dropout: not measured on"):
        profit.check_dropped(replace(slower, adapters=torch.float16, dtype=torch.float32), device)


def test_number_of_rows_of_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tensor cores one is for no more rows than it was measured with, and for weights along K."""
    few = decode.Shape(1, 4096, (4096,), (16,), torch.bfloat16, torch.float32)
    row, rows = decode.Config(2, 2048, 4, 1, 16), decode.Config(4, 1024, 4, 1, 8)
    tile = decode.Config(32, 256, 4, 4, 8, lanes=4)
    found = [{**few.key, "tokens": m, "config": asdict(c)} for m, c in ((1, row), (4, rows), (16, tile))]
    monkeypatch.setattr(tables, "load", lambda name: {"lora_decode": found})
    monkeypatch.setattr(tables, "device_name", lambda device: "any")
    monkeypatch.setattr(decode, "capability", lambda device: 90)

    def chosen(rows: int, along: bool = True) -> decode.Config:
        return decode.choose(replace(few, rows=rows, along=along), torch.device("cuda"))

    # Nor with lanes for more rows than they are made for.
    assert [chosen(m) for m in (1, 2, 3, 4, 5, 8, 16, 64)] == [
        row,
        *[rows] * 3,
        *[tile] * 3,
        decode.default(replace(few, rows=64), 90),
    ]
    assert chosen(1, along=False) == tile
    found[1:] = []
    assert chosen(1) == row and chosen(2) == decode.default(replace(few, rows=2), 90) != row
    # What an earlier table has.
    found[0]["config"].pop("lanes")
    assert chosen(1) == row


def test_candidates_for_few_rows() -> None:
    """Kernels without tensor cores up to 8 rows; from 2 to 16, tiles with a lane for each warp."""
    few = decode.Shape(1, 4096, (4096,), (16,), torch.bfloat16, torch.float32)
    for rows in (1, 2, 3, 4, 8, 9, 16, 17, 64):
        shape = replace(few, rows=rows)
        tried = decode.candidates(shape, 90)
        assert len(tried) == len(set(tried)) and tried[0] == decode.default(shape, 90)
        assert tried[0].row == (rows <= 4)
        assert any(c.row for c in tried) == (rows <= 8)
        assert any(c.lanes > 1 for c in tried) == (1 < rows <= 16)
        assert all(c.num_warps % c.lanes == 0 and c.block_k % c.lanes == 0 for c in tried)
        assert not any(c.row for c in decode.candidates(replace(shape, along=False), 90))


def test_parts_of_a_skinny_product(own_tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest problem's tile is taken, and K in as many parts as fill the device with the rows here."""
    near = narrow.Shape(4096, 4096, (16,), "n", torch.bfloat16, torch.bfloat16)
    row = {**narrow.problem(near), "config": asdict(narrow.Config(32, 128, 1, 4, 4))}
    table = {"schema": 1, "device": "NVIDIA H200", "narrow_mm": [row]}
    (own_tables / "nvidia_h200.json").write_text(json.dumps(table))
    monkeypatch.setattr(tables, "device_name", lambda device: "nvidia_h200")
    for rows, splits in ((4096, 1), (1000, 4), (200, 14)):
        found = narrow.measured(replace(near, rows=rows, inner=3584), torch.device("cuda"))
        assert found == narrow.Config(32, 128, splits, 4, 4), rows
    assert narrow.measured(near, torch.device("cuda")) == narrow.Config(32, 128, 1, 4, 4)
