"""Worker processes that take tasks one by one, in order, and survive the death of a worker."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

Answer = tuple[Any, bool]
Worker = Callable[[Any, Path], Answer]


class FileLock:
    """A lock between processes, which the system frees if its holder dies.

    `with lock:` waits until no one else has it. `with lock.shared():` is for work that may go on side by
    side, but not beside the former; it waits behind those who wait for the lock alone, so that they get it.
    """

    def __init__(self, path: Path) -> None:
        # They live as long as the lock.
        self._file = open(path, "w")  # noqa: SIM115
        self._gate = open(f"{path}.gate", "w")  # noqa: SIM115

    def __enter__(self) -> None:
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        fcntl.flock(self._gate, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Beside others that share it."""
        fcntl.flock(self._gate, fcntl.LOCK_SH)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _loop(work: Worker, lock: Path, pipe: Connection) -> None:
    """In a worker: answer tasks until the pipe closes, or until an answer says that the process is lost."""
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        value, usable = work(task, lock)
        pipe.send((value, usable))
        if not usable:
            os._exit(1)  # a broken device context can hang an orderly exit


class _Worker:
    def __init__(self, work: Worker, lock: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_loop, args=(work, lock, other), daemon=True)
        self.process.start()
        other.close()
        self.task: Any = None

    def give(self, task: Any) -> None:
        self.task = task
        self.pipe.send(task)


def run_tasks(
    work: Worker,
    tasks: Sequence[Any],
    jobs: int,
    may_start: Callable[[], bool],
    deadline: Callable[[], float],
) -> Iterator[tuple[Any, Any]]:
    """Yield (task, answer) as tasks end; the answer is None where the worker died of the task.

    Args:
        work: called in a worker with a task and the path of a lock that all workers share; returns the
            answer and whether the process can go on. It must be importable by name.
        tasks: what to do, first things first.
        may_start: asked before each task is handed out; False ends the run after those under way.
        deadline: seconds until the tasks under way are given up as well.
    """
    queue = list(tasks)[::-1]
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "device.lock"
        workers: list[_Worker] = []
        try:
            while True:
                idle = [w for w in workers if w.task is None]
                while queue and may_start():
                    if not idle:
                        if len(workers) >= jobs:
                            break
                        workers.append(_Worker(work, lock))
                        idle.append(workers[-1])
                    idle.pop().give(queue.pop())
                busy = [w for w in workers if w.task is not None]
                if not busy or deadline() <= 0:
                    return
                ready = wait([w.pipe for w in busy], timeout=max(0.1, min(deadline(), 5.0)))
                for worker in busy:
                    if worker.pipe not in ready:
                        continue
                    task, worker.task = worker.task, None
                    try:
                        answer, usable = worker.pipe.recv()
                    except (EOFError, ConnectionResetError):
                        answer, usable = None, False
                    if not usable:
                        workers.remove(worker)
                        worker.process.join(timeout=5)
                    yield task, answer
        finally:
            for worker in workers:
                worker.pipe.close()
                worker.process.join(timeout=0.5 if worker.task is None else 0)
                if worker.process.is_alive():
                    worker.process.terminate()
