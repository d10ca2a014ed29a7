"""The measuring process: a JSON problem on each line of stdin, an answer on each line of stdout.

Each problem is measured in a child of this process, which has imported everything and never uses the
device itself. So several problems compile at the same time, and whatever one of them does to its process
or to its context on the device ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

#: Seconds without a question after which the process ends.
IDLE = 120.0


def main() -> None:
    """Answer until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch and compilers print is no answer
    prepare()
    asked, rest = sys.stdin.buffer.fileno(), b""
    running: dict[int, Child] = {}
    with tempfile.TemporaryFile() as lock:
        while True:
            until = min((child.until for child in running.values()), default=time.monotonic() + IDLE)
            ready = select.select([asked, *running], [], [], max(0.0, until - time.monotonic()))[0]
            if asked in ready:
                some = os.read(asked, 1 << 16)
                if not some:
                    break
                *lines, rest = (rest + some).split(b"\n")
                started = [Child(json.loads(line), lock.fileno()) for line in lines]
                running |= {child.pipe: child for child in started}
            elif not ready and not running:
                break
            for pipe, child in list(running.items()):
                if pipe in ready and not child.listen():
                    del running[pipe]
                    answers.write(json.dumps(child.answer()) + "\n")
                    answers.flush()
                elif time.monotonic() >= child.until:
                    child.kill()
    for child in running.values():
        child.kill()


class Child:
    """A process that measures one problem.

    Args:
        asked: what `answer` is asked, and "seconds" after which it is given up.
        lock: a file that is locked while the device is in use.

    Attributes:
        pipe: where it writes its answer; at its end the child is gone.
        until: when it is given up.
    """

    def __init__(self, asked: Mapping[str, Any], lock: int) -> None:
        self.asked, self.said, self.late = asked, b"", False
        self.until = time.monotonic() + asked["seconds"]
        self.pipe, end = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            with contextlib.suppress(BaseException):
                os.write(end, json.dumps(answer(asked, turn(lock))).encode())
            os._exit(0)
        os.close(end)

    def listen(self) -> bool:
        """Read what it has written; whether it is still there."""
        some = os.read(self.pipe, 1 << 16)
        self.said += some
        return bool(some)

    def kill(self) -> None:
        """Give it up."""
        self.late, self.until = True, time.monotonic() + IDLE
        os.kill(self.process, signal.SIGKILL)

    def answer(self) -> dict[str, Any]:
        """What it said, with the number of the question."""
        os.close(self.pipe)
        os.waitpid(self.process, 0)
        why = "the measurement timed out" if self.late else "the measuring process died"
        try:
            found: dict[str, Any] = json.loads(self.said)
        except ValueError:
            found = {"error": why}
        return {**found, "number": self.asked["number"]}


@contextlib.contextmanager
def turn(file: int) -> Iterator[None]:
    """Inside, no other child uses the device to compare or to time."""
    import fcntl

    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)


def prepare() -> None:
    """Import what children need. Nothing here may use the device: a child could not use it then."""
    from .. import _inductor, fusions  # noqa: F401  (registers the operations and their lowerings)
    from ..driver import passes  # noqa: F401  (or each child would import it)
    from . import problem  # noqa: F401  (likewise)

    _inductor.compile_each_anew()
    _inductor.without_attention_patterns()


def answer(asked: Mapping[str, Any], alone: contextlib.AbstractContextManager[None]) -> dict[str, Any]:
    """{"rows": of each section}, {"unable": why} or {"error": what was raised}.

    Args:
        asked: "section", "row", "kernels"; "device" and "index"; "threads" of a CPU.
        alone: entered once, while the device is used to compare and to time.
    """
    import torch

    from ..sites import error_text
    from .case import UnableError
    from .measuring import NotFusedError
    from .problem import rows_of

    try:
        set_up(asked)
        return {"rows": rows_of(asked["section"], asked["row"], asked["kernels"], asked["device"], alone)}
    except (UnableError, NotFusedError) as error:
        return {"unable": error_text(error)}
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:
        return {"error": error_text(error)}


def set_up(asked: Mapping[str, Any]) -> None:
    """Settings that a problem is measured under."""
    import torch

    tf32 = bool(asked["row"].get("tf32"))
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if asked["device"] == "cuda":
        torch.cuda.set_device(asked["index"])
    else:
        torch.set_num_threads(asked["threads"])
