"""What flex attention becomes on a GPU computes what it should, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.attention.interpreted_flex import CASES, LIMIT
from tests.support.interpreter import errors_of

pytest.importorskip("triton")


errors = errors_of("tests.attention.interpreted_flex")


@pytest.mark.parametrize("name", CASES)
def test_error(name: str, errors: Callable[[str], list[float]]) -> None:
    """Output and gradients, of samples that differ in what they hide."""
    assert all(error < LIMIT for error in errors(name))
