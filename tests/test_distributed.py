"""torch's own engines over two processes: results of one, and each attention fused on each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

ENGINES = ["ddp", "ddp_outside", "fsdp", "tp"]


def torchrun(engine: str, backend: str, cache: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.distributed_worker", engine, backend]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("engine", ENGINES)
def test_gloo(engine: str, tmp_path: Path) -> None:
    torchrun(engine, "gloo", tmp_path)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("engine", ENGINES)
def test_nccl(engine: str, tmp_path: Path) -> None:
    torchrun(engine, "nccl", tmp_path)
