"""A plugin of pytest that judges what tests check: `pytest -p tests.gpu.collecting`, by `tests.gpu.programs`.

The helpers that tests hand functions and inputs to (`testing.check`, `testing.capture` and those built on
them) judge the program on a device instead, as `judging` has it, and give back an object that agrees with
everything; asserts of the tests are left out when their files are read. So whatever a new test checks is a
program here, without being listed.

A program is named by its test and its number among those that the test checks. What a test's file makes by
factories of torch is on the device: a device is written into their calls.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.reading import Finder
from tests.gpu.recording import BESIDE, Recorder, Stop

TASK = "PROGRAMS_TASK"  # environment variable: the file that says what this process does
ROOT = Path(__file__).resolve().parents[2]
#: Tests that check many programs are cut into as many parts.
PARTS = {"test_all_mutants": 48}
#: Of which a seed has every eighth.
EVERY = 8
#: Tests whose programs another one has too, or that have none and take long; those with an index out of
#: bounds, which stops the device in eager mode too; and one whose setting drops gradients.
WITHOUT = {
    "test_a_cell_that_is_none",
    "test_label_out_of_bounds",
    "test_label_out_of_bounds_of_log_probabilities",
    "test_returned_logits_without_gradients",
    "test_some_mutants",
    "test_numbers",
    "test_sharded",
    "test_other_strides_and_sizes",
}
#: Helpers that hand programs over; a file that calls none of them has no program.
HELPERS = "check(", "capture(", "unfused(", "through_flex(", "close_to_eager(", "assert_fusions(", "run("
#: Tests of the machinery itself, and those that patch the package or pretend to be on another machine.
WITHOUT_PROGRAMS = (
    "tests/bench/", "tests/caches/", "tests/cli/", "tests/docs/", "tests/harness/", "tests/package/",
    "tests/fuzz/test_", "tests/gpu/test_", "tests/models/test_survey", "tests/conftest",
    "tests/decisions/test_tables", "tests/report/test_explain", "tests/report/test_reporting",
    "tests/torch_features/test_distributed", "tests/torch_features/test_load",
)  # fmt: skip


class Plugin:
    def __init__(self, task: Mapping[str, Any]) -> None:
        self.task = task
        self.recorder = Recorder(task)

    def pytest_configure(self, config: pytest.Config) -> None:
        """Install the recorder; what tests make of torch is on the device."""
        import torch

        torch.set_num_threads(1)
        if self.recorder.device != "cpu":
            torch.set_default_device(self.recorder.device)
        self.recorder.install()

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Files without programs."""
        if collection_path.suffix != ".py":
            return None
        if collection_path.is_relative_to(ROOT):
            if collection_path.relative_to(ROOT).as_posix().startswith(WITHOUT_PROGRAMS):
                return True
        text = collection_path.read_text()
        return None if any(helper in text for helper in HELPERS) else True

    def pytest_collect_file(self, file_path: Path, parent: Any) -> Any:
        """The drawn ones are in a file that has no name of tests."""
        if file_path.name != "drawn.py" or parent.session.isinitpath(file_path):
            return None
        return pytest.Module.from_parent(parent, path=file_path)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """This process's share, in parts where there is much, shuffled."""
        found = []
        for item in items:
            function = getattr(item, "function", None)
            if function is None or function.__name__ in WITHOUT:
                continue
            if "monkeypatch" in inspect.signature(function).parameters:
                continue
            # A file elsewhere has no name in there.
            name = f"{item.path}{item.nodeid}" if item.nodeid.startswith("::") else item.nodeid
            if any(f"[{other}" in name for other in ("cuda",)):
                continue
            parts = PARTS.get(function.__name__, 1)
            chosen_parts = range(self.recorder.seed % EVERY, parts, EVERY) if parts > 1 else (0,)
            for part in chosen_parts:
                found.append((f"{name} part {part}" if parts > 1 else name, item, part, parts))
        wanted, done = self.task.get("items"), set(self.task.get("done", ()))
        share, shares = self.task.get("share", 0), self.task.get("shares", 1)
        mine = [
            one for one in found
            if (one[0] in wanted if wanted is not None else zlib.crc32(one[0].encode()) % shares == share)
        ]  # fmt: skip
        left = [one for one in mine if f"{zlib.crc32(one[0].encode()):08x}" not in done]
        random.Random(f"{self.recorder.seed} {share}").shuffle(left)
        # Of three seeds in a row each begins with another third: little time has all programs once.
        left.sort(key=lambda one: (zlib.crc32(one[0].encode()[::-1]) - self.recorder.seed) % 3 != 0)
        self.recorder.write("collected", items=len(mine), left=len(left))
        items[:] = [self.renamed(*one) for one in left]

    def renamed(self, name: str, item: Any, part: int, parts: int) -> Any:
        """The test, or a test like it for a part of its programs."""
        if parts > 1:
            item = type(item).from_parent(
                item.parent, name=item.name, callspec=getattr(item, "callspec", None), callobj=item.obj,
                fixtureinfo=item._fixtureinfo, originalname=item.originalname,
            )  # fmt: skip
        item.programs_of = name, part, parts
        return item

    def pytest_collection_finish(self) -> None:
        """All is imported."""
        self.recorder.remember()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        """A row for each test."""
        recorder = self.recorder
        if time.time() > recorder.deadline:
            item.session.shouldstop = "the time is over"
            return (yield)
        recorder.item, recorder.part, recorder.parts = item.programs_of
        recorder.number, recorder.row = 0, {}
        recorder.seen.clear()
        found = yield
        if time.time() <= recorder.deadline:
            recorder.write("done", item=recorder.item, row=recorder.row)
        else:
            recorder.write("over", item=recorder.item)
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> Iterator[None]:
        """Whatever a test says of the object that agrees with everything is no matter."""

        def stop(*_: Any) -> None:
            raise Stop

        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, BESIDE)
        try:
            return (yield)
        except Stop:
            self.recorder.count("cut", "other work")
        except pytest.skip.Exception:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.recorder.count("cut", f"{type(error).__name__}: {str(error)[:60]}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return True


def _start() -> None:
    """In a process that has a task: before any of the tests' files is read."""
    path = os.environ.get(TASK)
    if path:
        task = json.loads(Path(path).read_text())
        sys.meta_path.insert(0, Finder(task["device"]))
        globals()["PLUGIN"] = Plugin(task)


_start()


def pytest_configure(config: pytest.Config) -> None:
    plugin = globals().get("PLUGIN")
    if plugin is not None:
        config.pluginmanager.register(plugin, "programs")  # whose own hook is called now
