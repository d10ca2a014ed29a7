"""The worker process as its parent sees it: problems in, rows out (`inductor_fusions.worker`)."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import tables
from .problems import Row

#: Seconds after which a problem is given up, whatever the budget.
LONGEST = 120.0
#: Seconds that the worker has to say that a problem is given up.
GRACE = 5.0
#: Problems that are compiled at the same time, at most; and the processors and the bytes of the device that
#: are counted for each.
MOST, PROCESSORS, BYTES = 8, 2, 4 << 30

#: Runs the worker of this very package, wherever it was imported from.
_MAIN = (
    "import sys; sys.path.insert(0, {!r}); from inductor_fusions.worker import main; sys.path.pop(0); main()"
)

#: A problem: its section, its row, and the kernels that support it.
Problem = tuple[str, Row, tuple[str, ...]]


class Unanswered(Exception):
    """The worker has not answered in time, or not at all."""


class Worker:
    """The process that measures; it is started when it is first asked, and ends by itself when it is idle."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.owner = device, os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self.folder, self.said = "", b""

    def answers(
        self, problems: Iterator[Problem], left: Callable[[], float]
    ) -> Iterator[tuple[Problem, dict[str, Any]]]:
        """Measure problems, several at a time, and give each with its answer as it comes.

        An answer is {"rows": of each section}, {"unable": why} or {"error": exception}.

        Args:
            problems: the next one is taken when there is a place for it.
            left: the seconds that are left for all of them. If none are left, no further problem is taken.

        Raises:
            Unanswered: the worker died, or hangs; it is ended then.
            OSError: it cannot be started.
        """
        running: dict[int, Problem] = {}
        places, number = side_by_side(self.device), 0
        try:
            while True:
                while len(running) < places and left() > 0 and (one := next(problems, None)) is not None:
                    running[number] = one
                    self._ask(number, one, min(left(), LONGEST))
                    number += 1
                if not running:
                    return
                answer = self._next(time.monotonic() + min(max(left(), 0.0), LONGEST) + GRACE)
                yield running.pop(answer["number"]), answer
        except (BrokenPipeError, KeyError, ValueError) as error:
            raise Unanswered("the measuring process died") from error
        finally:
            if running:
                self.end()

    def _ask(self, number: int, problem: Problem, seconds: float) -> None:
        section, row, kernels = problem
        index = self.device.index or 0 if self.device.type == "cpu" else self.device.index
        asked = {
            "number": number, "seconds": seconds, "section": section, "row": dict(row),
            "kernels": list(kernels), "device": self.device.type,
            "index": torch.cuda.current_device() if index is None else index,
            "threads": torch.get_num_threads(),
        }  # fmt: skip
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.flush()

    def _next(self, until: float) -> dict[str, Any]:
        """The next line of the worker."""
        assert self.process is not None and self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.said:
            left = until - time.monotonic()
            if left <= 0:
                raise Unanswered("the measurement timed out")
            if select.select([pipe], [], [], min(left, 0.5))[0]:
                some = os.read(pipe, 1 << 16)
                if not some:
                    raise Unanswered("the measuring process died")
                self.said += some
        line, _, self.said = self.said.partition(b"\n")
        return dict(json.loads(line))

    def _start(self) -> None:
        self.end()
        self.folder = tempfile.mkdtemp(prefix="inductor_fusions-")
        # What is set for this process does not hold there, but for the tables.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("INDUCTOR_FUSIONS", "TORCH_LOGS", "TORCH_TRACE", "TORCH_COMPILE_DEBUG"))
            or name == tables.VARIABLE
        }
        # Python imports from the folder that it starts in: a folder of Inductor's may be called z3 there.
        caches = str(Path(self.folder, "caches"))
        kept |= dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), caches)
        # By default, asking whether there is a GPU initialises CUDA, which a forked child cannot use then.
        kept["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN.format(str(Path(__file__).parents[2]))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=self.folder,
            env=kept, start_new_session=True,
        )  # fmt: skip

    def end(self) -> None:
        """End the process and its children, and remove what they have written."""
        if os.getpid() != self.owner:
            return
        process, self.process, self.said = self.process, None, b""
        if process is not None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            process.wait()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""


def side_by_side(device: torch.device) -> int:
    """How many problems may be compiled at the same time. On a CPU one: its timing needs all of it."""
    if device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(MOST, len(os.sched_getaffinity(0)) // PROCESSORS, free // BYTES))
