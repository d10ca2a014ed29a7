"""What is read from disk or found beside the package is checked, and the process is left as it was."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from inductor_fusions import _inductor, records
from inductor_fusions.cli import benching, common, models
from inductor_fusions.sites import Report, Site

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef" * 2


def test_key_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that a cache tells names a file: nothing but one that was made of a hash."""
    monkeypatch.setattr(_inductor, "cache_folder", lambda: tmp_path)
    text = Report([Site("attention", "fused", "softmax")]).to_json()
    for path in (tmp_path / "elsewhere.json", records.path_of(KEY)):
        assert path is not None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "inductor_fusions" / "..").mkdir(exist_ok=True)
    assert records.read(KEY) == [Site("attention", "fused", "softmax")]
    for key in ("../elsewhere", "../../elsewhere", str(tmp_path / "elsewhere"), KEY.upper(), KEY + "\n", ""):
        assert records.read(key) is None


def test_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"fusion": "attention", "verdict": "fused", "node": "softmax"}
    assert Site.from_dict(values) == Site("attention", "fused", "softmax")
    for wrong in ({**values, "verdict": "perhaps"}, {"fusion": "attention", "node": "softmax"}):
        with pytest.raises(ValueError, match="not a verdict"):
            Site.from_dict(wrong)
    monkeypatch.setattr(_inductor, "cache_folder", lambda: tmp_path)
    path = records.path_of(KEY)
    assert path is not None
    path.parent.mkdir(parents=True)
    verdict: Any = "perhaps"
    path.write_text(Report([Site("attention", verdict, "softmax")]).to_json())
    assert records.read(KEY) is None


def test_path_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the caller's folder is found there, and nothing is left on the path."""
    (tmp_path / "own_model_of_a_test.py").write_text(
        "import sys, torch\n"
        "def make():\n"
        "    import own_part_of_a_test\n"
        "    return torch.nn.ReLU(), {'input': torch.ones(2)}\n"
    )
    (tmp_path / "own_part_of_a_test.py").write_text("")
    monkeypatch.chdir(tmp_path)
    before = [entry for entry in sys.path if entry]
    monkeypatch.setattr(sys, "path", list(before))
    _, kwargs = models.from_callable("own_model_of_a_test:make")
    assert list(kwargs) == ["input"] and sys.path == before
    with pytest.raises(common.UserError, match="cannot import"):
        models.from_callable("no_such_module_of_a_test:make")
    assert sys.path == before


def test_path_of_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    monkeypatch.setattr(sys, "path", list(before))
    assert Path(str(benching.load("cases").__file__)).is_relative_to(ROOT)
    assert sys.path == before


def test_benchmarks_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder `bench` beside an installed package is not run."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "suites.py").write_text("raise SystemExit('run')")
    monkeypatch.setattr(benching, "ROOT", tmp_path)
    for project in (None, '[project]\nname = "another"\n'):
        if project is not None:
            (tmp_path / "pyproject.toml").write_text(project)
        with pytest.raises(common.UserError, match="the installed package has no benchmarks"):
            benching.load("suites")


# -- what the project says of itself ---------------------------------------------------------------------


def test_versions_of_python() -> None:
    """The oldest one is the same wherever it is said, and the sources are of it."""
    project = (ROOT / "pyproject.toml").read_text()
    oldest = re.findall(r'requires-python = ">=(3\.\d+)"', project)[0]
    assert re.findall(r"Python :: (3\.\d+)", project)[0] == oldest
    assert re.findall(r'python_version = "(3\.\d+)"', project) == [oldest]
    for page in ("README.md", "CONTRIBUTING.md", "docs/compatibility.md"):
        words = " ".join((ROOT / page).read_text().split())
        assert f"Python {oldest} or later" in words, page
    major, minor = map(int, oldest.split("."))
    for path in (ROOT / "inductor_fusions").rglob("*.py"):
        ast.parse(path.read_text(), feature_version=(major, minor))


def test_dependencies() -> None:
    """What the package imports is declared, or asked for where it is used."""
    project = (ROOT / "pyproject.toml").read_text()
    declared = set(re.findall(r'^    "([a-z0-9]+)', project, re.M)) | {"transformers", "peft", "triton"}
    found = set()
    for path in (ROOT / "inductor_fusions").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
    ours = {"inductor_fusions", "bench", "functorch"}  # functorch is a part of torch
    assert {"jinja2", "torch", "typer"} <= found - set(sys.stdlib_module_names) - ours <= declared
