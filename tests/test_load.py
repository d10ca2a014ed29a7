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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import inductor_fusions
from inductor_fusions import config, reporting, testing

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")


def attention(factor: float) -> Any:
    """A function with code of its own: Dynamo limits how often one code is compiled."""
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def function(q, k, v): return torch.softmax(q @ k.mT * {factor}, dim=-1) @ v", scope)
    return scope["function"]


def qkv() -> list[torch.Tensor]:
    return [torch.randn(2, 2, 5, 8) for _ in range(3)]


def test_threads() -> None:
    """16 threads compile at once: each has its result, and the report has every site."""
    wrong: list[Any] = []
    start = threading.Barrier(16)

    def run(number: int) -> None:
        function, inputs = attention(0.1 + number), qkv()
        try:
            start.wait(60)
            with config.patch(policy="always"), torch.no_grad():
                compiled = torch.compile(function, backend=testing._AfterPasses([]), dynamic=False)
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


def live_graphs() -> int:
    """Number of graphs that something holds."""
    gc.collect()
    return sum(type(item) is torch.fx.Graph for item in gc.get_objects())


def resident_bytes() -> int:
    """Memory that this process holds, without what malloc would give back."""
    inductor_fusions.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def grown(compiles: int, enabled: bool, held: Callable[[], int] = live_graphs) -> int:
    """How much more is held after all of some compiles than after a third of them.

    Args:
        compiles: how many.
        enabled: with the fusions, or stock.
        held: what is measured.
    """
    counts = []
    for number in range(compiles):
        torch._dynamo.reset()
        with config.patch(policy="always", enabled=enabled), torch.no_grad():
            torch.compile(attention(0.5 + number), backend=testing._AfterPasses([]))(*qkv())
        if number in (compiles // 3, compiles - 1):
            torch._dynamo.reset()
            counts.append(held())
    return counts[1] - counts[0]


def test_nothing_is_kept() -> None:
    """Compiles leave no graph behind beyond what stock leaves; a site keeps text alone."""
    reporting.clear()
    assert grown(30, enabled=True) <= max(0, grown(30, enabled=False))
    sites = list(inductor_fusions.report())
    assert len(sites) == 30
    assert {type(value) for site in sites for value in vars(site).values()} <= {str, dict}


@pytest.mark.long
def test_a_thousand_compiles() -> None:
    stock, fused = (grown(1000, enabled) for enabled in (False, True))
    print(f"graphs kept by two thirds of 1000 compiles: stock {stock}, fused {fused}")
    assert fused <= max(0, stock)


MEMORY = """
import sys
from tests.test_load import grown, resident_bytes

print(grown(int(sys.argv[1]), sys.argv[2] == "fused", resident_bytes))
"""


def grown_bytes(compiles: int, kind: str, folder: Path) -> int:
    """`grown` in bytes, in a process of its own, which holds nothing of other tests."""
    return int(finish(process(folder, MEMORY, str(compiles), kind), seconds=3600))


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_memory_of_a_thousand_compiles(tmp_path: Path) -> None:
    """At most 10% more than what stock keeps, which is some tens of kilobytes a compile, and noise."""
    stock, fused = (grown_bytes(1000, kind, tmp_path) for kind in ("stock", "fused"))
    print(f"bytes kept by two thirds of 1000 compiles: stock {stock}, fused {fused}")
    assert fused < 1.1 * max(0, stock) + 4 * 2**20, (stock, fused)


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


def process(cache: Path, code: str = COMPILE, *words: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {
        **os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "INDUCTOR_FUSIONS_POLICY": "always", **environment,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
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
def test_nothing_can_be_written(tmp_path: Path) -> None:
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
