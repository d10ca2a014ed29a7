"""What is installed: the package with its tables, models and templates, and nothing of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("setuptools")

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves folders beside its sources."""
    copied, out = tmp_path_factory.mktemp("source") / "repository", tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, copied, ignore=unwanted)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=copied, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


def files(folder: str, pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern)}


def test_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tables = {f"inductor_fusions/{name}" for name in files("configs", "*.json")}
    assert tables and tables <= names
    for wanted in (files("inductor_fusions", "*.py"), files("inductor_fusions", "*.jinja")):
        assert wanted and wanted <= names
    assert "inductor_fusions/py.typed" in names
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "inductor_fusions",
        "inductor_fusions_hooks",
    }


def test_installed(wheel: Path, tmp_path: Path) -> None:
    """Away from the checkout its tables are found, and `bench` says where the benchmarks are."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip

    shown = "print(tables.__file__, *tables.load('nvidia_h200'))"
    done = run("-c", f"from inductor_fusions.decisions import tables; {shown}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path)) and "attention" in done.stdout.split()
    done = run("-m", "inductor_fusions", "bench")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "clone the repository" in done.stderr


def test_source_distribution(tmp_path: Path) -> None:
    """It holds every file of the repository, so that its tests run."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    build = BUILD.replace("build_wheel", "build_sdist")
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=tmp_path / "source", capture_output=True,
        check=True, timeout=300,
    )  # fmt: skip
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(listed.split()) - names == {".gitignore"}
