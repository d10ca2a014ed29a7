"""Every row of the five systems has a test of its name, and a line in the documentation."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: letter of a system -> its rows
COUNTS = {"K": 13, "S": 9, "L": 6, "E": 7, "X": 7}
ROWS = [f"{letter}{number}" for letter, count in COUNTS.items() for number in range(1, count + 1)]


#: Rows of tools, which do the same on every device.
ANYWHERE = {"K10", "K11", "S7"}


def every_test() -> list[ast.FunctionDef]:
    """The tests in this folder."""
    files = [ast.parse(path.read_text("utf-8")) for path in HERE.glob("test_*.py")]
    return [node for file in files for node in file.body if isinstance(node, ast.FunctionDef)]


def names_of_tests() -> list[str]:
    """Their names."""
    return [test.name for test in every_test()]


def runs_on(test: ast.FunctionDef) -> set[str]:
    """Devices of a test: both with the fixture `device`, a GPU alone where it is marked so, else the CPU."""
    if "device" in {argument.arg for argument in test.args.args}:
        return {"cpu", "gpu"}
    marked = any(ast.unparse(each) == "pytest.mark.gpu" for each in test.decorator_list)
    return {"gpu"} if marked else {"cpu"}


@pytest.mark.parametrize("row", ROWS)
def test_row_has_a_test(row: str) -> None:
    assert [name for name in names_of_tests() if name.startswith(f"test_{row}_")]


@pytest.mark.parametrize("row", ROWS)
def test_row_has_a_part_for_each_device(row: str) -> None:
    """What only shows on a GPU is looked at without one too, and the other way round."""
    found = [runs_on(test) for test in every_test() if test.name.startswith(f"test_{row}_")]
    assert set().union(*found) >= {"cpu"} | ({"gpu"} if row not in ANYWHERE else set())


def test_no_test_of_a_row_that_is_none() -> None:
    named = {match[1] for name in names_of_tests() if (match := re.match(r"test_([A-Z]\d+)_", name))}
    assert named == set(ROWS)


def test_rows_are_documented() -> None:
    """`docs/coming_from.md` says of each row what to write; "K1 to K3" stands for three."""
    text = (HERE.parents[1] / "docs" / "coming_from.md").read_text("utf-8")
    found = set()
    for letter, first, _, last in re.findall(r"^\| ([A-Z])(\d+)( to [A-Z](\d+))? \|", text, re.MULTILINE):
        found |= {f"{letter}{number}" for number in range(int(first), int(last or first) + 1)}
    assert found == set(ROWS)
