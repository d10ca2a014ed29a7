"""The kernels: numbers in Triton's interpreter, and machine code without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from tests.dot_interaction.interpreted import CASES
from tests.support.covering import pairwise
from tests.support.interpreter import errors_of

#: The result and the gradient are rounded once.
LIMITS = {"float16": 4e-4, "float32": 1e-6}


errors = errors_of("tests.dot_interaction.interpreted")


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, errors: Callable[[str], dict[str, float]]) -> None:
    found = errors(name)
    assert set(found) == {"y", "dt"}
    assert all(error < LIMITS[name.split()[-1]] for error in found.values()), found


POINTERS = {"cells": "*i64", "last": "*i32", "before": "*i32"}


@pytest.mark.parametrize(
    ("name", "width", "arch"),
    pairwise(["interaction", "gradient", "pairs", "pairs_gradient"], [64, 128, 256], [80, 90]),
)
def test_machine_code(name: str, width: int, arch: int) -> None:
    """Tensor cores, no spill, and shared memory that the device has."""
    from devtools import cuda_codegen
    from inductor_fusions.fusions.dot_interaction import kernels

    fn = getattr(kernels, f"{name}_kernel")
    _, warps, _, _ = kernels.default_tiles(27, width)
    constants = {
        "F": 27, "D": width, "X": width, "UPPER": False, "DIAGONAL": False, "BLOCK_F": 32,
        "BLOCK_D": width, "BLOCK_X": width, "SAMPLES": 1, "P": 351, "BLOCK_P": 512,
        "t_columns": 1, "dense_columns": 1, "dy_columns": 1,
    }  # fmt: skip
    constants = {key: value for key, value in constants.items() if key in fn.arg_names}
    signature = {
        argument: "constexpr" if argument in constants
        else "i32" if argument == "samples" or "_" in argument
        else POINTERS.get(argument, "*bf16")
        for argument in fn.arg_names
    }  # fmt: skip
    # Rows of the result and of its gradient have an odd number of columns.
    aligned = [a for a, kind in signature.items() if kind != "constexpr" and a not in ("out_rows", "dy_rows")]
    found = cuda_codegen.compile_function(fn, signature, constants, arch, aligned=aligned, num_warps=warps)
    print(name, arch, found)
    assert found.fits and found.spill_bytes == 0, found
    assert found.uses_mma


@pytest.mark.parametrize("given", [False, True], ids=["triangle", "given"])
def test_launched_by_inductor(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel of ours forward and one backward in the code that Inductor writes, and no matrix product."""
    from devtools import cuda_codegen
    from inductor_fusions.fusions.dot_interaction import op

    monkeypatch.setattr(op, "has_kernel", lambda t: True)
    x, t = torch.randn(8, 64).bfloat16(), torch.randn(8, 27, 64).bfloat16()

    cells = torch.arange(0, 700, 3) if given else None

    def fn(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return op.DOT_INTERACTION(t, x, cells, False, False, []) * 2

    code = cuda_codegen.generate(fn, (x.requires_grad_(), t.requires_grad_()), train=True, run=False)
    forward, backward = code.modules
    names = [f"{'pairs_' * given}gradient_kernel_0", f"{'pairs' if given else 'interaction'}_kernel_0"]
    assert names[1] in forward.launches and names[0] in backward.launches
    # The other kernels: the factor, the gradient of the dense features; what says which pairs a cell has.
    assert len(forward.launches) == 2 and len(backward.launches) <= 4 + 2 * given
    assert not forward.extern_calls and not backward.extern_calls
