"""The command line of the ledger."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.common import Json, Progress
from bench.pool import run_tasks
from devtools import ledger
from devtools.ledger.compiling import DEVICES, work
from devtools.ledger.entries import QUICK, Entry, entries
from devtools.ledger.rows import PATH, Change, compare, key, read, save, series, unlike, versions


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m devtools.ledger", description=(ledger.__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--file", type=Path, default=PATH, help="the ledger; default: devtools/ledger.json")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a row is worse")
    parser.add_argument("--quick", action="store_true", help=f"one dtype of {', '.join(QUICK)}")
    parser.add_argument("--only", type=re.compile, help="only models whose name matches this expression")
    parser.add_argument("--missing", action="store_true", help="only rows that the ledger lacks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--list", action="store_true", help="name the models and stop")
    options = parser.parse_args()
    known, rows = read(options.file)
    todo = [each for each in entries(options.quick) if not options.only or options.only.search(each.name)]
    if options.missing:
        todo = [each for each in todo if any(key(each.header(device)) not in rows for device in DEVICES)]
    if options.list:
        print(*(each.name for each in todo), sep="\n")
        return
    different = unlike(known)
    if different and options.check:
        raise SystemExit(f"{different}: run python -m devtools.ledger with this torch first")
    whole = not (options.quick or options.only or options.missing)
    if different and not whole and series() in known:
        raise SystemExit(f"{different}: rewrite all rows of torch {series()}")
    if whole and not options.check:  # rows of models that are gone go
        there = {key(each.header(device)) for each in todo for device in DEVICES}
        rows = {name: row for name, row in rows.items() if row["torch"] != series() or name in there}

    def keep() -> None:
        if not options.check:
            save(options.file, {**known, series(): versions()}, rows.values())

    changes, failed = run(todo, rows, options.jobs, keep)
    for change in changes:
        if change.worse or change.better:
            print(("worse: " if change.worse else "gained: ") + str(change))
    worse = sum(bool(change.worse) for change in changes)
    gained = sum(bool(change.better) and not change.worse for change in changes)
    print(f"{len(changes)} rows of torch {series()}: {worse} worse, {gained} gained")
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    if options.check and gained and not worse:
        print("make ledger writes the gains down, so that they cannot be lost unseen")
    sys.exit(1 if failed or (worse and options.check) else 0)


def run(
    todo: Sequence[Entry], rows: dict[str, Json], jobs: int, keep: Callable[[], None]
) -> tuple[list[Change], dict[str, str]]:
    """Measure models and put their rows in place of the old ones.

    Args:
        rows: of the ledger, by key; they are changed.

    Returns:
        What became of each row, and why models failed.
    """
    changes: list[Change] = []
    failed: dict[str, str] = {}
    with Progress(len(todo)) as progress:
        for entry, answer in run_tasks(work, todo, jobs, lambda: True, lambda: float("inf")):
            if not isinstance(answer, list):
                failed[entry.name] = answer or "the process died"
                progress.step(f"{entry.name}: {failed[entry.name]}")
                continue
            for row in answer:
                changes.append(compare(rows.get(key(row)), row))
                rows[key(row)] = row
            keep()
            progress.step(entry.name)
    return sorted(changes, key=lambda change: change.row), failed


if __name__ == "__main__":
    main()
