"""Python in a process of its own, with this checkout on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]


def start(
    *arguments: str, folder: Path = ROOT, first: str = "", timeout: float | None = 500, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` did in `folder`, with these variables and `first` in front of its path."""
    path = os.pathsep.join(filter(None, [first, str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)


def quick_rows(script: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a script of `bench` at small sizes, whose kernels run in Triton's interpreter."""
    out = folder / "rows.json"
    command = ("-m", f"bench.{script}", "--quick", "--device", "cpu", "--out", str(out))
    done = start(*command, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def leave() -> NoReturn:
    """End a rank that is done, without shutting the interpreter down.

    Threads of gloo outlive their group: one that lets go of a tensor during the shutdown asks for Python's
    lock, and aborts the process ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
