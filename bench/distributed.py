"""Measure steps over two processes under torch's engines, with the fusions and without.

Llama-3.2-1B of transformers with its loss head and random weights, in bfloat16, with 4 x 2048 tokens for
each process. An engine whose name ends in "lora" trains PEFT's adapters on it; one that ends in "inference"
reads a prompt. DDP compiles the whole model, FSDP2 and tensor parallel each block. `stock` is the fusions
switched off, `fused` the default policy; the two take turns, each is the best of six blocks of steps, by the
wall clock, on the slower process. Memory is the peak of a step, with weights, on the process with more.

    python -m bench.distributed --out bench/results/distributed_h100.json
    python -m bench.distributed --backend gloo --out /tmp/try.json --only '^tp'

The first needs two GPUs. The processes are those of `tests/distributed_worker.py`, so it runs in a checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from bench.common import Json, Results
from bench.provenance import environment

ROOT = Path(__file__).resolve().parents[1]
#: What is tried, one after the other; the last three need PEFT.
ENGINES = ("fsdp", "ddp", "tp", "tp_inference", "ddp_outside", "fsdp_lora", "tp_lora", "ddp_lora")

#: File of what the processes say.
ANSWER = "result.json"
#: FSDP2 over tensor parallel: two by two processes. Tested, not timed.
COMBINED = ("fsdp_tp", "fsdp_tp_lora")


def engines(names: Sequence[str] = ENGINES) -> list[str]:
    """Those that can run here."""
    return [e for e in names if not e.endswith("lora") or importlib.util.find_spec("peft")]


def start(folder: Path, log: IO[str], module: str, *words: str, processes: int = 2) -> subprocess.Popen[str]:
    """Start torchrun, in a session of its own.

    Args:
        log: a file for what it writes.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(processes), "-m", module, *words]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def stop(running: subprocess.Popen[str]) -> None:
    """End torchrun, if it still runs, and its processes.

    Each of them has a session of its own, which torchrun ends when it is asked to; what is left in its own
    session is killed.
    """
    if running.poll() is None:
        running.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(60)  # it gives its processes 30 s
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def torchrun(
    backend: str, folder: Path, chosen: Sequence[str], *options: str, seconds: float = 900, processes: int = 2
) -> Json:
    """engine -> what its processes say.

    Args:
        backend: "gloo" or "nccl".
        folder: of Inductor's cache, and of the answer.
        options: of the worker: "--times" for times instead of what is wrong.
        seconds: after which all processes are stopped.

    Raises:
        RuntimeError: it failed, with the end of what it wrote.
        TimeoutError: the same, when no time is left; `answer(folder)` is what was found by then.
    """
    with (folder / "log.txt").open("w+") as log:
        words = backend, str(folder / ANSWER), *options, *chosen
        running = start(folder, log, "tests.distributed_worker", *words, processes=processes)
        late = False
        try:
            running.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            stop(running)
        log.seek(0)
        wrote = log.read()[-4000:]
    if late:
        raise TimeoutError(f"stopped after {seconds:g} s\n{wrote}")
    if running.returncode:
        raise RuntimeError(wrote)
    return answer(folder)


def answer(folder: Path) -> Json:
    """engine -> what was said of it so far, in a folder that was given to `torchrun`."""
    path = folder / ANSWER
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser("bench.distributed", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file, grown and resumed")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), help="engines that match")
    parser.add_argument("--budget", type=float, default=900, help="seconds after which it is stopped")
    options = parser.parse_args()
    device = "cuda" if options.backend == "nccl" else "cpu"
    header = environment(device, "bench.distributed")
    header["device"] = f"2 x {header['device']}"
    header["model"] = "Llama-3.2-1B"
    results = Results(options.out, header, lambda row: str(row["key"]))
    chosen = [e for e in engines() if options.only.search(e) and e not in results]
    if not chosen:
        print(f"nothing is left to measure: {options.out}")
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = torchrun(options.backend, Path(folder), chosen, "--times", seconds=options.budget)
        except TimeoutError:
            found = answer(Path(folder))
    for engine, times in found.items():
        results.append({"key": engine, **times})
        print(f"{engine}: {times}")
    if missing := [e for e in chosen if e not in found]:
        raise SystemExit(f"no time was left for {', '.join(missing)}")


if __name__ == "__main__":
    main()
