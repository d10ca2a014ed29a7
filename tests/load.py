"""What many compiles in one process leave behind, with the fusions and without:

    python -m tests.load --json bench/results/load_cpu.json

Each run is a process of its own, which holds nothing else. `passes` are compiles of different functions up to
the passes of the fusions, whose results are run as they are; `inductor` are whole compiles, of functions that
are alike, so that the C++ compiler is asked once.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import inductor_fusions
from bench.common import Results
from bench.provenance import environment
from inductor_fusions import config, testing
from tests.support.processes import start

BACKENDS = ("passes", "inductor")
KINDS = ("stock", "fused")


def attention(factor: float) -> Any:
    """A function with code of its own: Dynamo limits how often one code is compiled."""
    scope: dict[str, Any] = {"torch": torch}
    exec(f"def function(q, k, v): return torch.softmax(q @ k.mT * {factor}, dim=-1) @ v", scope)
    return scope["function"]


def qkv() -> list[torch.Tensor]:
    """Inputs of `attention`."""
    return [torch.randn(2, 2, 5, 8) for _ in range(3)]


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


def grown(compiles: int, enabled: bool, backend: str = "passes", memory: bool = False) -> dict[str, int]:
    """How much more is held after all of some compiles than after a third of them.

    Args:
        enabled: with the fusions, or stock.
        memory: measure memory as well, for which the report is cleared.

    Returns:
        "graphs", "bytes" (0 where that was not measured), and how many sites were fused.
    """
    held: list[tuple[int, int]] = []
    fused = 0
    for number in range(compiles):
        torch._dynamo.reset()
        how = "inductor" if backend == "inductor" else testing.AfterPasses([])
        factor = 0.5 if backend == "inductor" else 0.5 + number
        with (
            config.patch(policy="always", enabled=enabled),
            torch._inductor.config.patch(force_disable_caches=True),
            torch.no_grad(),
        ):
            torch.compile(attention(factor), backend=how)(*qkv())
        if number in (compiles // 3, compiles - 1):
            torch._dynamo.reset()
            fused += inductor_fusions.report().count("fused")
            held.append((live_graphs(), resident_bytes() if memory else 0))
    (graphs, used), (more_graphs, more_used) = held
    return {"graphs": more_graphs - graphs, "bytes": more_used - used, "fused": fused}


def apart(backend: str, kind: str, compiles: int, folder: Path) -> dict[str, Any]:
    """`grown` with memory, in a process of its own.

    Raises:
        RuntimeError: it failed, with what it wrote.
    """
    started = time.monotonic()
    command = ("-m", "tests.load", "--one", backend, kind, "--compiles", str(compiles))
    done = start(*command, timeout=None, TORCHINDUCTOR_CACHE_DIR=str(folder))
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.load", description=__doc__.splitlines()[0])
    parser.add_argument("--compiles", type=int, default=1000, help="in each process (%(default)s)")
    parser.add_argument("--json", type=Path, help="a report, grown row by row and resumed")
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "KIND"), help="run this one here")
    options = parser.parse_args(argv)
    if options.one:
        backend, kind = options.one
        print(json.dumps(grown(options.compiles, kind == "fused", backend, memory=True)))
        return
    report = None
    if options.json is not None:
        head = {**environment("cpu", "tests.load"), "settings": {"compiles": options.compiles}}
        del head["transformers"]  # nothing here needs it
        report = Results(options.json, head, lambda row: str(row["key"]))
    with tempfile.TemporaryDirectory() as folder:
        for backend in BACKENDS:
            for kind in KINDS:
                key = f"{backend} {kind}"
                if report is not None and key in report:
                    continue
                row = {"key": key, "backend": backend, "kind": kind}
                row |= apart(backend, kind, options.compiles, Path(folder))
                print(row, file=sys.stderr)
                if report is not None:
                    report.append(row)


if __name__ == "__main__":
    main()
