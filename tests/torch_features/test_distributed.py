"""torch's own engines over two processes, or four: results of one, and each attention fused on each rank.

On a machine with two GPUs, all with NCCL, and the times of training steps beside stock's:

    python -m pytest tests/torch_features/test_distributed.py -k nccl
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import distributed
from bench.distributed import COMBINED, ENGINES, engines, start, stop, torchrun

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


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun that is stopped takes the processes with it that it has started."""
    code = (
        "import os, sys, time\nopen(os.path.join(sys.argv[1], f'pid{os.getpid()}'), 'w')\ntime.sleep(600)\n"
    )
    (tmp_path / "sleeper.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with (tmp_path / "log").open("w+") as log:
        running = start(tmp_path, log, "sleeper", str(tmp_path))
        deadline = time.monotonic() + 120
        while len(found := list(tmp_path.glob("pid*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        stop(running)
        log.seek(0)
        assert len(found) == 2, log.read()
    assert running.returncode
    assert not [path for path in found if alive(int(path.name[3:]))]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_time_is_up(tmp_path: Path) -> None:
    """It is said, and nothing is taken for an answer."""
    with pytest.raises(TimeoutError, match=r"stopped after 0.5 s"):
        torchrun("gloo", tmp_path, ["ddp"], seconds=0.5)
    assert distributed.answer(tmp_path) == {}


def test_measured_engines_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped keeps what it had, and the next one goes on."""
    asked: list[list[str]] = []

    def fake(backend: str, folder: Path, chosen: list[str], *options: str, seconds: float) -> object:
        asked.append(list(chosen))
        (folder / distributed.ANSWER).write_text(json.dumps({chosen[0]: {"ratio": 1.0}}))
        if len(asked) == 1:
            raise TimeoutError
        return distributed.answer(folder)

    out = tmp_path / "out.json"
    monkeypatch.setattr(distributed, "torchrun", fake)
    monkeypatch.setattr(sys, "argv", ["it", "--backend", "gloo", "--out", str(out), "--only", "^(ddp|tp)$"])
    with pytest.raises(SystemExit, match="no time was left for tp"):
        distributed.main()
    distributed.main()
    distributed.main()
    assert asked == [["ddp", "tp"], ["tp"]]
    assert [row["key"] for row in json.loads(out.read_text())["rows"]] == ["ddp", "tp"]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_nccl(tmp_path: Path) -> None:
    """On two GPUs FSDP2 over tensor parallel has one part of the samples."""
    chosen = engines((*ENGINES, *COMBINED))
    assert torchrun("nccl", tmp_path, chosen) == dict.fromkeys(chosen, "")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_nccl_is_not_slower(tmp_path: Path) -> None:
    found = torchrun("nccl", tmp_path, engines(), "--times")
    assert set(found) == set(engines())
    assert not {engine: times for engine, times in found.items() if times["ratio"] < SLOWEST}
