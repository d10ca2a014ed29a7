"""Every kernel compiles to machine code that does not spill, fits, and uses what the chip has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from packaging.version import Version

pytest.importorskip("triton")

import torch._inductor.config
import triton

from devtools import cuda_codegen
from inductor_fusions.block_mm import configurations, heuristics
from inductor_fusions.block_mm.configurations import Config
from inductor_fusions.block_mm.problem import Problem
from inductor_fusions.decisions import problems, tables
from tests.block_mm.test_structures import Drawn, kernels
from tests.support.covering import others_long, pairwise

#: Where no register may spill, since these are what kernels are tuned for.
ARCHS = (80, 90, 100)


def problem(kind: str, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Problem:
    """Problems of real models, by the kind that tables call them."""
    three, two, nt = (0, 1, 2), (0, 1), ("nt",) * 3
    qkv = (4096, 1024, 1024)
    return {
        "shared_a": Problem((tokens,) * 3, qkv, (4096,) * 3, three, nt, dtype, False, "a"),
        "gated": Problem((tokens,) * 2, (8192,) * 2, (2048,) * 2, two, nt[:2], dtype, True, "a"),
        "shared_b": Problem(qkv[:2], (4096,) * 2, (tokens,) * 2, two, ("tn",) * 2, dtype, False, "b"),
        "sum": Problem((tokens,), (4096,), (4096, 1024, 1024), (0, 0, 0), ("nn",) * 3, dtype),
        "linear": Problem((tokens,), (3072,), (768,), (0,), ("nt",), dtype),
    }[kind]


def code(
    posed: Problem, chosen: Config | None, arch: int, output: torch.dtype | None = None, norm: bool = False
) -> cuda_codegen.MachineCode:
    """The machine code of a problem in one configuration, or in the default one, for outputs of a dtype.

    Args:
        norm: whether an RMSNorm is in front.
    """
    activation = posed.activation or ("silu" if posed.gated else "")
    (kernel,) = kernels(
        Drawn(
            posed, activations=(activation, *[""] * posed.groups[-1]), output=output or posed.dtype,
            arch=arch, chosen=chosen if chosen is not None else heuristics.choose, norm=norm,
        )
    )  # fmt: skip
    assert kernel.is_template
    (found,) = cuda_codegen.compile_kernel(kernel.source, arch)
    return found


#: Groups that share b, at one row, are an outer product, which is no `block_mm`.
DEFAULTS = [
    (kind, tokens)
    for kind in ("shared_a", "gated", "shared_b", "sum", "linear")
    for tokens in (1, 64, 4096)
    if (kind, tokens) != ("shared_b", 1)
]


@pytest.mark.parametrize(
    ("kind", "tokens", "arch"), others_long([(*default, arch) for default in DEFAULTS for arch in ARCHS])
)
def test_default(kind: str, tokens: int, arch: int) -> None:
    found = code(problem(kind, tokens), None, arch)
    assert found.fits, found
    one_row = tokens == 1 and kind != "sum"  # whose products are vectors times matrices
    assert found.uses_mma != one_row
    if arch == 90 and tokens == 4096:
        assert found.uses_wgmma and found.uses_tma
    if arch == 80:
        assert not found.uses_tma


@pytest.mark.parametrize("inner", [64, 2048])
@pytest.mark.parametrize("layouts", [("nt", "nt"), ("nt", "nn"), ("nn", "nt"), ("tn", "nn"), ("tn", "tn")])
def test_second_products_of_any_layout(layouts: tuple[str, str], inner: int) -> None:
    """Groups with an adapter each: Triton does not compile every one of these as one loop over all tiles."""
    posed = Problem(
        (4096,) * 2, (4096, 1024), (inner, 16, inner, 16), (0, 0, 1, 1), layouts * 2, torch.bfloat16
    )
    found = code(posed, None, 90)
    assert found.fits and found.uses_tma, found


@pytest.mark.parametrize(
    "tile", [(128, 256, 64, 8, 3, 8, 1), (128, 128, 64, 4, 3, 8, 1, 2), (256, 128, 64, 8, 3, 8, 2)]
)
def test_wider_outputs(tile: tuple[int, ...]) -> None:
    """A tile of float32 takes twice the shared memory of that which was measured: it is stored in parts."""
    chosen = Config("persistent", *tile)
    found = code(problem("linear", 4096), chosen, 90, torch.float32)
    assert found.fits and found.shared_bytes <= found.shared_limit // chosen.per_processor, found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["shared_a", "gated", "shared_b"])
def test_three_times_a_power_of_two(kind: str, arch: int) -> None:
    """Tiles of 96 columns are products of 64 and of 32."""
    chosen = Config("tiled", 64, 96, 64, 8 if arch == 80 else 4, 3)
    found = code(problem(kind, 512), chosen, arch)
    assert found.fits and found.uses_wgmma == (arch == 90), found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("columns", [96, 128])
def test_tiles_across_groups(columns: int, arch: int) -> None:
    """Loads of 16 bytes, although each column has an address of its own."""
    chosen = Config("tiled", 64, columns, 64, 8 if arch == 80 else 4, 3, across=True)
    found = code(problem("shared_a", 512), chosen, arch)
    assert found.fits, found
    copied = re.findall(r"cp\.async\.\S+ [^;]*?, (0x\w+)", found.ptx)
    assert copied and set(copied) == {"0x10"}


def test_tiles_across_groups_are_told_from_others() -> None:
    posed = problem("shared_a", 512)
    across = Config("tiled", 64, 96, 64, 4, 3, across=True)
    assert configurations.suits(across, posed)
    for other in (
        replace(posed, layouts=("nt", "nt", "nn")),
        replace(posed, inner=(4096, 4096, 2048)),
        replace(posed, shared=""),
        problem("gated", 512),
        problem("sum", 512),
    ):
        assert not configurations.suits(across, other)


@pytest.mark.parametrize(
    ("kind", "tokens", "dtype", "arch"),
    pairwise(["shared_a", "gated", "linear"], [2, 3, 4], [torch.bfloat16, torch.float32], ARCHS),
)
def test_few_rows(kind: str, tokens: int, dtype: torch.dtype, arch: int) -> None:
    """Before anything is measured, without tensor cores."""
    posed = problem(kind, tokens, dtype)
    chosen = configurations.default(posed, arch)
    found = code(posed, chosen, arch)
    assert chosen.template == "row" and found.fits and not found.uses_mma, found


@pytest.mark.parametrize(
    ("kind", "tokens", "arch"), pairwise(["shared_a", "gated", "linear"], [1, 2, 3, 4], ARCHS)
)
def test_norm_of_few_rows(kind: str, tokens: int, arch: int) -> None:
    posed = problem(kind, tokens)
    found = code(posed, configurations.default(posed, arch), arch, norm=True)
    assert found.fits and not found.uses_mma, found


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("tokens", [1, 16, 4096])
def test_launched_early(tokens: int, arch: int, graphs: bool) -> None:
    """In CUDA graphs, short kernels start before the one in front has ended, and wait for it."""
    with torch._inductor.config.patch({"triton.cudagraphs": graphs}):
        found = code(problem("shared_a", tokens), None, arch)
    assert found.fits, found
    assert ("griddepcontrol.wait" in found.ptx) == (graphs and arch >= 90 and tokens < 4096)


@pytest.mark.parametrize("activation", ["relu", "relu_squared"])
@pytest.mark.parametrize("tokens", [1, 16, 4096])
def test_relu_keeps_what_is_no_number(tokens: int, activation: str) -> None:
    """`max.f32` gives the other operand of a NaN."""
    found = code(replace(problem("linear", tokens), activation=activation), None, 90)
    assert found.fits, found
    assert "max.NaN.f32" in found.ptx and "max.f32" not in found.ptx


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tokens", [16, 1024])
def test_default_in_float32(tokens: int, arch: int, tf32: None) -> None:
    found = code(problem("shared_a", tokens, torch.float32), None, arch)
    assert found.fits and found.uses_mma, found


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        (kind, candidate)
        for kind, tokens in (
            ("shared_a", 1),
            ("gated", 1),
            ("shared_a", 4),
            ("gated", 4),
            ("shared_a", 16),
            ("shared_a", 4096),
            ("gated", 4096),
            ("sum", 4096),
            ("shared_a", 512),
            ("gated", 512),
            ("sum", 512),
        )
        for candidate in configurations.candidates(problem(kind, tokens), 90)
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(str(v) for v in asdict(value).values()),
)
def test_candidate(kind: str, chosen: Config) -> None:
    """What tuning tries on Hopper does not spill."""
    small = {"row": chosen.block_m, "tiled": 16 if chosen.block_m == 16 else 4096}
    tokens = small.get(chosen.template, 4096)
    found = code(problem(kind, tokens), chosen, 90)
    assert found.fits, found


def shipped() -> Iterator[tuple[str, Any]]:
    """The configurations of the tables that are used, each with a row that has it: its problem's widest."""
    found: dict[tuple[Any, ...], tuple[str, Any]] = {}
    for entry in sorted((tables.folder() / "devices").iterdir(), key=lambda e: str(e)):
        table = tables.load(entry.name.removesuffix(".json")) if entry.name.endswith(".json") else None
        for row in sorted((table or {}).get("block_mm", []), key=lambda row: max(row["n"])):
            if row["config"] is not None and row["gain"] >= problems.MARGIN:
                config = tuple(sorted(row["config"].items()))
                found[row["kind"], tuple(row["layout"]), row["dtype"], config] = entry.name, row
    yield from found.values()


def _id(value: Any) -> str:
    if isinstance(value, str):
        return value.removesuffix(".json")
    numbers = "-".join(str(v) for v in value["config"].values())
    return f"{value['kind']}-{value['tokens']}-{'+'.join(map(str, value['n']))}-{numbers}"


def traits(named: tuple[Any, ...]) -> tuple[Any, ...]:
    """What of a row decides on the code that is generated."""
    _, row = named
    config = Config(**row["config"])
    layouts, arch = tuple(row["layout"]), row["capability"][0]
    return (row["kind"], layouts, arch, row.get("activation", ""), *asdict(config).values())


@pytest.mark.parametrize(("name", "row"), others_long(list(shipped()), traits), ids=_id)
def test_shipped_tables(name: str, row: Any) -> None:
    """What a table names compiles without spilling."""
    wide = {"shared_a": "a", "gated": "a", "shared_b": "b"}.get(row["kind"], "")
    tokens, count = row["tokens"], len(row["n"])
    products = len(row["layout"])
    groups = row.get("groups") or (range(count) if products == count else (0,) * products)
    posed = Problem(
        rows=tuple(row["m"] or [tokens] * count),
        columns=tuple(row["n"]),
        inner=tuple(row["k"] or [tokens] * products),
        groups=tuple(groups),
        layouts=tuple(row["layout"]),
        dtype=getattr(torch, row["dtype"]),
        gated=row["kind"] == "gated",
        shared=wide,
        activation=row.get("activation", ""),
    )
    arch = 10 * row["capability"][0] + row["capability"][1]
    found = code(posed, Config(**row["config"]), arch)
    # docs/compatibility.md
    may_spill = Version(triton.__version__) >= Version("3.9") and row["config"]["block_n"] in (96, 192)
    if may_spill and row["kind"] == "shared_a":
        found = replace(found, spill_bytes=0, stack_bytes=0)
    assert found.fits, found
