"""What flex attention becomes on a GPU computes what it should, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from tests.attention.interpreted_flex import CASES, LIMIT
from tests.support.interpreter import errors_of

pytest.importorskip("triton")

#: A training run has the forward in it.
NAMES = [f"{name} train" for name in CASES]


@pytest.fixture(scope="module")
def errors() -> dict[str, Any]:
    """Errors of each case, or what it raised."""
    return errors_of("tests.attention.interpreted_flex", *NAMES, timeout=1500)


@pytest.mark.parametrize("name", NAMES)
def test_error(name: str, errors: dict[str, Any]) -> None:
    """Output and gradients, of samples that differ in what they hide."""
    assert isinstance(errors[name], list), errors[name]
    assert max(errors[name]) < LIMIT
