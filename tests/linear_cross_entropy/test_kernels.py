"""The kernel of the loss head: numbers in Triton's interpreter, and machine code without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

from tests.linear_cross_entropy.interpreted import CASES
from tests.support.covering import pairwise
from tests.support.interpreter import errors_of

errors = errors_of("tests.linear_cross_entropy.interpreted")
#: Of `test_machine_code`.
FORMS = ["plain", "everything", "entropy", "forward"]
#: Sums are made in float32; gradients are rounded to the dtype of the logits.
LIMITS = {"float16": 6e-4, "float32": 2e-6}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, errors: Callable[[str], dict[str, float]]) -> None:
    found = errors(name)
    limit = LIMITS[name.split()[-1]]
    assert all(error < (limit if key == "dx" else 2e-6) for key, error in found.items()), found


@pytest.mark.parametrize(
    ("form", "dtype", "arch"),
    pairwise(FORMS, ["bf16", "fp32"], [80, 90, 100]),
)
def test_machine_code(form: str, dtype: str, arch: int) -> None:
    """It fits, without a spill."""
    from devtools import cuda_codegen
    from inductor_fusions.fusions.linear_cross_entropy import kernels

    every, pulled = form == "everything", form != "forward"
    entropy = every or form == "entropy"
    constants = {
        "CAPPED": every, "TOTALS": every, "WEIGHTED": every, "PULLS": pulled, "FLAT": every,
        "ENTROPY": entropy, "CLAMPED": every, "SPREAD": entropy, "BLOCK": kernels.BLOCK,
    }  # fmt: skip
    vectors = "weights", "stats", "soft", "hot", "flat", "spread"
    signature = dict.fromkeys(vectors, "*fp32")
    signature |= {"x": f"*{dtype}", "labels": "*i64", "scale": "fp32", "cap": "fp32"}
    signature |= dict.fromkeys(("columns", "x_rows", "stats_rows"), "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    fn = kernels.rows_kernel
    found = cuda_codegen.compile_function(
        fn, {name: signature[name] for name in fn.arg_names}, constants, arch,
        aligned=["x", "labels", *vectors, "columns", "x_rows"],
        num_warps=kernels.WARPS, num_stages=3,
    )  # fmt: skip
    print(form, dtype, arch, found.registers, found.spill_bytes, found.shared_bytes)
    assert found.fits and found.spill_bytes == 0, found
