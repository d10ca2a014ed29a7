"""Tables of measurements, `devices/<device>.json`, from the package and from the user.

Whether a fusion pays is decided from them, in `decisions`; here they are found, checked and read.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from .problems import SECTIONS, Row, has_adapters

log = logging.getLogger(__name__)

#: Version of the JSON format that is read.
SCHEMA = 1
#: The variable that names one more folder of tables.
VARIABLE = "INDUCTOR_FUSIONS_TABLES"


def folder() -> Any:
    """The folder of the package's tables: in the installed package, or in its checkout."""
    root = resources.files("inductor_fusions")
    beside = root / ".." / "configs"
    is_checkout = (root / ".." / "pyproject.toml").is_file() and (root / ".." / "bench").is_dir()
    found = (root / "configs", *((beside,) if is_checkout else ()))
    return next((d for d in found if d.is_dir()), root)


def user_folder() -> Path:
    """The folder of the user's own tables, whose rows precede those of the package for the same problem."""
    return expanded(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "inductor_fusions"


def expanded(path: str) -> Path:
    """A path without `~`; one that cannot exist if the user has no home, as in some containers."""
    found = os.path.expanduser(path)
    return Path(os.devnull if found.startswith("~") else found)


def folders() -> Iterator[Any]:
    """Every folder with tables, the first one first: of the variable, of the user, of the package."""
    if named := os.environ.get(VARIABLE):
        yield expanded(named)
    own = user_folder()
    if is_private(own) and is_private(own / "devices"):
        yield own / "devices"
    yield folder() / "devices"


def is_private(path: Path) -> bool:
    """Whether a folder exists and only its owner, the current user, can write to it."""
    try:
        found = path.stat()
    except (OSError, RuntimeError):
        return False
    mine = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    if stat.S_ISDIR(found.st_mode) and not (mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        log.warning("%s is ignored: other users can write to it", path)
        return False
    return stat.S_ISDIR(found.st_mode)


def _entries(directory: Any) -> list[Any]:
    try:
        found = [entry for entry in directory.iterdir() if entry.name.endswith(".json")]
    except OSError:
        return []
    return sorted(found, key=lambda entry: entry.name)


@functools.lru_cache
def digest() -> str:
    """Hash of all tables, for cache keys."""
    if (named := os.environ.get(VARIABLE)) and not os.path.isdir(expanded(named)):
        log.warning("%s is ignored: there is no folder %s", VARIABLE, named)
    found = hashlib.sha256()
    for number, directory in enumerate(folders()):
        for entry in _entries(directory):
            found.update(f"{number} {entry.name}\n".encode() + hashlib.sha256(_content(entry)).digest())
    return found.hexdigest()


def _content(entry: Any) -> bytes:
    """The bytes of a file; none where it cannot be read: it is not used then either."""
    try:
        return bytes(entry.read_bytes())
    except OSError:
        return b""


def names() -> list[str]:
    """Every device that there is a table of."""
    return sorted({entry.name.removesuffix(".json") for place in folders() for entry in _entries(place)})


def columns_of(sizes: Any, *without: str) -> dict[str, Any]:
    """The fields of a dataclass as columns of a row: dtypes by name, tuples as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return dtype_name(value)
        return list(map(plain, value)) if isinstance(value, tuple) else value

    return {name: plain(value) for name, value in vars(sizes).items() if name not in without}


def device_name(device: torch.device) -> str:
    """Name of a device's table: "nvidia_h200", "cpu"."""
    if device.type != "cuda":
        return device.type
    return slug(torch.cuda.get_device_name(device))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as tables and reports have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def slug(text: str) -> str:
    """A device's name as that of a file."""
    return re.sub(r"\W+", "_", text.lower())


@dataclass(frozen=True)
class Measured:
    """One row, with what it is looked up by.

    Attributes:
        row: as the table has it.
        same: what a problem that is like it agrees in.
        key: which problem it is of, but for the number of tokens.
        place: the logarithms of its sizes, weighted.
        gains: of each kernel; {} where the row has tiles alone.
    """

    row: Row
    same: tuple[Hashable, ...]
    key: tuple[Hashable, ...]
    place: tuple[float, ...]
    gains: dict[str, float]


class Table(dict[str, Any]):
    """The content of a device's files; `rows` has it as `Measured`."""

    def rows(self, section: str) -> list[Measured]:
        """The rows of a section, in order."""
        cache: dict[str, list[Measured]] = self.__dict__.setdefault("_rows", {})
        if section not in cache:
            cache[section] = [_measured(section, row) for row in self.get(section, ())]
        return cache[section]


def _measured(section: str, row: Row) -> Measured:
    kind = SECTIONS[section]
    gain = row.get("gain") if kind.gains else None
    # Of a linear with adapters the gain is a row of its own section.
    if section == "block_mm" and has_adapters(row):
        gain = None
    gains = gain if isinstance(gain, dict) else {} if gain is None else {section: float(gain)}
    return Measured(row, kind.same(row), kind.key(row), kind.place(row), gains)


@functools.lru_cache
def load(name: str) -> Table | None:
    """The table of a device; None, with a warning where a file is broken, if there is none to use."""
    found: Table | None = None
    for directory in folders():
        entry = directory / f"{name}.json"
        table = _read(entry, name)
        found = table if found is None else found if table is None else merged(found, table)
    return found


def _read(entry: Any, name: str) -> Table | None:
    try:
        if not entry.is_file():
            return None
        content = entry.read_text("utf-8")
    except (OSError, ValueError) as error:
        log.warning("the table %s is invalid and ignored: %s", entry, error)
        return None
    return parse(content, entry, name)


def parse(content: str, entry: Any, name: str) -> Table | None:
    """A table from the text of its file; None, with a warning, if it is not one of that device.

    Args:
        name: of the device, as `device_name` gives it.
    """
    try:
        table = json.loads(content)
        check(table, name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        log.warning("the table %s is invalid and ignored: %s", entry, why)
        return None
    return Table(table)


def text(table: Mapping[str, Any]) -> str:
    """A table as JSON with one row a line, so that diffs can be read."""
    sections = {name: rows for name, rows in table.items() if isinstance(rows, list)}
    lines = json.dumps({name: head for name, head in table.items() if name not in sections}, indent=1)[:-2]
    for name, rows in sections.items():
        body = ",\n".join("  " + json.dumps(row) for row in rows)
        lines += f',\n "{name}": [\n{body}\n ]' if rows else f',\n "{name}": []'
    return lines + "\n}\n"


def merged(first: Table, second: Table) -> Table:
    """The rows of two tables; of the same problem those of the first."""
    merged = Table(first)
    for name, kind in SECTIONS.items():

        def problem(row: Row, kind: Any = kind) -> tuple[Hashable, ...]:
            return (*kind.key(row), row.get(kind.along))

        known = {problem(row) for row in first.get(name, ())}
        rows = [row for row in second.get(name, ()) if problem(row) not in known]
        if rows or name in first:
            merged[name] = [*first.get(name, ()), *rows]
    return merged


def check(table: Any, name: str) -> None:
    """Refuse an object that is no table of a device.

    Args:
        table: the content of `<name>.json`.
        name: of the device, as `device_name` gives it.

    Raises:
        ValueError, KeyError, TypeError: what is wrong, and where. A table says with which device and torch,
            and when, it was measured, and the device of a GPU's table is the one that it is named after.
    """
    if table["schema"] != SCHEMA:
        raise ValueError(f"schema {table['schema']}, not {SCHEMA}")
    if not all(isinstance(table[what], str) for what in ("device", "torch", "date")):
        raise ValueError("device, torch and date must be strings")
    if name != "cpu" and slug(table["device"]) != name:
        raise ValueError(f"it was measured on {table['device']}")
    if "attention" not in table:
        raise KeyError("attention")
    for section, rows in table.items():
        if section in ("schema", "device", "torch", "triton", "driver", "date"):
            continue
        if section not in SECTIONS:
            raise ValueError(f"the section {section} is missing")
        if not isinstance(rows, list):
            raise ValueError(f"{section} is not a list")
        for number, row in enumerate(rows):
            try:
                SECTIONS[section].check(row)
            except ValueError as error:
                raise ValueError(f"{section}, row {number}: {error}") from None
