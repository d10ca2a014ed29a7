"""Errors of the kernels of adapters, for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.config

from devtools import cuda_codegen
from inductor_fusions import config
from inductor_fusions.fusions.lora import decode, narrow, narrow_kernel
from inductor_fusions.fusions.lora.op import LORA_LINEAR, NARROW_MM
from inductor_fusions.fusions.lora.split import LORA_SPLIT
from tests.support.errors import relative

HALF, WHOLE = torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """One skinny GEMM, or linears with adapters where there are `columns`.

    Attributes:
        rows, inner: M and K.
        ranks: of the narrow matrices, or of the adapters.
        dtypes: of x, and of the narrow matrices.
        config: of the skinny GEMM, or of the pair of kernels.
        layout: of x: "n" or "t".
        split: whether the form for a product of the dtype of x is wanted as well, doubled.
        transposed: whether the results are.
        summands: whether float32 is split up into parts of 16 bits, as beside bfloat16.
        given: whether that is an operation of its own, in front.
        columns: N of each linear.
        groups: which linear each adapter belongs to.
        bias: whether each linear has one.
        wide: the linears whose output is float32, as in the operation.
        dynamic: whether M is symbolic.
        large: whether what A gives has no room for the factors in float16.
        masks: whether each product has one.
    """

    rows: int
    inner: int
    ranks: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    config: Any
    layout: str = "n"
    split: bool = False
    transposed: bool = False
    summands: bool = False
    given: bool = False
    columns: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    bias: bool = False
    wide: str = ""
    dynamic: bool = False
    large: bool = False
    masks: bool = False


PLAIN = narrow.Config(16, 32, 1, 4, 2)
NARROW = Case(37, 96, (16,), (HALF, HALF), PLAIN)
PAIR = decode.Config(16, 32, 4, 2, 2)
ROW = decode.Config(4, 64, 4, 1, 2)
LANES = decode.Config(16, 64, 4, 2, 2, lanes=4)
DECODE = Case(3, 96, (16,), (HALF, HALF), PAIR, columns=(48,), groups=(0,))


def parts(count: int) -> dict[str, Any]:
    """K in so many parts."""
    return {"config": replace(PLAIN, splits=count)}


TWO, THREE = {"ranks": (16, 5)}, {"ranks": (16, 5, 20)}
FLOAT32 = {"dtypes": (HALF, WHOLE)}
#: Halves of the product, and a product that is doubled.
HALVES, DOUBLED = {**FLOAT32, "split": True}, {"split": True}
SUMMANDS = {**FLOAT32, "summands": True, "rows": 70}
TURNED = {"layout": "t", "transposed": True}
LONG = {**SUMMANDS, **TURNED, "rows": 96, "inner": 83}
ALONE = {"rows": 1, "config": ROW}
QKV = {"columns": (48, 16, 24), "groups": (0, 1, 2), "ranks": (16, 8, 5), "bias": True}
FIRST_TWO = {"columns": (48, 16), "groups": (0, 1), "ranks": (16, 8)}
PAIRS = {"groups": (0, 0), "ranks": (16, 20)}
ODD = {"inner": 83, "columns": (50,)}
#: What is another than in NARROW, and in DECODE.
NARROWS: dict[str, dict[str, Any]] = {
    "": {},
    "ranks": THREE,
    "rank 1": {"ranks": (1,), **FLOAT32},
    "odd K": {"inner": 83},
    "in parts": parts(3),
    "in uneven parts": {"inner": 83, "ranks": (16, 8), **parts(2)},
    "widened": FLOAT32,
    "in summands": {**FLOAT32, "summands": True},
    "in summands made ahead": {**SUMMANDS, **TWO},
    "in summands one by one": {**SUMMANDS, **THREE},
    "t in summands made ahead": LONG,
    "in summands given": {**SUMMANDS, **TWO, "given": True, "split": True},
    "t in summands given, in parts": {**LONG, "given": True, **parts(3)},
    "float32": {"dtypes": (WHOLE, WHOLE)},
    "halves": {**HALVES, **TWO},
    "halves in parts": {**HALVES, **parts(3)},
    "halves of three in parts": {**HALVES, **THREE, **parts(3)},
    "doubled of two in parts": {"rows": 131, **DOUBLED, **TWO, **parts(2)},
    "doubled": {**DOUBLED, **TWO},
    "doubled in parts": {**DOUBLED, **parts(3)},
    "t": {"layout": "t"},
    "t odd": {"layout": "t", "inner": 83, **TWO},
    "t transposed": {**TURNED, **TWO},
    "t transposed in parts": {**TURNED, **TWO, **parts(3)},
    "alone transposed in parts": {"transposed": True, **FLOAT32, "ranks": (5,), **parts(2)},
    "transposed float32": {"transposed": True, **FLOAT32},
    "masked": {**TWO, "masks": True, "split": True},
    "masked odd K in parts": {"inner": 83, **THREE, "masks": True, **parts(3)},
    "masked float32": {"dtypes": (WHOLE, WHOLE), "masks": True},
    "masked in summands": {**SUMMANDS, **TWO, "masks": True, "split": True},
    "t masked": {**TURNED, "inner": 83, **TWO, **FLOAT32, "masks": True},
    "t masked in summands, in parts": {**LONG, "masks": True, **parts(3)},
    "masked dynamic": {"dynamic": True, "ranks": (16, 8), "masks": True},
    "dynamic": {"dynamic": True, "ranks": (16, 8)},
}
DECODES: dict[str, dict[str, Any]] = {
    "": {},
    "one row": {"rows": 1},
    "qkv": {**QKV, "ranks": (16, 8, 16)},
    "with large factors": {"large": True, "groups": (0, 0), **TWO},
    "lanes with large factors": {"large": True, "config": LANES, "inner": 128},
    "row with large factors": {"large": True, **ALONE},
    "some": {"columns": (48, 16, 24), "groups": (0, 2), **TWO},
    "two adapters": PAIRS,
    "float32": {**FLOAT32, "bias": True},
    "odd K": ODD,
    "row": ALONE,
    "row qkv": {**ALONE, **QKV},
    "row, two adapters": {**ALONE, **PAIRS},
    "row float32": {**ALONE, **FLOAT32, **ODD},
    "row, one column a program": {"rows": 1, "config": replace(ROW, block_n=1)},
    "the first result in float32": {**FIRST_TWO, "wide": "0"},
    "row, the second result in float32": {**ALONE, **FIRST_TWO, "wide": "1"},
    "33 rows": {"rows": 33},
    "16 rows": {"rows": 16},
    "row, three rows of three linears": {"config": ROW, **QKV},
    "row, four rows, two adapters": {"rows": 4, "config": ROW, **PAIRS},
    "row, two rows of float32 results": {"rows": 2, "config": ROW, **FIRST_TWO, "wide": "0"},
    "lanes": {"config": LANES, "inner": 128},
    "lanes, whole tile": {"config": LANES, "rows": 16, **ODD},
    "lanes qkv": {"config": LANES, **QKV},
    "lanes float32": {"rows": 7, "config": LANES, **FLOAT32, **ODD, "wide": "0"},
    **{
        f"row, {rows} rows of odd sizes": {"rows": rows, "config": ROW, **FLOAT32, **ODD}
        for rows in (2, 3, 4, 5, 8)
    },
}
CASES = {f"narrow {name}".strip(): replace(NARROW, **changes) for name, changes in NARROWS.items()}
CASES |= {f"decode {name}".strip(): replace(DECODE, **changes) for name, changes in DECODES.items()}


def rand(rows: int, columns: int, dtype: torch.dtype, turned: bool = False) -> torch.Tensor:
    """A random matrix, transposed in memory or not."""
    made = (torch.randn((columns, rows) if turned else (rows, columns)) / 4).to(dtype)
    return made.t() if turned else made


def errors(name: str) -> float:
    """The largest relative error of an output against float64; of the parts, of what they sum up to.

    For "split, 1" and "no number" how many matrices are not in the same parts as in eager mode.
    """
    if name.startswith("split"):
        return different_bits(int(name.split()[-1]))
    if name == "no number":
        return wrong_numbers()
    case = CASES[name]
    torch.manual_seed(0)
    narrow_kernel.SUMMANDS = (HALF,) if case.summands else (torch.bfloat16,)
    wide, thin = case.dtypes
    x = rand(case.rows, case.inner, wide, case.layout == "t")
    a = [rand(case.inner, r, thin, True) for r in case.ranks]
    scales = [0.5 + i for i in range(len(a))]
    if case.large:
        a, scales = [right * 2048 for right in a], [64 * scale for scale in scales]
    error = _linear_error if case.columns else _narrow_error
    with (
        mock.patch.object(decode if case.columns else narrow, "default", lambda shape: case.config),
        mock.patch.object(narrow, "measured", lambda shape, device: None),
        mock.patch.object(decode, "capability", lambda device: 80),  # the interpreter waits for no kernel
    ):
        return error(case, x, a, scales)


def _narrow_error(case: Case, x: torch.Tensor, a: list[torch.Tensor], scales: list[float]) -> float:
    wide, thin = case.dtypes
    kept = [_like(torch.rand(x.shape) > 0.25, x) for _ in a] if case.masks else []

    def fn(x: Any, a: Any, kept: Any) -> Any:
        if case.given:
            zeros = [0] * len(a)
            stacks = LORA_SPLIT([right.t() for right in a], [3] * len(a), zeros, zeros, wide)
            a = [stack.permute(0, 2, 1) for stack in stacks]
        further = [2.0 * case.split] * len(a)
        return NARROW_MM(x, a, scales, further, case.transposed, kept)

    if case.dynamic:
        for t in (x, *kept):
            torch._dynamo.mark_dynamic(t, 0)
    templates = 2 if case.summands and case.rows > narrow_kernel.UNSPLIT_ROWS else 1
    in_parts = case.config.splits > 1
    together = in_parts and (len(a) > 1 or (case.split and wide != thin))
    outputs = generated(fn, (x, a, kept), in_parts and not together, templates + together)
    read = [x.double() * mask for mask in kept] or [x.double()] * len(a)
    exact = [s * left @ right.double() for s, left, right in zip(scales, read, a, strict=True)]
    whole = [y.double().t() if case.transposed else y.double() for y in outputs[: len(a)]]
    for part, y in zip(outputs[len(a) :], exact, strict=False):
        if wide == thin:
            whole.append(part.double() / 2)
        else:
            high, again, low = part.double().chunk(3, dim=1)
            assert torch.equal(high, again)
            whole.append((high + low) / 2)
        exact = [*exact, y]
    return largest(whole, exact)


def wrong_numbers() -> int:
    """Rows that have numbers where what is dropped is none, or the other way round."""
    narrow.default = lambda shape: PLAIN  # type: ignore[assignment]
    x, a, kept = rand(37, 96, HALF), rand(96, 16, HALF), torch.ones(37, 96, dtype=torch.bool)
    x[5, 7], x[20, 3] = float("nan"), float("inf")
    kept[5, 7] = kept[20, 3] = False
    (y,) = generated(lambda x, a, kept: NARROW_MM(x, [a], [1.0], [0.0], False, [kept]), (x, a, kept), False)
    expected = torch.zeros(37, 1, dtype=torch.bool)
    expected[5] = expected[20] = True
    return int((y.isnan() != expected).sum())


def _like(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A mask that lies in memory as x does."""
    return mask.contiguous() if x.stride(1) == 1 else mask.t().contiguous().t()


def _linear_error(case: Case, x: torch.Tensor, a: list[torch.Tensor], scales: list[float]) -> float:
    wide, thin = case.dtypes
    w = [rand(case.inner, n, wide, True) for n in case.columns]
    b = [rand(r, case.columns[g], thin, True) for r, g in zip(case.ranks, case.groups, strict=True)]
    b = [right / 2048 for right in b] if case.large else b
    bias = [torch.randn(n).to(wide) for n in case.columns] if case.bias else []

    def fn(x: Any, w: Any, bias: Any, a: Any, b: Any) -> Any:
        offsets, owners = list(range(len(bias))), list(case.groups)
        return LORA_LINEAR(x, w, bias, offsets, a, b, owners, scales, False, wide, case.wide)

    outputs = generated(fn, (x, w, bias, a, b), False, templates=2)
    exact = [x.double() @ right.double() for right in w]
    for g, offset in enumerate(bias):
        exact[g] = exact[g] + offset.double()
    for down, up, g, scale in zip(a, b, case.groups, scales, strict=True):
        exact[g] = exact[g] + scale * (x.double() @ down.double()) @ up.double()
    kinds = [WHOLE if str(g) in case.wide.split(",") else wide for g in range(len(w))]
    assert [y.dtype for y in outputs] == kinds
    return largest(outputs, exact)


def generated(
    fn: Any, args: Any, loops: bool, templates: int = 1, extern: Sequence[str] = ()
) -> list[torch.Tensor]:
    """The outputs of the kernels that are generated for a function.

    Args:
        fn, args: the function.
        loops: whether some of the kernels are Inductor's own.
        templates: how many are of templates.
        extern: what is called beside them.
    """
    with torch.no_grad(), config.patch(policy="always", strict=True):
        made = cuda_codegen.generate(fn, args, interpreted=True)
    (module,) = made.modules
    assert sum(kernel.is_template for kernel in module.kernels) == templates, module.wrapper
    assert module.extern_calls == list(extern), module.wrapper
    assert loops == (len(module.kernels) > templates), module.wrapper
    return list(made.outputs)


def largest(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The largest relative error of several results."""
    return max(relative(x, y) for x, y in zip(found, exact, strict=True))


def _parts(matrices: list[torch.Tensor], halves: list[bool]) -> tuple[Any, Any]:
    """What the kernel makes of matrices, and what the operation does."""
    summands = [0 if half else 2 + i % 2 for i, half in enumerate(halves)]
    along = [i % 2 for i in range(len(matrices))]
    sizes = [3 * matrix.shape[dim] + dim for matrix, dim in zip(matrices, along, strict=True)]

    def fn(matrices: Any) -> Any:
        return LORA_SPLIT(matrices, summands, along, sizes, HALF)

    return generated(fn, (matrices,), False), fn(matrices)


def different_bits(first: int) -> int:
    """Matrices in parts that are not those of the operation in eager mode.

    Args:
        first: which one is stored by Inductor's own code; the others are by the template's.
    """
    torch.manual_seed(0)
    matrices = [rand(37, 16, WHOLE), rand(5, 130, WHOLE), rand(70, 5, WHOLE, True), rand(12, 96, WHOLE)]
    matrices.append(rand(20, 64, WHOLE)[:, 3:50])
    given = [*matrices[first:], *matrices[:first]] * 2
    halves = [i >= len(matrices) for i in range(len(given))]
    found = [_parts(given[::turn], halves[::turn]) for turn in (1, -1)]
    return sum(not torch.equal(y, z) for parts in found for y, z in zip(*parts, strict=True))
