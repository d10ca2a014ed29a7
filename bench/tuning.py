"""What scripts that measure rows share: command line, worker processes, resumed results, tables of devices.

A script gives its rows, and a function that measures one: `run` measures them side by side in processes,
`script` one by one in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from bench import device_table
from bench.common import Budget, Json, Progress, Results, is_fatal, one_line
from bench.pool import FileLock, Worker, run_tasks
from bench.provenance import environment

DIED = "the process died"


class Row(Protocol):
    """A row of a grid: a dataclass whose `key` names it."""

    @property
    def key(self) -> str: ...


R = TypeVar("R", bound=Row)
#: Measures a row, with the options and the lock of the device.
MeasureRow = Callable[[Any, argparse.Namespace, FileLock], Json]


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
        write: called with the path of the table and the rows of the file.
    """
    if not options.table:
        return False
    measured = json.loads(options.out.read_text())
    path = Path("configs/devices") / f"{options.table}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        device_table.write(path, {**device_table.head(measured), "attention": []})
    write(path, measured["rows"])
    print(f"{len(measured['rows'])} rows in {path}")
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
        groups: rows that one task measures together; most tuners have one in each.
        work: called with a task and the path of a lock of the device, mostly in another process. Answers the
            result of its one row or a list of results with their "key", and whether the process can go on. A
            result that has a reason as "failed" is not kept.
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
    # Files of whole models from before rows had keys name them alone.
    results = Results(options.out, head, key=lambda row: str(row.get("key") or row["name"]))
    todo = [[row for row in group if options.again or row.key not in results] for group in groups]
    todo = [group for group in todo if group]
    total = sum(map(len, todo))
    slowest = seconds
    tasks = {id(made): (made, group) for group in todo for made in [task(group)]}

    def may_start(_: object = None) -> bool:
        return budget.left > 1.5 * slowest

    def measured() -> Iterator[Json]:
        nonlocal slowest
        for made, answer in _answers(work, [made for made, _ in tasks.values()], jobs, may_start, budget):
            for row in _rows(answer, tasks[id(made)][1]):
                slowest = max(slowest, _seconds(row))
                yield row

    with Progress(total) as progress:
        failed = keep(results, measured(), describe, progress)
    left = total - progress.done
    print(f"{len(results.rows)} rows in {options.out}, {left} left, {len(failed)} failed")
    print(f"{budget.elapsed:.0f} s")
    return results, [str(row["key"]) for row in failed]


def keep(
    results: Results, rows: Iterable[Json], describe: Callable[[Json], str], progress: Progress
) -> list[Json]:
    """Add rows to results as they are measured. Those with a reason as "failed" are not added, so that the
    next run tries them again, but returned."""
    failed = []
    for row in rows:
        if isinstance(row.get("failed"), str):
            failed.append(row)
            told = f"failed: {row['failed']}"
        else:
            results.append(row)
            told = describe(row)
        progress.step(f"{row.get('key') or row['name']}: {told}")
    return failed


def tried(measure_row: Callable[[], Json]) -> tuple[Json, bool]:
    """What a measurement gives, or why it failed; and whether the process can go on."""
    try:
        return measure_row(), True
    except Exception as error:
        return {"failed": one_line(error, 300)}, not is_fatal(error)


def each(task: tuple[MeasureRow, Any, argparse.Namespace], lock: Path) -> tuple[Json, bool]:
    """A worker: measure one row. `measure_s` is what is not compiling, where a row does not say it."""
    measure_row, row, options = task
    started = time.monotonic()
    found, usable = tried(lambda: measure_row(row, options, FileLock(lock)))
    seconds = time.monotonic() - started - found.get("compile_s", 0.0)
    return {"measure_s": round(seconds, 2), **found}, usable


def run(
    module: str,
    options: argparse.Namespace,
    rows: Sequence[R],
    measure_row: MeasureRow,
    describe: Callable[[Json], str],
    jobs: int = 1,
    seconds: float = 5.0,
    header: Json | None = None,
) -> None:
    """Measure each row by itself, and leave with exit status 1 where some failed.

    Args:
        module, options, describe, jobs, seconds, header: as in `measure`.
        rows: of the grid, all of them.
        measure_row: of a row, the options and the lock of the device, its result. With several processes it
            is a function that a module has by name.
    """
    groups = [[row] for row in select(rows, options)]
    jobs = min(jobs, len(groups) or 1)
    _, failed = measure(
        module, options, groups, each, lambda group: (measure_row, group[0], options), describe, jobs,
        seconds, header,
    )  # fmt: skip
    end(failed)


def script(
    module: str,
    doc: str | None,
    grid: Callable[[bool], Sequence[R]],
    measure_row: Callable[[R, str, bool], Json],
    describe: Callable[[Json], str],
    table: Callable[[Path, list[Json]], None] | None = None,
) -> None:
    """The command line of a script that measures one row after the other.

    Args:
        module, doc: as in `parser`.
        grid: the rows; quick ones where it is given True.
        measure_row: of a row, the device, and whether it is quick, the result.
        describe: a result in a few words.
        table: writes rows into the table of a device.
    """
    options = parser(module, doc, parallel=False, table=table is not None).parse_args()
    if table is None or not wrote_table(options, table):
        rows, device, quick = grid(options.quick), options.device, options.quick
        run(module, options, rows, lambda row, *_: measure_row(row, device, quick), describe)


def _seconds(result: Json) -> float:
    """What a row took; where it does not say so itself, in its parts."""
    parts = (result.get(name, 0.0) for name in ("compile_s", "measure_s"))
    return float(result["seconds"] if "seconds" in result else sum(parts))


def _rows(answer: Any, group: Sequence[Any]) -> list[Json]:
    if isinstance(answer, list):
        return answer
    return [{"key": group[0].key, **asdict(group[0]), **(answer or {"failed": DIED})}]


def _answers(
    work: Worker, tasks: Sequence[Any], jobs: int, may_start: Callable[..., bool], budget: Budget
) -> Iterator[tuple[Any, Any]]:
    """Tasks with their answers, of this process or of others."""
    if jobs == 1:
        return here(work, tasks, may_start)
    # The processes are parallel as it is.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    return run_tasks(work, tasks, jobs, may_start, deadline=lambda: budget.left)


def here(work: Worker, tasks: Sequence[Any], may_start: Callable[[Any], bool]) -> Iterator[tuple[Any, Any]]:
    """Tasks with their answers, worked on in this process until it cannot go on.

    Args:
        may_start: of a task, whether there is time for it; else it is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        for task in tasks:
            if not may_start(task):
                continue
            answer, usable = work(task, Path(folder) / "device.lock")
            yield task, answer
            if not usable:
                return


def end(failed: Sequence[str]) -> None:
    """Leave with exit status 1 where rows failed, which are named."""
    if failed:
        print("failed:", *failed, sep="\n  ")
        sys.exit(1)
