"""Measurements on this machine: when they are allowed, their order, and the worker process.

A problem is measured in a process of its own (`inductor_fusions.worker`). Whatever happens there, the compile
that asks and the memory of its process are not affected.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import _inductor, config
from . import machine, tables
from .problems import SECTIONS, Row

log = logging.getLogger(__name__)

#: From which second on it is said that something is measured, and how often again.
SILENT, AGAIN = 3.0, 10.0
#: Seconds after which a problem is given up, whatever the budget.
LONGEST = 120.0

#: Runs the worker of this very package, wherever it was imported from.
_MAIN = (
    "import sys; sys.path.insert(0, {!r}); from inductor_fusions.worker import main; sys.path.pop(0); main()"
)

Rows = Mapping[str, Sequence[Row]]
#: A problem: its section, its row, and the kernels that support it.
Problem = tuple[str, Row, tuple[str, ...]]


class Unanswered(Exception):
    """The process that measures has not answered in time, or not at all."""


class Worker:
    """The process that measures; it is started when it is first asked, and ends by itself when it is idle."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.owner = device, os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        self.folder = ""

    def ask(self, problem: Problem, seconds: float) -> dict[str, Any]:
        """Ask the worker: {"rows": of each section}, {"unable": why} or {"error": exception}.

        Raises:
            Unanswered: not in this time, or it died; it is ended then.
            OSError: it cannot be started.
        """
        section, row, kernels = problem
        index = self.device.index or 0 if self.device.type == "cpu" else self.device.index
        asked = {
            "section": section, "row": dict(row), "kernels": list(kernels), "device": self.device.type,
            "index": torch.cuda.current_device() if index is None else index,
            "threads": torch.get_num_threads(),
        }  # fmt: skip
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(asked).encode() + b"\n")
            self.process.stdin.flush()
            answer = json.loads(self._line(time.monotonic() + seconds))
        except (BrokenPipeError, ValueError) as error:
            self.end()
            raise Unanswered("the measuring process died") from error
        except Unanswered:
            self.end()
            raise
        return dict(answer)

    def _line(self, until: float) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        found, pipe = b"", self.process.stdout.fileno()
        while not found.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0:
                raise Unanswered("the measurement timed out")
            if select.select([pipe], [], [], min(left, 0.5))[0]:
                some = os.read(pipe, 1 << 16)
                if not some:
                    raise Unanswered("the measuring process died")
                found += some
        return found

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
        caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), self.folder)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _MAIN.format(str(Path(__file__).parents[2]))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=self.folder,
            env={**kept, **caches},
        )  # fmt: skip

    def end(self) -> None:
        """End the process, and remove what it has written."""
        if os.getpid() != self.owner:
            return
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            process.wait()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""


class Measurer:
    """Measures problems for this process: each once, within the budget.

    Attributes:
        spent: seconds of the budget that are used.
        measured: the problems that have rows now, in order.
        left: how many were not reached.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew, as in a child process: the processes that measure answer their parent alone."""
        self.spent = 0.0
        self.measured: list[Problem] = []
        self.left = 0
        self.workers: dict[torch.device, Worker] = {}
        self.asked: set[str] = set()
        self.said: set[str] = set()
        self.here = threading.local()
        self.lock = threading.RLock()

    # -- whether ----------------------------------------------------------------------------------------

    def may(self, problem: Problem, device: torch.device) -> bool:
        """Whether an unknown problem may be measured now."""
        wanted = config.measure and not config.always() and _key(problem, device) not in self.asked
        return bool(wanted) and not self.forbidden(device)

    def forbidden(self, device: torch.device) -> str:
        """Why nothing is measured here, or ""."""
        if device.type not in ("cpu", "cuda") or os.name != "posix" or not sys.executable:
            return "no worker process is available"
        if _inductor.is_absent():
            return "the device is not in this machine"
        if torch.are_deterministic_algorithms_enabled() or _inductor.is_deterministic():
            return "deterministic algorithms are enabled"
        if machine.company() != "alone":
            return "the processes of a distributed job have to decide alike"
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        return ""

    # -- what comes first -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def first_what_saves_most(self) -> Iterator[None]:
        """Problems that would be measured inside are counted, and measured at the end."""
        before: Counter[tuple[str, torch.device]] | None = getattr(self.here, "collected", None)
        found: Counter[tuple[str, torch.device]] = Counter()
        self.here.collected = found
        try:
            yield
        finally:
            self.here.collected = before
        for device in {device for _, device in found}:
            self.measure({text: count for (text, at), count in found.items() if at == device}, device)

    def collects(self, problem: Problem, device: torch.device) -> bool:
        """Whether problems are collected: then this one is counted."""
        found: Counter[tuple[str, torch.device]] | None = getattr(self.here, "collected", None)
        if found is None:
            return False
        found[json.dumps(problem), device] += 1
        return True

    # -- measuring --------------------------------------------------------------------------------------

    def measure(self, counts: Mapping[str, int], device: torch.device) -> None:
        """Measure problems, those with the largest savings first, and store the rows.

        Whatever goes wrong is said once, and leaves the problems to stock.

        Args:
            counts: of each problem as JSON, the number of places where it stands.
        """
        read = [(json.loads(text), count) for text, count in counts.items()]
        found = [((section, row, tuple(kernels)), count) for (section, row, kernels), count in read]
        with self.lock:
            todo = [
                problem
                for problem, _ in sorted(found, key=lambda one: -_work(one[0]) * one[1])
                if self.may(problem, device)
            ]
            if not todo:
                return
            started, before = time.monotonic(), self.spent
            try:
                if why := machine.prepare():
                    raise OSError(why)
                with machine.lock(device) as mine:
                    if not mine:
                        raise Unanswered("another process is measuring on this machine")
                    with _progress(len(todo), self._budget() - self.spent) as done:
                        for number, problem in enumerate(todo):
                            done[0] = number
                            self.spent = before + time.monotonic() - started
                            self._one(problem, device)
            except Exception as error:
                self._say(f"left to stock: {error}")
                rest = {_key(problem, device) for problem in todo} - self.asked
                self.left += len(rest)
                self.asked |= rest
            finally:
                self.spent = before + time.monotonic() - started

    def rest(self) -> None:
        """End the processes that measure, as the code that was compiled may need their memory."""
        if self.lock.acquire(blocking=False):
            try:
                for worker in self.workers.values():
                    worker.end()
            finally:
                self.lock.release()

    def _one(self, problem: Problem, device: torch.device) -> None:
        self.asked.add(_key(problem, device))
        seconds = min(self._budget() - self.spent, LONGEST)
        if seconds <= 0:
            self.left += 1
            return
        try:
            answer = self._worker(device).ask(problem, seconds)
        except Unanswered as error:
            self.left += 1
            self._say(f"{problem[0]} {json.dumps(problem[1])} is left to stock: {error}")
            return
        if "rows" in answer:
            machine.add(device, _checked(answer["rows"], problem))
            self.measured.append(problem)
        elif "unable" in answer:
            log.info("%s was not measured: %s", problem, answer["unable"])
        else:
            self._say(f"{problem[0]} {json.dumps(problem[1])} is left to stock: {answer.get('error')}")

    def _worker(self, device: torch.device) -> Worker:
        if device not in self.workers:
            self.workers[device] = Worker(device)
            atexit.register(self.workers[device].end)
        return self.workers[device]

    def _budget(self) -> float:
        return math.inf if config.measure_budget is None else float(config.measure_budget)

    def _say(self, text: str) -> None:
        kind = text.rpartition(":")[2]
        (log.info if kind in self.said else log.warning)("measuring on this machine: %s", text)
        self.said.add(kind)


def _checked(rows: Any, problem: Problem) -> Rows:
    """The rows that the worker answered, checked.

    Raises:
        ValueError: that are no rows, or none of the problem is among them.
    """
    section, row, _ = problem
    kind = SECTIONS[section]
    for name, some in rows.items():
        for each in some:
            SECTIONS[name].check(each)
    if not any(
        kind.key(each) == kind.key(row) and each.get(kind.along) == row.get(kind.along)
        for each in rows.get(section, ())
    ):
        raise ValueError("the measurement is for another problem")
    return dict(rows)


def _key(problem: Problem, device: torch.device) -> str:
    return json.dumps([problem[0], {**problem[1]}, str(device)], sort_keys=True)


def _work(problem: Problem) -> float:
    """The product of a problem's sizes: what a kernel may save grows with it."""
    section, row, _ = problem
    return math.prod(SECTIONS[section].sizes(row))


@contextlib.contextmanager
def _progress(total: int, budget: float) -> Iterator[list[int]]:
    """Says on stderr how far it is, from the third second on; the list holds how many are done."""
    done, ended, started = [0], threading.Event(), time.monotonic()

    def say() -> None:
        wait = SILENT
        while not ended.wait(wait):
            wait, seconds = AGAIN, time.monotonic() - started
            print(
                f"inductor_fusions: measuring on this machine, {done[0] + 1} of {total}, "
                f"{seconds:.0f} s of at most {budget:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()


#: The measurer of this process.
measurer = Measurer()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=measurer.reset)
