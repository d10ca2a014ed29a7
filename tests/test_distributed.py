"""torch's own engines over two processes, or four: results of one, and each attention fused on each rank.

On a machine with two GPUs, all with NCCL, and the times of training steps beside stock's:

    python -m pytest tests/test_distributed.py -k nccl
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.distributed import COMBINED, engines, torchrun

#: Of a training step, stock / fused: noise may take so much of it away.
SLOWEST = 0.95


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_gloo(tmp_path: Path) -> None:
    assert torchrun("gloo", tmp_path, engines()) == dict.fromkeys(engines(), "")


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_by_two(tmp_path: Path) -> None:
    """FSDP2 over tensor parallel, also with adapters: samples over one dim of the mesh, heads over one."""
    chosen = engines(COMBINED)
    assert torchrun("gloo", tmp_path, chosen, processes=4) == dict.fromkeys(chosen, "")


@pytest.mark.long
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_times_are_taken(tmp_path: Path) -> None:
    found = torchrun("gloo", tmp_path, engines(), "--times")
    assert set(found) == set(engines())
    for engine, times in found.items():
        assert times["stock_ms"] > 0 and times["fused_ms"] > 0, engine
        assert len(times["sites"]) == 2 and times["sites"][0] == times["sites"][1], engine


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_nccl(tmp_path: Path) -> None:
    assert torchrun("nccl", tmp_path, engines()) == dict.fromkeys(engines(), "")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_nccl_is_not_slower(tmp_path: Path) -> None:
    found = torchrun("nccl", tmp_path, engines(), "--times")
    assert set(found) == set(engines())
    assert not {engine: times for engine, times in found.items() if times["ratio"] < SLOWEST}
