"""The rows of the ledger: the file, and what became of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench.common import Json

PATH = Path(__file__).parents[1] / "ledger.json"
#: Versions that decide what a row holds. Their rows are compared only where all of them are the same.
PACKAGES = ("torch", "transformers", "triton")


def versions() -> dict[str, str]:
    """What decides the rows of a series of torch besides this package."""
    return {name: metadata.version(name).partition("+")[0] for name in PACKAGES}


def series() -> str:
    """The torch of this process: "2.13"."""
    return ".".join(str(torch.__version__).split(".")[:2])


def key(row: Mapping[str, Any]) -> str:
    """The name of a row."""
    return " ".join(str(row[name]) for name in ("model", "mode", "dtype", "device", "torch"))


def read(path: Path = PATH) -> tuple[dict[str, dict[str, str]], dict[str, Json]]:
    """The versions of each series of torch, and the rows by key."""
    if not path.exists():
        return {}, {}
    data = json.loads(path.read_text("utf-8"))
    return data["versions"], {key(row): row for row in data["rows"]}


def save(path: Path, known: Mapping[str, Mapping[str, str]], rows: Iterable[Json]) -> None:
    """Write the file, a row a line, so that diffs can be read."""
    head = json.dumps({"schema": 1, "versions": dict(sorted(known.items()))}, indent=1)
    lines = ",\n".join("  " + json.dumps(row) for row in sorted(rows, key=key))
    path.write_text(head[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n", "utf-8")


@dataclass(frozen=True)
class Change:
    """What a row of the ledger lost and gained."""

    row: str
    worse: tuple[str, ...] = ()
    better: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.row}: " + "; ".join([*self.worse, *(f"{text} (a gain)" for text in self.better)])


def compare(old: Json | None, new: Json) -> Change:
    """What became of a row; one that the ledger lacks is worse, so that it is written down."""
    name = key(new)
    if old is None:
        return Change(name, worse=("not in the ledger",))
    worse, better = [], []
    for fusion in sorted({*old["sites"], *new["sites"]}):
        before, after = old["sites"].get(fusion, 0), new["sites"].get(fusion, 0)
        if before != after:
            (worse if after < before else better).append(f"{fusion}: {before} -> {after} sites fused")
    for what, count in (("kernels", _kernels), ("extern calls", _extern), ("bytes", _bytes)):
        before, after = count(old), count(new)
        if before != after:
            (worse if after > before else better).append(f"{what}: {before:,} -> {after:,}")
    return Change(name, tuple(worse), tuple(better))


def _kernels(row: Json) -> int:
    return int(row["kernels"])


def _extern(row: Json) -> int:
    return sum(row["extern"].values())


def _bytes(row: Json) -> int:
    return int(row["bytes"])


def unlike(known: Mapping[str, Mapping[str, str]]) -> str:
    """Why the rows of this torch cannot be compared here; empty if they can."""
    recorded, here = known.get(series()), versions()
    if recorded is None:
        return f"the ledger has no rows of torch {series()}"
    other = [
        f"{name} {here[name]}, not {recorded.get(name)}"
        for name in PACKAGES
        if here[name] != recorded.get(name)
    ]
    return f"other versions than the ledger's: {', '.join(other)}" if other else ""
