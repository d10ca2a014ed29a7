"""Modules that run kernels in Triton's interpreter, in processes of their own.

TRITON_INTERPRET=1 python -m tests.support.interpreter tests.block_mm.interpreted
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
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
    command = [sys.executable, "-m", __name__, module, *names]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _without_idle_checks() -> None:
    """The interpreter computes for each sum and product whether it overflows, and then asserts nothing.

    It asserts with `debug` alone, which is off. Without them it takes two thirds of the time.
    """
    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = dataclasses.replace(
            interpreter_builder.options, sanitize_overflow=False
        )


if __name__ == "__main__":
    _without_idle_checks()
    del sys.argv[0]  # to the module it is as if it had been started itself
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
