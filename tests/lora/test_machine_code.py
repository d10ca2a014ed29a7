"""Every kernel of adapters compiles to machine code that does not spill, fits, and uses tensor cores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import torch._inductor.config

from devtools import cuda_codegen
from inductor_fusions import _inductor, config
from inductor_fusions.decisions import tables
from inductor_fusions.fusions.lora import accumulate_kernel, decode, gather, lowering, narrow
from inductor_fusions.fusions.lora.accumulate import LORA_ACCUMULATE
from inductor_fusions.fusions.lora.op import LORA_LINEAR, NARROW_MM
from inductor_fusions.fusions.lora.split import LORA_SPLIT
from tests.support.covering import others_long

#: Where no register may spill, since these are what kernels are tuned for.
ARCHS = (80, 90, 100)
HALF, WHOLE = torch.bfloat16, torch.float32


def written(fn: Any, args: tuple[Any, ...], arch: int, owner: Any = None, chosen: Any = None) -> list[Any]:
    """The kernels of an inference, in the configuration that `owner.choose` gives, or in `chosen`."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), config.patch(policy="always", strict=True):
        if chosen is not None:
            patch.setattr(owner, "choose", lambda shape, device: chosen)
        return cuda_codegen.generate(fn, args, run=False, arch=arch).kernels


def narrow_code(shape: narrow.Shape, arch: int, chosen: Any = None) -> Any:
    """The machine code of a skinny GEMM, in one configuration or in the default one."""
    assert shape.rows is not None and shape.inner is not None
    turned = shape.layout == "t"
    x = torch.empty((shape.inner, shape.rows) if turned else (shape.rows, shape.inner), dtype=shape.dtype)
    right = [torch.empty(r, shape.inner, dtype=shape.narrow).t() for r in shape.ranks]
    further = [0.0 if turned else 2.0] * len(right)
    kept = [torch.empty(x.shape, dtype=torch.bool) for _ in range(shape.masks)]

    def fn(x: Any, right: Any, kept: Any) -> Any:
        return NARROW_MM(x, right, [0.5] * len(right), further, turned, kept)

    args = (x.t() if turned else x, right, [m.t() if turned else m for m in kept])
    templates = [kernel for kernel in written(fn, args, arch, lowering, chosen) if kernel.is_template]
    (kernel,) = [kernel for kernel in templates if "tl.dot(" in kernel.source]
    for beside in templates:
        if beside is not kernel:
            (found,) = cuda_codegen.compile_kernel(beside.source, arch)
            assert found.fits, found
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
    "masked": narrow.Shape(4096, 4096, (16,), "n", HALF, WHOLE, masks=1),
    "masked bf16": narrow.Shape(4096, 4096, (16,), "n", HALF, HALF, masks=1),
    "masked bf16 r128": narrow.Shape(4096, 4096, (128,), "n", HALF, HALF, masks=1),
    "masked qkv": narrow.Shape(4096, 4096, (16, 16, 16), "n", HALF, WHOLE, masks=3),
    "masked qkv bf16": narrow.Shape(4096, 4096, (16, 16, 16), "n", HALF, HALF, masks=3),
    "masked float32": narrow.Shape(4096, 4096, (16,), "n", WHOLE, WHOLE, masks=1),
    "masked gradient": narrow.Shape(4096, 4096, (16,), "t", HALF, WHOLE, masks=1),
    "masked gradients": narrow.Shape(4096, 4096, (16, 16, 16), "t", HALF, WHOLE, masks=3),
    "masked gradient bf16": narrow.Shape(4096, 4096, (64,), "t", HALF, HALF, masks=1),
    "gradients of float32": narrow.Shape(4096, 4096, (64, 64), "t", WHOLE, WHOLE),
}


def each_on(archs: Sequence[int], shapes: Mapping[str, Any]) -> pytest.MarkDecorator:
    """The names on architectures, where each field of a shape meets each of them; the others in long runs."""

    def traits(row: tuple[Any, ...]) -> tuple[Any, ...]:
        name, arch = row
        return *(getattr(shapes[name], field.name) for field in fields(shapes[name])), arch

    rows = [(name, arch) for name in shapes for arch in archs]
    return pytest.mark.parametrize(("name", "arch"), others_long(rows, traits))


@each_on(ARCHS, SHAPES)
def test_narrow(name: str, arch: int) -> None:
    found = narrow_code(SHAPES[name], arch)
    assert found.fits and found.uses_mma, found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["r16", "masked bf16"])
def test_sums_of_steps_are_not_those_of_tensor_cores(
    name: str, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is between a product and the sum that it is added to, Triton makes them one."""
    apart = narrow_code(SHAPES[name], arch).ptx.count("add.f32")
    monkeypatch.setattr(_inductor, "interprets_triton", lambda: True)
    assert narrow_code(SHAPES[name], arch).ptx.count("add.f32") < apart


@pytest.mark.parametrize("arch", ARCHS)
def test_split(arch: int) -> None:
    """As many matrices as one kernel takes, in each form."""
    shapes = [(4096, 16), (16, 4096), (1024, 16), (5, 8192), (8192, 12), (64, 4096)] * (gather.MOST // 6)
    matrices = [torch.empty(shape) for shape in shapes]
    summands = [(2, 3, 0)[i % 3] for i in range(len(shapes))]
    along = [int(columns < rows) for rows, columns in shapes]
    sizes = [3 * shape[dim] + 1 for shape, dim in zip(shapes, along, strict=True)]
    (kernel,) = written(
        lambda *given: LORA_SPLIT(list(given), summands, along, sizes, HALF), tuple(matrices), arch
    )
    (found,) = cuda_codegen.compile_kernel(kernel.source, arch)
    assert found.fits, found


def accumulate_code(
    shape: accumulate_kernel.Shape, arch: int, chosen: Any = None, loop: bool = False, turned: bool = True
) -> Any:
    """The machine code of adapters that are added to a base, which is in memory or computed in a loop."""
    assert shape.rows is not None
    base = torch.empty(shape.rows, shape.columns, dtype=shape.dtype)
    a = [torch.empty(shape.rows, k, dtype=shape.narrow) for k in shape.inner]
    b = [torch.empty(shape.columns, k, dtype=shape.narrow).t() for k in shape.inner]
    b = b if turned else [right.contiguous() for right in b]
    kept = [torch.empty(base.shape, dtype=torch.bool) for _ in range(shape.masks)]
    scales = [2.0] * len(a)

    def fn(base: Any, a: Any, b: Any, kept: Any) -> Any:
        base = base * 2 if loop else base
        return LORA_ACCUMULATE(base, a, b, scales, kept, list(range(len(kept))), shape.dtype)

    (kernel,) = written(fn, (base, a, b, kept), arch, accumulate_kernel, chosen)
    assert kernel.is_template
    (found,) = cuda_codegen.compile_kernel(kernel.source, arch)
    return found


SUMS = {
    "r16": accumulate_kernel.Shape(4096, 4096, (16,), 0, HALF, HALF),
    "r16 in halves": accumulate_kernel.Shape(4096, 4096, (48,), 0, HALF, HALF),
    "three masks": accumulate_kernel.Shape(4096, 4096, (48, 48, 48), 3, HALF, HALF),
    "three masks, r64": accumulate_kernel.Shape(8192, 2048, (192, 192, 192), 3, HALF, HALF),
    "r128 in halves": accumulate_kernel.Shape(4096, 8192, (384,), 1, HALF, HALF),
    "eight masks": accumulate_kernel.Shape(4096, 2048, (16,) * 8, 8, HALF, HALF),
    "odd": accumulate_kernel.Shape(2049, 2051, (5, 12), 1, HALF, HALF),
    "few rows": accumulate_kernel.Shape(4, 4096, (16,), 0, HALF, HALF),
    "float16": accumulate_kernel.Shape(4096, 4096, (16, 16), 2, torch.float16, torch.float16),
    "base of float32": accumulate_kernel.Shape(4096, 4096, (48,), 1, WHOLE, HALF),
    "float32": accumulate_kernel.Shape(4096, 4096, (16,), 1, WHOLE, WHOLE),
    "float32, r128": accumulate_kernel.Shape(4096, 4096, (128,), 1, WHOLE, WHOLE),
}


@each_on(ARCHS, SUMS)
def test_accumulate(name: str, arch: int) -> None:
    """However b lies, and with a base that a loop computes."""
    for found in (accumulate_code(SUMS[name], arch), accumulate_code(SUMS[name], arch, None, True, False)):
        assert found.fits and found.uses_mma, found


def shipped(section: str) -> list[dict[str, Any]]:
    """The rows of a table that have a configuration, but for those that another one compiles alike."""
    rows = tables.load("nvidia_h200")[section]  # type: ignore[index]
    alike = {
        json.dumps({**row, "tokens": 0, "gain": 0}, sort_keys=True): row for row in rows if row["config"]
    }
    return list(alike.values())


@pytest.mark.long
@pytest.mark.parametrize("row", shipped("narrow_mm"), ids=lambda row: f"{row['width']}-{row['ranks']}")
def test_shipped_narrow_products(row: dict[str, Any]) -> None:
    """On the device that they were measured on."""
    dtype, thin = (getattr(torch, row[name]) for name in ("dtype", "narrow"))
    turned = row["layout"] == "t"
    rows, inner = (row["width"], row["tokens"]) if turned else (row["tokens"], row["width"])
    shape = narrow.Shape(
        rows, inner, tuple(row["ranks"]), row["layout"], dtype, thin, masks=row.get("masks", 0)
    )
    found = narrow_code(shape, 90, narrow.Config(**row["config"]))
    assert found.fits, found


@pytest.mark.long
@pytest.mark.parametrize(
    "row", shipped("lora_accumulate"), ids=lambda row: f"{row['columns']}-{row['inner']}"
)
def test_shipped_sums(row: dict[str, Any]) -> None:
    dtype, thin = (getattr(torch, row[name]) for name in ("dtype", "narrow"))
    shape = accumulate_kernel.Shape(
        row["tokens"], row["columns"], tuple(row["inner"]), row["masks"], dtype, thin
    )
    found = accumulate_code(shape, 90, accumulate_kernel.Config(**row["config"]))
    assert found.fits, found


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

    made = written(fn, (x, w, a, b), arch, decode, chosen)
    assert len(made) == 2 and all(kernel.is_template for kernel in made)
    return [cuda_codegen.compile_kernel(kernel.source, arch)[0] for kernel in made]


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


@each_on(ARCHS, FEW)
def test_few_rows(name: str, arch: int) -> None:
    """From Hopper on the second kernel waits for the first in its own code."""
    down, up = pair_code(FEW[name], arch)
    assert down.fits and up.fits, (down, up)
    # The table of the H200 has tensor cores for four rows of so many columns.
    assert down.uses_mma and up.uses_mma == (FEW[name].rows > 4 or (name, arch) == ("four rows", 90))
    assert ("griddepcontrol.launch_dependents" in down.ptx) == (arch >= 90)
    assert ("griddepcontrol.wait" in up.ptx) == (arch >= 90)


def tried(kernel: str, name: str) -> Iterator[tuple[Any, Any]]:
    """The configurations that tuning tries on Hopper, and their machine code."""
    if kernel == "accumulate":
        yield from ((c, accumulate_code(SUMS[name], 90, c)) for c in accumulate_kernel.candidates(SUMS[name]))
    elif kernel == "narrow":
        yield from ((c, narrow_code(SHAPES[name], 90, c)) for c in narrow.candidates(SHAPES[name]))
    else:
        for chosen in decode.candidates(FEW[name], 90):
            yield from ((chosen, found) for found in pair_code(FEW[name], 90, chosen))


CANDIDATES = {
    "accumulate": list(SUMS),
    "narrow": ["r16", "qkv", "bf16", "gradient", "masked", "masked qkv bf16", "masked gradient"],
    "pair": ["one row", "three rows", "qkv", "eight rows", "16 rows", "r128"],
}


@pytest.mark.long
@pytest.mark.parametrize(("kernel", "name"), [(k, name) for k, names in CANDIDATES.items() for name in names])
def test_candidates(kernel: str, name: str) -> None:
    """What tuning tries on Hopper does not spill."""
    assert not {chosen: found for chosen, found in tried(kernel, name) if not found.fits}


# -- random shapes -----------------------------------------------------------------------------------------

EIGHTS = st.one_of(st.sampled_from([8, 16, 64, 128, 1024, 4096]), st.integers(1, 1024).map(lambda n: 8 * n))
RANKS = st.lists(st.sampled_from([4, 8, 12, 16, 32, 64, 128]), min_size=1, max_size=4).filter(
    lambda ranks: sum(map(narrow.padded, ranks)) <= narrow.MOST_TOGETHER
)
DTYPES = st.sampled_from([(HALF, HALF), (HALF, WHOLE), (torch.float16, torch.float16), (WHOLE, WHOLE)])
WHICH = st.one_of(st.none(), st.floats(0, 1, exclude_max=True))
any_shape = pytest.mark.parametrize("examples", [3, pytest.param(500, marks=pytest.mark.long)])


def one_of(options: list[Any], which: float | None) -> Any:
    """One of the configurations; None is the default one."""
    return None if which is None else options[int(which * len(options))]


@pytest.mark.slow
@any_shape
def test_any_narrow(examples: int) -> None:
    """Any shape compiles, in any configuration, and can be launched; registers may spill."""

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(
        st.integers(1, 8192), EIGHTS, RANKS, DTYPES, st.sampled_from("nt"), st.booleans(), WHICH,
        st.sampled_from(ARCHS),
    )  # fmt: skip
    def judge(
        rows: int, inner: int, ranks: Any, dtypes: Any, layout: str, masked: bool, which: float | None,
        arch: int,
    ) -> None:  # fmt: skip
        shape = narrow.Shape(rows, inner, tuple(ranks), layout, *dtypes, masks=len(ranks) * masked)
        found = narrow_code(shape, arch, one_of(narrow.candidates(shape), which))
        assert found.shared_bytes <= found.shared_limit and not found.overwritten, str(found)

    judge()


@pytest.mark.slow
@any_shape
def test_any_pair(examples: int) -> None:
    """Likewise for few rows."""

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.integers(1, 64), EIGHTS, st.lists(EIGHTS, min_size=4, max_size=4), RANKS, DTYPES, WHICH,
           st.sampled_from(ARCHS))  # fmt: skip
    def judge(
        rows: int, inner: int, columns: Any, ranks: Any, dtypes: Any, which: float | None, arch: int
    ) -> None:
        shape = decode.Shape(rows, inner, tuple(columns[: len(ranks)]), tuple(ranks), *dtypes)
        for found in pair_code(shape, arch, one_of(decode.candidates(shape, arch), which)):
            assert found.shared_bytes <= found.shared_limit, str(found)

    judge()
