"""Errors of generated kernels, for Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config

from devtools import cuda_codegen
from inductor_fusions import config
from inductor_fusions.block_mm import configurations, heuristics, lowering
from inductor_fusions.block_mm.op import BLOCK_MM, Call, composite
from tests.support.errors import relative

TILED = configurations.Config("tiled", 16, 32, 32, 4, 2, group_m=2)
PERSISTENT = configurations.Config("persistent", 32, 32, 32, 4, 2, group_m=2)
ROW = configurations.Config("row", 1, 8, 64, 4, 1)


@dataclass(frozen=True)
class Case:
    """One grouped GEMM.

    Attributes:
        rows: M, of every group.
        inner: K of each product of a group.
        columns: N of each group.
        config: the kernel.
        far: whether no two weights are near enough for one bulk copy.
        same: whether all weights are one matrix in memory, as different tensors.
        turned: whether weights lie in memory in the opposite order.
        wide: the outputs that are float32, as in the operation.
        heights: M of each group, if each has inputs of its own.
        last: the layout of the last weight, if it is another one.
        layout: of the operands: "nt" (as linears have them), "nn", "tn" (as gradients of weights) or "tt".
        bias: "", "row" or "whole".
        activations: of each group.
        norm: the arguments of an RMSNorm in front: eps, whether it has a vector, what is added to that.
        clamps: whether the root of it is that of the larger one of mean and eps.
    """

    rows: int
    inner: tuple[int, ...]
    columns: tuple[int, ...]
    config: configurations.Config
    layout: str = "nt"
    bias: str = ""
    activations: tuple[str, ...] = ()
    gated: bool = False
    scales: tuple[float, ...] = (1.0,)
    dtype: torch.dtype = torch.float16
    tail: bool = False
    dynamic: bool = False
    far: bool = False
    turned: bool = False
    same: bool = False
    wide: str = ""
    heights: tuple[int, ...] = ()
    last: str = ""
    norm: tuple[float, bool, float] | None = None
    clamps: bool = False


CASES: dict[str, Case] = {}
for name, kernel in (("tiled", TILED), ("persistent", PERSISTENT)):
    base = Case(37, (64,), (64, 16, 40), kernel)
    CASES |= {
        f"{name} qkv": base,
        f"{name} qkv bias": replace(base, bias="row"),
        f"{name} one row": replace(base, rows=1),
        f"{name} K is no multiple of the step": replace(base, inner=(72,)),
        f"{name} nn": replace(base, layout="nn", inner=(72,)),
        f"{name} tn": replace(base, rows=40, layout="tn", inner=(72,)),
        f"{name} tt": replace(base, rows=40, layout="tt", inner=(72,)),
        f"{name} sum": replace(base, inner=(64, 40, 16), columns=(64,), scales=(1.0, 0.5, -2.0)),
        f"{name} adapters": replace(base, inner=(64, 8), scales=(1.0, 0.25), bias="row"),
        f"{name} residual": replace(base, columns=(64,), bias="whole", activations=("relu",)),
        f"{name} tail": replace(base, columns=(64,), tail=True),
        f"{name} dynamic": replace(base, dynamic=True, tail=True),
        f"{name} tf32": replace(base, dtype=torch.float32, bias="row"),
    }
    for act in ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu_squared", "sigmoid"):
        CASES[f"{name} gated {act}"] = replace(base, columns=(40, 40), activations=(act, ""), gated=True)
    CASES[f"{name} gated adapters"] = replace(
        base, columns=(40, 40), inner=(64, 8), scales=(1.0, 0.5), activations=("silu", ""), gated=True
    )
CASES["persistent gated, weights far apart"] = replace(CASES["persistent gated silu"], far=True)
CASES["persistent gated, weights in the other order"] = replace(CASES["persistent gated silu"], turned=True)
CASES["persistent gated, one matrix twice"] = replace(CASES["persistent gated silu"], same=True)
CASES["persistent gated adapters, weights far apart"] = replace(CASES["persistent gated adapters"], far=True)
CASES["persistent gated nn"] = replace(CASES["persistent gated silu"], layout="nn")
CASES["persistent gated bias"] = replace(CASES["persistent gated gelu"], bias="row")
chain = replace(CASES["persistent adapters"], inner=(64, 8), scales=(1.0, 1.0))
CASES |= {
    "persistent chain": chain,
    "persistent chain nn": replace(chain, layout="nn", scales=(2.0, 2.0)),
    "persistent chain one group": replace(
        chain, rows=333, columns=(256,), config=replace(PERSISTENT, subtiles=2)
    ),
    "persistent chain two adapters": replace(
        chain, tail=True, columns=(64,), inner=(64, 8, 16), scales=(1.0,) * 3
    ),
    "persistent chain of long products": replace(
        chain, tail=True, columns=(64,), inner=(72, 144, 8, 80), scales=(1.0,) * 4
    ),
}
CASES["two programs on a multiprocessor"] = replace(
    CASES["persistent gated silu"], rows=333, columns=(256, 256), config=replace(PERSISTENT, per_processor=2)
)
row = Case(1, (72,), (64, 16, 40), ROW)
CASES |= {
    "row qkv": row,
    "row qkv bias": replace(row, bias="row"),
    "row whole steps": replace(row, inner=(128,)),
    "row odd sizes": replace(row, inner=(61,), columns=(33, 17), bias="whole"),
    "row sum": replace(row, inner=(64, 40, 16), columns=(64,), scales=(1.0, 0.5, -2.0)),
    "row adapters": replace(row, inner=(72, 8), scales=(1.0, 0.25), bias="row"),
    "row tail": replace(row, columns=(64,), tail=True),
    "row gated": replace(row, columns=(40, 40), activations=("silu", ""), gated=True, bias="row"),
    "row float32": replace(row, dtype=torch.float32),
    "row, one column a program": replace(row, config=replace(ROW, block_n=1)),
    "row norm": replace(row, norm=(1e-5, False, 0.0)),
    "row norm with a vector": replace(row, norm=(1e-5, True, 0.0), bias="row"),
    "row norm with a vector and 1": replace(row, norm=(1e-6, True, 1.0), inner=(61,), columns=(33, 17)),
    "row norm by its length": replace(row, norm=(0.9, True, 0.0), clamps=True),
    "row norm adapters": replace(row, norm=(1e-5, True, 1.0), inner=(72, 8), scales=(1.0, 0.25), bias="row"),
}
for rows in (2, 3, 4):
    few = replace(row, rows=rows, config=replace(ROW, block_m=4))
    CASES |= {
        f"{rows} rows": few,
        f"{rows} rows bias": replace(few, bias="row"),
        f"{rows} rows odd sizes": replace(few, inner=(61,), columns=(33, 17), bias="whole"),
        f"{rows} rows sum": replace(few, inner=(64, 40, 16), columns=(64,), scales=(1.0, 0.5, -2.0)),
        f"{rows} rows tail": replace(few, columns=(64,), tail=True),
        f"{rows} rows gated": replace(
            few, columns=(40, 40), activations=("silu", ""), gated=True, bias="row"
        ),
        f"{rows} rows norm": replace(few, norm=(1e-5, True, 0.0)),
        f"{rows} rows gated norm": replace(
            few, columns=(40, 40), activations=("silu", ""), gated=True, norm=(1e-5, True, 1.0)
        ),
        f"{rows} rows float32": replace(few, dtype=torch.float32, wide="1"),
        f"tiled {rows} rows": replace(CASES["tiled qkv bias"], rows=rows),
    }
CASES["tiled odd sizes"] = Case(7, (61,), (33, 17), TILED, bias="row")
CASES["tiled odd sizes nn"] = Case(7, (61,), (33, 17), TILED, layout="nn", bias="row")
CASES["tiled odd sizes tt"] = Case(7, (61,), (33, 17), TILED, layout="tt")
for name in (
    "qkv bias", "K is no multiple of the step", "nn", "tn", "tt", "sum", "adapters", "residual", "tail",
    "dynamic", "tf32", "gated silu", "gated adapters", "odd sizes", "odd sizes nn", "odd sizes tt",
):  # fmt: skip
    CASES[f"three times 16 columns, {name}"] = replace(
        CASES[f"tiled {name}"], config=replace(TILED, block_n=48)
    )
for columns, kernel in ((32, TILED), (48, replace(TILED, block_n=48))):
    wide = replace(CASES["tiled qkv"], columns=(72, 8, 40), config=replace(kernel, across=True))
    CASES |= {
        f"{columns} columns across groups": wide,
        f"{columns} columns across groups, bias": replace(wide, bias="row"),
        f"{columns} columns across groups, scaled": replace(wide, bias="row", scales=(0.5,)),
        f"{columns} columns across groups, activations": replace(wide, activations=("silu", "", "relu")),
        f"{columns} columns across groups, K is no multiple": replace(wide, inner=(72,), rows=1),
        f"{columns} columns across groups, odd sizes": replace(wide, inner=(61,), columns=(33, 17)),
        f"{columns} columns across groups, tail": replace(wide, tail=True, dynamic=True),
    }
CASES["persistent in two parts"] = replace(
    CASES["persistent qkv bias"], config=replace(PERSISTENT, subtiles=2)
)
CASES["persistent in four parts with a tail"] = replace(
    CASES["persistent tail"], config=replace(PERSISTENT, block_n=64, subtiles=4), columns=(104,)
)
for name in ("qkv bias", "adapters", "chain", "in two parts"):
    base = CASES[f"persistent {name}"]
    CASES[f"persistent {name}, inputs of their own"] = replace(base, heights=(37, 100, 1))
    CASES[f"persistent {name}, layouts of their own"] = replace(base, last="n")
CASES["persistent with activations"] = replace(
    CASES["persistent qkv bias"], activations=("relu", "gelu", "gelu_tanh")
)
CASES["more tiles than multiprocessors"] = replace(
    CASES["persistent qkv"],
    rows=155,
    columns=(256, 136, 8),
    config=replace(PERSISTENT, block_m=16, block_n=16),
)


def operands(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """a and b of each product, and the biases."""
    torch.manual_seed(0)

    def matrix(rows: int, columns: int, letter: str) -> torch.Tensor:
        shape = (rows, columns) if letter == "n" else (columns, rows)
        made = (torch.randn(shape) / 4).to(case.dtype)
        return made if letter == "n" else made.t()

    left = [matrix(case.rows, k, case.layout[0]) for k in case.inner]
    a, b = [], []
    for g, n in enumerate(case.columns):
        a += [matrix(case.heights[g], k, case.layout[0]) for k in case.inner] if case.heights else left
        layout = case.last if case.last and g == len(case.columns) - 1 else case.layout[1]
        b += [matrix(k, n, layout) for k in case.inner]
    if case.same:
        b = [b[0].view_as(right) for right in b]
    if case.turned:
        held = torch.empty(len(b), *reversed(b[0].shape), dtype=case.dtype)
        b = [held[-1 - i].t().copy_(right) for i, right in enumerate(b)]
    shapes = {"": [], "row": [(n,) for n in case.columns], "whole": [(case.rows, n) for n in case.columns]}
    return a, b, [torch.randn(shape).to(case.dtype) for shape in shapes[case.bias]]


def errors(name: str) -> float:
    """The largest relative error of an output against float64."""
    case = CASES[name]
    torch.set_float32_matmul_precision("high")
    a, b, bias = operands(case)
    count = len(case.columns)
    groups = [g for g in range(count) for _ in case.inner]
    scales = list(case.scales) * count if len(case.scales) == len(case.inner) else [1.0] * len(a)
    activations = list(case.activations) or [""] * count

    offsets, names = list(range(len(bias))), ",".join(activations)
    eps, has_gain, shift = case.norm or (None, False, 0.0)
    gain = torch.randn(case.inner[0]).to(case.dtype) if has_gain else None

    def fn(a: Any, b: Any, bias: Any, gain: Any) -> Any:
        plain = a, b, bias, offsets, groups, scales, names, case.gated, a[0].dtype, case.wide
        found = BLOCK_MM(*plain, 0, eps, gain, shift, case.clamps)
        return [torch.relu(y) * 2 + 1 for y in found] if case.tail else found

    # Not the tiles of a table, which has some for 3 rows.
    heuristics.tiles = lambda *_: None  # type: ignore[assignment]
    configurations.default = lambda problem, arch: case.config  # type: ignore[assignment]
    lowering.FARTHEST = 0 if case.far else 2**40
    if case.dynamic:
        torch._dynamo.mark_dynamic(a[0], 0)
    with torch.no_grad(), config.patch(policy="always", strict=True):
        made = cuda_codegen.generate(fn, (a, b, bias, gain), interpreted=True)
    (module,) = made.modules
    assert sum(kernel.is_template for kernel in module.kernels) == 1, module.wrapper
    assert not module.extern_calls
    assert case.dynamic == ("ks0" in module.kernels[0].source)
    wide = [[t.double() for t in tensors] for tensors in (a, b, bias)]
    wide_gain = None if gain is None else gain.double()
    sizes = offsets, groups, scales, names, case.gated, torch.float64, ""
    exact = composite(Call(*wide, *sizes, 0, eps, wide_gain, shift, case.clamps))
    exact = [torch.relu(y) * 2 + 1 for y in exact] if case.tail else exact
    return max(relative(x, y) for x, y in zip(made.outputs, exact, strict=True))
