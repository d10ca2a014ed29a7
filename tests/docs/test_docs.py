"""The documentation says what the results and the code say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import (
    docs,
    docs_models,
    docs_pieces,
    docs_plots,
    docs_reliability,
    docs_tables,
    mlp_training,
    provenance,
)
from bench.provenance import environment
from tests.support.processes import start

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_figures_are_those_of_the_results() -> None:
    done = start("-m", "bench.docs", "--check")
    assert done.returncode == 0, done.stderr


def copied(to: Path) -> Path:
    """What bench.docs reads and writes, elsewhere."""
    shutil.copytree(ROOT / "bench" / "results", to / "bench" / "results")
    shutil.copytree(ROOT / "docs", to / "docs")
    shutil.copy(ROOT / "README.md", to)
    return to


def test_changed_result_is_stale(tmp_path: Path) -> None:
    root = copied(tmp_path)
    assert docs.stale(root) == []
    path = root / "bench" / "results" / docs.README_RESULTS
    data = json.loads(path.read_text())
    data["rows"][0]["median_ms"]["fused"] *= 2
    path.write_text(json.dumps(data))
    written = ("README.md", "docs/performance.md", "docs/measurements.html", "docs/speedups.svg")
    assert docs.stale(root) == [root / name for name in written]


def test_gain_is_over_the_better_stock(tmp_path: Path) -> None:
    """Where stock was autotuned as well, the faster one counts, on the page, in the README and in the
    picture; the others stay as they were."""
    root = copied(tmp_path)
    path = root / "bench" / "results" / docs.README_RESULTS
    data = json.loads(path.read_text())
    row = next(row for row in data["rows"] if row["name"] == "gpt2 eager b16 s1024 train")
    row["median_ms"] = {"stock": 9.0, "fused": 6.0, "autotuned": 7.5, "fused_autotuned": 8.0}
    row["spread"] = dict.fromkeys(row["median_ms"], 0.0)
    row["device_ms"] = {"stock": 8.0, "fused": 5.0, "autotuned": 7.0, "fused_autotuned": 7.0}
    data["rows"] = [row, *(r for r in data["rows"] if r["name"] == "swin-tiny b64")]
    path.write_text(json.dumps(data))
    written = docs.render(root)
    times = "| 9.00 | 7.50 | 6.00 | 1.25 | 1.25 ± 0.00 |"
    assert f"| gpt2 eager b16 s1024 train {times}" in written[root / "README.md"]
    assert docs_models.BETTER in written[root / "README.md"]
    page = written[root / "docs" / "performance.md"]
    assert "| 9.00 | 7.50 | 6.00 | 8.00 | 1.25 ± 0.00 | 0.94 ± 0.00 | 8.00 | 5.00 | 1.40 |" in page
    slower = "Slower than stock where both are autotuned (fused / stock): gpt2 eager b16 s1024 train (1.07"
    assert slower in page
    assert ">1.25</text>" in written[root / "docs" / "speedups.svg"]
    other = data["rows"][1]
    stock, fused = other["median_ms"]["stock"], other["median_ms"]["fused"]
    gain = other["ratio"]["stock/fused"]
    assert f"| swin-tiny b64 | 12 of 12 | {stock:.2f} | - | {fused:.2f} | - | {gain:.2f}" in page


COLUMNS = (
    "median_ms", "spread", "error", "peak_gib", "compile_s", "compiles_s", "sites", "correct", "failed",
    "device_ms",
)  # fmt: skip
VARIANTS = ("stock", "fused", "limit", "sdpa", "autotuned", "fused_autotuned")


@pytest.mark.parametrize("lost", [*COLUMNS, *VARIANTS, "autotuned fused_autotuned"])
def test_missing(lost: str, tmp_path: Path) -> None:
    """A column or a variant that rows lack is a dash, not an error; nothing is said of it."""
    root = copied(tmp_path)
    path = root / "bench" / "results" / docs.README_RESULTS
    data = json.loads(path.read_text())
    for row in data["rows"]:
        for held in (row, *(values for values in row.values() if isinstance(values, dict))):
            for name in lost.split():
                held.pop(name, None)
    path.write_text(json.dumps(data))
    written = docs.render(root)
    assert all(written.values())
    if lost.count("autotuned") == 2:
        assert "both are autotuned" not in written[root / "docs" / "performance.md"]
        assert docs_models.BETTER not in written[root / "README.md"]


PROJECTION = {
    "key": "shared_a 64->64+64 m16 bfloat16", "kind": "shared_a", "tokens": 16, "best": "ours", "error": {},
    "times_us": {"stock": 6.0, "max_autotune": 5.0, "ours": 4.0, "limit": 3.2},
}  # fmt: skip
BLOCK = {
    "suite": "blocks", "name": "a block train", "train": True, "dtype": "bfloat16", "noise": 0.1,
    "median_ms": {"stock": 3.0, "fused": 2.0}, "ratio": {"stock/fused": 1.5},
    "sites": {"fused": 2, "total": 3},
}  # fmt: skip


@pytest.mark.parametrize(("name", "row", "shown"), [
    ("projections_h200.json", PROJECTION, "| shared_a, up to 128 rows | 1 | 1.25 | 1.25 | 1.25 | 1 | 1.25 |"),
    ("bench_h200.json", BLOCK, "| a block train | 2 of 3 | 3.000 | 2.000 | 1.50 ± 0.15 |"),
    ("bench_cpu.json", BLOCK, "| blocks, training | 1 | 1.500 | 0 | 0 |"),
])  # fmt: skip
def test_new_result_is_stale(name: str, row: dict[str, Any], shown: str, tmp_path: Path) -> None:
    """A file that scripts of the benchmarks write is part of the page as soon as it is in bench/results."""
    root = copied(tmp_path)
    data = {"schema": 1, "device": "a device", "torch": "2", "command": "python -m x --out /far/away/x.json"}
    (root / "bench" / "results" / name).write_text(json.dumps({**data, "rows": [row]}))
    page = root / "docs" / "measurements.html"
    rows = (root / "bench" / "results" / name).with_suffix(".csv")
    also = ("whole_mlp.md", "roofline.svg", "lengths.svg") if name.startswith("projections") else ()
    found = docs.stale(root)
    assert {page, rows, *(root / "docs" / name for name in also)} <= set(found)
    assert root / "README.md" not in found
    written = docs.render(root)
    assert shown in re.sub(r"</td><td>|</?tr>|</?td>", " | ", written[page])
    assert "--out x.json" in written[page] and "/far/away" not in written[page]
    assert f"[{rows.name}](../bench/results/{rows.name})" in written[root / "docs" / "performance.md"]
    assert len(written[rows].splitlines()) == 2


def mlp_row(part: str, width: int, **times: float) -> dict[str, Any]:
    return {
        "part": part, "width": width, "tokens": 64, "times_us": {}, "device_us": times, "wrong": ["triton"],
        "roofline_us": {"unfused": 2.0, "epilogue": 1.5, "whole": 1.0},
    }  # fmt: skip


def linear(activation: str, tokens: int, stock: float, ours: float) -> dict[str, Any]:
    return {
        "key": f"linear 64->256 {activation} m{tokens} bfloat16", "kind": "linear", "tokens": tokens,
        "inner": [64], "outer": [256], "activation": activation, "best": "ours",
        "times_us": {"stock": stock, "bare": 2.0, "ours": ours},
    }  # fmt: skip


TRAINED = {"stock": 112.0, "max_autotune": 110.0, "gemms": 100.0, "up": 30.0, "hidden": 15.0}
TRAINED |= {"up_triton": 33.0, "hidden_triton": 17.0}
COUNTS = {"rejected": 1, "judged": 100, "code": 5, "stock_wrong": 0, "seconds": 1800.0}
#: A page, the results that are taken away and what it says then; results made up, and what it says of them.
REPORTS: dict[str, tuple[str, str, str, dict[str, list[dict[str, Any]]], tuple[str, ...]]] = {
    "whole MLP": (
        "whole_mlp.md", "whole_mlp_*", "python -m bench.whole_mlp --out",
        {"whole_mlp_h200.json": [
            mlp_row("mlp", 64, stock=9.0, epilogue=8.0, whole=4.0),
            mlp_row("mlp", 256, stock=9.0, epilogue=8.0, whole=16.0),
            mlp_row("up", 64, stock=4.0, triton=1.0, bare=2.0),
        ]},
        (
            "in 1 of 2 cases: 1 of 1 at width 64.", " 2.00, at 64 tokens and width 64.", "in 0 of 0 cases",
            "| width 256, 64 tokens | 9.0 | 8.0 | 16.0 | 2.0 | 1.0 | epilogue |",
            "| width 64, 64 tokens | 4.0 | wrong | 2.0 | 2.0 | 1.5 | stock |",
        ),
    ),
    "training of an MLP": (
        "whole_mlp.md", "mlp_training_*", "",
        {"mlp_training_h200.json": [{
            "key": "a t64", "persistent": True, "times_us": TRAINED, "device_us": None,
            "limits": mlp_training.limits(TRAINED),
        }]},
        ("## Training", "| a t64 | 112 | 110 | 100 | 30 | 33 | 15 | 17 | 1.10 | 1.05 |"),
    ),
    "first half of an MLP, from the rows of linears": (
        "whole_mlp.md", "projections_*", "",
        {"projections_h200.json": [
            linear("relu", 16, 6.0, 2.0), linear("relu", 32, 6.0, 3.0), linear("gelu", 512, 4.0, 4.0),
            {**PROJECTION, "inner": [64]},
        ]},
        (
            "first half alone", "in 2 of 3 cases", "| relu, up to 128 tokens | 2 | 2.45 | 2.00 | 1.22 |",
            "| gelu, more tokens | 1 | 1.00 | 1.00 | 2.00 |",
        ),
    ),
    "random programs, summed over batches": (
        "reliability.md", docs_reliability.REPORT, "Nothing is recorded yet",
        {docs_reliability.REPORT: [
            {"kind": "masks", **COUNTS, "fused": 60, "sites": {"attention": 61}, "failures": 0},
            {"kind": "masks", **COUNTS, "fused": 50, "sites": {"attention": 50}, "failures": 1},
            {"kind": "adapters", **COUNTS, "fused": 90, "sites": {"lora": 150}, "failures": 0},
        ]},
        (
            "300 programs were judged: 200 had at least one fused site, 1 failed.",
            "| masks of attentions | 200 | 2 | 110 | 10 | 0 | 1 | 1.0 |",
        ),
    ),
    "random programs on a GPU": (
        "reliability.md", "fuzz_h200*", "",
        {"fuzz_h200.json": [{
            "kind": "adapters", "judged": 40, "rejected": 0, "fused": 30, "code": 40, "stock_wrong": 0,
            "sites": {"lora": 31}, "failures": 0, "seconds": 1.0,
        }]},
        ("40 programs were judged: 30 had at least one fused site, 0 failed.",),
    ),
    "compute-sanitizer": (
        "reliability.md", "sanitizer_*", "",
        {"sanitizer_h200.json": [
            {"tool": "memcheck", "template": "flex, window", "clean": True},
            {"tool": "racecheck", "template": "flex, window", "clean": True},
            {"tool": "racecheck", "template": "adapters", "clean": False},
        ]},
        ("| racecheck | 2 | 1 | `adapters` |", "| memcheck | 1 | 1 | none |"),
    ),
    "programs of the tests": (
        "reliability.md", "programs_*", "",
        {"programs_h200.json": [
            {
                "seed": 1, "file": "tests/lora/test_x.py", "seconds": 7200.0, "fused": 3, "draws": 1,
                "judged": {"bfloat16 training": 3, "float32 inference": 2}, "stock_wrong": [{}],
                "left": {"TypeError in eager": 4},
                "failures": [{"name": "test_x 0", "dtype": "bfloat16", "mode": "training", "what": "off|",
                              "alone": "passes"}],
            },
            {"seed": 2, "file": "tests/graph/test_casts.py", "seconds": 1.0,
             "judged": {"float16 training": 1}},
        ]},
        (
            "6 programs were judged in 2 orders and 2.0 process hours: 3 had at least one fused site",
            "| adapters: forms and near misses | 3 | 0 | 2 | 0 | 3 | 2 | 4 | 1 | 1 |",
            "| `test_x 0` | bfloat16 training | 1 | off/ | passes |", "| TypeError in eager | 4 |",
        ),
    ),
    "many compiles": (
        "reliability.md", "load_*", "",
        {"load_cpu.json": [
            {"backend": "inductor", "kind": kind, "graphs": 0, "bytes": size * 2**20, "seconds": 9.6}
            for kind, size in (("stock", 3), ("fused", 4))
        ]},
        ("1000 compiles in one process", "| Inductor as a whole, fused | 0 | 4.0 | 10 |"),
    ),
    "architectures": (
        "reliability.md", "architectures_*", "",
        {"architectures_cpu.json": [
            {"attention": "eager", "train": False, **row} for row in (
                {"state": "right", "name": "bert", "left": {},
                 "fused": {"attention": 2, "stock_misfires": 1}},
                {"state": "right", "name": "xlm", "fused": {"attention": 1},
                 "left": {"the weights are used elsewhere": 3}},
                {"state": "not made", "name": "other", "reason": "small: ValueError"},
            )
        ]},
        ("| eager | 2 | 0 | 1 | 3 | 3 |", "| eager | the weights are used elsewhere | 1 | `xlm` |"),
    ),
    "libraries": (
        "reliability.md", "libraries_*", "",
        {"libraries_cpu.json": [
            {"library": "timm", "train": False, **row} for row in (
                {"state": "right", "name": "swin", "fused": {"attention": 4}, "left": {}, "codes": {}},
                {"state": "right", "name": "cait", "fused": {"attention": 1},
                 "codes": {"attention: in-between": 3}},
                {"state": "not made", "name": "volo", "reason": "ValueError"},
            )
        ]},
        ("| timm 1.0 | 2 | 0 | 1 | 5 | 3 |", "| timm 1.0 | attention: in-between | 3 | `cait` |"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_reports(name: str, tmp_path: Path) -> None:
    """Without results the page says what makes them, or nothing; with them, what they say."""
    page, taken, said, files, says = REPORTS[name]
    root = copied(tmp_path)
    folder = root / "bench" / "results"
    for path in folder.glob(taken):
        path.unlink()
    text = docs.render(root)[root / "docs" / page]
    assert said in text and not any(each in text for each in says)
    header = {"schema": 1, "device": "a device", "settings": {"compiles": 1000}, "libraries": {"timm": "1.0"}}
    header["peak"] = {"tflops": {"bfloat16": 700.0}, "gb_per_s": 4000.0}
    for file, rows in files.items():
        (folder / file).write_text(json.dumps({**header, "rows": rows}))
    text = docs.render(root)[root / "docs" / page]
    missing = [each for each in says if each not in text]
    assert not missing and (not said or said not in text)


def test_reliability_of_loss_curves(tmp_path: Path) -> None:
    """The criterion for each model, computed from the losses, and the picture on the same page."""
    root = copied(tmp_path)
    page, results = root / "docs" / "reliability.md", root / "bench" / "results"
    for path in results.glob("convergence_*.json"):
        path.unlink()
    without = docs.render(root)[page]
    assert "## Loss curves" not in without and "convergence.svg" not in without
    sites = {"what": {"attention: fused: sdpa, mask: pad": 12}}
    rows = [
        {"model": model, "variant": variant, "seed": seed, "loss": loss, "parameters": 9.8e7, "step_ms": 9.06,
         "sites": sites if variant == "fused" else {"what": {}}}
        for model, variant, seed, loss in [
            ("bert", "stock", 0, [4.0, 3.0, 2.0]), ("bert", "stock", 1, [4.0, 3.0, 2.5]),
            ("bert", "fused", 0, [4.0, 3.0, 2.25]), ("gpt2", "stock", 0, [4.0, 3.0, 2.0]),
            ("gpt2", "stock", 1, [4.0, 3.0, 2.0]), ("gpt2", "fused", 0, [4.0, 3.0, 2.25]),
            ("llama", "stock", 0, [4.0, 3.0, 2.0]),
        ]
    ]  # fmt: skip
    data = {"schema": 1, "device": "a device", "window": 1, "criterion": "A criterion.", "rows": rows}
    data["settings"] = {"steps": 3, "batch": 8, "length": 256, "policy": "always"}
    (results / "convergence_h100.json").write_text(json.dumps(data))
    picture = root / "docs" / "convergence.svg"
    assert docs.stale(root) == [page, picture]
    text = docs.render(root)[page]
    assert "| bert | 98 | 12 | 2.0000 | 2.2500 | 0.2500 | 0.5000 | yes | 9.1 | 9.1 |" in text
    assert "| gpt2 | 98 | 12 | 2.0000 | 2.2500 | 0.2500 | 0.0000 | no | 9.1 | 9.1 |" in text
    assert "| llama | 98 | 0 | 2.0000 | - | - | - | - | 9.1 | - |" in text
    assert "A criterion. 1 of 2 models pass." in text and "](convergence.svg)" in text
    assert "convergence.svg" not in docs.render(root)[root / "docs" / "performance.md"]
    pytest.importorskip("matplotlib")
    docs_plots.write(picture, *docs.plotted(root)[picture])
    drawn = picture.read_bytes()
    docs_plots.write(picture, *docs.plotted(root)[picture])
    assert picture.read_bytes() == drawn and docs.stale(root) == [page]


def test_header_tells_commit_and_clocks() -> None:
    """What every script of the benchmarks records, and what the page shows of it; older files lack it."""
    made = environment("cpu", "bench.some_script")
    assert {"device", "torch", "commit", "clocks_mhz", "date", "command"} <= set(made)
    shown = docs_pieces.header({**made, "commit": "abc", "clocks_mhz": {"sm": 1980, "max.sm": 1980}})
    assert "; commit of the last run: abc" in shown and "; clocks in MHz: sm 1980, max.sm 1980" in shown
    idle = docs_pieces.header({"clocks_mhz": {"sm": 345, "max.sm": 1980, "mem": 2619}})
    assert "; clocks in MHz: max.sm 1980; date" in idle, "idle clocks are not those of the measurements"
    assert "clocks" not in docs_pieces.header({"device": "a device"})


def test_results_leave_a_commit_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run writes is no difference of the code that it ran."""
    result, source = tmp_path / "bench" / "results" / "some.json", tmp_path / "bench" / "code.py"
    result.parent.mkdir(parents=True)
    for path in (result, source):
        path.write_text("old")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "first")):
        subprocess.run((*git, *command), check=True)
    monkeypatch.setattr(provenance, "__file__", str(source))
    result.write_text("new")
    clean = provenance.commit()
    source.write_text("new")
    assert clean is not None and len(clean) == 12 and provenance.commit() == f"{clean}-dirty"
    monkeypatch.setattr(provenance, "__file__", str(tmp_path.parent / "nowhere" / "code.py"))
    assert provenance.commit() is None


def test_geometric_means_are_told() -> None:
    def case(ratio: float, train: bool) -> docs.Json:
        return {"name": "x", "train": train, "median_ms": {"stock": ratio, "fused": 1.0}}

    text = docs_models.tally([case(2.0, False), case(0.5, False), case(3.0, True)])
    assert text.endswith("is 1.00 over the 2 inference cases and 3.00 over the 1 training cases.")
    assert "mean" not in docs_models.tally([])


def test_numbers_and_spreads_are_columns_of_their_own() -> None:
    section = "## Title\n\n| case | gain |\n| --- | ---: |\n| a, b | 1.50 ± 0.10 |\n| c | - |"
    assert docs_tables.rows_of(section) == 'case,gain,± gain\n"a, b",1.50,0.10\nc,,\n'
    page = docs_tables.page([section])
    assert '<h2 id="title">Title</h2>' in page and "<td>a, b</td><td>1.50 ± 0.10</td>" in page
    assert "http" not in page, "it opens from a disk, and asks nobody"
