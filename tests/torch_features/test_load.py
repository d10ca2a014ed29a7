"""Many compiles, several at once, and caches that were left in the middle of one or cannot be written."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_fusions
from inductor_fusions import config, reporting, testing
from tests.load import BACKENDS, KINDS, apart, attention, grown, qkv

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_inputs_are_not_referred_to(train: bool) -> None:
    """Nothing that a compile leaves behind refers to an input, so that `swap_tensors` takes it at once."""
    function, inputs = attention(0.3), [x.requires_grad_(train) for x in qkv()]
    collects = gc.isenabled()
    gc.disable()  # what is left in cycles counts
    try:
        with config.patch(policy="always"), torch.set_grad_enabled(train):
            compiled = torch.compile(function, dynamic=False)
            result = compiled(*inputs)
        assert any(site.verdict == "fused" for site in inductor_fusions.report())
        if train:
            result.sum().backward()
        del result
        assert not any(weakref.getweakrefs(x) for x in inputs)
        for x in inputs:
            torch.utils.swap_tensors(x, torch.zeros_like(x))
    finally:
        if collects:
            gc.enable()


@pytest.mark.parametrize("backend", ["passes", pytest.param("inductor", marks=pytest.mark.slow)])
def test_threads(backend: str) -> None:
    """16 threads compile at once: each has its result, and the report has every site."""
    wrong: list[Any] = []
    start = threading.Barrier(16)

    def run(number: int) -> None:
        function, inputs = attention(0.1 + number), qkv()
        try:
            start.wait(60)
            with config.patch(policy="always"), torch.no_grad():
                how = "inductor" if backend == "inductor" else testing.AfterPasses([])
                compiled = torch.compile(function, backend=how, dynamic=False)
                torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=1e-4, atol=1e-5)
        except BaseException as error:
            wrong.append(error)

    inductor_fusions.clear()
    threads = [threading.Thread(target=run, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not wrong, wrong
    assert inductor_fusions.report().count("fused") == 16


def test_nothing_is_kept() -> None:
    """Compiles leave no graph behind beyond what stock leaves; a site keeps text alone."""
    reporting.clear()
    assert grown(30, enabled=True)["graphs"] <= max(0, grown(30, enabled=False)["graphs"])
    sites = list(inductor_fusions.report())
    assert len(sites) == 30
    assert {type(value) for site in sites for value in vars(site).values()} <= {str, dict}


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_of_a_thousand_compiles(backend: str, tmp_path: Path) -> None:
    """No graph that stock does not keep; at most 10% more memory than it keeps, and noise."""
    stock, fused = (apart(backend, kind, 1000, tmp_path) for kind in KINDS)
    assert fused["graphs"] <= max(0, stock["graphs"]), (stock, fused)
    assert fused["bytes"] < 1.1 * max(0, stock["bytes"]) + 4 * 2**20, (stock, fused)
    assert fused["fused"] and not stock["fused"]


COMPILE = """
import sys, torch, inductor_fusions

def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v

torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 2, 5, 8).unbind()
print("compiling", flush=True)
found = torch.compile(attention)(q, k, v)
torch.testing.assert_close(found, attention(q, k, v))
from torch._dynamo.utils import counters
print("fused", counters["inductor"]["fusions_attention"])
"""


def may_not_override() -> None:
    """Permissions hold for root as well, in the program that is started next."""
    capability_bounding_set_drop, override = 24, 1
    ctypes.CDLL(None).prctl(capability_bounding_set_drop, override, 0, 0, 0)


def process(cache: Path, code: str = COMPILE, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {
        **os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "INDUCTOR_FUSIONS_POLICY": "always", **environment,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=may_not_override if os.geteuid() == 0 else None,
    )


def finish(running: subprocess.Popen[str], seconds: float = 300) -> str:
    out, err = running.communicate(timeout=seconds)
    assert running.returncode == 0, err
    return out


@pytest.mark.slow
def test_killed_in_the_middle(tmp_path: Path) -> None:
    """What a killed compile leaves in the caches serves the next one, or is made anew."""
    for seconds in (0.3, 1.5, 4.0):
        running = process(tmp_path)
        assert running.stdout is not None
        assert running.stdout.readline().strip() == "compiling"
        time.sleep(seconds)
        running.send_signal(signal.SIGKILL)
        running.communicate()
    assert "fused 1" in finish(process(tmp_path))
    assert "fused 1" in finish(process(tmp_path))  # now from the cache


NO_SPACE = COMPILE.replace(
    'print("compiling"',
    "import resource, torch._inductor.compile_fx\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    'print("compiling"',
)


@pytest.mark.slow
def test_no_room(tmp_path: Path) -> None:
    """A cache directory without room: a warm cache serves, where it serves stock."""
    assert "fused 1" in finish(process(tmp_path))
    ours = process(tmp_path, NO_SPACE)
    out, err = ours.communicate(timeout=300)
    if ours.returncode:
        finish(process(tmp_path / "stock", INDUCTOR_FUSIONS="0"))
        stock = process(tmp_path / "stock", NO_SPACE, INDUCTOR_FUSIONS="0")
        stock.communicate(timeout=300)
        assert stock.returncode, err
    else:
        assert "fused 1" in out


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, pytest.param(False, marks=pytest.mark.long)], ids=["warm", "empty"])
def test_read_only(warm: bool, tmp_path: Path) -> None:
    """A cache directory that may not be written to is no error where it is none to stock.

    Which raises where it has something to write.
    """
    runs = {"ours": {}, "stock": {"INDUCTOR_FUSIONS": "0"}}
    for name, variables in runs.items():
        (tmp_path / name).mkdir()
        if warm:
            finish(process(tmp_path / name, **variables))
    inside = [path for path in tmp_path.rglob("*") if not path.is_symlink()]
    for path in inside:
        path.chmod(path.stat().st_mode & ~0o222)
    try:
        ours, stock = (process(tmp_path / name, **variables) for name, variables in runs.items())
        out, err = ours.communicate(timeout=300)
        stock.communicate(timeout=300)
        assert ours.returncode == 0 or stock.returncode, err
        assert ours.returncode or "fused 1" in out
    finally:
        for path in inside:
            path.chmod(path.stat().st_mode | 0o200)
