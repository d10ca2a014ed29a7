"""Python in a process of its own, with this checkout on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(
    *arguments: str, folder: Path = ROOT, first: str = "", timeout: float | None = 500, **variables: str
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` did in `folder`, with these variables and `first` in front of its path."""
    path = os.pathsep.join(filter(None, [first, str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)
