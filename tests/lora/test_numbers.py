"""The kernels compute what they should, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from inductor_fusions.fusions.lora import narrow, narrow_kernel
from tests.lora.interpreted import CASES
from tests.support.interpreter import errors_of

errors = errors_of("tests.lora.interpreted")


@pytest.mark.parametrize("name", CASES)
def test_error(name: str, errors: Callable[[str], float]) -> None:
    """Half an ulp of a float16 output; what is float32 comes out as float32."""
    case = CASES[name]
    exact = not case.columns and case.dtypes[1] == torch.float32
    assert errors(name) < (1e-6 if exact else 5e-4)


def test_no_number_under_a_mask(errors: Callable[[str], float]) -> None:
    """0 times what is no number is none."""
    assert errors("no number") == 0


@pytest.mark.parametrize("first", range(3))
def test_split(first: int, errors: Callable[[str], float]) -> None:
    """Bit for bit, in each form, whichever comes first."""
    assert errors(f"split, {first}") == 0


@pytest.mark.parametrize("ranks", [(16, 5), (16, 64)], ids=["beside", "one by one"])
@pytest.mark.parametrize("tf32", [False, True])
def test_what_tensor_cores_add_up(
    tf32: bool, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cut off where they add to a sum: without TF32 those of two steps are added elsewhere.

    Where the summands of a matrix lie beside each other, a step has one product for all of them.
    """
    monkeypatch.setattr(narrow_kernel, "may_use_tf32", lambda: tf32)
    shape = narrow.Shape(4096, 2048, ranks, "n", torch.bfloat16, torch.float32)
    source = narrow_kernel.variant(narrow.default(shape), shape, [1.0, 1.0], (), False).source
    products = source.split("for k in range(start, stop, BLOCK_K):")[1].split("idx_m = ")[0]
    summands = 1 if ranks == (16, 5) else 2 if tf32 else 3
    for i in (0, 1):
        assert products.count("tl.dot(x") == 2 * summands
        assert (f"tl.dot(x, b, acc_{i}" in products) == tf32
        assert (f"acc_{i} += step_{i}" in products) == (not tf32)
