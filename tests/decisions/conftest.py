"""A place of its own for the measurements of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inductor_fusions.decisions import machine, tables


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of the files; no table but those, and a measurer that has measured nothing."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for name in machine.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tables, "folders", lambda: iter(()))
    load = tables.load
    load.cache_clear()
    machine.forget()
    yield tmp_path / "inductor_fusions" / "measured"
    load.cache_clear()
    machine.forget()
