"""Every row of the five systems has a test of its name, and a line in the documentation."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: letter of a system -> its rows
COUNTS = {"K": 13, "S": 9, "L": 6, "E": 7, "X": 7}
ROWS = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]


#: Rows of tools, which do the same on every device.
ANYWHERE = {"K10", "K11", "S7"}


@functools.cache
def by_row() -> dict[str, list[ast.FunctionDef]]:
    """The tests that have the name of a row, in any folder."""
    name = re.compile(r"test_([A-Z]\d+)_")
    texts = (path.read_text("utf-8") for path in HERE.parent.rglob("test_*.py"))
    files = [ast.parse(text) for text in texts if name.search(text)]
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in (node for file in files for node in file.body if isinstance(node, ast.FunctionDef)):
        if match := name.match(node.name):
            found.setdefault(match[1], []).append(node)
    return found


def runs_on(test: ast.FunctionDef) -> set[str]:
    """Devices of a test: both with the fixture `device`, a GPU alone where it is marked so, else the CPU."""
    if "device" in {argument.arg for argument in test.args.args}:
        return {"cpu", "gpu"}
    marked = any(ast.unparse(each) == "pytest.mark.gpu" for each in test.decorator_list)
    return {"gpu"} if marked else {"cpu"}


def test_rows_have_tests() -> None:
    assert set(by_row()) == set(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_row_has_a_part_for_each_device(row: str) -> None:
    """What only shows on a GPU is looked at without one too, and the other way round."""
    found = [runs_on(test) for test in by_row()[row]]
    assert set().union(*found) >= {"cpu"} | ({"gpu"} if row not in ANYWHERE else set())


def test_rows_are_documented() -> None:
    """`docs/coming_from.md` says of each row what to write; "K1 to K3" stands for three."""
    text = (HERE.parents[1] / "docs" / "coming_from.md").read_text("utf-8")
    found = set()
    for letter, first, _, last in re.findall(r"^\| ([A-Z])(\d+)( to [A-Z](\d+))? \|", text, re.MULTILINE):
        found |= {f"{letter}{number}" for number in range(int(first), int(last or first) + 1)}
    assert found == set(ROWS)
