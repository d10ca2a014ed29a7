"""Runs each kernel template once on small tensors, for a tool that watches the kernels:

    python -m tests.gpu.sanitize --tool memcheck --tool racecheck --json bench/results/sanitizer_h200.json
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.gpu.sanitize "short attention"

The first runs every template under compute-sanitizer, several at a time, and goes on where it was stopped:
what is compiled is in the caches before. The exit status is 1 where a template raised or gave something that
is not finite, or where the tool found something.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from bench.common import Results
from bench.provenance import environment
from tests.gpu.templates import TEMPLATES, compiled

ROOT = Path(__file__).resolve().parents[2]
#: Exit status of compute-sanitizer where it found something.
FOUND = 9


def once(name: str, device: str) -> str:
    """What is wrong with a template, or ""."""
    template = TEMPLATES[name]
    try:
        with template.active():
            found = compiled(template)(template.inputs(device))
            if device == "cuda":
                torch.cuda.synchronize()
    except Exception:
        return traceback.format_exc()
    return "" if all(bool(y.isfinite().all()) for y in found) else "not finite"


def without_kernel(name: str, device: str) -> bool:
    """Whether the device has no such kernel."""
    arch = 100
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        arch = 10 * major + minor
    return TEMPLATES[name].least > arch or (device == "cpu" and name.startswith("flex"))


def watched(tool: str, name: str, device: str, seconds: float) -> dict[str, Any]:
    """A row of the report: a template under a tool of compute-sanitizer.

    Args:
        tool: "memcheck", "racecheck", "initcheck" or "synccheck".
        seconds: after which it is stopped, which counts as not clean.
    """
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-m"]
    command += ["tests.gpu.sanitize", "--device", device, name]
    started = time.monotonic()
    try:
        # What is compiled is in the caches: no processes that compile are watched.
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds,
        )  # fmt: skip
        clean, said = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired:
        clean, said = False, f"stopped after {seconds:g} s"
    lines = [line.strip() for line in said.splitlines() if "=====" in line or "stopped" in line]
    told = "\n".join(lines[-1:] if clean else lines[:30] or said.splitlines()[-30:])
    row = {"key": f"{tool} {name}", "tool": tool, "template": name, "clean": clean, "said": told}
    return {**row, "seconds": round(time.monotonic() - started, 1)}


def watch(
    tools: Sequence[str], names: Sequence[str], device: str, path: Path | None, jobs: int, seconds: float
) -> int:
    """Run templates under each tool; the number of those that are not clean, earlier runs included."""
    report = None
    if path is not None:
        report = Results(path, environment(device, "tests.gpu.sanitize"), lambda row: str(row["key"]))
    todo = [(t, n) for t in tools for n in names if report is None or f"{t} {n}" not in report]
    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(watched, tool, name, device, seconds) for tool, name in todo]
        for done in as_completed(running):
            rows.append(done.result())
            print(f"{rows[-1]['key']}: {rows[-1]['said']}", flush=True)
            if report is not None:
                report.append(rows[-1])
    return sum(not row["clean"] for row in (rows if report is None else report.rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"templates, all by default: {', '.join(TEMPLATES)}")
    parser.add_argument("--device", default="cuda", help="cpu tries the script alone (%(default)s)")
    parser.add_argument("--tool", action="append", help="run each under this tool of compute-sanitizer")
    parser.add_argument("--json", type=Path, help="with --tool: a report, grown row by row and resumed")
    parser.add_argument("--jobs", type=int, default=6, help="with --tool: at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=300, help="with --tool: for each (%(default)s)")
    options = parser.parse_args(argv)
    if unknown := set(options.names) - set(TEMPLATES):
        parser.error(f"there is no template {unknown.pop()!r}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 0
    failures, right = 0, []
    for name in options.names or TEMPLATES:
        if without_kernel(name, options.device):
            print(f"{name}: skipped, the device has no such kernel", flush=True)
            continue
        started = time.monotonic()
        wrong = once(name, options.device)
        failures += bool(wrong)
        right += [] if wrong else [name]
        print(f"{name}: {wrong or 'done'}, {time.monotonic() - started:.1f} s", flush=True)
    if options.tool:
        failures += watch(options.tool, right, options.device, options.json, options.jobs, options.seconds)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
