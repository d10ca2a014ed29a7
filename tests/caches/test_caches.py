"""Two processes share one cache directory: what changed between them must never be served stale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import inductor_fusions
from inductor_fusions import config
from tests.caches.machine import PACKAGE, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


ON = {"INDUCTOR_FUSIONS_POLICY": "always"}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_unchanged_is_a_hit(machine: Machine, train: bool) -> None:
    first, second = (machine.run(train=train, fresh=True, **ON) for _ in range(2))
    assert first["fused"] and second["fused"]
    assert first["misses"] and not first["hits"]
    assert second["hits"] and not second["misses"]
    assert not first["bypassed"] and not second["bypassed"]


def test_counts_are_restored(machine: Machine) -> None:
    """The passes do not run on a warm cache; what they counted is there all the same."""
    assert [machine.run(**ON)["counted"] for _ in range(2)] == [1, 1]


def test_off_then_on(machine: Machine) -> None:
    """Not imported, switched off in two ways, and on: each finds its own code."""
    assert not machine.run(package=False)["fused"]
    found = machine.run(**ON)
    assert found["fused"] and found["misses"] and not found["hits"]
    assert not machine.run(**ON, INDUCTOR_FUSIONS_ATTENTION="0")["fused"]
    assert not machine.run(**ON, INDUCTOR_FUSIONS="0")["fused"]


def test_on_then_off(machine: Machine) -> None:
    assert machine.run(**ON)["fused"]
    found = machine.run(package=False)
    assert not found["fused"] and found["misses"] and not found["hits"]
    assert not machine.run(**ON, INDUCTOR_FUSIONS="0")["fused"]
    found = machine.run(**ON)
    assert found["fused"] and found["hits"]


def test_one_toggle_changed(machine: Machine) -> None:
    """A toggle that changes nothing here is a miss as well: it is part of the key."""
    assert machine.run(**ON)["misses"]
    changed = machine.run(**ON, INDUCTOR_FUSIONS_EMPTY_ROWS="ignore")
    assert changed["misses"] and not changed["hits"]


def test_functions_that_dynamo_stores() -> None:
    """With `caching_precompile` their keys have their names and lines alone; ours says the settings too."""
    from torch._dynamo import package

    def key() -> str:
        return package.CompilePackage.source_id_from_fn(key)

    first = key()
    with config.patch(attention=False):
        changed = key()
    with config.patch(enabled=False):
        off = key()
    assert first == key() and len({first, changed, off}) == 3
    with config.patch(max="1"):  # caches are bypassed
        assert key() != key()
    inductor_fusions.disable()
    try:
        assert key() == off
    finally:
        inductor_fusions.enable()
    assert first == key()


def test_one_source_file_changed(machine: Machine) -> None:
    """The new source refuses what the old one fused."""
    assert machine.run(**ON)["fused"]
    source = machine.root / PACKAGE.name / "fusions" / "attention" / "recognise.py"
    text = source.read_text()
    changed = text.replace(
        "def recognise(",
        "def recognise(*args: Any) -> Any:\n    raise Rejected('changed')\n\n\ndef _before(",
        1,
    )
    assert changed != text
    source.write_text(changed)
    found = machine.run(**ON)
    assert not found["fused"]
    assert found["misses"] and not found["hits"]
    source.write_text(text)
    found = machine.run(**ON)
    assert found["fused"] and found["hits"]
    # A file that is new, and no module of Python.
    (source.parent / "template.py.jinja").write_text("# nothing\n")
    found = machine.run(**ON)
    assert found["misses"] and not found["hits"]


def table(gain: float) -> str:
    """Measurements for a CPU in which SDPA is `gain` times as fast as stock at the shape of PROGRAM."""
    rows = [
        {
            "batch": 2, "heads": 2, "q_len": 8, "kv_len": 8, "head_dim": 16, "dtype": "float32",
            "mask": mask, "train": train, "gain": {"sdpa": gain},
        }
        for mask in ("none", "causal", "pad", "bias", "bias_batch", "bias_full", "bias_heads")
        for train in (False, True)
    ]  # fmt: skip
    return json.dumps({"schema": 1, "device": "cpu", "torch": "2", "date": "today", "attention": rows})


def test_one_table_changed(machine: Machine) -> None:
    """Under the default policy the tables decide: another table, other code."""
    path = machine.tables / "devices" / "cpu.json"
    for gain, fused in ((2.0, True), (0.5, False)):
        path.write_text(table(gain))
        found = machine.run()
        assert found["fused"] is fused
        assert found["misses"] and not found["hits"]
    path.write_text(table(2.0))
    found = machine.run()
    assert found["fused"] and found["hits"]
