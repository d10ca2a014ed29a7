"""The documentation says what the results and the code say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import docs
from inductor_fusions import config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_figures_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.docs", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
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
    assert docs.stale(root) == [root / "README.md", root / "docs" / "performance.md"]


@pytest.mark.parametrize(
    "lost",
    ["median_ms", "spread", "error", "peak_gib", "compile_s", "compiles_s", "sites", "correct", "failed"],
)
def test_missing_column(lost: str, tmp_path: Path) -> None:
    """A table that a row lacks is a dash, not an error."""
    root = copied(tmp_path)
    path = root / "bench" / "results" / docs.README_RESULTS
    data = json.loads(path.read_text())
    for row in data["rows"]:
        row.pop(lost, None)
    path.write_text(json.dumps(data))
    assert all(docs.render(root).values())


@pytest.mark.parametrize("lost", ["stock", "fused", "limit", "sdpa"])
def test_missing_variant(lost: str, tmp_path: Path) -> None:
    root = copied(tmp_path)
    path = root / "bench" / "results" / docs.README_RESULTS
    data = json.loads(path.read_text())
    for row in data["rows"]:
        for values in row.values():
            if isinstance(values, dict):
                values.pop(lost, None)
    path.write_text(json.dumps(data))
    assert all(docs.render(root).values())


@pytest.mark.parametrize("variable", sorted(config.variables()))
def test_variable_is_documented(variable: str) -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "configuration.md").read_text()
    assert f"`{variable}`" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    """Links to files of the repository lead somewhere."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
