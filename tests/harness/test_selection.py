"""Which tests a quick run takes: nothing is left out for ever, and the budget holds."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations, selection
from tests.selection import select, stage
from tests.support.processes import start

ROOT = Path(__file__).resolve().parents[2]


def suite(sizes: dict[str, int]) -> list[str]:
    """Test ids: of each function so many."""
    return [f"{name}[{i}]" if size > 1 else name for name, size in sizes.items() for i in range(size)]


def drawn(seed: int) -> tuple[list[str], dict[str, float | None]]:
    """A suite of few dear functions, some products and many cheap functions."""
    random_ = random.Random(seed)
    sizes = {f"tests/test_{i % 7}.py::test_{i}": random_.choice((1, 1, 2, 5, 40)) for i in range(120)}
    seconds = {name: random_.choice((0.01, 0.2, 0.5, 3.0, None)) for name in sizes}
    return suite(sizes), seconds


@pytest.mark.parametrize("drawing", range(4))
@pytest.mark.parametrize("share", [0.05, 0.2, 0.6, 2.0])
def test_budget_holds_and_nothing_is_left_out_for_ever(drawing: int, share: float) -> None:
    ids, seconds = drawn(drawing)
    cost = {nodeid: selection.guess(seconds[durations.function(nodeid)]) for nodeid in ids}
    budget = share * sum(cost.values())
    union: set[str] = set()
    for seed in range(739_000, 739_000 + 40 + round(10 / share)):
        found = select(ids, seconds, budget, seed)
        assert found.seconds == pytest.approx(sum(cost[nodeid] for nodeid in found.chosen))
        assert found.seconds <= budget + 1e-6 and not found.new
        union |= found.chosen
    assert union == set(ids)
    if share > 1:
        assert found.chosen == set(ids)


def test_same_seed_takes_the_same_and_another_one_takes_others() -> None:
    ids, seconds = drawn(0)
    first, again, other = (
        select(order, seconds, 60.0, seed) for order, seed in ((ids, 1), (ids[::-1], 1), (ids, 2))
    )
    assert first == again
    assert first.chosen != other.chosen


def test_new_test_always_runs() -> None:
    ids, seconds = drawn(1)
    new = suite({"tests/test_new.py::test_product": 30, "tests/test_new.py::test_alone": 1})
    for seed in range(5):
        found = select([*ids, *new], seconds, 20.0, seed)
        assert found.chosen >= set(new)
        assert found.new == ("tests/test_new.py::test_alone", "tests/test_new.py::test_product")
        assert found.chosen - set(new) == select(ids, seconds, 20.0, seed).chosen


def test_each_cheap_function_runs_and_the_cheapest_runs_whole() -> None:
    sizes = {f"tests/a.py::test_{i}": 10 for i in range(20)} | {"tests/b.py::test_dear": 4}
    seconds = {name: 1.0 for name in sizes} | {"tests/a.py::test_0": 0.01, "tests/b.py::test_dear": 50.0}
    for seed in range(10):
        chosen = select(suite(sizes), seconds, 60.0, seed).chosen
        assert {durations.function(nodeid) for nodeid in chosen} >= sizes.keys() - {"tests/b.py::test_dear"}
        assert chosen >= set(suite({"tests/a.py::test_0": 10}))


def test_products_have_even_shares() -> None:
    """A stretch of the ring takes a tenth of each product, not the whole of one."""
    sizes = {f"tests/a.py::test_{i}": 100 for i in range(5)}
    cost = {nodeid: 1.0 for nodeid in suite(sizes)}
    for seed in range(10):
        found = selection.stretch(cost, 51.0, seed)
        counts = [sum(durations.function(nodeid) == name for nodeid in found) for name in sizes]
        assert sum(counts) == 50 and all(9 <= count <= 11 for count in counts)


def test_test_that_is_dearer_than_the_budget_gets_its_turn() -> None:
    sizes = {"tests/a.py::test_dear": 1, "tests/a.py::test_cheap": 40}
    seconds = {"tests/a.py::test_dear": 100.0, "tests/a.py::test_cheap": 1.0}
    chosen = [select(suite(sizes), seconds, 10.0, seed).chosen for seed in range(150)]
    assert 0 < sum("tests/a.py::test_dear" in some for some in chosen) < 20


def test_static_tests_come_first_and_models_last() -> None:
    seconds = {"tests/lora/test_a.py::test_a": 0.01, "tests/models/test_b.py::test_b": 9.0}
    order = [
        "tests/package/test_layering.py::test_l", "tests/lora/test_a.py::test_a[x]",
        "tests/attention/test_new.py::test_c", "tests/counterexamples/test_d.py::test_d",
        "tests/models/test_b.py::test_b",
    ]  # fmt: skip
    stages = [stage(nodeid, seconds) for nodeid in order]
    assert stages == sorted(set(stages))
    assert all((ROOT / "tests" / name).exists() for name in selection.FIRST)


def test_seed_is_the_day_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_SEED", raising=False)
    assert selection.todays_seed() > 739_000
    monkeypatch.setenv("TEST_SEED", "12")
    assert selection.todays_seed() == 12


PASSED = re.compile(r"PASSED test_some.py::(\S+)|test_some.py::(\S+) PASSED")
SUITE = """
import os
import pytest
@pytest.mark.parametrize("i", range(6))
def test_known(i): assert i != 2
def test_dear():
    if "CRASH" in os.environ: os._exit(1)
def test_new(pytestconfig): assert os.environ["TEST_SEED"] == str(pytestconfig.getoption("seed"))
@pytest.mark.skip
def test_skipped(): pass
"""
#: What passes there.
SOUND = {"test_dear", "test_new", *(f"test_known[{i}]" for i in range(6) if i != 2)}


def run(folder: Path, *args: str) -> str:
    """pytest on SUITE with this folder's conftest."""
    (folder / "test_some.py").write_text(SUITE)
    (folder / "conftest.py").write_text(
        "from pathlib import Path\n"
        "from tests import durations, selection\n"
        "read = durations.read\n"
        "durations.read = selection.read = lambda: read(Path(__file__).parent / 'durations.json')\n"
        "def pytest_addoption(parser):\n"
        "    durations.addoption(parser)\n"
        "    selection.addoption(parser)\n"
        "def pytest_configure(config):\n"
        "    durations.configure(config)\n"
        "    selection.configure(config)\n"
    )
    seconds = {"test_some.py::test_known": 1.0, "test_some.py::test_dear": 9.0}
    (folder / "durations.json").write_text(json.dumps({"functions": seconds}))
    command = ["-m", "pytest", "-v", "-pno:cacheprovider", *args, "."]
    return start(*command, folder=folder, PYTEST_ADDOPTS="").stdout


def test_a_folder_that_is_named_as_a_marker(tmp_path: Path) -> None:
    """Of its tests, those without the marker run."""
    (folder := tmp_path / "long").mkdir()
    (folder / "test_one.py").write_text(
        "import pytest\ndef test_one(): pass\n@pytest.mark.long\ndef test_two(): pass\n"
    )
    items = [
        f"-c{ROOT / 'pyproject.toml'}",
        f"--rootdir={tmp_path}",
        str(folder),
        str(ROOT / "tests" / "conftest.py"),
    ]
    output = start("-m", "pytest", "-q", "-pno:cacheprovider", *items, folder=folder).stdout
    assert "1 passed, 1 skipped" in output, output


def passed(output: str) -> set[str]:
    """The tests of SUITE that have passed, in one process or on workers."""
    return {name for pair in PASSED.findall(output) for name in pair if name}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_two_parts_are_everything_and_a_failure_says_how_it_is_repeated(tmp_path: Path, workers: str) -> None:
    options = ["--budget", "4", "--seed", "3"]
    if workers != "0":
        pytest.importorskip("xdist")
        options += ["-n", workers]
    quick, rest = (run(tmp_path, "--part", part, *options) for part in ("quick", "rest"))
    assert not passed(quick) & passed(rest)
    assert passed(quick) | passed(rest) == SOUND
    assert "test_new" in passed(quick) and "test_dear" in passed(rest)
    (failing,) = [output for output in (quick, rest) if "1 failed" in output]
    assert "python -m pytest 'test_some.py::test_known[2]'" in failing
    assert "SEED=3" in failing and "seed 3" in quick and "1 functions without a duration" in quick


def test_durations_are_recorded_and_a_journal_goes_on(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    first = run(tmp_path, f"--journal={journal}", "--cases=2")
    assert len(list(durations.entries(journal))) == 5, first
    with journal.open("a") as file:
        file.write('["test_some.py::test_kn')  # the process ended here
    second = run(tmp_path, f"--journal={journal}")
    assert passed(first) | passed(second) == SOUND and not passed(first) & passed(second)
    outcomes = {"test_known[2]": "failed", "test_skipped": "skipped"} | dict.fromkeys(SOUND, "passed")
    found = list(durations.entries(journal))
    assert len(found) == len(outcomes)
    assert {entry["test"]: entry["outcome"] for entry in found} == {
        f"test_some.py::{name}": outcome for name, outcome in outcomes.items()
    }
    means = durations.means(found)
    assert means.pop("test_some.py::test_skipped") is None
    assert means.keys() == {f"test_some.py::test_{name}" for name in ("known", "dear", "new")}
    assert all(value is not None and 0 <= value < 5 for value in means.values())
    third = tmp_path / "third"
    assert passed(run(tmp_path, f"--journal={third}", "--unmeasured")) == {"test_new"}


def test_journal_goes_on_where_a_worker_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xdist")
    monkeypatch.setenv("CRASH", "1")
    journal = tmp_path / "journal"
    run(tmp_path, f"--journal={journal}", "-n1", "--max-worker-restart=2")
    ran = {entry["test"] for entry in durations.entries(journal)}
    assert ran == {
        f"test_some.py::{name}" for name in (SOUND | {"test_known[2]", "test_skipped"}) - {"test_dear"}
    }


def test_children_count() -> None:
    before = durations.cpu_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(5_000_000))"], check=True)
    assert durations.cpu_seconds() > before + 0.02
