"""Python in a process of its own, with this checkout on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]


def start(
    *arguments: str,
    folder: Path = ROOT,
    first: str = "",
    timeout: float | None = 500,
    input: str | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """What `python *arguments` did in `folder`, with these variables and `first` in front of its path.

    Args:
        input: what it reads from its standard input.
    """
    path = os.pathsep.join(filter(None, [first, str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, input=input
    )


#: Imports torch once, and forks for each run: importing it is most of the time of a small program.
_FORKING = """
import json, os, sys, tempfile, traceback
import torch, torch._inductor.compile_fx
program, runs = json.load(sys.stdin)
found = []
for arguments, environment in runs:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                os.environ.update(environment)
                sys.argv[1:] = arguments
                exec(compile(program, "program", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for stream in (out, errors):
            stream.seek(0)
        found.append((status, out.read(), errors.read()))
print(json.dumps(found))
"""

#: Arguments and variables of one run of a program.
Given = tuple[Sequence[str], Mapping[str, str]]


def forked(program: str, runs: Sequence[Given]) -> list[subprocess.CompletedProcess[str]]:
    """What a program did in several processes, one after the other, into which torch was imported already.

    They have the hash seed of one interpreter: where the order of imports or sets matters, `start` them.
    """
    done = start("-c", _FORKING, timeout=None, input=json.dumps([program, runs]))
    assert done.returncode == 0, done.stderr
    return [subprocess.CompletedProcess(["forked"], *each) for each in json.loads(done.stdout)]


def quick_rows(script: str, folder: Path) -> list[dict[str, Any]]:
    """The rows of a script of `bench` at small sizes, whose kernels run in Triton's interpreter."""
    out = folder / "rows.json"
    command = ("-m", f"bench.{script}", "--quick", "--device", "cpu", "--out", str(out))
    done = start(*command, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def leave() -> NoReturn:
    """End a rank that is done, without shutting the interpreter down.

    Threads of gloo outlive their group: one that lets go of a tensor during the shutdown asks for Python's
    lock, and aborts the process ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
