"""Packages of AOTInductor on a GPU, which not every torch can load."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

LOADS_A_PACKAGE = """
import sys, torch
package = torch.export.export(torch.nn.Linear(8, 8).cuda(), (torch.ones(4, 8).cuda(),))
torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(package, package_path=sys.argv[1]))
"""


@functools.cache
def _exit_code() -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", LOADS_A_PACKAGE, str(Path(folder) / "linear.pt2")]
        return subprocess.run(command, env={**os.environ, "INDUCTOR_FUSIONS": "0"}).returncode


def skip_unless_they_load() -> None:
    """Skip a test where stock torch cannot load a package of one linear on the GPU.

    Seen with torch 2.11 and CUDA 13.0: loading any package ends the process.
    """
    if code := _exit_code():
        pytest.skip(f"this torch cannot load a package of one linear: exit code {code}")
