"""The generated kernels compute what they should, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from inductor_fusions.block_mm import template
from inductor_fusions.block_mm.op import ACTIVATIONS
from tests.block_mm.interpreted import CASES
from tests.support.interpreter import errors_of

errors = errors_of("tests.block_mm.interpreted")


@pytest.mark.parametrize("name", CASES)
def test_error(name: str, errors: Callable[[str], float]) -> None:
    """Half an ulp of the output's dtype; in float32 the interpreter multiplies exactly."""
    assert errors(name) < (1e-6 if "tf32" in name else 5e-4)


@pytest.mark.parametrize("name", [*filter(None, ACTIVATIONS), "gelu_rounded"])
def test_activation(name: str) -> None:
    """The kernels' activations in float32, element by element: to some eps, and for results that are
    rounded to bfloat16 to a thousandth of what the rounding of 1 loses."""
    text = template.environment(template.FOLDER).get_template("activations.py.jinja").render()
    functions: dict[str, Any] = {
        "tl": SimpleNamespace(
            exp=torch.exp, exp2=torch.exp2, erf=torch.erf, maximum=_maximum, PropagateNan=tl.PropagateNan
        ),
        "triton": SimpleNamespace(jit=lambda function: function),
    }
    exec(text, functions)
    x = torch.linspace(-12, 12, 1_000_001, dtype=torch.float64)
    found = functions[name](x.float())
    exact = ACTIVATIONS[name.removesuffix("_rounded")](x)
    allowed = 4e-6 if name == "gelu_rounded" else 5e-7
    scale = torch.maximum(x.abs(), exact.abs())
    assert bool(((found - exact).abs() <= allowed + 2 * torch.finfo(torch.float32).eps * scale).all())
    ends = torch.tensor([float("inf"), -3e38, 3e38, float("nan")])
    limits = torch.tensor([1.0, 0.0, 1.0, float("nan")]) if name == "sigmoid" else ends.clamp_min(0.0)
    limits = limits.square() if name == "relu_squared" else limits
    torch.testing.assert_close(functions[name](ends), limits, equal_nan=True)


def _maximum(
    x: torch.Tensor, y: float, propagate_nan: tl.PropagateNan = tl.PropagateNan.NONE
) -> torch.Tensor:
    """As compiled: the interpreter keeps a NaN however it is told."""
    return torch.clamp_min(x, y) if propagate_nan == tl.PropagateNan.ALL else torch.fmax(x, torch.tensor(y))
