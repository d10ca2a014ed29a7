"""The problem of a grouped GEMM, by which kernels are chosen: sizes, layouts and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..decisions import tables
from ..decisions.problems import SINGLE_ROWS
from ..operands import known_size


@dataclass(frozen=True)
class Problem:
    """The sizes of a grouped GEMM.

    Attributes:
        rows: M of each group; None where it is symbolic.
        columns: N of each group.
        inner: K of each product; None where it is symbolic.
        layouts: of each product, two letters: whether a and b have their elements in order ("n", along
            the last dim) or are transposed ("t", along the first).
        dtype: of the operands of the first product.
        gated: whether the two groups are multiplied.
        shared: "a" or "b" where all products have that operand in common, else "".
        activation: that the kernel applies to the first group; what the scheduler fuses behind it is not
            known here.
        lefts: of each product, the number of its left operand; () where `shared` says all there is.
    """

    rows: tuple[int | None, ...]
    columns: tuple[int, ...]
    inner: tuple[int | None, ...]
    groups: tuple[int, ...]
    layouts: tuple[str, ...]
    dtype: torch.dtype
    gated: bool = False
    shared: str = ""
    activation: str = ""
    lefts: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The kind in tables: "gated", "shared_a", "shared_b", "sum", "linear", or "mixed"."""
        count = self.groups[-1] + 1
        if self.gated:
            return "gated"
        if count == 1:
            return "linear" if len(self.groups) == 1 else "sum"
        if len(self.groups) == count and self.shared:
            return f"shared_{self.shared}"
        return "mixed"

    @property
    def key(self) -> dict[str, Any]:
        """What a row of a table must agree in. Rows of a shared a, K of a shared b, are left open."""
        open_inner = self.kind == "shared_b"
        return {
            "kind": self.kind,
            **({"groups": list(self.groups)} if self.kind == "mixed" else {}),
            **({"activation": self.activation} if self.kind in ("gated", "linear") else {}),
            "n": list(self.columns),
            "m": list(self.rows) if open_inner else None,
            "k": None if open_inner else list(self.inner),
            "layout": list(self.layouts),
            "dtype": tables.dtype_name(self.dtype),
        }

    @property
    def tokens(self) -> int | None:
        """The size that differs from call to call: rows, or K where the gradient of weights is computed."""
        return self.inner[0] if self.kind == "shared_b" else self.rows[0]


def describe(problem: Problem) -> str:
    """A problem in words: "2048 x (4096 -> 14336 + 14336), bfloat16, silu"."""
    inner = problem.inner if problem.kind == "sum" else dict.fromkeys(problem.inner)
    rows = " + ".join(map(size_text, dict.fromkeys(problem.rows)))
    sizes = [" + ".join(map(size_text, each)) for each in (inner, problem.columns)]
    words = [
        f"{rows} x ({' -> '.join(sizes)})",
        str(problem.dtype).removeprefix("torch."),
        problem.activation,
    ]
    return ", ".join(filter(None, words))


def size_text(size: int | None) -> str:
    """A size in words; a symbolic one is "?"."""
    return "?" if size is None else str(size)


def few_rows(problem: Problem) -> int:
    """The number of rows if the template for few rows supports the problem, else 0."""
    rows = problem.rows[0]
    if rows is None or rows > SINGLE_ROWS or set(problem.rows) != {rows} or None in problem.inner:
        return 0
    return rows if {x[1] for x in problem.layouts} == {"t"} else 0


def tiles(problem: Problem, block_m: int, block_n: int) -> int:
    """Number of tiles of a problem."""
    groups = list(zip(problem.rows, problem.columns, strict=True))[: 1 if problem.gated else None]
    return sum(-(-(512 if m is None else m) // block_m) * -(-n // block_n) for m, n in groups)


def of_operands(
    a: Sequence[Any],
    b: Sequence[Any],
    groups: Sequence[int],
    gated: bool,
    dtype: torch.dtype,
    names: Any,
    activation: str,
) -> Problem:
    """A problem from (sizes, strides) of its operands.

    Args:
        a, b: of each product: ((rows, columns), (strides)).
        gated: whether the groups are multiplied.
        names: of each product: what tells its operands apart, a pair.
    """
    first = [list(groups).index(group) for group in range(groups[-1] + 1)]
    lefts = list(dict.fromkeys(pair[0] for pair in names))
    shared = "a" if len(lefts) == 1 else ""
    shared = shared or ("b" if len({pair[1] for pair in names}) == 1 else "")
    return Problem(
        rows=tuple(known_size(a[p][0][0]) for p in first),
        columns=tuple(known_size(b[p][0][1]) or 0 for p in first),
        inner=tuple(known_size(left[0][1]) for left in a),
        groups=tuple(groups),
        layouts=tuple(_letter(left) + _letter(right) for left, right in zip(a, b, strict=True)),
        dtype=dtype,
        gated=gated,
        shared=shared,
        activation=activation,
        lefts=tuple(lefts.index(pair[0]) for pair in names),
    )


def _letter(operand: Any) -> str:
    (_, _), (_, last) = operand
    return "n" if last == 1 else "t"
