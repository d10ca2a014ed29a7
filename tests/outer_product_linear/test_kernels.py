"""The kernels: numbers in Triton's interpreter, and machine code without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.support.interpreter import errors_of

#: y and the gradients are within half an ulp or so; one for rounding the product of u and v as well.
LIMITS = {"float16": 6e-4, "float32": 1e-6}


def test_numbers() -> None:
    errors = errors_of("tests.outer_product_linear.interpreted", timeout=600)
    assert len(errors) == 12
    for name, found in errors.items():
        assert isinstance(found, dict), f"{name}: {found}"
        assert set(found) == {"y", "du", "dv", "dw"}
        assert max(found.values()) < LIMITS[name.split()[-1]], f"{name}: {found}"


SIZES = ("M", "P", "Q", "N", "per_part")


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", ["linear", "factors", "weight"])
def test_machine_code(name: str, arch: int) -> None:
    """Tensor cores, no spill, and shared memory that the device has."""
    from bench import cuda_codegen
    from inductor_fusions.fusions.outer_product_linear import kernels

    fn = getattr(kernels, f"{name}_kernel")
    tile = dict(getattr(kernels, name.upper()))
    warps, stages = tile.pop("num_warps"), tile.pop("num_stages")
    outputs = {"linear": {"out": "*fp32"}, "factors": {"du": "*fp32", "dv": "*fp32"}, "weight": {}}[name]
    signature, constants, aligned = {}, dict(tile), []
    for argument in fn.arg_names:
        if argument in tile:
            signature[argument] = "constexpr"
        elif argument.endswith("_columns"):  # 1, as of a contiguous tensor: Triton makes a constant of it
            signature[argument], constants[argument] = "constexpr", 1
        elif argument in SIZES or argument.endswith("_rows"):
            signature[argument] = "i32"
            aligned += [argument] if argument != "per_part" else []
        else:
            signature[argument] = outputs.get(argument, "*bf16")
            aligned.append(argument)
    found = cuda_codegen.compile_function(
        fn, signature, constants, arch, aligned=aligned, num_warps=warps, num_stages=stages
    )
    print(name, arch, found.registers, found.spill_bytes, found.shared_bytes, found.uses_wgmma)
    assert found.fits and found.spill_bytes == 0, found
    assert found.uses_wgmma if arch == 90 else found.uses_mma
