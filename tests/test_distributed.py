"""torch's own engines over two processes: results of one, and each attention fused on each rank.

On a machine with two GPUs, all with NCCL and the times of training steps beside stock's:

    python -m pytest tests/test_distributed.py -k nccl -s

DISTRIBUTED_TIMES=FILE keeps the times as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

ENGINES = ["ddp", "ddp_outside", "fsdp", "tp"]
if importlib.util.find_spec("peft"):
    ENGINES += ["fsdp_lora", "tp_lora"]


#: Of a training step, stock / fused: noise may take so much of it away.
SLOWEST = 0.95


def torchrun(backend: str, folder: Path, *options: str) -> dict[str, Any]:
    """engine -> what was wrong (or its times), of two processes that try one after the other."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    result = folder / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.distributed_worker", backend, str(result), *options, *ENGINES]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_gloo(tmp_path: Path) -> None:
    assert torchrun("gloo", tmp_path) == dict.fromkeys(ENGINES, "")


@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_times_are_taken(tmp_path: Path) -> None:
    found = torchrun("gloo", tmp_path, "--times")
    assert set(found) == set(ENGINES)
    for engine, times in found.items():
        assert times["stock_ms"] > 0 and times["fused_ms"] > 0, engine
        assert len(times["sites"]) == 2 and times["sites"][0] == times["sites"][1], engine


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_nccl(tmp_path: Path) -> None:
    assert torchrun("nccl", tmp_path) == dict.fromkeys(ENGINES, "")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_nccl_is_not_slower(tmp_path: Path) -> None:
    found = torchrun("nccl", tmp_path, "--times")
    text = json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "engines": found})
    print(text)
    if kept := os.environ.get("DISTRIBUTED_TIMES"):
        Path(kept).write_text(text)
    assert set(found) == set(ENGINES)
    slower = {engine: times for engine, times in found.items() if times["ratio"] < SLOWEST}
    assert not slower
