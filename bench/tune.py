"""`python -m inductor_fusions tune KIND`: runs `bench/tune_KIND.py`, and writes the table of a device.

Each script is resumable (`--out`, `--budget`, `--only`), and says with `--help` what it measures.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from inductor_fusions.cli.common import PROG, UserError, writable
from inductor_fusions.decisions import tables

ROOT = Path(__file__).resolve().parents[1]


def kinds() -> list[str]:
    """What can be tuned: the scripts `bench/tune_*.py`."""
    return sorted(path.stem.removeprefix("tune_") for path in (ROOT / "bench").glob("tune_*.py"))


def measure(
    kind: str, where: torch.device, out: Path | None, only: str, quick: bool, budget: float | None,
    write_table: bool, list_only: bool,
) -> int:  # fmt: skip
    """Run the script of a kind, as `python -m inductor_fusions tune KIND` does it; its exit code.

    Args:
        out, only, quick, budget, write_table, list_only: options of the command.

    Raises:
        UserError: there is no such kind, no such file, or `only` is not a regular expression.
    """
    if kind not in kinds():
        raise UserError(f"there is nothing called {kind} to tune; there are: {', '.join(kinds())}")
    name = tables.device_name(where)
    short = name.removeprefix("nvidia_")
    results = out if out is not None else ROOT / "bench" / "results" / f"{kind}_{short}.json"
    writable(results, "--out")
    results = results.absolute()  # the scripts run in the root of the checkout
    try:
        re.compile(only)
    except re.error as error:
        raise UserError(f"--only: {only!r} is not a regular expression: {error}") from error
    if write_table:
        return _write_table(kind, name, results)
    command = [f"bench.tune_{kind}", "--out", str(results), "--device", where.type]
    command += ["--only", only] * bool(only) + ["--quick"] * quick + ["--list"] * list_only
    command += ["--budget", str(budget)] if budget is not None else []
    start = time.monotonic()
    code = _module(command)
    if not list_only:
        print(f"{PROG}: {time.monotonic() - start:.0f} s; {PROG} tune {kind} --table writes the table")
    return code


def _write_table(kind: str, name: str, results: Path) -> int:
    """Put the results of one kind into the table of a device; those of the others stay."""
    if not results.is_file():
        raise UserError(f"there are no results in {results}: run {PROG} tune {kind} first")
    if kind not in ("attention", "flex"):
        if not (ROOT / "configs" / "devices" / f"{name}.json").is_file():
            raise UserError(f"there is no configs/devices/{name}.json yet: tune attention first")
        return _module([f"bench.tune_{kind}", "--out", str(results), "--table", name])
    other = {"attention": "flex", "flex": "attention"}[kind]
    beside = results.with_name(results.name.replace(kind, other, 1))
    files = [str(path) for path in sorted({results, beside}) if path.is_file()]  # attention's header counts
    return _module(["bench.device_table", *files, "--name", name])


def _module(command: Sequence[str]) -> int:
    """Run a module of `bench` in a process of its own: it needs settings that hold before torch is used."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment).returncode
