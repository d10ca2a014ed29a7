"""Python in a process of its own, with this checkout on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]


def start(
    *arguments: str, folder: Path = ROOT, first: str = "", timeout: float | None = 500, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` did in `folder`, with these variables and `first` in front of its path."""
    path = os.pathsep.join(filter(None, [first, str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)


def leave() -> NoReturn:
    """End a rank that is done, without shutting the interpreter down.

    Threads of gloo outlive their group: one that lets go of a tensor during the shutdown asks for Python's
    lock, and aborts the process ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
