"""The loop that the tuners share: what is measured, kept, resumed and left."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench import tuning


@dataclass(frozen=True)
class Row:
    name: str
    size: int = 1

    @property
    def key(self) -> str:
        return f"{self.name} s{self.size}"


ROWS = [Row("a"), Row("b"), Row("c", 2)]


def single(task: tuple[Row, str], lock: Path) -> tuple[Any, bool]:
    """One row a task; what it does is said by the second value."""
    row, what = task
    if what == "die" and row.name == "b":
        os._exit(3)
    if what == "fail" and row.name == "b":
        return {"failed": "no memory"}, True
    if what == "lose" and row.name == "b":
        return {"failed": "the device is gone"}, False
    if what == "sleep":
        time.sleep(0.3)
    return {"time": row.size, "compile_s": 0.3 if what == "sleep" else 0.0}, True


def several(task: list[Row], lock: Path) -> tuple[list[dict[str, Any]], bool]:
    """Rows that are measured together."""
    return [{"key": row.key, "name": row.name, "time": row.size} for row in task], True


def options(path: Path, *more: str) -> Any:
    return tuning.parser("bench.tune_x", "Words.").parse_args(["--out", str(path), "--device", "cpu", *more])


def run(
    path: Path, *more: str, what: str = "", jobs: int = 1, seconds: float = 0.0
) -> tuple[list[str], list[str]]:
    """Keys in the file afterwards, and of the rows that failed."""
    given = options(path, *more)
    groups = [[row] for row in tuning.select(ROWS, given)]
    results, failed = tuning.measure(
        "bench.tune_x",
        given,
        groups,
        single,
        lambda g: (g[0], what),
        lambda r: f"{r['time']} us",
        jobs,
        seconds,
    )
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    assert kept == results.rows
    return [row["key"] for row in kept], failed


def test_rows_are_kept_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    assert run(path, "--only", "a|c") == (["a s1", "c s2"], [])
    assert run(path) == (["a s1", "c s2", "b s1"], [])
    assert "3 rows in" in capsys.readouterr().out
    before = json.loads(path.read_text())
    assert before["rows"][1] == {"key": "c s2", "name": "c", "size": 2, "time": 2, "compile_s": 0.0}
    run(path, what="fail")  # nothing is left to do
    assert json.loads(path.read_text())["rows"] == before["rows"]
    assert run(path, "--again", what="fail") == (["a s1", "c s2", "b s1"], ["b s1"])


@pytest.mark.parametrize("jobs", [1, 2])
def test_failed_row_is_not_kept(jobs: int, tmp_path: Path) -> None:
    kept, failed = run(tmp_path / "x.json", what="fail", jobs=jobs)
    assert (sorted(kept), failed) == (["a s1", "c s2"], ["b s1"])
    with pytest.raises(SystemExit) as code:
        tuning.end(failed)
    assert code.value.code == 1
    tuning.end([])


def test_lost_device_ends_this_process_only(tmp_path: Path) -> None:
    assert run(tmp_path / "here.json", what="lose") == (["a s1"], ["b s1"])
    kept, failed = run(tmp_path / "there.json", what="lose", jobs=2)  # another process goes on
    assert (sorted(kept), failed) == (["a s1", "c s2"], ["b s1"])


def test_dead_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, failed = run(tmp_path / "x.json", what="die", jobs=2)
    assert (sorted(kept), failed) == (["a s1", "c s2"], ["b s1"])
    assert tuning.DIED in capsys.readouterr().err


def test_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none.json", "--budget", "1", seconds=1.0) == ([], [])
    kept, _ = run(tmp_path / "some.json", "--budget", "0.5", what="sleep")  # after one, another would not end
    assert kept == ["a s1"]
    assert "2 left, 0 failed" in capsys.readouterr().out


def test_rows_that_belong_together(tmp_path: Path) -> None:
    given = options(tmp_path / "x.json")
    seen: list[list[str]] = []

    def task(group: Any) -> list[Row]:
        seen.append([row.key for row in group])
        return list(group)

    def once(groups: list[list[Row]]) -> list[str]:
        results, _ = tuning.measure("bench.tune_x", given, groups, several, task, lambda r: "", 1, 0.0)
        return [row["key"] for row in results.rows]

    assert once([[ROWS[0]]]) == ["a s1"]
    assert once([[ROWS[0], ROWS[1]], [ROWS[2]]]) == ["a s1", "b s1", "c s2"]
    assert seen == [["a s1"], ["b s1"], ["c s2"]]  # what is there is not measured again


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as code:
        run(tmp_path / "x.json", "--list", "--only", "b")
    assert code.value.code == 0 and capsys.readouterr().out.splitlines() == ["b s1", "1 rows"]


def test_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    given = options(tmp_path / "x.json")
    assert tuning.processes(given) == 1
    given.device = "cuda"
    assert [tuning.processes(given), tuning.processes(given, most=8), tuning.processes(given, 5 / 8)] == [
        16,
        8,
        20,
    ]
    given.jobs = 3
    assert tuning.processes(given, most=2) == 3


def test_rows_that_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that raise are named at the end, with exit status 1, and the others are kept."""
    path = tmp_path / "x.json"

    def measure_row(row: Row, *_: Any) -> dict[str, Any]:
        if row.name == "b":
            raise ValueError("no tile fits")
        return {"key": row.key, "time": row.size}

    with pytest.raises(SystemExit) as ended:
        tuning.run(
            "bench.tune_x", options(path), ROWS, measure_row, lambda r: f"{r['time']} us", header={"peak": 7}
        )
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert "no tile fits" in said.out + said.err
    found = json.loads(path.read_text())
    assert [row["key"] for row in found["rows"]] == ["a s1", "c s2"] and found["peak"] == 7


def test_wrote_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --table nothing is written; with it, the rows of the file are, into a table that is made."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"device": "A device", "rows": [{"key": "a s1"}]}))
    given: list[Any] = []
    parser = tuning.parser("bench.tune_x", "Words.", table=True)

    def write(*what: Any) -> None:
        given.append(what)

    assert not tuning.wrote_table(parser.parse_args(["--out", str(path)]), write) and not given
    assert tuning.wrote_table(parser.parse_args(["--out", str(path), "--table", "a_device"]), write)
    made = Path("configs/devices/a_device.json")
    assert given == [(made, [{"key": "a s1"}])]
    assert json.loads(made.read_text()) == {"schema": 1, "device": "A device", "attention": []}
