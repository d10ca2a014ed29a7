"""The lock of the processes that share a device."""

from __future__ import annotations

import threading
from pathlib import Path

from bench.pool import FileLock

#: Seconds in which a thread that need not wait is through, and in which one that waits shows it.
SOON, WHILE = 5.0, 0.2


class Held(threading.Thread):
    """A process that holds the lock until it is told to let go."""

    def __init__(self, path: Path, shared: bool) -> None:
        super().__init__(daemon=True)
        self.lock, self.shared = FileLock(path), shared
        self.has, self.done = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self.lock.shared() if self.shared else self.lock:
            self.has.set()
            self.done.wait(SOON)

    def release(self) -> None:
        self.done.set()
        self.join(SOON)


def test_many_share_it(tmp_path: Path) -> None:
    first, second = (Held(tmp_path / "lock", shared=True) for _ in range(2))
    assert first.has.wait(SOON) and second.has.wait(SOON)
    first.release()
    second.release()


def test_one_alone_waits_for_those_who_share_and_others_wait_for_it(tmp_path: Path) -> None:
    """Those who come later and would share it wait as well: else it would never be free."""
    path = tmp_path / "lock"
    compiling = Held(path, shared=True)
    assert compiling.has.wait(SOON)
    timing = Held(path, shared=False)
    assert not timing.has.wait(WHILE)
    later = Held(path, shared=True)
    assert not later.has.wait(WHILE)
    compiling.release()
    assert timing.has.wait(SOON) and not later.has.wait(WHILE)
    timing.release()
    assert later.has.wait(SOON)
    later.release()


def test_two_are_never_alone_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = Held(path, shared=False)
    assert first.has.wait(SOON)
    second = Held(path, shared=False)
    assert not second.has.wait(WHILE)
    first.release()
    assert second.has.wait(SOON)
    second.release()
