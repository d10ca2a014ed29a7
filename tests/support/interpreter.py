"""Modules that run kernels in Triton's interpreter, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def errors_of(module: str, *names: str, timeout: int = 900) -> dict[str, Any]:
    """What a module of tests prints: the error of each case, or what it raised.

    What Triton defines when it is imported depends on TRITON_INTERPRET.

    Args:
        module: "tests.block_mm.interpreted"; its last line is JSON.
        names: cases to run; none for those that the module runs by itself.
        timeout: seconds.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", module, *names]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
