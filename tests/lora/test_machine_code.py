"""Every kernel of adapters compiles to machine code that does not spill, fits, and uses tensor cores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import torch._inductor.config

from bench import cuda_codegen
from inductor_fusions import config
from inductor_fusions.fusions.lora import decode, gather, lowering, narrow
from inductor_fusions.fusions.lora.op import LORA_LINEAR, NARROW_MM
from inductor_fusions.fusions.lora.split import LORA_SPLIT

ARCHS = sorted(cuda_codegen.DEVICES)
HALF, WHOLE = torch.bfloat16, torch.float32


def narrow_code(shape: narrow.Shape, arch: int, chosen: Any = None, transposed: bool = False) -> Any:
    """The machine code of a narrow product, in one configuration or in the default one."""
    assert shape.rows is not None and shape.inner is not None
    turned = shape.layout == "t"
    x = torch.empty((shape.inner, shape.rows) if turned else (shape.rows, shape.inner), dtype=shape.dtype)
    right = [torch.empty(r, shape.inner, dtype=shape.narrow).t() for r in shape.ranks]
    further = [0.0 if transposed else 2.0] * len(right)

    def fn(x: Any, right: Any) -> Any:
        return NARROW_MM(x, right, [0.5] * len(right), further, transposed)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if chosen is not None:
            patch.setattr(lowering, "choose", lambda shape, device: chosen)
        with config.patch(policy="always", strict=True):
            made = cuda_codegen.generate(fn, (x.t() if turned else x, right), run=False, arch=arch)
    templates = [kernel for kernel in made.kernels if kernel.is_template]
    (kernel,) = [kernel for kernel in templates if "tl.dot(" in kernel.source]
    for beside in templates:
        if beside is not kernel:
            (found,) = cuda_codegen.compile_kernel(beside.source, arch)
            assert found.fits and not found.spill_bytes, found
    (found,) = cuda_codegen.compile_kernel(kernel.source, arch)
    return found


SHAPES = {
    "r16": narrow.Shape(4096, 4096, (16,), "n", HALF, WHOLE),
    "qkv": narrow.Shape(4096, 4096, (16, 16, 16), "n", HALF, WHOLE),
    "r128": narrow.Shape(4096, 4096, (128,), "n", HALF, WHOLE),
    "bf16": narrow.Shape(8192, 4096, (16,), "n", HALF, HALF),
    "bf16 r128": narrow.Shape(4096, 4096, (128, 128), "n", HALF, HALF),
    "one row": narrow.Shape(1, 4096, (16, 16), "n", HALF, WHOLE),
    "512 rows": narrow.Shape(512, 4096, (16, 16), "n", HALF, WHOLE),
    "gradient": narrow.Shape(4096, 4096, (16,), "t", HALF, WHOLE),
    "gradient bf16": narrow.Shape(4096, 4096, (64,), "t", HALF, HALF),
    "gradient of float32": narrow.Shape(4096, 4096, (16,), "t", WHOLE, WHOLE),
    "gradients of float32": narrow.Shape(4096, 4096, (64, 64), "t", WHOLE, WHOLE),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SHAPES)
def test_narrow(name: str, arch: int) -> None:
    found = narrow_code(SHAPES[name], arch, transposed="gradient" in name)
    assert found.fits and found.uses_mma, found


@pytest.mark.parametrize("arch", ARCHS)
def test_split(arch: int) -> None:
    """As many matrices as one kernel takes, in each form."""
    shapes = [(4096, 16), (16, 4096), (1024, 16), (5, 8192), (8192, 12), (64, 4096)] * (gather.MOST // 6)
    matrices = [torch.empty(shape) for shape in shapes]
    summands = [(2, 3, 0)[i % 3] for i in range(len(shapes))]
    along = [int(columns < rows) for rows, columns in shapes]
    sizes = [3 * shape[dim] + 1 for shape, dim in zip(shapes, along, strict=True)]

    def fn(*given: Any) -> Any:
        return LORA_SPLIT(list(given), summands, along, sizes, HALF)

    with torch.no_grad(), config.patch(policy="always", strict=True):
        made = cuda_codegen.generate(fn, tuple(matrices), run=False, arch=arch)
    (kernel,) = made.kernels
    (found,) = cuda_codegen.compile_kernel(kernel.source, arch)
    assert found.fits and not found.spill_bytes, found


@pytest.mark.long
@pytest.mark.parametrize("name", ["r16", "qkv", "bf16", "gradient"])
def test_narrow_candidates(name: str) -> None:
    """What tuning tries on Hopper does not spill."""
    wrong = {}
    for chosen in narrow.candidates(SHAPES[name]):
        found = narrow_code(SHAPES[name], 90, chosen)
        if not found.fits:
            wrong[chosen] = found
    assert not wrong


def pair_code(shape: decode.Shape, arch: int, chosen: Any = None) -> list[Any]:
    """The machine code of the two kernels for few rows."""
    x = torch.empty(shape.rows, shape.inner, dtype=shape.dtype)
    w = [torch.empty(n, shape.inner, dtype=shape.dtype).t() for n in shape.columns]
    a = [torch.empty(r, shape.inner, dtype=shape.adapters).t() for r in shape.ranks]
    groups = list(range(len(shape.columns)))[: len(shape.ranks)]
    b = [
        torch.empty(shape.columns[g], r, dtype=shape.adapters).t()
        for r, g in zip(shape.ranks, groups, strict=True)
    ]

    def fn(x: Any, w: Any, a: Any, b: Any) -> Any:
        return LORA_LINEAR(x, w, [], [], a, b, groups, [2.0] * len(a), True, shape.dtype)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if chosen is not None:
            patch.setattr(decode, "choose", lambda shape, device: chosen)
        with config.patch(policy="always", strict=True):
            made = cuda_codegen.generate(fn, (x, w, a, b), run=False, arch=arch)
    assert len(made.kernels) == 2 and all(kernel.is_template for kernel in made.kernels)
    return [cuda_codegen.compile_kernel(kernel.source, arch)[0] for kernel in made.kernels]


FEW = {
    "one row": decode.Shape(1, 4096, (4096,), (16,), HALF, WHOLE),
    "two rows": decode.Shape(2, 4096, (4096,), (16,), HALF, HALF),
    "three rows": decode.Shape(3, 8192, (2048,), (128,), HALF, WHOLE),
    "four rows": decode.Shape(4, 2048, (8192, 8000), (16, 16), HALF, HALF),
    "eight rows": decode.Shape(8, 4096, (4096,), (16,), HALF, WHOLE),
    "16 rows": decode.Shape(16, 4096, (14336,), (16,), HALF, HALF),
    "qkv": decode.Shape(12, 2048, (2048, 512, 512), (16, 16, 16), HALF, WHOLE),
    "r128": decode.Shape(16, 4096, (4096,), (128,), HALF, WHOLE),
    "64 rows": decode.Shape(64, 4096, (4096, 1024, 1024), (16, 16, 16), HALF, HALF),
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", FEW)
def test_few_rows(name: str, arch: int) -> None:
    """From Hopper on the second kernel waits for the first in its own code."""
    down, up = pair_code(FEW[name], arch)
    assert down.fits and up.fits, (down, up)
    assert down.uses_mma and up.uses_mma == (FEW[name].rows > 4)
    assert ("griddepcontrol.launch_dependents" in down.ptx) == (arch >= 90)
    assert ("griddepcontrol.wait" in up.ptx) == (arch >= 90)


@pytest.mark.long
@pytest.mark.parametrize("name", ["one row", "three rows", "qkv", "eight rows", "16 rows", "r128"])
def test_candidates_for_few_rows(name: str) -> None:
    """What tuning tries on Hopper does not spill."""
    wrong = {}
    for chosen in decode.candidates(FEW[name], 90):
        for found in pair_code(FEW[name], 90, chosen):
            if not found.fits:
                wrong[chosen] = found
    assert not wrong
