"""The tuning script: its grid, its candidates, and the tables that it writes and the package reads."""

from __future__ import annotations

import json
from collections.abc import Callable
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


def measured(row: Row, stock: float, ours: float, **extra: Any) -> dict[str, Any]:
    return {
        "key": row.key, **vars(row), "outer": list(row.outer), "best": "ours", "capability": [9, 0],
        "times_us": {"stock": stock, "ours": ours}, **extra,
    }  # fmt: skip


DEVICE, WHOLE, HALF = torch.device("cuda"), torch.float32, torch.bfloat16
THIN = narrow.Shape(64, 4096, (16,), "t", HALF, WHOLE)
MASKED = narrow.Shape(128, 64, (16,), "n", HALF, WHOLE, masks=1)
FEW = decode.Shape(4, 64, (64,), (16,), HALF, WHOLE)
POSED = Problem((128,) * 2, (64, 32), (64, 48) * 2, (0, 0, 1, 1), ("nt",) * 4, HALF, shared="")
TILE = accumulate_kernel.Shape(128, 48, (48,), 0, HALF, HALF)
BLOCK = next(c for c in configurations.candidates(POSED, 90) if c.template == "tiled")
CHOSEN, READING = narrow.Config(16, 64, 2, 4, 3), narrow.Config(16, 64, 1, 4, 3)
PAIR, TILED = decode.Config(16, 64, 4, 3, 2), accumulate_kernel.Config(64, 64, 4)
MEASURED = [
    measured(ROWS[0], 30.0, 20.0, block={**POSED.key, "config": asdict(BLOCK)}),
    measured(Row("forward", 4, 64, (64,)), 30.0, 31.0, decode={**FEW.key, "config": asdict(PAIR)}),
    measured(
        Row("gradient", 4096, 64, ()), 30.0, 10.0, narrow=[{**narrow.key(THIN), "config": asdict(CHOSEN)}]
    ),
    measured(ROWS[3], 30.0, 10.0),
    measured(ROWS[5], 30.0, 15.0, added={**accumulate_kernel.key(TILE), "config": asdict(TILED)}),
    measured(ROWS[7], 30.0, 12.0),
    measured(Row("forward", 128, 64, (48,), 16, "float32", 0.1), 30.0, 15.0, narrow=[
        {**narrow.key(MASKED), "config": asdict(READING)},
        {**narrow.key(replace(MASKED, masks=0)), "config": asdict(CHOSEN)},
    ]),
    measured(Row("step", 128, 64, (48,), 16, "float32", 0.1), 30.0, 20.0, masks=1),
    measured(Row("step", 128, 64, (48,), 16, "bfloat16", 0.1), 30.0, 31.0),
]  # fmt: skip


@pytest.fixture
def written(own_tables: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The table of the device, with attentions that it has had, and what was measured twice."""
    target = own_tables / "nvidia_h200.json"
    shipped = json.loads((ROOT / "configs" / "devices" / "nvidia_h200.json").read_text())
    other = {n: found for n, found in shipped.items() if n == "attention" or not isinstance(found, list)}
    target.write_text(json.dumps(other))
    write_table(target, MEASURED)
    write_table(target, MEASURED)
    assert json.loads(target.read_text())["attention"] == shipped["attention"]
    monkeypatch.setattr(tables, "device_name", lambda device: "nvidia_h200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return target


def test_table(written: Path) -> None:
    """What is written beside what was there."""
    assert {name: len(found) for name, found in device_table.kept(written).items()} == {
        "block_mm": 1, "lora": 2, "narrow_mm": 2, "lora_decode": 1, "lora_sums": 2, "lora_accumulate": 1,
        "lora_dropout": 2,
    }  # fmt: skip


def test_tiles_that_were_written(written: Path) -> None:
    assert heuristics.choose(POSED, DEVICE) == BLOCK
    assert narrow.measured(THIN, DEVICE) == CHOSEN
    assert narrow.measured(MASKED, DEVICE) == READING
    assert narrow.measured(replace(MASKED, masks=0), DEVICE) is None  # masks make another kernel
    assert decode.choose(FEW, DEVICE) == PAIR
    assert accumulate_kernel.choose(TILE, DEVICE) == TILED
    # Nothing like it; and tiles that threads have no room for.
    for other in (replace(TILE, rows=None), replace(TILE, masks=1), replace(TILE, inner=(48,) * 3, masks=2)):
        assert accumulate_kernel.choose(other, DEVICE) == accumulate_kernel.default(other)


LINEAR = profit.Shape(128, (64,), (64, 32), ((16,), (16,)), HALF, WHOLE, "t")
DROPPED = profit.Dropped(128, 64, 48, 16, HALF, WHOLE)


def test_gains_that_were_written(written: Path) -> None:
    base = profit.Accumulated(128, (64,), 48, (16,), 0, HALF, WHOLE)
    masks = profit.Accumulated(128, (64, 32, 32), 64, (16,) * 3, 3, HALF, HALF)
    assert "1.50x measured" in profit.kernel(LINEAR, DEVICE)
    assert "2.00x measured" in profit.kernel(base, DEVICE) and "2.50x measured" in profit.kernel(
        masks, DEVICE
    )
    assert "3.00x measured" in profit.narrow_kernel(THIN, 4096, DEVICE)
    assert profit.kernel(DROPPED, DEVICE).endswith(
        "128 x (64 -> 48), rank 16 behind a dropout, bfloat16, adapter float32, 1.50x measured"
    )


#: Of a call, why it is left to stock.
LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "slower": (
        lambda: profit.kernel(replace(LINEAR, tokens=4, outer=(64,), ranks=((16,),)), DEVICE),
        "no faster than stock",
    ),
    "other adapters": (lambda: profit.kernel(replace(LINEAR, adapters=HALF), DEVICE), "not measured on"),
    "symbolic": (lambda: profit.kernel(replace(LINEAR, tokens=None), DEVICE), "symbolic"),
    # Measured of what the dropout had left in memory.
    "dropout": (lambda: profit.kernel(replace(DROPPED, adapters=HALF), DEVICE), "not measured on"),
    "dropped in memory": (
        lambda: profit.check_dropped(replace(DROPPED, adapters=HALF), DEVICE),
        "adapter with dropout: measured",
    ),
    "dropped in memory, other dtypes": (
        lambda: profit.check_dropped(replace(DROPPED, adapters=torch.float16, dtype=WHOLE), DEVICE),
        "adapter with dropout: not measured on",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_to_stock(name: str, written: Path) -> None:
    call, says = LEFT[name]
    with pytest.raises(LeftToStock, match=says):
        call()


def test_number_of_rows_of_a_configuration(
    shelf: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tensor cores one is for no more rows than it was measured with, and for weights along K."""
    few = decode.Shape(1, 4096, (4096,), (16,), torch.bfloat16, torch.float32)
    row, rows = decode.Config(2, 2048, 4, 1, 16), decode.Config(4, 1024, 4, 1, 8)
    tile = decode.Config(32, 256, 4, 4, 8, lanes=4)
    found = [{**few.key, "tokens": m, "config": asdict(c)} for m, c in ((1, row), (4, rows), (16, tile))]
    shelf(on="any", any={"lora_decode": found})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def chosen(rows: int, along: bool = True) -> decode.Config:
        return decode.choose(replace(few, rows=rows, along=along), torch.device("cuda"))

    # Nor with lanes for more rows than they are made for.
    assert [chosen(m) for m in (1, 2, 3, 4, 5, 8, 16, 64)] == [
        row,
        *[rows] * 3,
        *[tile] * 3,
        decode.default(replace(few, rows=64)),
    ]
    assert chosen(1, along=False) == tile
    found[1:] = []
    assert chosen(1) == row and chosen(2) == decode.default(replace(few, rows=2)) != row
    # What an earlier table has.
    found[0]["config"].pop("lanes")
    assert chosen(1) == row


def test_candidates_for_few_rows() -> None:
    """Kernels without tensor cores up to 8 rows; from 2 to 16, tiles with a lane for each warp."""
    few = decode.Shape(1, 4096, (4096,), (16,), torch.bfloat16, torch.float32)
    for rows in (1, 2, 3, 4, 8, 9, 16, 17, 64):
        shape = replace(few, rows=rows)
        tried = decode.candidates(shape, 90)
        assert len(tried) == len(set(tried)) and tried[0] == decode.default(shape)
        assert tried[0].row == (rows <= 4)
        assert any(c.row for c in tried) == (rows <= 8)
        assert any(c.lanes > 1 for c in tried) == (1 < rows <= 16)
        assert all(c.num_warps % c.lanes == 0 and c.block_k % c.lanes == 0 for c in tried)
        assert not any(c.row for c in decode.candidates(replace(shape, along=False), 90))


def test_parts_of_a_skinny_product(own_tables: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem's own row is taken; without one a usual tile, and K in as many parts as fill the device."""
    near = narrow.Shape(4096, 4096, (16,), "n", torch.bfloat16, torch.bfloat16)
    row = {**narrow.problem(near), "config": asdict(narrow.Config(32, 128, 1, 4, 4))}
    about = {"schema": 1, "device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-27", "attention": []}
    (own_tables / "nvidia_h200.json").write_text(json.dumps({**about, "narrow_mm": [row]}))
    monkeypatch.setattr(tables, "device_name", lambda device: "nvidia_h200")
    for rows, splits in ((40000, 1), (4096, 4), (1000, 16), (200, 16)):
        other = replace(near, rows=rows, inner=3584)
        assert narrow.measured(other, torch.device("cuda")) is None
        assert narrow.default(other) == narrow.Config(64, 64, splits, 4, 4), rows
    assert narrow.default(replace(near, inner=768)) == narrow.Config(64, 128, 1, 4, 4), "K is short"
    assert narrow.measured(near, torch.device("cuda")) == narrow.Config(32, 128, 1, 4, 4)
