"""`tune run` and `tune export`: from an installed package, without the benchmarks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from inductor_fusions import cli, decisions
from inductor_fusions.cli import benching
from inductor_fusions.decisions import machine, tables

CPU = torch.device("cpu")
ROW = {
    "batch": 1, "heads": 2, "q_len": 96, "kv_len": 96, "head_dim": 32, "dtype": "float32", "mask": "causal",
    "train": False, "gain": {"sdpa": 1.75},
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Folders of the user's that are empty; this is no checkout, and there is no GPU."""
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in machine.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(benching, "ROOT", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine.forget()
    yield tmp_path
    machine.forget()


def measure(**changes: Any) -> None:
    assert machine.prepare() == ""
    with machine.lock(CPU):
        machine.add(CPU, {"attention": [{**ROW, **changes}]})


def tune(*arguments: str, code: int = 0) -> str:
    done = CliRunner(env={"COLUMNS": "400"}).invoke(cli.app, ["tune", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return " ".join((done.output + (done.stderr if code else "")).split())


def test_a_script_runs_with_measuring_on_and_its_own_arguments(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it measures is shown; here it writes the row itself."""
    script = home / "train.py"
    script.write_text(
        "import sys, torch\n"
        "from inductor_fusions import config\n"
        "from inductor_fusions.decisions import machine\n"
        "print(sys.argv[1:], config.measure, config.measure_budget)\n"
        f"torch.set_num_threads({torch.get_num_threads()})\n"
        "device = torch.device('cpu')\n"
        "machine.prepare()\n"
        f"with machine.lock(device): machine.add(device, {{'attention': [{ROW!r}]}})\n"
        "sys.exit(3)\n"
    )
    measure(q_len=7)
    said = tune("run", str(script), "--device", "cuda", "--only", "[", code=3)
    assert f"['--device', 'cuda', '--only', '['] True {365 * 24 * 3600}" in capfd.readouterr().out
    assert "sdpa 1.75" in said and '"q_len": 96' in said and '"q_len": 7' not in said


def test_nothing_was_measured(home: Path) -> None:
    script = home / "train.py"
    script.write_text("")
    assert "nothing was measured" in tune("run", str(script))
    assert tune("run", "no_such.py", code=2) == ""  # the line on stderr is the other process's


def test_help_of_bench_without_a_checkout() -> None:
    done = CliRunner().invoke(cli.app, ["bench", "--help"])
    assert (done.exit_code, "Only in a checkout" in done.output) == (0, True)


def test_run_wants_a_script_and_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs a script" in tune("run", code=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "do not measure" in tune("run", "train.py", code=2)


def test_rows_are_exported_as_a_table_that_is_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no measurements of this machine" in tune("export", code=2)
    measure()
    assert "Usage:" in tune("export", "--help")
    folder = home / "tables"
    folder.mkdir()
    assert "1 rows in" in tune("export", str(folder))
    machine.forget()
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "elsewhere"))
    monkeypatch.setenv(tables.VARIABLE, str(folder))
    tables.load.cache_clear()
    try:
        found = decisions.attention(
            device=CPU, dtype=torch.float32, mask="causal", train=False, batch_heads=2, q_len=96, kv_len=96,
            head_dim=32, candidates=("sdpa",),
        )  # fmt: skip
    finally:
        tables.load.cache_clear()
    assert found.note == "1.75x measured"


def test_rows_are_added_to_a_table_that_is_there(home: Path) -> None:
    measure()
    tune("export")
    measure(q_len=7)
    measure(gain={"sdpa": 1.5})
    path = tables.user_folder() / "devices" / "cpu.json"
    assert "2 rows in" in tune("export")
    table = json.loads(path.read_text())
    tables.check(table, "cpu")
    assert {row["q_len"]: row["gain"]["sdpa"] for row in table["attention"]} == {7: 1.75, 96: 1.5}
    path.write_text("{}")
    assert "is not a table of cpu" in tune("export", code=2)
    assert path.read_text() == "{}"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container with a user that the system does not know: a folder has to be named."""
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(machine, "load", lambda device: {"attention": []})
    assert "tune export: cannot create" in tune("export", code=2)
    assert "cannot create" in machine.prepare()


def test_why_says_that_it_was_measured_here() -> None:
    measure()
    problem = {name: value for name, value in ROW.items() if name != "gain"}
    said = tune("attention", "--why", json.dumps(problem))
    assert "sdpa, 1.75x measured on this machine" in said and '{"sdpa": 1.75}' in said
