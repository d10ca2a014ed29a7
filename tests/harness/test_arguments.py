"""Tests of our operations take arguments by name, with `named` of tests/support/arguments.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
#: Folders whose graphs hold operations of this package.
FOLDERS = ("lora", "block_mm", "outer_product_linear", "dot_interaction", "linear_cross_entropy")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_argument_is_known_by_its_place(folder: str) -> None:
    """An operation that gets one more argument in its middle must not break tests, or pass them by chance."""
    for path in sorted((TESTS / folder).glob("*.py")):
        places = re.findall(r".*\.args\[\d.*", path.read_text())
        assert not places, f"{path.name}: {places[0].strip()} (named() of tests/support/arguments.py)"
