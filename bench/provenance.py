"""Where and when results were measured: the header of every file of results."""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

from bench.common import Json
from inductor_fusions.decisions import machine


def commit() -> str | None:
    """The commit of this checkout, with a mark where files other than results differ from it."""
    git = ("git", "-C", str(Path(__file__).parent))
    others = (":(top)", ":(top,exclude)bench/results")
    try:
        done = subprocess.run(
            (*git, "rev-parse", "--short=12", "HEAD"), capture_output=True, text=True, timeout=20
        )
        if done.returncode:
            return None
        differs = subprocess.run((*git, "diff", "--quiet", "HEAD", "--", *others), timeout=20).returncode
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() + "-dirty" * bool(differs)


def clocks(device: str) -> Json:
    """Clocks of the device under load and at most, in MHz, as far as the system tells."""
    found: Json = {}
    if device == "cuda":
        query = "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", "0"]
        try:
            values = [part.strip() for part in _under_load(command).split(",")]
        except OSError:
            return found
        names = query.replace("clocks.", "").split(",")
        return {n: int(v) for n, v in zip(names, values, strict=False) if v.isdigit()}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return found
    now = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return {"cpu": round(statistics.median(now))} if now else found


def _under_load(command: Sequence[str]) -> str:
    """What a command prints while the GPU is busy; "" if it does not end within 20 seconds."""
    start, matrix = time.monotonic(), torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")

    def work() -> float:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()
        return time.monotonic() - start

    while work() < 0.5:  # the clocks rise
        pass
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            if work() > 20.0:
                process.kill()
                return ""
        return process.stdout.read() if process.stdout is not None else ""


def environment(device: str, module: str) -> Json:
    """The header of a results file: device, versions, clocks, commit, date and the command that made it."""
    header: Json = {"schema": 1, "device": machine.device_title(torch.device(device))}
    if device == "cuda":
        header["capability"] = list(torch.cuda.get_device_capability())
        header["cuda"] = torch.version.cuda
        header["cudnn"] = torch.backends.cudnn.version()
    header["torch"] = str(torch.__version__)
    for package in ("triton", "transformers"):
        header[package] = machine.version(package) or None
    header["python"] = platform.python_version()
    header["commit"], header["clocks_mhz"] = commit(), clocks(device)
    header["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    header["command"] = shlex.join(["python", "-m", module, *sys.argv[1:]])
    return header


def write(path: Path, module: str, rows: list[Json]) -> None:
    """A results file of the CPU, all rows at once."""
    path.write_text(json.dumps({**environment("cpu", module), "rows": rows}, indent=1) + "\n", "utf-8")
