"""Judges on a device every program that the tests check, and drawn ones, in long-lived processes:

    python -m tests.gpu.programs --seed 1 --seed 2 --seed 3 --jobs 14 --budget 540 \\
        --json bench/results/programs_h100.json

A seed says the order of the programs, and the dtype and mode of each: three seeds in a row run each in
bfloat16, float16 and float32, in training and in inference. Eager calls are mixed in, with other layouts of
incoming gradients. A program that fails is run once more alone, in a fresh process; one that ends its process
or hangs is reported, and the others go on. What the report has for this commit is not run again. The exit
status is 1 if there was a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import Results
from bench.provenance import environment
from tests.gpu.collecting import ROOT, TASK

#: What pytest collects: all tests, and a file that is none.
EVERYTHING = ("tests", "tests/fuzz/drawn.py")
#: Processes for programs that are run alone.
ALONE = 2
#: Seconds for them behind the budget.
BEHIND = 40.0

Json = dict[str, Any]


class Report:
    """Rows by seed and file: counts, failures, and which tests are done."""

    def __init__(self, path: Path, device: str) -> None:
        head = {**environment(device, "tests.gpu.programs"), "settings": {}}
        self.commit = str(head["commit"]).removesuffix("-dirty")
        self.results = Results(path, head, lambda row: str(row["key"]))
        self.rows = {row["key"]: row for row in self.results.rows if row["commit"] == self.commit}

    def row(self, seed: int, item: str) -> Json:
        file = item.partition("::")[0]
        key = f"{seed} {file}"
        fresh = {"key": key, "seed": seed, "file": file, "commit": self.commit, "done": [], "seconds": 0.0}
        return self.rows.setdefault(key, fresh)

    def done(self, seed: int) -> list[str]:
        """Digests of the tests that are done."""
        return [one for row in self.rows.values() if row["seed"] == seed for one in row["done"]]

    def ended(self, seed: int) -> list[str]:
        """Programs that ended their process."""
        found = [f for row in self.rows.values() if row["seed"] == seed for f in row.get("failures", ())]
        return [failure["name"] for failure in found if failure.get("ended")]

    def add(self, seed: int, item: str, part: Json) -> None:
        """A test is done."""
        row = self.row(seed, item)
        row["done"].append(digest(item))
        row["seconds"] = round(row["seconds"] + part.pop("seconds", 0.0), 1)
        for failure in part.get("failures", ()):
            failure["name"] = f"{item} {failure.pop('number')}"
        for wrong in part.get("stock_wrong", ()):
            wrong["name"] = f"{item} {wrong.pop('number')}"
        for name, value in part.items():
            if isinstance(value, dict):
                counts = row.setdefault(name, {})
                for what, count in value.items():
                    counts[what] = counts.get(what, 0) + count
            elif isinstance(value, list):
                row.setdefault(name, []).extend(value)
            else:
                row[name] = row.get(name, 0) + value
        self.results.append(row)

    def fail(self, seed: int, failure: Json) -> None:
        """A program ended its process."""
        row = self.row(seed, failure["name"])
        row.setdefault("failures", []).append(failure)
        self.results.append(row)

    def tried_alone(self, row: Json, failure: Json, found: Json | None, late: bool) -> None:
        """A failure was run once more, in a process of its own: `found` is that test's row."""
        failure["alone"] = _alone(found, late)
        if found and found.get("stock_wrong"):
            row["failures"].remove(failure)
            wrong = {key: failure[key] for key in ("dtype", "mode", "name")}
            row.setdefault("stock_wrong", []).append({**wrong, "what": found["stock_wrong"][0]["what"]})
        self.results.append(row)

    def failures(self) -> Iterator[tuple[Json, Json]]:
        """(row, failure) of all that failed."""
        for row in self.rows.values():
            for failure in row.get("failures", ()):
                yield row, failure


def digest(item: str) -> str:
    """A short name of a test."""
    return f"{zlib.crc32(item.encode()):08x}"


@dataclass
class Worker:
    """A process of pytest that judges, and what is known of it.

    Attributes:
        task: what it was given.
        folder: of its files.
        paths: what pytest collects.
        current: the program that it is at, as its log has it.
        read: bytes of the log that were read.
    """

    task: Json
    folder: Path
    paths: Sequence[str]
    current: Json | None = None
    read: int = 0
    process: Any = None
    started: float = field(default_factory=time.time)

    def start(self) -> Worker:
        """Begin, or begin again behind what is done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self.read, self.current, self.started = 0, None, time.time()
        task = self.folder / "task.json"
        task.write_text(json.dumps({**self.task, "log": str(self.log)}))
        threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        env = {**os.environ, TASK: str(task), "PYTHONPATH": str(ROOT), **threads}
        command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.collecting", "-p", "no:cacheprovider"]
        # Its start looks at the machine through processes, which are not to be started here.
        command += ["-p", "no:benchmark"]
        command += ["--assert=plain", "--long", "-q", "--no-header", "--tb=line"]
        # The last one: settings of the tests also for a file that is elsewhere.
        command += ["-c", "pyproject.toml", "--rootdir", ".", *self.paths, "tests/conftest.py"]
        with (self.folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        return self

    @property
    def log(self) -> Path:
        """What it writes, line by line."""
        return self.folder / "log"

    def events(self) -> Iterator[Json]:
        """What it wrote since it was asked last."""
        with self.log.open("rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.read += len(line)
                event: Json = json.loads(line)
                self.current = event if event["event"] == "begin" else None
                yield event

    def stop(self) -> None:
        """At once, with the processes that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Batch:
    """Runs programs until all are judged, or the time is over.

    Args:
        deadline: in seconds since the epoch.
        limit: seconds that a program may take.
        folder: for files of the processes.
    """

    def __init__(
        self, report: Report, device: str, jobs: int, deadline: float, limit: float, paths: Sequence[str],
        folder: Path,
    ) -> None:  # fmt: skip
        self.report, self.device, self.jobs, self.deadline = report, device, jobs, deadline
        self.limit, self.paths, self.folder = limit, paths, folder
        self.alone: list[tuple[Worker, Json, Json]] = []
        self.left = 0

    def run(self, seed: int) -> None:
        """All programs of a seed."""
        done, ended = self.report.done(seed), self.report.ended(seed)
        common = {"device": self.device, "seed": seed, "deadline": self.deadline, "shares": self.jobs}
        workers = [
            Worker(
                {**common, "share": i, "done": done, "skip": ended}, self.folder / f"{seed}-{i}", self.paths
            )
            for i in range(self.jobs)
        ]
        for worker in workers:
            worker.start()
        self.left = 0
        while workers and time.time() < self.deadline + BEHIND:
            for worker in list(workers):
                if not self.look(worker, seed):
                    workers.remove(worker)
            self.look_at_those_alone()
            time.sleep(0.2)
        for worker in workers:
            worker.stop()

    def look(self, worker: Worker, seed: int) -> bool:
        """Take what a process wrote; whether it goes on."""
        over = worker.process.poll() is not None
        for event in worker.events():
            if event["event"] == "collected":
                self.left += event["left"]
            elif event["event"] == "done":
                worker.task["done"] = [*worker.task["done"], digest(event["item"])]
                self.report.add(seed, event["item"], event["row"])
                for failure in event["row"].get("failures", ()):
                    print(
                        f"{failure['name']}, {failure['dtype']} {failure['mode']}: {failure['what']}",
                        flush=True,
                    )
            elif event["event"] == "lost":
                worker.current = event
        late = worker.current is not None and time.time() - worker.current["at"] > self.limit
        if not over and not late:
            return True
        worker.stop()
        if worker.current is not None and time.time() < self.deadline + self.limit:
            at = worker.current
            ended = at.get("text", f"its process ended with {worker.process.returncode}")
            what = "it hangs" if late else ended
            mode = "training" if at.get("train") else "inference"
            failure = {
                "name": at["name"], "dtype": at.get("dtype", ""), "mode": mode, "what": what, "ended": True,
            }  # fmt: skip
            print(f"{failure['name']}: {what}", flush=True)
            self.report.fail(seed, failure)
            worker.task["skip"] = [*worker.task["skip"], at["name"]]
        else:
            if worker.process.returncode not in (0, 1, 5) and time.time() < self.deadline:
                tail = (worker.folder / "output").read_text()[-1500:]
                print(f"a process ended with {worker.process.returncode}:\n{tail}", file=sys.stderr)
            return False
        if time.time() < self.deadline:
            worker.start()
            return True
        return False

    def look_at_those_alone(self) -> None:
        """Run failures again, each in a process of its own."""
        for worker, row, failure in list(self.alone):
            rows = [event["row"] for event in worker.events() if event["event"] == "done"]
            late = time.time() - worker.started > self.limit
            if worker.process.poll() is None and not rows and not late:
                continue
            worker.stop()
            rows += [event["row"] for event in worker.events() if event["event"] == "done"]
            self.alone.remove((worker, row, failure))
            self.report.tried_alone(row, failure, rows[0] if rows else None, late)
        busy = [id(failure) for _, _, failure in self.alone]
        for row, failure in self.report.failures():
            if len(self.alone) >= ALONE or time.time() > self.deadline:
                break
            if "alone" in failure or id(failure) in busy:
                continue
            item, _, number = failure["name"].rpartition(" ")
            task = {"device": self.device, "seed": row["seed"], "items": [item], "only": int(number)}
            folder = self.folder / f"alone-{digest(failure['name'])}-{row['seed']}"
            self.alone.append((Worker(task, folder, [row["file"]]).start(), row, failure))

    def rest(self) -> None:
        """Those that are still to be run alone, and a little behind the budget those that are running."""
        while time.time() < self.deadline + BEHIND:
            self.look_at_those_alone()
            if not self.alone:
                return
            time.sleep(0.2)
        for worker, _, _ in self.alone:
            worker.stop()


def _alone(row: Json | None, late: bool) -> str:
    """What became of a program that was run alone."""
    if row is None:
        return "hangs" if late else "ends its process"
    if row.get("failures"):
        return "fails"
    return "passes" if row.get("judged") else "not judged"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.programs", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=EVERYTHING, help="what pytest collects (everything)")
    parser.add_argument("--device", default="cuda", help="(%(default)s); cpu judges float32 alone")
    parser.add_argument("--seed", type=int, action="append", help="one or more (1)")
    parser.add_argument("--jobs", type=int, default=4, help="processes (%(default)s)")
    parser.add_argument("--budget", type=float, default=540, help="seconds (%(default)s)")
    parser.add_argument("--limit", type=float, default=150, help="seconds of a program (%(default)s)")
    parser.add_argument("--json", type=Path, required=True, help="a report, grown test by test and resumed")
    options = parser.parse_args(argv)
    report = Report(options.json, options.device)
    folder = Path(tempfile.mkdtemp(prefix="programs_"))
    deadline = time.time() + options.budget
    batch = Batch(report, options.device, options.jobs, deadline, options.limit, options.paths, folder)
    try:
        for seed in options.seed or [1]:
            if time.time() < deadline:
                batch.run(seed)
        batch.rest()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(summary(report), flush=True)
    return 1 if any(True for _ in report.failures()) else 0


def summary(report: Report) -> str:
    """What the report has, in lines."""
    lines = []
    for seed in sorted({row["seed"] for row in report.rows.values()}):
        rows = [row for row in report.rows.values() if row["seed"] == seed]
        judged = sum(sum(row.get("judged", {}).values()) for row in rows)
        left = sum(sum(row.get("left", {}).values()) for row in rows)
        failed = sum(len(row.get("failures", ())) for row in rows)
        stock = sum(len(row.get("stock_wrong", ())) for row in rows)
        tests, seconds = sum(len(row["done"]) for row in rows), sum(row["seconds"] for row in rows)
        lines.append(
            f"seed {seed}: {tests} tests, {judged} programs judged in {seconds:.0f} s of processes, {left} "
            f"not judged, {stock} wrong in stock, {failed} failed"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
