"""What the tuners share: their command line, and the loop over rows, within a time budget and resumed."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from bench.common import Budget, Json, Progress, Results, is_fatal, one_line
from bench.pool import Worker, run_tasks
from bench.provenance import environment

DIED = "the process died"


class Row(Protocol):
    """A row of a grid: a dataclass whose `key` names it."""

    @property
    def key(self) -> str: ...


R = TypeVar("R", bound=Row)


def parser(
    module: str, doc: str | None, *, parallel: bool = True, table: bool = False
) -> argparse.ArgumentParser:
    """The options that every tuner has; one adds its own.

    Args:
        module: "bench.tune_attention".
        doc: its docstring, of which the first paragraph is shown.
        parallel: whether processes compile side by side.
        table: whether it writes tables itself: `wrote_table`.
    """
    found = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").split("\n\n")[0])
    cuda = torch.cuda.is_available()
    found.add_argument(
        "--out", "--json", type=Path, required=True, help="JSON file; rows that it has are skipped"
    )
    found.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    found.add_argument("--only", type=re.compile, help="only rows whose name matches this expression")
    found.add_argument("--budget", type=float, help="seconds after which no row is started")
    if parallel:
        found.add_argument("--jobs", type=int, help="compiling processes; 1 works in this process")
    found.add_argument("--quick", action="store_true", help="short blocks, to try the script")
    found.add_argument("--again", action="store_true", help="measure and replace rows that the file has too")
    found.add_argument("--list", action="store_true", help="name the rows and stop")
    if table:
        found.add_argument("--table", help="write configs/devices/TABLE.json from the file and stop")
    return found


def wrote_table(options: argparse.Namespace, write: Callable[[Path, list[Json]], None]) -> bool:
    """With --table, write what the file has into the table of a device, and say so.

    Args:
        options: as `parser` reads them.
        write: called with the path of the table and the rows of the file.
    """
    if not options.table:
        return False
    measured = json.loads(options.out.read_text())["rows"]
    path = Path("configs/devices") / f"{options.table}.json"
    write(path, measured)
    print(f"{len(measured)} rows in {path}")
    return True


def select(rows: Sequence[R], options: argparse.Namespace) -> list[R]:
    """The rows that are meant; with --list they are named instead, and the process ends."""
    found = [row for row in rows if not options.only or options.only.search(row.key)]
    if options.list:
        print(*(row.key for row in found), f"{len(found)} rows", sep="\n")
        sys.exit(0)
    return found


def processes(options: argparse.Namespace, share: float = 0.5, most: int = 64) -> int:
    """How many processes compile: those that were asked for, else on a GPU a share of the cores."""
    if options.jobs:
        return int(options.jobs)
    return max(1, min(most, int((os.cpu_count() or 2) * share))) if options.device == "cuda" else 1


def measure(
    module: str,
    options: argparse.Namespace,
    groups: Sequence[Sequence[R]],
    work: Worker,
    task: Callable[[Sequence[R]], Any],
    describe: Callable[[Json], str],
    jobs: int,
    seconds: float,
    header: Json | None = None,
) -> tuple[Results, list[str]]:
    """Measure rows, each as soon as there is a process for it, and keep every one that is done.

    Args:
        module: of the tuner, for the header of the file.
        options: as `parser` reads them.
        groups: rows that one task measures together; most tuners have one in each.
        work: called with a task and the path of a lock of the device, mostly in another process. Answers the
            result of its one row or a list of results with their "key", and whether the process can go on. A
            result with "failed" is not kept.
        task: what `work` gets for a group.
        describe: a result in a few words.
        jobs: processes; 1 works in this one.
        seconds: what a row takes, until one has taken longer.
        header: what the header of the file has besides.

    Returns:
        The results, and the names of the rows that failed.
    """
    budget = Budget(options.budget)
    head = {**environment(options.device, module), **(header or {})}
    results = Results(options.out, head, key=lambda row: str(row["key"]))
    todo = [[row for row in group if options.again or row.key not in results] for group in groups]
    todo = [group for group in todo if group]
    total = sum(map(len, todo))
    slowest, failed = seconds, []

    def may_start() -> bool:
        return budget.left > 1.5 * slowest

    with Progress(total) as progress:
        tasks = {id(made): (made, group) for group in todo for made in [task(group)]}
        if jobs == 1:
            answers = _here(work, [made for made, _ in tasks.values()], may_start)
        else:
            # The processes are parallel as it is.
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
            answers = run_tasks(
                work, [made for made, _ in tasks.values()], jobs, may_start, deadline=lambda: budget.left
            )
        for made, answer in answers:
            for result in _rows(answer, tasks[id(made)][1]):
                if "failed" in result:
                    failed.append(str(result["key"]))
                    progress.step(f"{result['key']}: failed: {result['failed']}")
                    continue
                results.append(result)
                slowest = max(slowest, result.get("compile_s", 0.0) + result.get("measure_s", 0.0))
                progress.step(f"{result['key']}: {describe(result)}")
    left = total - progress.done
    print(f"{len(results.rows)} rows in {options.out}, {left} left, {len(failed)} failed")
    print(f"{budget.elapsed:.0f} s")
    return results, failed


def one_by_one(
    module: str,
    options: argparse.Namespace,
    rows: Sequence[R],
    measure_row: Callable[[R], Json],
    describe: Callable[[Json], str],
    header: Json | None = None,
) -> None:
    """Measure rows in this process, and leave with exit status 1 where some failed.

    Args:
        module, options, describe, header: as in `measure`.
        rows: of the grid, all of them.
        measure_row: the result of a row.
    """

    def work(row: R, lock: Path) -> tuple[Json, bool]:
        started = time.monotonic()
        try:
            found = measure_row(row)
        except Exception as error:
            return {"failed": one_line(error)}, not is_fatal(error)
        seconds = time.monotonic() - started - found.get("compile_s", 0.0)
        return {**found, "measure_s": round(seconds, 2)}, True

    groups = [[row] for row in select(rows, options)]
    _, failed = measure(module, options, groups, work, itemgetter(0), describe, 1, 5.0, header)
    end(failed)


def _rows(answer: Any, group: Sequence[Any]) -> list[Json]:
    if isinstance(answer, list):
        return answer
    return [{"key": group[0].key, **asdict(group[0]), **(answer or {"failed": DIED})}]


def _here(work: Worker, tasks: Sequence[Any], may_start: Callable[[], bool]) -> Iterator[tuple[Any, Any]]:
    """The answers of tasks that run in this process, until it cannot go on."""
    with tempfile.TemporaryDirectory() as folder:
        for task in tasks:
            if not may_start():
                return
            answer, usable = work(task, Path(folder) / "device.lock")
            yield task, answer
            if not usable:
                return


def end(failed: Sequence[str]) -> None:
    """Leave with exit status 1 where rows failed, which are named."""
    if failed:
        print("failed:", *failed, sep="\n  ")
        sys.exit(1)
