"""Errors of the kernel that adds adapters to what is in memory, for Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo

from inductor_fusions.fusions.lora import accumulate_kernel
from inductor_fusions.fusions.lora.accumulate import LORA_ACCUMULATE
from inductor_fusions.fusions.lora.accumulate_kernel import Config
from tests.lora.interpreted import HALF, WHOLE, generated, rand
from tests.support.errors import relative


@dataclass(frozen=True)
class Case:
    """One call of the operation.

    Attributes:
        rows, columns: M and N.
        inner: K of each product.
        masks: the products that have a mask.
        dtypes: of the base, of the operands of the products, and of the result.
        base: how the base lies: "n" row-major, "t" transposed, "gaps" every second column, "loop" computed,
            "product" one's result, that the kernel writes over.
        turned: whether each b is transposed, and each mask.
        dynamic: whether M is symbolic.
        behind: whether something is computed of the result.
        packed: whether each a is some columns of a wider matrix.
        config: of the kernel.
    """

    rows: int = 37
    columns: int = 80
    inner: tuple[int, ...] = (16,)
    masks: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (HALF, HALF, HALF)
    base: str = "n"
    turned: bool = False
    dynamic: bool = False
    behind: bool = False
    packed: bool = False
    config: Config = field(default_factory=lambda: Config(16, 32, 4))


CASES = {
    "plain": Case(),
    "one mask": Case(masks=(0,)),
    "two masks": Case(inner=(16, 8), masks=(0, 1)),
    "three masks": Case(inner=(16, 8, 24), masks=(0, 1, 2), turned=True),
    "some masks": Case(inner=(16, 8, 24), masks=(1,)),
    "odd sizes": Case(rows=19, columns=51, inner=(5, 1), masks=(1,)),
    "one row": Case(rows=1, masks=(0,)),
    "many steps": Case(inner=(384, 150), masks=(0,)),
    "base transposed": Case(base="t", masks=(0,)),
    "base with gaps": Case(base="gaps"),
    "base computed": Case(base="loop", masks=(0,)),
    "base written over": Case(base="product", masks=(0,)),
    "base written over, odd sizes": Case(rows=19, columns=51, inner=(5, 150), masks=(1,), base="product"),
    "b transposed": Case(turned=True),
    "float32": Case(dtypes=(WHOLE, WHOLE, WHOLE), inner=(16, 5), masks=(0,)),
    "base of float32": Case(dtypes=(WHOLE, HALF, WHOLE), masks=(0,)),
    "base of float32, result of 16 bits": Case(dtypes=(WHOLE, HALF, HALF)),
    "result of float32": Case(dtypes=(HALF, HALF, WHOLE), masks=(0,)),
    "result of float32, base computed": Case(dtypes=(HALF, HALF, WHOLE), base="loop"),
    "symbolic rows": Case(dynamic=True, masks=(0,)),
    "symbolic rows, base computed": Case(dynamic=True, masks=(0,), base="loop"),
    "something behind it": Case(behind=True, masks=(0,)),
    "some columns of a packed A": Case(inner=(16, 8), masks=(1,), packed=True),
    "the default tile": Case(rows=70, columns=200, masks=(0,), config=Config(64, 128, 4)),
}
#: What is under the masks, and which elements of the result are no numbers then.
SPECIAL = {"nan": float("nan"), "inf": float("inf")}


def errors(name: str) -> float:
    """The largest relative error against float64; of "nan" and "inf", how many elements are wrong."""
    torch.manual_seed(0)
    if name in SPECIAL:
        return _misplaced(SPECIAL[name])
    case = CASES[name]
    base, a, b, scales, kept = operands(case)
    found = _run(case, base, a, b, scales, kept)
    exact = (2 * base if case.base == "loop" else base).double()
    masks = dict(zip(case.masks, kept, strict=True))
    for i, (left, right, scale) in enumerate(zip(a, b, scales, strict=True)):
        part = scale * left.double() @ right.double()
        exact = exact + (part * masks[i] if i in masks else part)
    return relative(found, torch.sigmoid(exact) if case.behind else exact)


def operands(case: Case) -> tuple[Any, ...]:
    """Base, a, b, scales and masks."""
    wide, thin, _ = case.dtypes
    base = rand(case.rows, case.columns * (2 if case.base == "gaps" else 1), wide, case.base == "t")
    gap = 8 if case.packed else 0
    a = [rand(case.rows, k + 2 * gap, thin)[:, gap : gap + k] for k in case.inner]
    b = [rand(k, case.columns, thin, case.turned) for k in case.inner]
    shape = (case.columns, case.rows) if case.turned else (case.rows, case.columns)
    kept = [torch.rand(shape) > 0.3 for _ in case.masks]
    kept = [mask.t() for mask in kept] if case.turned else kept
    scales = [1.0, -0.5, 2.25][: len(a)]
    base = base[:, ::2] if case.base == "gaps" else base
    return base, a, b, scales, kept


def _run(case: Case, base: Any, a: Any, b: Any, scales: list[float], kept: Any) -> torch.Tensor:
    accumulate_kernel.default = lambda shape: case.config  # type: ignore[assignment]

    def fn(base: Any, a: Any, b: Any, kept: Any) -> Any:
        if case.base == "loop":
            base = base + base
        if case.base == "product":
            base = base @ torch.eye(case.columns, dtype=base.dtype)
        y = LORA_ACCUMULATE(base, a, b, scales, kept, list(case.masks), case.dtypes[2])
        return [torch.sigmoid(y) if case.behind else y]

    if case.dynamic:
        for tensor in (base, *a, *kept):
            torch._dynamo.mark_dynamic(tensor, 0)
    product = case.base == "product"
    extern = ["extern_kernels.mm"] if product else []
    (found,) = generated(fn, (base, a, b, kept), loops=product, extern=extern)
    assert found.dtype == case.dtypes[2]
    return found


def _misplaced(fill: float) -> float:
    """A row of a that is no number: it is none under the mask as well, as 0 times it."""
    case = replace(CASES["one mask"], inner=(16, 8), masks=(0,))
    base, a, b, scales, kept = operands(case)
    a[0][3] = fill
    b[0].abs_()
    found = _run(case, base, a, b, scales, kept)
    wanted = torch.zeros(case.rows, case.columns, dtype=torch.bool)
    wanted[3] = True
    under = found[3][~kept[0][3]]
    assert bool(under.isnan().all()) and under.numel()
    return float((found.isfinite() == wanted).sum())
