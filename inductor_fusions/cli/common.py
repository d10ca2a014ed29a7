"""Shared by all commands: options, user errors and output."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

if TYPE_CHECKING:
    from rich.console import Console

PROG = "inductor-fusions"
EXIT_CODES = "Exit codes: 0 done; 2 a wrong argument or environment variable, said in one line on stderr."
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class UserError(typer.BadParameter):
    """A mistake of the user's: shown as one line, exit code 2."""

    def format_message(self) -> str:
        return str(self.message)


class Device(str, Enum):
    """A device that `--device` names."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def find_device(wanted: Device) -> torch.device:
    """The device that is meant."""
    available = torch.cuda.is_available()
    if wanted is Device.cuda and not available:
        raise UserError("--device cuda: torch finds no CUDA device")
    if wanted is Device.auto:
        wanted = Device.cuda if available else Device.cpu
    return torch.device(wanted.value)


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """Without the warnings of torch and transformers about models that are only looked at."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
        yield


@contextlib.contextmanager
def imports_from(folder: Path) -> Iterator[None]:
    """Inside, the modules of a folder can be imported."""
    name = str(folder)
    added = name not in sys.path
    if added:
        sys.path.insert(0, name)
    try:
        yield
    finally:
        if added and name in sys.path:
            sys.path.remove(name)


def one_line(text: str, limit: int = 300) -> str:
    """Text without line breaks, and not endless."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def table(*columns: str, header: bool = True) -> Any:
    """An empty table for `rich`."""
    from rich.table import Table

    found = Table(show_header=header)
    for column in columns:
        found.add_column(column, overflow="fold")
    return found


def console() -> Console:
    """The console for tables, as wide as the terminal, or 160 columns without one."""
    from rich.console import Console

    at_terminal = sys.stdout is not None and sys.stdout.isatty()  # None if the caller has closed it
    return Console() if at_terminal else Console(width=160)


def print_json(data: dict[str, Any]) -> None:
    """JSON on stdout."""
    print(json.dumps(data, indent=1))


def writable(path: os.PathLike[str] | None, option: str) -> None:
    """Refuse a file that cannot be written before the work is done for it.

    Raises:
        UserError: its folder does not exist, it is a folder itself, or the user may not write it.
    """
    if path is None:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UserError(f"{option}: the folder {os.path.dirname(path)} does not exist")
    if os.path.isdir(path):
        raise UserError(f"{option}: {os.fspath(path)} is a folder, not a file")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UserError(f"{option}: no permission to write {os.fspath(path)}")
