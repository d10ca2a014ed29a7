"""Tables of devices: what is one; a broken or a foreign one is a warning and stock, never a crash."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_fusions
from inductor_fusions import config
from inductor_fusions.block_mm import configurations
from inductor_fusions.decisions import tables
from inductor_fusions.decisions.problems import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
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
            "kind": "shared_a", "n": [64, 64], "m": None, "k": [64, 64], "layout": ["nt", "nt"],
            "dtype": "bfloat16", "tokens": 16, "capability": [9, 0], "gain": 1.5, "config": CONFIG,
        }
    ],
}  # fmt: skip
LORA = {
    "inner": [64], "outer": [64, 64], "ranks": [[16], [16]], "dtype": "bfloat16", "adapters": "bfloat16",
    "layout": "t", "tokens": 16, "gain": 1.5,
}  # fmt: skip
NAME = "nvidia_z1_0_80gb"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_table(path: Path) -> None:
    """Each is right, its file has the name that is looked for, and its measurements are in the repository."""
    data = json.loads(path.read_text())
    tables.check(data, path.stem)
    assert tables.load(path.stem) is not None
    assert any(data.get(section) for section in SECTIONS)
    results = [json.loads(file.read_text()) for file in (ROOT / "bench" / "results").glob("*.json")]
    assert any((one["device"], one["torch"]) == (data["device"], data["torch"]) for one in results)


def test_good_table_is_used(own_tables: Path) -> None:
    (own_tables / f"{NAME}.json").write_text(json.dumps(GOOD))
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
    "an unknown section": broken(lambda t: t.update(lora_sum=[])),
    "an unknown column": attention({"q_length": 64}),
    "an unknown kernel": attention({"gain": {"sdp": 2.0}}),
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
    "more results than products": block_mm({"n": [64, 64, 64]}),
    "a product without k": block_mm({"k": [64]}),
    "gradients of weights without m": block_mm({"kind": "shared_b", "k": None}),
    "a sum of two results": block_mm({"kind": "sum"}),
    "products without groups": block_mm({"kind": "mixed"}),
    "a group without a result": block_mm({"kind": "mixed", "groups": [0, 2]}),
    "groups that are not in order": block_mm({"kind": "mixed", "groups": [1, 0]}),
    "an adapter too few": broken(lambda t: t.update(lora=[{**LORA, "ranks": [[16]]}])),
    "config is a text": block_mm({"config": "tiled"}),
    "config lacks a tile": block_mm({"config": {**CONFIG, "block_m": None}}),
    "a tile is no power of two": block_mm({"config": {**CONFIG, "block_k": 48 + 4}}),
    "a tile is a text": block_mm({"config": {**CONFIG, "block_k": "64); import os"}}),
    "config has what is unknown": block_mm({"config": {**CONFIG, "clusters": 2}}),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_table_is_a_warning(text: str, own_tables: Path, caplog: pytest.LogCaptureFixture) -> None:
    (own_tables / f"{NAME}.json").write_text(text)
    with caplog.at_level(logging.WARNING, "inductor_fusions"):
        assert tables.load(NAME) is None
    (record,) = caplog.records
    assert f"{NAME}.json is invalid" in record.getMessage() and "\n" not in record.getMessage()


def test_unreadable_table(own_tables: Path, caplog: pytest.LogCaptureFixture) -> None:
    (own_tables / f"{NAME}.json").write_bytes(b"\xff\xfe")
    (own_tables / "folder.json").mkdir()
    assert tables.load(NAME) is None and tables.load("folder") is None
    assert tables.digest()
    assert tables.load("not_there") is None


def test_broken_table_leaves_to_stock(own_tables: Path, fresh_cache: None) -> None:
    """A whole compile: right, and the report says why."""
    (own_tables / "cpu.json").write_text("{")

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.transpose(-2, -1) / 4, dim=-1) @ x

    x = torch.randn(2, 3, 8, 16)
    inductor_fusions.reporting.clear()
    with config.patch(policy="profitable"):
        torch.testing.assert_close(torch.compile(fn)(x), fn(x))
    (site,) = inductor_fusions.report()
    assert (site.verdict, site.reason) == ("left to stock", "no measurements for the device cpu")


# Where tables are read from ----------------------------------------------------------------------


@pytest.fixture
def own(own_tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's tables; the package has GOOD."""
    (own_tables / f"{NAME}.json").write_text(json.dumps(GOOD))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    folder = tmp_path / "home" / "inductor_fusions" / "devices"
    folder.mkdir(parents=True)
    return folder


def gains(name: str = NAME) -> list[dict[str, float]]:
    tables.load.cache_clear()
    table = tables.load(name)
    return [] if table is None else [row["gain"] for row in table["attention"]]


def test_tables_of_the_user_come_first(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row: the variable's, the user's, the package's; each is part of the cache key."""
    seen = [tables.digest()]
    assert gains() == [{"sdpa": 2.0}] and tables.names() == [NAME]
    longer = {**GOOD["attention"][0], "q_len": 128, "gain": {"sdpa": 5.0}}
    same = {**GOOD["attention"][0], "gain": {"sdpa": 3.0}}
    (own / f"{NAME}.json").write_text(json.dumps({**GOOD, "attention": [same, longer]}))
    assert gains() == [{"sdpa": 3.0}, {"sdpa": 5.0}]
    table = tables.load(NAME)
    assert table is not None and len(table["block_mm"]) == 1
    tables.digest.cache_clear()
    seen.append(tables.digest())
    named = tmp_path / "named"
    named.mkdir()
    least = {**GOOD["attention"][0], "gain": {"sdpa": 4.0}}
    (named / f"{NAME}.json").write_text(json.dumps({**GOOD, "attention": [least], "block_mm": []}))
    monkeypatch.setenv(tables.VARIABLE, str(named))
    assert gains() == [{"sdpa": 4.0}, {"sdpa": 5.0}]
    tables.digest.cache_clear()
    seen.append(tables.digest())
    assert len(set(seen)) == 3
    # A broken one is a warning; the others count.
    (named / f"{NAME}.json").write_text("{")
    assert gains() == [{"sdpa": 3.0}, {"sdpa": 5.0}]


def test_folders_that_are_not_there(
    own: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tables that remain are used; a folder that was named is missed in a warning."""
    monkeypatch.setenv(tables.VARIABLE, "no/such")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # the user has no home
    tables.digest.cache_clear()
    assert tables.digest() and gains() == [{"sdpa": 2.0}] and not tables.user_folder().exists()
    assert "there is no folder no/such" in caplog.text


def test_tables_that_others_can_write_are_left_alone(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = {**GOOD["attention"][0], "gain": {"sdpa": 3.0}}
    (own / f"{NAME}.json").write_text(json.dumps({**GOOD, "attention": [row]}))
    for folder in (own, own.parent):
        folder.chmod(0o777)
        with caplog.at_level(logging.WARNING, "inductor_fusions"):
            assert gains() == [{"sdpa": 2.0}]
        assert "can write to it" in caplog.text
        folder.chmod(0o700)
    assert gains() == [{"sdpa": 3.0}]


def test_a_folder_beside_the_installed_package_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a checkout it is."""
    (tmp_path / "inductor_fusions").mkdir()
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(tables.resources, "files", lambda name: tmp_path / "inductor_fusions")
    assert tables.folder() == tmp_path / "inductor_fusions"
    (tmp_path / "bench").mkdir()
    (tmp_path / "pyproject.toml").touch()
    assert tables.folder().resolve() == tmp_path / "configs"


def test_place_of_an_error(own_tables: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Section, row and column, in every section."""
    shipped = json.loads((ROOT / "configs" / "devices" / "nvidia_h200.json").read_text())
    for section in (name for name, found in shipped.items() if isinstance(found, list)):
        broken = copy.deepcopy(shipped)
        broken[section] = broken[section][:2]
        column = next(iter(broken[section][1]))
        broken[section][1][column] = {"a": 1}
        with pytest.raises(ValueError, match=f"{section}, row 1: {column} = "):
            tables.check(broken, "nvidia_h200")
        del broken[section][1][column]
        with pytest.raises(ValueError, match=f"{section}, row 1: {column} is missing"):
            tables.check(broken, "nvidia_h200")
