"""Tables of a test, and a place of its own for the measurements of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inductor_fusions.decisions import devices, machine, tables
from inductor_fusions.decisions.problems import SECTIONS
from inductor_fusions.decisions.tables import Table

H100 = "nvidia_h100_80gb_hbm3"


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


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives tables by device; the device that is asked for is an H100."""

    def put(on: str = H100, **found: dict[str, Any]) -> None:
        for table in found.values():
            for section, rows in table.items():
                for row in rows:
                    SECTIONS[section].check(row)
        monkeypatch.setattr(tables, "load", lambda name: Table(found[name]) if name in found else None)
        monkeypatch.setattr(tables, "names", lambda: sorted(found))
        monkeypatch.setattr(tables, "device_name", lambda device: on)
        monkeypatch.setattr(devices, "hardware", lambda device: devices.known(on))

    return put
