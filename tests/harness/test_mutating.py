"""Mutants of source: what is changed, and what a marked file says when it runs."""

from __future__ import annotations

import ast
import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from tests import mutants, mutating
from tests.mutating import REACHED, Site, changed

SOURCE = """
LIMIT = 3 < 4


def guard(x, y=None):
    if x > 3 and y is not None:
        raise ValueError(x)
    if not y:
        return "no y"
    return [a for a in range(x) if a != y][0] if x in (1, 2) else "other"
"""


def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Site]:
    monkeypatch.setattr(mutating, "ROOT", tmp_path)
    (tmp_path / "m.py").write_text(SOURCE)
    return mutating.sites(tmp_path / "m.py")


def run(*args: Any, **changes: Any) -> Any:
    """`guard` of the changed source."""
    names: dict[str, Any] = {}
    exec(compile(changed(SOURCE.encode(), "m.py", **changes), "m.py", "exec"), names)
    try:
        return names["guard"](*args)
    except (ValueError, IndexError) as error:
        return type(error).__name__


def test_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In functions alone; a raise and a return behind a condition, not the last return."""
    sites = found(tmp_path, monkeypatch)
    assert [(site.line, site.kind) for site in sites] == [
        (6, "dropped"), (6, "flipped"), (6, "next"), (6, "flipped"), (7, "left out"), (8, "negated"),
        (9, "left out"), (10, "flipped"), (10, "flipped"), (10, "next"),
    ]  # fmt: skip
    assert all(Site.parse(str(site)) == site for site in sites)


#: Of each site: arguments, what the function gives, and what the mutant gives.
BEHAVIOUR: list[tuple[tuple[Any, ...], Any, Any]] = [
    ((4, None), "no y", "ValueError"), ((3, 1), "other", "ValueError"), ((4, 1), "ValueError", "other"),
    ((4, None), "no y", "ValueError"), ((4, 1), "ValueError", "other"), ((1, 1), 0, "no y"),
    ((1, None), "no y", 0), ((1, 1), 0, "other"), ((2, 1), 0, 1), ((2, 5), 0, 1),
]  # fmt: skip


def test_mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for site, (args, was, becomes) in zip(found(tmp_path, monkeypatch), BEHAVIOUR, strict=True):
        assert (run(*args), run(*args, mutant=site)) == (was, becomes), site


def test_marks_say_what_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = found(tmp_path, monkeypatch)
    reached: set[str] = set()
    monkeypatch.setattr(builtins, REACHED, reached.add, raising=False)
    assert run(1, None, marks=sites) == "no y"
    assert {Site.parse(text).line for text in reached} == {6, 8, 9}
    reached.clear()
    assert run(4, 1, marks=sites[4:5]) == "ValueError"
    assert reached == {str(sites[4])}


def test_mutant_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no such mutant"):
        changed(SOURCE.encode(), "m.py", Site("m.py", 1, 0, "flipped"))


def test_every_file_can_be_marked() -> None:
    sites = mutants.sample(10_000, 0)
    assert len(sites) > 5_000 and len(set(sites)) == len(sites)
    assert mutants.sample(20, 1) == mutants.sample(20, 1) != mutants.sample(20, 2)
    for file in {site.file for site in sites}:
        marks = [site for site in sites if site.file == file]
        tree: Any = changed((mutating.ROOT / file).read_bytes(), file, marks=marks)
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == REACHED]
        assert len(calls) == len(marks), file
        compile(tree, file, "exec", dont_inherit=True)


@pytest.mark.slow
@pytest.mark.long
def test_mutant_is_killed_by_the_tests_that_reach_it(tmp_path: Path) -> None:
    """From the marks to the verdict; a second run has nothing left to do."""
    options = [
        "tests/graph/test_operands.py", "--sources", "operands.py", "--sample=2", "--seed=1", "--jobs=1",
    ]  # fmt: skip
    args = mutants.parser().parse_args([*options, f"--json={tmp_path / 'm.json'}"])
    result = mutants.run(args)
    assert json.loads((tmp_path / "m.json").read_text()) == result
    assert result["mutants"] == 2 and result["killed by all tests"] > 0
    for row in result["rows"]:
        assert row["quick tests"] > 0 or row["quick"] is None
        assert "rest" in row or row["quick"] is not None
    assert mutants.run(args) == result


def test_runs_of_a_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cheap tests run first; a mutant that one run kills is judged at once, the others after all runs."""
    killed, lives, unreached = (Site("m.py", line, 0, "flipped") for line in (1, 2, 3))
    reached = frozenset(map(str, (killed, lives)))
    ran = [mutants.Ran(f"t{i}", i != 4, 25.0 - i, reached) for i in range(6)]
    monkeypatch.setattr(mutants, "CHUNK", 50.0)
    runs = [[t.nodeid for t in run] for run in mutants.chunks(lives, ran)]
    assert runs == [["t5", "t3"], ["t2", "t1"], ["t0"]]
    seen = []

    def killer(site: Site, tests: list[mutants.Ran]) -> str | None:
        seen.append((site, tests[0].nodeid))
        return tests[0].nodeid if (site, tests[0].nodeid) == (killed, "t2") else None

    monkeypatch.setattr(mutants, "killer", killer)
    judged = list(mutants.judge([killed, lives, unreached], ran, 1))
    assert sorted(judged, key=lambda row: row[0]) == [
        (killed, "t2", 5),
        (lives, None, 5),
        (unreached, None, 0),
    ]
    assert (killed, "t5") in seen and (lives, "t0") in seen
