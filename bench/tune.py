"""The tuning scripts under one name: `python -m bench.tune KIND`, where KIND is that of a `bench/tune_*.py`.

Everything behind KIND is for that script: each is resumable (`--out`, `--budget`, `--only`), and says with
`--help` what it measures. The table of a device, `configs/devices/<device>.json`, is written from their
results; `python -m inductor_fusions tune KIND --table` does that as well.

    python -m bench.tune                        # name the kinds
    python -m bench.tune attention --help
    python -m bench.tune projections --out bench/results/projections_h200.json --budget 500
"""

from __future__ import annotations

import os
import re
import runpy
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
        kind: which.
        where: the device.
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


def main() -> None:
    """The command line."""
    kind = sys.argv[1] if len(sys.argv) > 1 else ""
    if kind in ("", "-h", "--help"):
        print(f"{__doc__}\nkinds: {', '.join(kinds())}")
        return
    if kind not in kinds():
        sys.exit(f"bench.tune: there is no kind {kind!r}; there are: {', '.join(kinds())}")
    sys.argv = [f"bench.tune_{kind}", *sys.argv[2:]]
    runpy.run_module(f"bench.tune_{kind}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
