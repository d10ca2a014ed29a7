"""Measurements of this machine: a file of rows for each device, torch, Triton and driver.

It is a table like those of `tables`, checked alike, and written by this package alone. It lies beside no
cache that is thrown away with the code, in a folder that only its owner can write to.

Processes that work together decide alike: the first one that asks publishes in their store what it has
found, and the others take that. Nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from .. import _inductor
from . import tables
from .problems import SECTIONS, Row
from .tables import Table

log = logging.getLogger(__name__)

#: What says which machine a file is of, and what its code was compiled with.
HEADER = ("device", "torch", "triton", "driver")
#: Variables of launchers with the number of processes that work together.
LAUNCHED = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")

Company = Literal["alone", "together", "launched"]


def folder() -> Path:
    """The folder with the measurements of this machine."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return tables.expanded(base) / "inductor_fusions" / "measured"


def identity(device: torch.device) -> dict[str, str]:
    """The header of a device's file, without the date."""
    return {
        "device": device_title(device),
        "torch": str(torch.__version__),
        "triton": version("triton"),
        "driver": _driver() if device.type == "cuda" else "",
    }


def file_name(device: torch.device) -> str:
    """The name of a device's file: that of its table, and a hash of the versions that must agree."""
    found = hashlib.sha256(json.dumps(identity(device)).encode()).hexdigest()
    return f"{tables.device_name(device)}-{found[:12]}.json"


def device_title(device: torch.device) -> str:
    """The accelerator's name, or the processor's with the number of threads that torch uses."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = found[1].strip() if found else name
    return f"{name}, {torch.get_num_threads()} threads"


@functools.cache
def version(package: str) -> str:
    """The installed version of a package, or ""."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _driver() -> str:
    try:
        found = re.search(r"\s(\d+\.\d[\d.]*)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return found[1] if found else f"CUDA {torch.version.cuda}"


# -- reading -----------------------------------------------------------------------------------------------


def company() -> Company:
    """Whether this process works alone, with others, or will once they have found each other."""
    if _inductor.has_peers():
        return "together"
    launched = (os.environ.get(name, "") for name in LAUNCHED)
    return "launched" if any(text.isdecimal() and int(text) > 1 for text in launched) else "alone"


def digest() -> str:
    """Hash of the files as this process has found them, for cache keys."""
    return hashlib.sha256(json.dumps(_found(company()), sort_keys=True).encode()).hexdigest()


def load(device: torch.device) -> Table | None:
    """The rows of this machine: those that the process has found, and those that it has added."""
    if _inductor.is_absent():
        return None
    if company() == "together":
        _compare_device(tables.device_name(device))
    if not (_found(company()) or _added):  # asked before the device, which takes longer
        return None
    return _table(company(), file_name(device), tables.device_name(device))


@functools.lru_cache
def _compare_device(name: str) -> None:
    """Say so, once, if the first process of the job that asked has another model of this kind of device.

    Each process then decides by what is known of its own device. Their code differs, but not the order of
    its collectives, which no fusion moves.
    """
    with contextlib.suppress(AttributeError, RuntimeError):
        first = _inductor.first_to_say(f"inductor_fusions/device/{name.partition('_')[0]}", name)
        if first != name:
            log.warning(
                "this process runs on %s, another one of the job on %s: each fuses what is faster on its "
                "own device, so results may differ in rounding. INDUCTOR_FUSIONS=0 leaves all to stock",
                name,
                first,
            )


_added = False


def forget() -> None:
    """Read the files anew when rows are next asked for."""
    global _added
    _added = False
    _found.cache_clear()
    _table.cache_clear()
    _compare_device.cache_clear()


@functools.lru_cache
def _found(company: Company) -> dict[str, str]:
    """The files by name, as they were when they were first asked for."""
    if company == "launched":
        return {}  # the others cannot be asked yet
    here = folder()
    files: dict[str, str] = {}
    if tables.is_private(here.parent) and tables.is_private(here):
        for path in sorted(here.glob("*.json")):
            with contextlib.suppress(OSError, ValueError):
                files[path.name] = _read(path)
    if company == "alone":
        return files
    try:
        agreed = json.loads(_inductor.first_to_say("inductor_fusions/measured", json.dumps(files)))
        return {str(name): str(text) for name, text in agreed.items()}
    except (AttributeError, RuntimeError, ValueError) as error:
        log.warning(
            "the measurements of this machine are ignored, because the processes cannot exchange them: %s",
            error,
        )
        return {}


def _read(path: Path) -> str:
    """The text of a file of ours.

    Raises:
        OSError: it cannot be read, or others than its owner can write to it.
    """
    with path.open(encoding="utf-8") as file:
        found = os.fstat(file.fileno())
        mine = not hasattr(os, "getuid") or found.st_uid == os.getuid()
        if not (mine and stat.S_ISREG(found.st_mode) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
            log.warning("%s is ignored: other users can write to it", path)
            raise PermissionError(path)
        return file.read()


@functools.lru_cache
def _table(company: Company, name: str, device: str) -> Table | None:
    text = _found(company).get(name)
    return None if text is None else _parsed(text, folder() / name, device)


def _parsed(text: str, path: Path, device: str) -> Table | None:
    """The table in a file; None, with a warning, if it is not one of this machine."""
    table = tables.parse(text, path, device)
    if table is not None and not all(isinstance(table.get(name), str) for name in HEADER):
        log.warning("the table %s is invalid and ignored: %s", path, "its header is incomplete")
        return None
    return table


# -- writing -----------------------------------------------------------------------------------------------


def prepare() -> str:
    """Make the folder; why it cannot be used, or ""."""
    here = folder()
    try:
        here.parent.parent.mkdir(parents=True, exist_ok=True)
        for path in (here.parent, here):
            path.mkdir(mode=0o700, exist_ok=True)
            if not tables.is_private(path):
                return f"other users can write to {path}"
    except OSError as error:
        return f"cannot create {here}: {error.strerror}"
    return "" if os.access(here, os.W_OK) else f"cannot write to {here}"


@contextlib.contextmanager
def lock(device: torch.device) -> Iterator[bool]:
    """Inside, no other process of this user measures on such a device here; gives whether that holds.

    Nobody waits: where another process measures, what it finds is there for the next one.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield False
        return
    path = folder() / f"{file_name(device)}.lock"
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True


def add(device: torch.device, found: Mapping[str, Sequence[Row]]) -> None:
    """Put rows into the device's file, in place of those of the same problems, and use them from now on.

    Called inside of `lock`. The file is replaced as a whole, so that nobody reads a part of it.

    Raises:
        ValueError: what is no row of its section.
        OSError: the file cannot be written.
    """
    global _added
    for section, rows in found.items():
        for row in rows:
            SECTIONS[section].check(row)
    path, name = folder() / file_name(device), tables.device_name(device)
    before: Table | None = None
    with contextlib.suppress(OSError, ValueError):
        before = _parsed(_read(path), path, name)
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    new = Table({"schema": tables.SCHEMA, **identity(device), "date": date, "attention": []})
    new.update({section: list(rows) for section, rows in found.items()})
    for table in (before, load(device)):
        new = new if table is None else tables.merged(new, table)
    _write(path, new)
    _found(company())[path.name] = json.dumps(new)
    _table.cache_clear()
    _added = True


def _write(path: Path, table: Mapping[str, Any]) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(tables.text(table))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
