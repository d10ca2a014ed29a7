"""`inductor_fusions bench` and `tune`: the cases, what is compared, the exit codes, the plots."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from bench import cases, common, compare, layers, models_lora, recommendation, suites
from bench.attention import inputs
from bench.attention.rows import rows_of
from inductor_fusions import cli, testing
from inductor_fusions.cli import benching
from tests.support.command_line import refuse

ROOT = Path(__file__).resolve().parents[1]


def row(
    name: str = "a", ratio: float | None = 1.5, noise: float | None = 0.02, **more: Any
) -> dict[str, Any]:
    """A row of results."""
    ratios = {} if ratio is None else {"stock/fused": ratio}
    times = {} if ratio is None else {"stock": ratio, "fused": 1.0, "limit": 0.9}
    found = {"suite": "attention", "name": name, "train": False, "dtype": "float32", "ratio": ratios}
    found |= {"noise": noise, "median_ms": times, "failed": {}, "correct": True}
    found["sites"] = {"fused": 1, "total": 1}
    return {**found, **more}


def results(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    header = {
        "schema": 1,
        "device": "a device",
        "torch": "2",
        "triton": None,
        "settings": {},
        "date": "2026-01-01",
    }
    return {**header, "peak": {"tflops": {"float32": 50.0}, "gb_per_s": 3000.0}, **more, "rows": list(rows)}


# -- comparing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "worse"),
    [
        (row(ratio=1.5), row(ratio=1.5), False),
        (row(ratio=1.5), row(ratio=1.46), False),  # 0.973
        (row(ratio=1.5, noise=0.0), row(ratio=1.4, noise=0.0), True),
        (row(ratio=1.5, noise=0.05), row(ratio=1.4, noise=0.05), False),  # within the noise of both
        (row(ratio=1.5, noise=0.05), row(ratio=1.2, noise=0.05), True),
        (row(ratio=0.9, noise=0.0), row(ratio=0.9, noise=0.0), False),  # no worse than it was
        (row(ratio=1.5), row(ratio=None, correct=False), True),
        (row(ratio=1.5), row(ratio=None, failed={"fused": "no"}), True),
        (row(ratio=None), row(ratio=0.5, noise=0.0), False),  # nothing to compare with
    ],
)
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


# -- the cases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases(device: str) -> None:
    found = suites.entries(device)
    assert len({entry.name for entry in found}) == len(found)
    assert {entry.suite for entry in found} == set(suites.SUITES)
    assert {entry.suite for entry in found if entry.quick} == set(suites.SUITES)
    assert {entry.train for entry in found} == {True, False}
    assert set(suites.SUITES) | set(suites.GROUPS) == set(benching.SUITES)
    lines = [case.line for case in cases.cases(device) if case.line]
    assert all(lines.count(line) > 1 for line in lines)


FAMILIES = (
    "bert-base", "roberta-base", "gpt2", "llama-1b", "llama-8b-8l", "qwen3-8l", "gemma2-8l", "t5-base",
    "whisper-small", "vit-base", "swin-tiny", "dlrm outer product", "dlrm dot products", "llama-1b lora",
)  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_in_both_modes(family: str, device: str) -> None:
    if "lora" in family:
        pytest.importorskip("peft")
    found = [e for e in suites.select(["models"], None, False, device) if e.name.startswith(f"{family} ")]
    assert {entry.train for entry in found} == {False, True}


@pytest.mark.parametrize("name", ["qkv", "gated_mlp", "linear_gelu", "lora", "attention"])
def test_operations_have_their_limit(name: str) -> None:
    """Beside stock stands what the products take alone, or what someone writes by hand."""
    found = [case for case in cases.cases("cpu") if case.name.startswith(f"{name} ") and not case.train]
    assert found and all("limit" in case.make("cpu").hands for case in found)


def test_causal_mask_is_made_in_the_graph() -> None:
    """As models do: then it is proved, and gone."""
    (case,) = rows_of([(1, 4, 48, 16)], ["causal"], dtype="float32", trains=[False], kv_heads=2)
    work = cases.AttentionWork(case, "cpu")
    given = inputs.allocate(case, "cpu")
    inputs.fill(case, given, 0)
    seen = testing.capture(work.function("fused"), *given.arguments("unfused"))
    assert [site.kernel for site in seen.sites] == ["sdpa, is_causal, enable_gqa"]
    exact = work.function("limit")(*given.arguments("sdpa"))
    torch.testing.assert_close(seen.tensors[0], exact, rtol=1e-5, atol=1e-5)


def test_limit_of_a_pair_is_its_products() -> None:
    x = torch.randn(5, 8)
    pair, first = layers.GatedMLP(8, 12, down=False), layers.MLP(8, 12, down=False)
    gate, up = layers.bare_pair(pair)(x)
    torch.testing.assert_close(F.silu(gate) * up, pair(x))
    torch.testing.assert_close(F.gelu(layers.bare(first)(x) + first.up.bias), first(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "train", [False, pytest.param(True, marks=pytest.mark.long)], ids=["inference", "training"]
)
@pytest.mark.parametrize("interaction", recommendation.MODELS)
def test_model_of_recommendation(interaction: str, train: bool) -> None:
    """Compiled, compared and timed; on a CPU its interaction is left to stock, and counted."""
    (case,) = (c for c in recommendation.cases("cpu") if c.train is train and interaction in c.name)
    before = torch.get_float32_matmul_precision()
    measured = suites.measure(case, suites.Settings("cpu", quick=True), lambda text: None)
    assert measured["correct"] is True and not measured["failed"] and measured["ratio"]["stock/fused"] > 0
    assert ("grad" in measured["error"]["fused"]) is train
    (site,) = (what for what in measured["sites"]["what"] if what.startswith(interaction.split()[0]))
    assert "left to stock" in site
    assert torch.get_float32_matmul_precision() == before


def test_float32_is_multiplied_as_tf32_where_a_case_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the time of that case, also where it fails."""
    seen: list[str] = []

    def measured(*_: Any) -> Any:
        seen.append(torch.get_float32_matmul_precision())
        raise ValueError

    monkeypatch.setattr(suites, "_measured", measured)
    before = torch.get_float32_matmul_precision()
    for tf32 in (True, False):
        case = cases.Case("models", "a", "float32", False, lambda device: None, tf32=tf32)
        with pytest.raises(ValueError):
            suites.measure(case, suites.Settings("cpu"), lambda text: None)
    assert seen == ["high", before] and torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("correct", [True, False])
def test_frozen_model_is_the_limit_of_adapters(correct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "failed_variants": {}, "compile_s_of": {"stock": 2.0}, "correct": correct, "error": {},
            "median_ms": {"stock": 4.0, "fused": 2.0, "frozen": 1.0}, "spread": {"stock": 0.0, "fused": 0.0},
            "peak_gib": {}, "ratio": {"stock/fused": ratio, "fused/frozen": 2.0, "stock/frozen": 4.0},
        }
        for ratio in (2.0, 2.2)
    ]  # fmt: skip
    left = iter(rows)
    monkeypatch.setattr(models_lora, "measure", lambda *_: next(left))
    monkeypatch.setattr(suites.whole_models, "free", lambda device: None)
    row = suites.measure_adapted(models_lora.CASES[0], suites.Settings("cpu", repeats=2), lambda text: None)
    assert row["median_ms"]["limit"] == 1.0 and row["failed"] == {} and row["compile_s"] == {"stock": 2.0}
    assert row["ratio"] == ({"stock/fused": 2.1, "fused/limit": 2.0} if correct else {})


@pytest.mark.slow
@pytest.mark.long
def test_model_with_adapters() -> None:
    pytest.importorskip("peft")
    (entry,) = (e for e in suites.entries("cpu") if e.name == "llama-1b lora decode b1 s1 reduce-overhead")
    row = entry.measure(suites.Settings("cpu", quick=True), lambda text: None)
    assert row["correct"] is True and not row["failed"]
    assert {"stock", "fused", "limit"} == set(row["median_ms"]) and row["ratio"]["fused/limit"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["attention", "projections", "lora", "blocks"])
def test_quick_case_is_right(suite: str) -> None:
    """Each variant of a suite's smallest case runs, and what is timed is within its budget."""
    found = [case for case in cases.cases("cpu") if case.quick and case.suite == suite]
    case = min(found, key=lambda case: case.make("cpu").flops)
    measured = suites.measure(case, suites.Settings("cpu", quick=True, repeats=2), lambda text: None)
    assert measured["correct"] is True and not measured["failed"]
    assert {"stock", "fused"} <= set(measured["median_ms"])
    assert len(measured["runs"]) == 2 and measured["noise"] >= 0
    assert measured["flops"] > measured["bytes"] > 0
    assert measured["sites"]["total"] > 0


def test_wrong_result_is_seen() -> None:
    """A function that is not the one that was asked for is out of the budget, and its ratios are left out."""
    case = next(case for case in cases.cases("cpu") if case.suite == "lora" and not case.train)
    work = case.make("cpu")
    good, bad = work.function("stock"), work.function("limit")  # the limit has no adapter
    exact = {"out": 1e-7}
    errors = {
        name: work.errors(lambda f=f: work.step("stock", f, 0)) for name, f in (("good", good), ("bad", bad))
    }
    assert suites.within_budget({"stock": errors["good"], "fused": errors["good"]}, "float32") is True
    assert suites.within_budget({"stock": exact, "fused": errors["bad"]}, "float32") is False
    assert suites.within_budget({"stock": exact}, "float32") is None
    run = {"wall": {"stock": suites.Timing(2.0, 0.0), "fused": suites.Timing(1.0, 0.0)}}
    assert suites.summary([run], True)["ratio"] == {"stock/fused": 2.0}
    assert suites.summary([run], False)["ratio"] == {}


def test_ratio_is_the_worse_one_of_both_clocks() -> None:
    times = {"stock": suites.Timing(2.0, 0.0), "fused": suites.Timing(1.0, 0.0)}
    alone = {"stock": suites.Timing(3.0, 0.0), "fused": suites.Timing(2.0, 0.0)}
    assert suites.summary([{"wall": times, "device": alone}], True)["ratio"] == {"stock/fused": 1.5}


@pytest.mark.parametrize("cold", [False, True])
def test_cache_is_emptied_outside_of_the_time(cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In front of each call, and between no pair of events but that of the call."""
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, last: Any) -> float:
            return 2.0

    class Waste:
        def zero_(self) -> None:
            log.append("empty")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(common, "_waste", Waste)
    clock = itertools.count()
    monkeypatch.setattr(common.time, "perf_counter", lambda: float(next(clock)))
    call = {"a": lambda: log.append("call")}
    found = common.interleave(call, "cuda", 1, 2.0, max_calls=2, run_ahead=True, cold=cold)["a"]
    timed = log[log.index("sleep") :]
    if cold:
        assert timed == ["sleep", *["empty", "event", "call", "event"] * 2, "wait"]
    else:
        assert timed == ["sleep", "event", "call", "call", "event", "wait"]
    assert found.median == pytest.approx(2e-3 if cold else 1e-3)


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
    monkeypatch.setattr(suites, "_free", lambda device: None)
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
    assert limits == [benching.QUICK_SECONDS, 3 * benching.QUICK_SECONDS, 7.0, None]
    assert benching.QUICK_SECONDS < 240


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
    assert sum(entry.seconds for entry in quick) < benching.QUICK_SECONDS


def test_mistakes(
    measured: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    bench = ("bench", "--device", "cpu")
    assert "no suite opps" in refuse(monkeypatch, capsys, *bench, "--suite", "opps")
    assert "--list names them" in refuse(monkeypatch, capsys, *bench, "--only", "nothing")
    assert "no regular expression" in refuse(monkeypatch, capsys, *bench, "--only", "(")
    assert "cannot be read" in refuse(monkeypatch, capsys, *bench, "--compare", str(tmp_path / "none.json"))
    (tmp_path / "other.json").write_text('{"schema": 1}')
    assert "holds no results" in refuse(
        monkeypatch, capsys, *bench, "--compare", str(tmp_path / "other.json")
    )
    (tmp_path / "far.json").write_text(json.dumps(results(row("a"))))
    assert "a device" in refuse(monkeypatch, capsys, *bench, "--compare", str(tmp_path / "far.json"))
    assert "no folder" in refuse(monkeypatch, capsys, *bench, "--out", str(tmp_path / "no" / "x.json"))
    assert "rows of the two" in refuse(monkeypatch, capsys, *bench, "--out", str(tmp_path / "far.json"))
    assert "nothing called flax" in refuse(monkeypatch, capsys, "tune", "flax")
    assert {"attention", "flex", "projections"} <= set(benching.kinds())
    assert "no results in" in refuse(
        monkeypatch,
        capsys,
        "tune",
        "attention",
        "--device",
        "cpu",
        "--table",
        "--out",
        str(tmp_path / "none.json"),
    )


def test_outside_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(benching, "ROOT", tmp_path)
    for command in (("bench",), ("tune", "attention")):
        assert "clone the repository" in refuse(monkeypatch, capsys, *command)


@pytest.mark.parametrize("kind", benching.kinds())
def test_tune_lists_its_rows(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(cli.app, ["tune", kind, "--device", "cpu", "--list"])
    assert done.exit_code == 0, done.output
    out = capfd.readouterr().out
    assert out.rstrip().endswith(" rows") and len(out.splitlines()) > 5


def test_tuning_scripts_under_one_name(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """`python -m bench.tune KIND` is the script of that kind; without one it names them."""
    from bench import tune

    monkeypatch.setattr(sys, "argv", ["bench.tune"])
    tune.main()
    assert f"kinds: {', '.join(benching.kinds())}" in capsys.readouterr().out
    ran: list[Any] = []
    monkeypatch.setattr(tune.runpy, "run_module", lambda name, **_: ran.append((name, sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", ["bench.tune", "lora", "--list"])
    tune.main()
    assert ran == [("bench.tune_lora", ["--list"])]
    monkeypatch.setattr(sys, "argv", ["bench.tune", "flax"])
    with pytest.raises(SystemExit, match="no kind 'flax'"):
        tune.main()


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


def test_variants_do_not_share_compiled_code() -> None:
    """The same function twice is compiled twice; what is timed is not compiled again."""
    torch._dynamo.reset()
    seen: list[int] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def same(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        seen.append(0)
        return gm.forward

    calls = [torch.compile(common.apart(double, name), backend=same) for name in ("stock", "fused")]
    for call in calls:
        call(torch.ones(3))
    assert seen == [0, 0]
    with common.compiled_only():
        for call in calls:
            assert call(torch.ones(3)).sum() == 6
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="compile"):
            calls[0](torch.ones(3))
