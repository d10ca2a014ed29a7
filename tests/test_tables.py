"""Tables of devices: what is one; a broken or a foreign one is a warning and stock, never a crash."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_fusions
from inductor_fusions import config, tables
from inductor_fusions.fusions.block_mm import configurations

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "configs" / "devices").glob("*.json"))

CONFIG = {"template": "tiled", "block_m": 16, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3}
GOOD: dict[str, Any] = {
    "schema": tables.SCHEMA,
    "device": "NVIDIA Z1-0 80GB",
    "torch": "2.13.0",
    "date": "2026-01-01",
    "attention": [
        {
            "batch": 1, "heads": 2, "q_len": 64, "kv_len": 64, "head_dim": 32, "dtype": "float32",
            "mask": "none", "train": False, "gain": {"sdpa": 2.0}, "options": {"fwd_BLOCK_M": 64},
        }
    ],
    "block_mm": [
        {
            "kind": "shared_a", "n": [64, 64], "m": None, "k": [64], "layout": ["nt", "nt"],
            "dtype": "bfloat16", "tokens": 16, "capability": [9, 0], "gain": 1.5, "config": CONFIG,
        }
    ],
}  # fmt: skip
NAME = "nvidia_z1_0_80gb"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_table(path: Path) -> None:
    """Each is right, its file has the name that is looked for, and its measurements are in the repository."""
    data = json.loads(path.read_text())
    tables.check(data, path.stem)
    assert tables.load(path.stem) is not None
    assert data["attention"] or data["block_mm"]
    results = [json.loads(file.read_text()) for file in (ROOT / "bench" / "results").glob("*.json")]
    assert any((one["device"], one["torch"]) == (data["device"], data["torch"]) for one in results)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder where tables are looked for."""
    (tmp_path / "devices").mkdir()
    monkeypatch.setattr(tables, "folder", lambda: tmp_path)
    for cached in (tables.load, tables.digest):
        cached.cache_clear()
    yield tmp_path / "devices"
    for cached in (tables.load, tables.digest):
        cached.cache_clear()


def test_good_table_is_used(shelf: Path) -> None:
    (shelf / f"{NAME}.json").write_text(json.dumps(GOOD))
    assert tables.load(NAME) == GOOD
    assert configurations.Config(**GOOD["block_mm"][0]["config"])


def broken(change: Callable[[Any], object]) -> str:
    table = copy.deepcopy(GOOD)
    change(table)
    return json.dumps(table)


def attention(change: dict[str, Any]) -> str:
    return broken(lambda table: table["attention"][0].update(change))


def block_mm(change: dict[str, Any]) -> str:
    return broken(lambda table: table["block_mm"][0].update(change))


BROKEN = {
    "empty": "",
    "cut": json.dumps(GOOD)[:-9],
    "not JSON": "a table",
    "a list": "[]",
    "null": "null",
    "another schema": broken(lambda t: t.update(schema=2)),
    "no schema": broken(lambda t: t.pop("schema")),
    "of another device": broken(lambda t: t.update(device="NVIDIA A1")),
    "no device": broken(lambda t: t.pop("device")),
    "no torch": broken(lambda t: t.pop("torch")),
    "no date": broken(lambda t: t.pop("date")),
    "no attention": broken(lambda t: t.pop("attention")),
    "attention is no list": broken(lambda t: t.update(attention=3)),
    "a row is no object": broken(lambda t: t["attention"].append(3)),
    "no mask": broken(lambda t: t["attention"][0].pop("mask")),
    "no gain": broken(lambda t: t["attention"][0].pop("gain")),
    "gain is a list": attention({"gain": [2.0]}),
    "options is a list": attention({"options": [64]}),
    "no configuration": broken(lambda t: t["block_mm"][0].pop("config")),
    "gain is a text": attention({"gain": {"sdpa": "2"}}),
    "gain is true": attention({"gain": {"sdpa": True}}),
    "gain is NaN": attention({"gain": {"sdpa": float("nan")}}),
    "gain is negative": attention({"gain": {"sdpa": -1.0}}),
    "length is a text": attention({"q_len": "64"}),
    "length is zero": attention({"q_len": 0}),
    "train is a number": attention({"train": 1}),
    "an option is a text": attention({"options": {"fwd_BLOCK_M": "64"}}),
    "no tokens": broken(lambda t: t["block_mm"][0].pop("tokens")),
    "no k": broken(lambda t: t["block_mm"][0].pop("k")),
    "k is a number": block_mm({"k": 64}),
    "config is a text": block_mm({"config": "tiled"}),
    "config lacks a tile": block_mm({"config": {**CONFIG, "block_m": None}}),
    "config has what is unknown": block_mm({"config": {**CONFIG, "clusters": 2}}),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_table_is_a_warning(text: str, shelf: Path, caplog: pytest.LogCaptureFixture) -> None:
    (shelf / f"{NAME}.json").write_text(text)
    with caplog.at_level(logging.WARNING, "inductor_fusions"):
        assert tables.load(NAME) is None
    (record,) = caplog.records
    assert f"{NAME}.json is not usable" in record.getMessage() and "\n" not in record.getMessage()


def test_unreadable_table(shelf: Path, caplog: pytest.LogCaptureFixture) -> None:
    (shelf / f"{NAME}.json").write_bytes(b"\xff\xfe")
    (shelf / "folder.json").mkdir()
    assert tables.load(NAME) is None and tables.load("folder") is None
    assert tables.digest()
    assert tables.load("not_there") is None


def test_broken_table_leaves_to_stock(shelf: Path, fresh_cache: None) -> None:
    """A whole compile: right, and the report says why."""
    (shelf / "cpu.json").write_text("{")

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(-2, -1) / 4, dim=-1) @ x

    x = torch.randn(2, 3, 8, 16)
    inductor_fusions.reporting.clear()
    with config.patch(policy="profitable"):
        torch.testing.assert_close(torch.compile(fn)(x), fn(x))
    (site,) = inductor_fusions.report()
    assert (site.verdict, site.reason) == ("left to stock", "no measurements for the device cpu")


# Looking up --------------------------------------------------------------------------------------

SHAPE = {"batch": 1, "heads": 2, "q_len": 64, "kv_len": 64, "head_dim": 32, "dtype": "float32", "train": True}
WANTED = {"dtype": torch.float32, "batch_heads": 2, "q_len": 64, "kv_len": 64, "head_dim": 32}


@pytest.fixture
def rows(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes a table whose rows have SHAPE with changes."""
    monkeypatch.setattr(tables, "device_name", lambda device: NAME)

    def write(*changes: dict[str, Any]) -> None:
        found = [{**SHAPE, "mask": "causal", "gain": {}, **change} for change in changes]
        (shelf / f"{NAME}.json").write_text(json.dumps({**GOOD, "attention": found}))

    return write


def verdict(candidates: tuple[str, ...] = ("sdpa", "flex")) -> str | None:
    device = torch.device("cuda")
    return tables.attention(device=device, mask="causal", train=True, candidates=candidates, **WANTED).kernel


LOOKED_UP: dict[str, tuple[list[dict[str, Any]], str | None]] = {
    "the best": ([{"gain": {"sdpa": 1.2, "flex": 1.5}}], "flex"),
    "level": ([{"gain": {"flex": 1.01}}], None),
    "level, and a neighbour gains": ([{"gain": {"flex": 1.01}}, {"q_len": 128, "gain": {"flex": 9.0}}], None),
    "a neighbour": ([{"q_len": 128, "gain": {"flex": 2.0}}], "flex"),
    "one of two masks of the kind loses": ([{"gain": {"flex": 2.0}}, {"gain": {"flex": 0.9}}], None),
    "both gain": ([{"gain": {"flex": 2.0}}, {"gain": {"flex": 1.1}}], "flex"),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_verdict(name: str, rows: Callable[..., None]) -> None:
    """A measurement of this very shape counts alone; without one, the neighbours do."""
    changes, expected = LOOKED_UP[name]
    rows(*changes)
    assert verdict() == expected


def test_tiles(rows: Callable[..., None]) -> None:
    """The nearest rows of the head dim, those of the mask first; Inductor's own where these were faster."""
    forward, backward = {"fwd_BLOCK_M": 64}, {"bwd_BLOCK_M1": 16}
    rows(
        {"train": False, "options": {"fwd_BLOCK_M": 32}, "mask": "tanh causal"},
        {"train": False, "options": forward, "q_len": 256},
        {"options": backward, "q_len": 256},
        {"options": {}},
    )
    device = torch.device("cuda")
    assert tables.flex_options(device=device, mask="causal", **WANTED) == forward
    assert tables.flex_options(device=device, mask="causal", **{**WANTED, "q_len": 256}) == forward | backward
    assert tables.flex_options(device=device, mask="causal", **{**WANTED, "head_dim": 64}) == {}


def test_backward_in_chunks(rows: Callable[..., None]) -> None:
    """By the shape and the share of the scores that is visible; nothing far from what was measured."""
    rows({"gemm_backward": 1024, "visible": 0.5}, {"gemm_backward": 0, "visible": 0.1})
    device = torch.device("cuda")
    assert tables.flex_backward(device=device, visible=0.6, **WANTED) == 1024
    assert tables.flex_backward(device=device, visible=0.12, **WANTED) == 0
    assert tables.flex_backward(device=device, visible=0.6, **{**WANTED, "q_len": 2**14}) == 0
    assert tables.flex_backward(device=device, visible=0.6, **{**WANTED, "head_dim": 64}) == 0


def test_nearest(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one size, whatever else must agree; all rows near it must gain."""
    monkeypatch.setattr(tables, "device_name", lambda device: NAME)
    found = [
        {"dtype": "float16", "rows": rows, "gain": gain}
        for rows, gain in ((64, 1.5), (256, 2.0), (1024, 1.0))
    ]
    (shelf / f"{NAME}.json").write_text(json.dumps({**GOOD, "kernel": found}))

    def nearest(rows: int, dtype: str = "float16", section: str = "kernel") -> tuple[tables.Verdict, Any]:
        return tables.nearest(section, torch.device("cuda"), {"dtype": dtype}, "rows", rows)

    assert nearest(100) == (tables.Verdict("kernel", note=", 1.50x measured", measured=True), found[0])
    assert nearest(128) == (tables.Verdict("kernel", note=", 1.50x measured", measured=True), found[0])
    assert nearest(200) == (tables.Verdict("kernel", note=", 2.00x measured", measured=True), found[1])
    level = tables.Verdict(None, "not measured to be faster for this shape", measured=True)
    assert nearest(512) == (level, found[1])
    unknown = (tables.Verdict(None, f"not measured on {NAME} for this shape"), {})
    assert nearest(31) == nearest(2049) == nearest(64, "bfloat16") == nearest(64, section="other") == unknown


def test_rows_between_two_measured_ones() -> None:
    rows = [{"tokens": tokens} for tokens in (1, 16, 4096)]
    assert [row["tokens"] for row in tables.bracket(rows, 4)] == []
    assert [row["tokens"] for row in tables.bracket(rows[1:], 16)] == [16, 16]
    assert tables.bracket([{"tokens": 1024}, *rows], 2048) == [{"tokens": 1024}, {"tokens": 4096}]
    assert tables.bracket(rows, 8192) == []
