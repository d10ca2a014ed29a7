"""The pages of the documentation: links, commands, variables and modules that they name exist."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from bench import docs, docs_models, docs_pieces
from inductor_fusions import cli, config
from inductor_fusions import fusions as fusions_of_the_package
from tests.support.processes import start

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *(ROOT / "docs").glob("*.md"),
]
#: Pages that the site does not have.
OTHERS = [ROOT / "configs" / "README.md", ROOT / "examples" / "README.md"]
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


def test_first_screen() -> None:
    """What it is, the line to add, two commands, one table with both means, one picture; then the rest."""
    text = (ROOT / "README.md").read_text()
    screen, _, rest = text.partition("\n## ")
    assert screen.index("import inductor_fusions") < screen.index("make demo") < screen.index("make test")
    assert screen.index("make test") < screen.index(docs.BEGIN) < screen.index("docs/speedups.svg")
    assert len(re.findall(r"^\| --- \|", screen, re.M)) == 1 and len(re.findall(r"!\[", text)) == 1
    assert len(screen.splitlines()) <= 50, "more than a screen"
    assert len(text.splitlines()) <= 100, "more than two screens"
    rows = json.loads((ROOT / "bench" / "results" / docs.README_RESULTS).read_text())["rows"]
    for train, mode in ((False, "inference"), (True, "training")):
        gains = [docs_models.gain(row) or 0.0 for row in rows if row["train"] is train]
        mean = math.prod(gains) ** (1 / len(gains))
        (shown,) = re.findall(
            rf"^\| \*\*all {len(gains)} {mode} cases\*\*.* \*\*([\d.]+)\*\* \|$", screen, re.M
        )
        best = [r for row in rows if row["train"] is train and (r := docs_models.over_best(row))]
        assert f"| {math.prod(best) ** (1 / len(best)):.2f} ({len(best)} cases) |" in screen
        assert float(shown) == pytest.approx(mean, abs=0.006)
    assert "Trainer(" in rest and "get_peft_model(" in rest


def test_site(tmp_path: Path) -> None:
    """The site builds without a warning: links, anchors, and the docstrings of the API."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    done = start("-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "inductor_fusions.explain" in (tmp_path / "reference.html").read_text()


def test_every_page_is_in_the_site() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    assert [page.name for page in PAGES[1:] if f"- {page.name}\n" not in menu + "\n"] == []


def test_performance_is_a_page_to_be_read() -> None:
    assert len((ROOT / "docs" / "performance.md").read_text().splitlines()) <= 300


@pytest.mark.parametrize("variable", sorted(config.variables()))
def test_variable_is_documented(variable: str) -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "configuration.md").read_text()
    assert f"`{variable}`" in text


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {docs_pieces.anchor(heading) for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Links to files of the repository, and to headings in them, lead somewhere."""
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target:
            found = page.parent / target if target else page
            assert found.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(found), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    """Modules that are run, commands of the package, targets of make, and tests that are named."""
    text = page.read_text()
    for name in re.findall(r"python -m ((?:bench|tests)[\w.]*)", text):
        path = ROOT.joinpath(*name.rstrip(".").split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page.name}: {name}"
    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    assert set(re.findall(r"python -m inductor_fusions ([a-z]+)", text)) <= commands
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    for name in re.findall(r"`(tests/[\w/]+(?:\.\w+)?)", text):
        assert (ROOT / name).exists(), f"{page.name}: {name}"
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in TESTS, f"{page.name}: {name}"
    sources = [path for top in ("inductor_fusions", "tests") for path in (ROOT / top).rglob("*.py")]
    for name, file in re.findall(r"`(\w+)` (?:in|of) `([\w./]+\.py)`", text):
        found = [path.read_text() for path in sources if str(path).endswith(f"/{file}")]
        assert any(re.search(rf"\b{name}\b", code) for code in found), f"{page.name}: {name} in {file}"


#: Packages of which each module has a row.
PACKAGES = ("_inductor", "block_mm", "checking", "decisions", "driver", "effects", "graph", "layouts")


def test_every_module_has_a_row() -> None:
    """In the tables of docs/design.md; a package of a fusion in one row, or in a table of its own."""
    named = set()
    for row in re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "design.md").read_text(), re.M):
        named |= {name.rstrip("/") for name in re.findall(r"`([^`]+)`", row)}
    package = ROOT / "inductor_fusions"
    fusions = package / "fusions"
    folders = (package, *(package / n for n in PACKAGES))
    for folder in (*folders, *(fusions / n for n in ("attention", "lora"))):
        modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
        assert modules - {"__init__", "__pycache__", "fusions"} <= named, folder.name
    names = {path.stem for path in fusions.iterdir()} - {"__init__", "__pycache__"}
    assert names <= {name.removeprefix("fusions/") for name in named}
    where = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"`{fusion.name}`" in where for fusion in fusions_of_the_package.ALL)
