"""The kernels compute what they should, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.lora.interpreted import CASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def errors() -> dict[str, Any]:
    """Error of each case, or what it raised."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.lora.interpreted"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_error(name: str, errors: dict[str, Any]) -> None:
    """Half an ulp of a float16 output; what is float32 comes out as float32."""
    case = CASES[name]
    exact = not case.columns and case.dtypes[1] == torch.float32
    assert isinstance(errors[name], float), errors[name]
    assert errors[name] < (1e-6 if exact else 5e-4)
