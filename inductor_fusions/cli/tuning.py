"""`tune run` and `tune export`: measuring ahead of time, from an installed package too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..decisions import machine, tables
from ..decisions.problems import SECTIONS, Row
from ..decisions.tables import Table
from .common import PROG, UserError, console, writable
from .common import table as table_of

#: No limit: seconds of a year.
ENDLESS = 365 * 24 * 3600
#: Runs the command line of this very package, wherever it was imported from.
_MAIN = "import sys; sys.path.insert(0, {!r}); from inductor_fusions.cli import main; sys.path.pop(0); main()"


def run_script(given: Sequence[str], device: torch.device) -> int:
    """Run a script with measuring on and no limit, and say what was measured; its exit code.

    Args:
        given: what `run` takes: the script and its arguments.

    Raises:
        UserError: there is no script, or nothing can be kept.
    """
    if not given:
        raise UserError("tune run needs a script: tune run train.py [ARGS]")
    if machine.company() != "alone":
        raise UserError(
            "distributed jobs do not measure, because their processes have to decide alike: run it as one "
            "process"
        )
    if why := machine.prepare():
        raise UserError(why)
    before = dict(_problems(device))
    own = {"INDUCTOR_FUSIONS_MEASURE": "1", "INDUCTOR_FUSIONS_MEASURE_BUDGET": str(ENDLESS)}
    main = _MAIN.format(str(Path(__file__).parents[2]))
    done = subprocess.run([sys.executable, "-c", main, "run", *given], env={**os.environ, **own})
    machine.forget()
    new = {problem: row for problem, row in _problems(device) if before.get(problem) != row}
    if new or done.returncode == 0:
        _show(new)
    return done.returncode


def _problems(device: torch.device) -> Iterator[tuple[tuple[str, str], Row]]:
    """The rows of this machine that say what a kernel gains, by section and problem."""
    for section, rows in (machine.load(device) or {}).items():
        kind = SECTIONS.get(section)
        for row in rows if kind is not None and kind.gains else ():
            assert kind is not None
            if "gain" in row:
                known = (*kind.columns, *kind.may)
                yield (section, json.dumps({name: row[name] for name in known if name in row})), row


def _show(found: dict[tuple[str, str], Row]) -> None:
    out = console()
    if not found:
        out.print("nothing was measured: everything near enough was measured before, or is left to stock")
        return
    shown = table_of("section", "problem", "gain over stock")
    for (section, problem), row in found.items():
        gain = row["gain"]
        text = f"{gain:.2f}" if not isinstance(gain, dict) else ""
        by_kernel = gain.items() if isinstance(gain, dict) else ()
        shown.add_row(section, problem, text or ", ".join(f"{name} {x:.2f}" for name, x in by_kernel))
    out.print(shown)
    out.print(f"kept in {machine.folder()}; {PROG} tune export writes them as a table", highlight=False)


def export(given: Sequence[str], device: torch.device) -> None:
    """Write the rows of this machine as a table of its device.

    Args:
        given: a file, or a folder; empty: the user's folder.

    Raises:
        UserError: there are none, or the file cannot be written.
    """
    if len(given) > 1:
        raise UserError("tune export takes at most one file or folder")
    found, name = machine.load(device), tables.device_name(device)
    if found is None:
        raise UserError(f"no measurements of this machine for {name}: measure with {PROG} tune run SCRIPT")
    path = Path(given[0]) if given else tables.user_folder() / "devices"
    if not given:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"tune export: cannot create {path}: {error.strerror}") from None
    path = path / f"{name}.json" if path.is_dir() else path
    writable(path, "tune export")
    new = Table(found)
    if path.is_file():
        there = tables.parse(path.read_text("utf-8"), path, name)
        if there is None:
            raise UserError(f"{path} exists and is not a table of {name}")
        new = tables.merged(new, there)
    path.write_text(tables.text(new), "utf-8")
    count = sum(len(rows) for rows in new.values() if isinstance(rows, list))
    print(f"{count} rows in {path}")
    if path.name != f"{name}.json":
        print(f"a table is read under the name {name}.json")
