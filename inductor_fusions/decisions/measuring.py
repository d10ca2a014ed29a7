"""Measurements on this machine: when they are allowed, and in which order.

A problem is measured in a process of its own (`asking`). Whatever happens there, the compile that asks and
the memory of its process are not affected.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import _inductor, config
from . import machine
from .asking import Problem, Unanswered, Worker
from .problems import SECTIONS, Row

log = logging.getLogger(__name__)

#: From which second on it is said that something is measured, and how often again.
SILENT, AGAIN = 3.0, 10.0

Rows = Mapping[str, Sequence[Row]]
#: Whether enough is known of a problem by now.
Known = Callable[[Problem, torch.device], bool]


class Measurer:
    """Measures problems for this process: each once, within the budget.

    Attributes:
        spent: seconds of the budget that are used.
        measured: the problems that have rows now, in order.
        left: how many have none, for lack of time or because of an error.
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
        if device.type not in ("cpu", "cuda") or sys.platform != "linux" or not sys.executable:
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
    def first_what_saves_most(self, known: Known) -> Iterator[Counter[tuple[str, torch.device]]]:
        """Problems that would be measured inside are counted, and measured at the end."""
        before: Counter[tuple[str, torch.device]] | None = getattr(self.here, "collected", None)
        found: Counter[tuple[str, torch.device]] = Counter()
        self.here.collected = found
        try:
            yield found
        finally:
            self.here.collected = before
        for device in {device for _, device in found}:
            self.measure({text: count for (text, at), count in found.items() if at == device}, device, known)

    def collects(self, problem: Problem, device: torch.device) -> bool:
        """Whether problems are collected: then this one is counted."""
        found: Counter[tuple[str, torch.device]] | None = getattr(self.here, "collected", None)
        if found is None:
            return False
        found[json.dumps(problem), device] += 1
        return True

    # -- measuring --------------------------------------------------------------------------------------

    def measure(self, counts: Mapping[str, int], device: torch.device, known: Known) -> None:
        """Measure problems, those with the largest savings first, and store the rows.

        Whatever goes wrong is said once, and leaves the problems to stock.

        Args:
            counts: of each problem as JSON, the number of places where it stands.
            known: asked before each: rows of those before it may say enough.
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
            waiting = {_key(problem, device) for problem in todo}

            def left() -> float:
                self.spent = before + time.monotonic() - started
                return self._budget() - self.spent

            def unknown() -> Iterator[Problem]:
                for problem in todo:
                    if not known(problem, device):
                        yield problem
                    else:
                        waiting.discard(_key(problem, device))

            try:
                if why := machine.prepare():
                    raise OSError(why)
                with machine.lock(device) as mine:
                    if not mine:
                        raise Unanswered("another process is measuring on this machine")
                    with _progress(len(todo), left()) as done:
                        for problem, answer in self._worker(device).answers(unknown(), left):
                            self.asked.add(_key(problem, device))
                            if self._take(problem, answer, device):
                                waiting.discard(_key(problem, device))
                            done[0] = len(todo) - len(waiting)
            except Exception as error:
                self._say(f"left to stock: {error}")
            finally:
                left()
                self.left += len(waiting)
                self.asked |= waiting

    def _take(self, problem: Problem, answer: Mapping[str, Any], device: torch.device) -> bool:
        """Store what was measured; whether nothing went wrong."""
        error = answer.get("error")
        if "rows" in answer:
            try:
                machine.add(device, _checked(answer["rows"], problem))
                self.measured.append(problem)
                return True
            except (TypeError, ValueError) as wrong:  # a row that is none
                error = wrong
        elif "unable" in answer:
            log.info("%s was not measured: %s", problem, answer["unable"])
            return True
        self._say(f"{problem[0]} {json.dumps(problem[1])} is left to stock: {error}")
        return False

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
