"""What flex attention becomes on a GPU computes what it should, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.attention.interpreted_flex import CASES, LIMIT

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
#: A training run has the forward in it.
NAMES = [f"{name} train" for name in CASES]


@pytest.fixture(scope="module")
def errors() -> dict[str, Any]:
    """Errors of each case, or what it raised."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.attention.interpreted_flex", *NAMES]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_error(name: str, errors: dict[str, Any]) -> None:
    """Output and gradients, of samples that differ in what they hide."""
    assert isinstance(errors[name], list), errors[name]
    assert max(errors[name]) < LIMIT
