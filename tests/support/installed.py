"""Packages that look installed."""

from __future__ import annotations

from pathlib import Path

import pytest


def install(pyproject: Path, folder: Path) -> None:
    """Write into a folder what pip makes of a pyproject.toml: a name, a version and the entry points."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(pyproject.read_text())["project"]
    name, version = project["name"].replace("-", "_"), project.get("version", "0.1.0")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{entry} = {value}" for entry, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
