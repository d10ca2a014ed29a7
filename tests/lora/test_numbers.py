"""The kernels compute what they should, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.lora.interpreted import CASES
from tests.support.interpreter import errors_of


@pytest.fixture(scope="module")
def errors() -> dict[str, Any]:
    """Error of each case, or what it raised."""
    return errors_of("tests.lora.interpreted")


@pytest.mark.parametrize("name", CASES)
def test_error(name: str, errors: dict[str, Any]) -> None:
    """Half an ulp of a float16 output; what is float32 comes out as float32."""
    case = CASES[name]
    exact = not case.columns and case.dtypes[1] == torch.float32
    assert isinstance(errors[name], float), errors[name]
    assert errors[name] < (1e-6 if exact else 5e-4)


def test_split(errors: dict[str, Any]) -> None:
    """Bit for bit, in each form, whichever comes first."""
    assert errors["split"] == 0
