"""`inductor_fusions bench` and `tune`: what is compared, the exit codes, the plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench import common, compare, gate, suites, tune
from inductor_fusions import cli
from inductor_fusions.cli import benching


def row(
    name: str = "a", ratio: float | None = 1.5, noise: float | None = 0.02, **more: Any
) -> dict[str, Any]:
    ratios = {} if ratio is None else {"stock/fused": ratio}
    times = {} if ratio is None else {"stock": ratio, "fused": 1.0, "limit": 0.9}
    found = {"suite": "attention", "name": name, "train": False, "dtype": "float32", "ratio": ratios}
    found |= {"noise": noise, "median_ms": times, "failed": {}, "correct": True}
    found["sites"] = {"fused": 1, "total": 1}
    return {**found, **more}


def results(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    header = {
        "schema": 1, "device": "a device", "torch": "2", "triton": None, "settings": {}, "date": "2026-01-01",
    }  # fmt: skip
    return {**header, "peak": {"tflops": {"float32": 50.0}, "gb_per_s": 3000.0}, **more, "rows": list(rows)}


# -- comparing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new", "worse"), [
    (row(ratio=1.5), row(ratio=1.5), False),
    (row(ratio=1.5), row(ratio=1.46), False),  # 0.973
    (row(ratio=1.5, noise=0.0), row(ratio=1.4, noise=0.0), True),
    (row(ratio=1.5, noise=0.05), row(ratio=1.4, noise=0.05), False),  # within the noise of both
    (row(ratio=1.5, noise=0.05), row(ratio=1.2, noise=0.05), True),
    (row(ratio=0.9, noise=0.0), row(ratio=0.9, noise=0.0), False),  # no worse than it was
    (row(ratio=1.5), row(ratio=None, correct=False), True),
    (row(ratio=1.5), row(ratio=None, failed={"fused": "no"}), True),
    (row(ratio=None), row(ratio=0.5, noise=0.0), False),  # nothing to compare with
])  # fmt: skip
def test_what_is_worse(old: dict[str, Any], new: dict[str, Any], worse: bool) -> None:
    (change,) = compare.compare([new], [old])
    assert change.worse(0.97) is worse


def test_without_an_earlier_run_stock_is_what_counts() -> None:
    changes = compare.compare([row("a", 0.9, 0.0), row("b", 0.99, 0.0), row("c", 0.9, 0.2)], None)
    assert [change.worse(0.97) for change in changes] == [True, False, False]


def test_new_case_is_not_compared() -> None:
    (change,) = compare.compare([row("b", 0.1, 0.0)], [row("a")])
    assert (change.problem, change.worse(0.97)) == ("new", False)


def test_means() -> None:
    found = compare.means(
        [row("a", 2.0), row("b", 0.5, 0.0), row("c", 0.99), row("d", 4.0, train=True), row("e", None)]
    )
    assert [(mean.kind, mean.cases, mean.below, mean.clearly) for mean in found] == [
        ("attention, inference", 3, 2, 1),
        ("attention, training", 1, 0, 0),
    ]
    assert found[0].mean == pytest.approx(0.99 ** (1 / 3)) and found[1].mean == pytest.approx(4.0)
    assert compare.geometric_mean([]) is None


def test_noise_comes_from_repeated_runs() -> None:
    assert suites.noise([1.0, 1.1, 1.05], {}) == pytest.approx(0.05 / 1.05)
    assert suites.noise([1.0], {"stock": 0.03, "fused": 0.04}) == pytest.approx(0.025)
    assert compare.noise({"spread": {"stock": 0.03, "fused": 0.04}}) == pytest.approx(0.025)  # bench.models


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Cases that take no time: their rows by name."""
    rows = {"a": row("a", 1.5, 0.01), "b": row("b", 1.2, 0.01)}

    def entry(name: str) -> suites.Entry:
        def measure(settings: suites.Settings, say: Any) -> dict[str, Any]:
            if "raises" in rows[name]:
                raise RuntimeError(rows[name]["raises"])
            return rows[name]

        return suites.Entry("attention", name, False, True, "float32", measure, 0.0)

    monkeypatch.setattr(suites, "entries", lambda device: [entry(name) for name in rows])
    monkeypatch.setattr(
        suites, "peak_rates", lambda device, dtypes: {"tflops": {"float32": 1.0}, "gb_per_s": 1.0}
    )
    monkeypatch.setattr(suites, "prepare", lambda todo, device: None)
    # Nothing is allocated, and a collection takes seconds where many tests have run.
    monkeypatch.setattr(suites, "free", lambda device: None)
    return rows


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, ["bench", "--device", "cpu", *arguments])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def run_json(*arguments: str, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code))


def test_table_and_means(measured: dict[str, dict[str, Any]]) -> None:
    text = run()
    for shown in ("1.50", "1.20", "1 of 1", "geometric mean", "attention, inference", "1.342"):
        assert shown in text
    found = run_json()
    assert found["means"][0]["mean"] == pytest.approx((1.5 * 1.2) ** 0.5)
    assert (found["worse"], found["left"]) == ([], 0)
    for name in ("device", "torch", "date", "clocks_mhz", "commit", "inductor_fusions"):
        assert name in found


def test_gate(measured: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    run("--out", str(old))
    assert "worse" not in run("--compare", str(old))
    measured["b"]["ratio"]["stock/fused"] = 1.0
    found = run_json("--compare", str(old), "--out", str(new), code=1)
    assert found["worse"] == ["b"]
    text = run("--compare", str(old), "--fail-under", "0.97", code=1)
    assert "b" in text.rpartition("worse than 0.97 of the earlier run")[2]
    run("--compare", str(old), "--fail-under", "0.8")
    run("--fail-under", "1.1", code=1)  # of stock
    run("--fail-under", "1.1", "--only", "a")


def test_wrong_and_failed_fail_the_gate(measured: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    measured["a"] |= {"correct": False, "ratio": {}}
    measured["b"] = {"raises": "no such kernel"}
    path = tmp_path / "bench.json"
    text = run("--out", str(path), code=1)
    assert "WRONG" in text and "failed" in text
    assert [kept["name"] for kept in json.loads(path.read_text())["rows"]] == ["a"]  # b is tried again


def test_results_are_kept(measured: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    run("--out", str(path), "--only", "a")
    measured["a"] = {"raises": "measured again"}
    assert [found["name"] for found in run_json("--out", str(path))["rows"]] == ["a", "b"]


def test_no_time(measured: dict[str, dict[str, Any]]) -> None:
    found = run_json("--budget", "0", "--only", "a")
    assert (found["rows"], found["left"]) == ([], 1)


def test_quick_ends_in_time(measured: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that was seen to take longer than what is left is left out, and counted."""
    limits: list[float | None] = []
    budget = common.Budget

    def limited(seconds: float | None) -> common.Budget:
        limits.append(seconds)
        return budget(seconds)

    monkeypatch.setattr(common, "Budget", limited)
    run("--quick")
    run("--quick", "--repeat", "3")
    run("--quick", "--budget", "7")
    run()
    assert limits == [gate.QUICK_SECONDS, 3 * gate.QUICK_SECONDS, 7.0, None]
    assert gate.QUICK_SECONDS < 240


def test_operations_are_expected_to_last_as_long_as_those_before() -> None:
    clock = iter([0.0, 40.0])  # the first takes 40 s

    def entry(name: str, seconds: float) -> suites.Entry:
        return suites.Entry("blocks", name, False, True, "float32", lambda *_: row(name), seconds)

    found, said = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suites.time, "monotonic", lambda: next(clock))
        left = iter([100.0, 30.0, 30.0])
        todo = [entry("a", 5.0), entry("b", 5.0)]
        for done, _ in suites.run(todo, suites.Settings("cpu"), lambda: next(left), said.append):
            found.append(done.name)
    assert found == ["a"] and said == ["b: left out, 30 s are too few"]


def test_whole_models_are_expected_to_last_as_recorded() -> None:
    recorded = suites.recorded_seconds()
    quick = [e for e in suites.select(["models"], None, True, "cuda") if e.suite == "models"]
    assert quick and all(entry.seconds == recorded[entry.name] for entry in quick)
    assert sum(entry.seconds for entry in quick) < gate.QUICK_SECONDS


MISTAKES = {
    ("--suite", "opps"): "no suite opps",
    ("--only", "nothing"): "--list names them",
    ("--only", "("): "not a regular expression",
    ("--compare", "none.json"): "cannot be read",
    ("--compare", "other.json"): "no results of",
    ("--compare", "far.json"): "a device",
    ("--out", "no/x.json"): "does not exist",
    ("--out", "far.json"): "rows of the two",
}


def test_mistakes(measured: Any, monkeypatch: Any, refuse: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text('{"schema": 1}')
    (tmp_path / "far.json").write_text(json.dumps(results(row("a"))))
    for arguments, said in MISTAKES.items():
        assert said in refuse("bench", "--device", "cpu", *arguments)
    assert "nothing called flax" in refuse("tune", "flax")
    assert {"attention", "flex", "projections"} <= set(tune.kinds())
    table = ("tune", "attention", "--device", "cpu", "--table", "--out", "none.json")
    assert "no results in" in refuse(*table)


def test_outside_of_a_checkout(monkeypatch: pytest.MonkeyPatch, refuse: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(benching, "ROOT", tmp_path)
    for command in (("bench",), ("tune", "attention")):
        assert "clone the repository" in refuse(*command)


@pytest.mark.parametrize("kind", tune.kinds())
def test_tune_lists_its_rows(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(cli.app, ["tune", kind, "--device", "cpu", "--list"])
    assert done.exit_code == 0, done.output
    out = capfd.readouterr().out
    assert out.rstrip().endswith(" rows") and len(out.splitlines()) > 5


@pytest.mark.slow
def test_tune_measures_a_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "attention.json"
    only = "float32 none b1 h4/4 q256 k256 d64 infer"
    arguments = ["tune", "attention", "--device", "cpu", "--quick", "--only", only, "--out", str(path)]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, capfd.readouterr().err
    (found,) = json.loads(path.read_text())["rows"]
    assert found["key"] == only and {"unfused", "sdpa"} <= set(found["times_us"])


# -- plots ----------------------------------------------------------------------------------------


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench import plots

    rows = [
        row(f"case {i}", 1 + i / 2, line="a curve", length=2**i, flops=1e9 * 2**i, bytes=1e6, noise=0.1)
        for i in range(5)
    ]
    written = plots.draw(results(*rows, row("slower", 0.8)), tmp_path)
    assert {path.name for path in written} == {
        f"{name}.{suffix}" for name in ("speedup", "roofline", "length") for suffix in ("png", "svg")
    }
    assert all(path.stat().st_size > 5000 for path in written)
    assert (tmp_path / "speedup.png").read_bytes().startswith(b"\x89PNG")
    # What there is no data for is left out.
    few = plots.draw(results(row("a")), tmp_path / "few")
    assert {path.stem for path in few} == {"speedup"}
