"""The ledger: what is compiled for each model does not get worse unseen."""

from __future__ import annotations

import json
import re
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformers")

from devtools.ledger import rows
from devtools.ledger.compiling import DEVICES, measure
from devtools.ledger.entries import QUICK, Entry, entries

ROOT = Path(__file__).resolve().parents[2]
KNOWN, ROWS = rows.read()


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries(quick=True), ids=lambda entry: entry.name.replace(" ", "-"))
def test_no_row_is_worse(entry: Entry) -> None:
    if why := rows.unlike(KNOWN):
        pytest.skip(why)
    for row in measure(entry):
        change = rows.compare(ROWS.get(rows.key(row)), row)
        assert not change.worse, f"{change}\nIf this is meant: make ledger, and review its diff"
        if change.better:
            warnings.warn(f"make ledger writes down: {change}", stacklevel=1)


def test_every_model_has_its_rows() -> None:
    """Also with torch of the pinned version, so that the test above is not skipped in CI."""
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^(torch|triton|transformers)==(\S+)$", constraints, re.M))
    series = ".".join(pinned["torch"].split(".")[:2])
    assert KNOWN.get(series) == pinned, "make ledger"
    wanted = {
        rows.key({**entry.header(device), "torch": series}) for entry in entries() for device in DEVICES
    }
    there = {key for key, row in ROWS.items() if row["torch"] == series}
    assert wanted == there, "python -m devtools.ledger --missing, or make ledger for rows that are not needed"


def test_rows_differ_where_they_should() -> None:
    """A GPU has the fusions of linears as well; a training step has more of everything."""
    one = {
        (row["mode"], row["device"]): row
        for row in ROWS.values()
        if row["model"] == QUICK[0] and row["dtype"] == "bfloat16" and row["torch"] == rows.series()
    }
    if not one:
        pytest.skip(f"no rows of torch {rows.series()}")
    assert one["inference", "cuda"]["sites"].keys() > one["inference", "cpu"]["sites"].keys() == {"attention"}
    assert one["inference", "cuda"]["extern"]["attention"] == 2
    assert one["training", "cuda"]["extern"]["attention backward"] == 2
    for device in DEVICES:
        for what in ("kernels", "bytes"):
            assert one["training", device][what] > one["inference", device][what] > 0


def test_flex_attention_is_counted_for_a_gpu() -> None:
    """A softcap is flex attention there; a CPU without its template keeps the written-out form."""
    found = [row for row in ROWS.values() if row["model"] == "gemma2-8l eager"]
    assert {row["mode"] for row in found} == {"inference", "training"}
    for row in found:
        assert row["sites"].get("attention", 0) == (2 if row["device"] == "cuda" else 0), rows.key(row)
        assert ("bmm" in row["extern"]) is (row["device"] == "cpu"), rows.key(row)


@pytest.mark.slow
@pytest.mark.long
def test_flex_attention_is_compiled_for_a_gpu() -> None:
    (entry,) = [e for e in entries() if e.name == "gemma2-8l eager inference bfloat16"]
    sites = {row["device"]: row["sites"] for row in measure(entry)}
    assert sites["cuda"]["attention"] == 2 and "attention" not in sites["cpu"]


ROW: dict[str, Any] = {
    "model": "m", "mode": "inference", "dtype": "bfloat16", "device": "cuda", "torch": "2.13",
    "sites": {"attention": 12, "qkv": 3}, "kernels": 40, "extern": {"mm": 4, "attention": 12}, "bytes": 1000,
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), [
    ({"sites": {"attention": 11, "qkv": 3}}, "attention: 12 -> 11 sites fused"),
    ({"sites": {"attention": 12}}, "qkv: 3 -> 0 sites fused"),
    ({"kernels": 41}, "kernels: 40 -> 41"),
    ({"extern": {"mm": 5, "attention": 12}}, "extern calls: 16 -> 17"),
    ({"bytes": 1001}, "bytes: 1,000 -> 1,001"),
])  # fmt: skip
def test_what_is_worse_is_named(change: dict[str, Any], said: str) -> None:
    found = rows.compare(ROW, {**deepcopy(ROW), **change})
    assert found.worse == (said,) and not found.better
    assert str(found) == f"m inference bfloat16 cuda 2.13: {said}"
    back = rows.compare({**deepcopy(ROW), **change}, ROW)  # the other way round it is a gain
    assert len(back.better) == 1 and not back.worse


def test_same_row_is_neither() -> None:
    found = rows.compare(ROW, deepcopy(ROW))
    assert (found.worse, found.better) == ((), ())
    assert rows.compare(None, ROW).worse == ("not in the ledger",)


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    versions = {"2.13": {"torch": "2.13.0", "transformers": "5", "triton": "3"}}
    other = {**ROW, "torch": "2.11"}
    rows.save(path, versions, [ROW, other])
    assert rows.read(path) == (versions, {rows.key(row): row for row in (ROW, other)})
    assert json.loads(path.read_text())["rows"][0] == other
    assert len(path.read_text().splitlines()) == len(json.dumps(versions, indent=1).splitlines()) + 7


def test_other_versions_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.8.7")
    assert rows.unlike({"2.13": rows.versions()}) == "the ledger has no rows of torch 9.8"
    assert rows.unlike({"9.8": rows.versions()}) == ""
    other = {**rows.versions(), "transformers": "1.0"}
    assert "transformers" in rows.unlike({"9.8": other}) and "1.0" in rows.unlike({"9.8": other})


def test_a_lost_fusion_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the model to the verdict: with a fusion switched off, its row is worse."""
    from inductor_fusions import config

    (entry,) = [e for e in entries(quick=True) if e.name == "gpt2 eager inference bfloat16"]
    (before,) = [row for row in measure(entry) if row["device"] == "cuda"]
    with config.patch(attention=False):
        (after,) = [row for row in measure(entry) if row["device"] == "cuda"]
    change = rows.compare(before, after)
    assert "attention: 2 -> 0 sites fused" in change.worse
    assert any(text.startswith("bytes: ") for text in change.worse)
