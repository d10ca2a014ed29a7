"""Arguments by name: what `named` gives, and that tests of our operations use it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from tests.support.arguments import named

TESTS = Path(__file__).parent
#: Folders whose graphs hold operations of this package.
FOLDERS = ("lora", "block_mm", "outer_product_linear", "dot_interaction", "linear_cross_entropy")


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return fx.Graph().call_function(target, args, kwargs)


def test_operation() -> None:
    """By position, by keyword, and left out."""
    found = named(call(torch.ops.aten.sum.dim_IntList, "x", [1], dtype=torch.float32))
    assert (found.self, found.dim, found.keepdim, found.dtype) == ("x", [1], False, torch.float32)


def test_function() -> None:
    def fn(x: int, scale: float = 1.0) -> float:
        return x * scale

    assert vars(named(call(fn, 3))) == {"x": 3, "scale": 1.0}


def test_arguments_that_are_not_taken() -> None:
    with pytest.raises(TypeError):
        named(call(torch.ops.aten.sin.default, "x", 1))


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_argument_is_known_by_its_place(folder: str) -> None:
    """An operation that gets one more argument in its middle must not break tests, or pass them by chance."""
    for path in sorted((TESTS / folder).glob("*.py")):
        places = re.findall(r".*\.args\[\d.*", path.read_text())
        assert not places, f"{path.name}: {places[0].strip()} (named() of tests/support/arguments.py)"
