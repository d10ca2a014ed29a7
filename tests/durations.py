"""How much CPU time each test function takes: `durations.json`, by which quick runs choose.

`python -m tests.durations` runs all tests and writes the file anew. A journal beside the file holds what has
run, so that a run which was interrupted goes on where it stopped. `--cases 2` measures two parameter sets of
each function, which is nearly as good and takes a third of the time. With `--new`, which measures the
functions without an entry, or with names of files, the other entries stay as they are.

On a large machine: python -m tests.durations --jobs 14 --json tests/durations.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parent / "durations.json"

#: CPU seconds of one parameter set, by function; None where it was skipped.
Seconds = Mapping[str, float | None]


def function(nodeid: str) -> str:
    """A test's id without its parameters."""
    return nodeid.partition("[")[0]


def shuffled(nodeid: str, salt: str = "") -> int:
    """A number by which tests are in the same random order everywhere."""
    return int.from_bytes(hashlib.sha256(f"{salt} {nodeid}".encode()).digest()[:8], "big")


def read(path: Path = FILE) -> dict[str, float | None]:
    """The recorded functions; none without a file."""
    return json.loads(path.read_text())["functions"] if path.exists() else {}


def cpu_seconds() -> float:
    """CPU time of this process and of the children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Recorder:
    """Adds each test's CPU seconds to its last report."""

    def __init__(self) -> None:
        self.started = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self.started = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("cpu seconds", round(cpu_seconds() - self.started, 4)))
        return report


class Remaining:
    """Takes the tests that are still to be measured.

    Args:
        ran: ids of those that the journal has.
        cases: parameter sets of each function, at most; None: all.
        measured: functions that are left out.
    """

    def __init__(self, ran: Collection[str], cases: int | None, measured: Collection[str]) -> None:
        self.ran = frozenset(ran)
        self.cases = cases
        self.measured = measured

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, Any, Any]:
        result = yield  # `--part` chooses from all tests
        sets: dict[str, list[str]] = defaultdict(list)
        for nodeid in sorted((item.nodeid for item in items), key=shuffled):
            if function(nodeid) not in self.measured:
                sets[function(nodeid)].append(nodeid)
        wanted = {nodeid for some in sets.values() for nodeid in some[: self.cases]} - self.ran
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]
        return result


class Journal:
    """In the process that gets all reports: one line for each test that has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ran = sorted(entry["test"] for entry in entries(path))
        with path.open("a") as file:  # the line at which an earlier run was interrupted
            file.write("\n")
        self.outcomes: dict[str, str] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker that replaces one which has crashed collects the same tests."""
        node.workerinput["ran"] = self.ran

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.skipped and not hasattr(report, "wasxfail")):
            self.outcomes[report.nodeid] = report.outcome
        if report.when == "teardown":
            outcome = self.outcomes.get(report.nodeid, "passed")
            entry = {"test": report.nodeid, "outcome": outcome, **dict(report.user_properties)}
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def entries(journal: Path) -> Iterator[Any]:
    """What each line of a journal holds. The process may have ended while it wrote one: that is left out."""
    for line in journal.read_text().splitlines() if journal.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        yield entry


def means(found: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """The mean of the tests of each function, by the entries of a journal."""
    by_function: dict[str, list[float]] = defaultdict(list)
    for entry in found:
        some = by_function[function(entry["test"])]
        if entry["outcome"] != "skipped":
            some.append(entry["cpu seconds"])
    return {
        name: round(statistics.fmean(some), 2 if statistics.fmean(some) > 0.1 else 3) if some else None
        for name, some in sorted(by_function.items())
    }


def addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations")
    group.addoption("--journal", type=Path, help="write each test's CPU seconds there; skip those it has")
    group.addoption("--cases", type=int, help="with --journal: parameter sets of each function")
    group.addoption("--unmeasured", action="store_true", help="with --journal: functions without a record")


def configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(), "durations")
    path = config.getoption("journal")
    if path is None:
        return
    if hasattr(config, "workerinput"):
        ran = config.workerinput["ran"]
    else:
        journal = Journal(path)
        ran = journal.ran
        config.pluginmanager.register(journal, "journal")
    measured = read() if config.getoption("unmeasured") else ()
    config.pluginmanager.register(Remaining(ran, config.getoption("cases"), measured), "remaining")


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__)
    parser.add_argument("files", nargs="*", help="test files; all if none is named")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--cases", type=int, help="parameter sets of each function, at most")
    parser.add_argument("--new", action="store_true", help="only functions without an entry")
    parser.add_argument("--json", type=Path, default=FILE, help="where to write")
    parser.add_argument("--write", action="store_true", help="run nothing: write what the journal has")
    args = parser.parse_args()
    journal = args.json.with_suffix(".journal")
    code = 0
    if not args.write:
        # As where `make test` is run: one thread a process, and no GPU.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "pytest", "-q", f"--journal={journal.resolve()}"]
        command += [f"--cases={args.cases}"] if args.cases else []
        command += ["--unmeasured"] if args.new else []
        workers = [f"--numprocesses={args.jobs}", "--maxschedchunk=4", "--max-worker-restart=20"]
        code = subprocess.run([*command, *workers, *args.files], env=env).returncode
    found = means(entries(journal))
    if code in (0, 1) and found:  # 1: tests failed, and have taken time all the same
        kept = read(args.json) if args.files or args.new or args.write else {}
        about = {"torch": torch.__version__, "unit": "CPU seconds of one parameter set; null where skipped"}
        if kept:  # where the other entries are from
            before = json.loads(args.json.read_text())["about"]
            about["other"] = before.get("other", f"the functions of before: torch {before['torch']}")
        document = {"about": about, "functions": dict(sorted({**kept, **found}.items()))}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{args.json}: {len(found)} functions")
        if not args.write:
            journal.unlink()
    return code


if __name__ == "__main__":
    sys.exit(main())
