"""The generated kernels compute what they should, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from tests.block_mm.interpreted import CASES
from tests.support.interpreter import errors_of


@pytest.fixture(scope="module")
def errors() -> dict[str, Any]:
    """Error of each case, or what it raised."""
    return errors_of("tests.block_mm.interpreted")


@pytest.mark.parametrize("name", CASES)
def test_error(name: str, errors: dict[str, Any]) -> None:
    """Half an ulp of the output's dtype; in float32 the interpreter multiplies exactly."""
    limit = 1e-6 if "tf32" in name else 5e-4
    assert isinstance(errors[name], float), errors[name]
    assert errors[name] < limit
