"""The generated kernels compute what they should, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.block_mm.interpreted import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def errors() -> dict[str, Any]:
    """Error of each case, or what it raised."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.block_mm.interpreted"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_error(name: str, errors: dict[str, Any]) -> None:
    """Half an ulp of the output's dtype; in float32 the interpreter multiplies exactly."""
    limit = 1e-6 if "tf32" in name else 5e-4
    assert isinstance(errors[name], float), errors[name]
    assert errors[name] < limit
