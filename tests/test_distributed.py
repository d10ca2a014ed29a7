"""torch's own engines over two processes: results of one, and each attention fused on each rank."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

ENGINES = ["ddp", "ddp_outside", "fsdp", "tp"]
if importlib.util.find_spec("peft"):
    ENGINES += ["fsdp_lora", "tp_lora"]


def torchrun(backend: str, folder: Path) -> dict[str, str]:
    """engine -> what was wrong, of two processes that try one after the other."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    result = folder / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.distributed_worker", backend, str(result), *ENGINES]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(result.read_text())
    return found


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_gloo(tmp_path: Path) -> None:
    assert torchrun("gloo", tmp_path) == dict.fromkeys(ENGINES, "")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_nccl(tmp_path: Path) -> None:
    assert torchrun("nccl", tmp_path) == dict.fromkeys(ENGINES, "")
