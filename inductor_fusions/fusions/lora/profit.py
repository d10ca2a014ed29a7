"""Profitability of linears with adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ... import config
from ...block_mm.problem import size_text
from ...decisions import Query, Span, decide_for_all, tables
from ...decisions.problems import FEW_ROWS
from ...fusion import LeftToStock
from ...operands import check_capability, expected, may_use_tf32
from ...reasons import Reason, like
from . import narrow


class Known:
    """A problem with adapters: the columns of a table's row, and text for reports.

    Attributes:
        kernels: what they are computed by.
        tokens: rows; None where it is not known.
        dtype, adapters: of the base, or of the sum, and of the adapters.
    """

    section: ClassVar[str]
    kernels: ClassVar[str]
    tokens: int | Span | None
    dtype: torch.dtype
    adapters: torch.dtype

    @property
    def key(self) -> dict[str, Any]:
        """The columns of a table's row."""
        return tables.columns_of(self, "tokens")

    def text(self, sizes: str, ranks: str, adapters: str = "adapters") -> str:
        """The shape in words, for reports: "128 x (64 -> 48), rank 16, bfloat16, adapters float32"."""
        tokens = "?" if self.tokens is None else self.tokens
        own, narrow = (tables.dtype_name(dtype) for dtype in (self.dtype, self.adapters))
        return f"{tokens} x ({sizes}), rank {ranks}, {own}, {adapters} {narrow}"


@dataclass(frozen=True)
class Shape(Known):
    """Linears with adapters, as tables describe them.

    Attributes:
        tokens: rows of the input; None where it is not known.
        inner: K of each base product of the first linear: one forward, several in a sum of gradients.
        outer: N of each linear.
        ranks: of the adapters of each linear.
        dtype, adapters: of the base and of the adapters.
        layout: how the weights lie: "t" forward, "n" backward.
    """

    section, kernels = "lora", "narrow_mm and block_mm"
    tokens: int | Span | None
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    adapters: torch.dtype
    layout: str

    def __str__(self) -> str:
        inner, outer = (" + ".join(map(str, sizes)) for sizes in (self.inner, self.outer))
        ranks = " + ".join(str(r) for ranks in self.ranks for r in ranks)
        return self.text(f"{inner} -> {outer}", ranks)


@dataclass(frozen=True)
class Accumulated(Known):
    """Adapters that are added to a value in memory, as tables describe them.

    Attributes:
        tokens: rows of the sum; None where it is not known.
        inner: K of each down-projection.
        masks: how many of them pass one.
        dtype, adapters: of the sum and of the adapters.
    """

    section, kernels = "lora_sums", "narrow_mm and lora_accumulate"
    tokens: int | Span | None
    inner: tuple[int, ...]
    columns: int
    ranks: tuple[int, ...]
    masks: int
    dtype: torch.dtype
    adapters: torch.dtype

    def __str__(self) -> str:
        inner, ranks = (" + ".join(map(str, sizes)) for sizes in (self.inner, self.ranks))
        masks = f", {self.masks} mask{'s' * (self.masks > 1)}" if self.masks else ""
        return self.text(f"{inner} -> {self.columns}", ranks + masks)


@dataclass(frozen=True)
class Dropped(Known):
    """A linear with an adapter behind a dropout, forward and backward together, as tables describe it.

    Attributes:
        tokens: M; None where it is not known.
        inner, outer: K and N of the linear.
        dtype, adapters: of the base and of the adapter.
        masks: 1, or 0 where the skinny GEMM reads what the dropout has left in memory.
    """

    section, kernels = "lora_dropout", "narrow_mm with a mask"
    tokens: int | Span | None
    inner: int
    outer: int
    rank: int
    dtype: torch.dtype
    adapters: torch.dtype
    masks: int = 1

    def __str__(self) -> str:
        return self.text(f"{self.inner} -> {self.outer}", f"{self.rank} behind a dropout", "adapter")


def kernel(shape: Known, device: torch.device) -> str:
    """The kernels of linears with adapters, or of a sum with them, for the report.

    Raises:
        LeftToStock: they are not expected to pay, and the policy asks for that.
    """
    return f"{shape.kernels}, {shape}{_expected(shape, device)}"


def _expected(shape: Known, device: torch.device) -> str:
    return _pays(_query(shape.section, shape.key, str(shape)), shape.tokens, device)


def check_dropped(shape: Dropped, device: torch.device) -> None:
    """Leave a linear that reads what a dropout has left in memory to stock, where that does not pay.

    Raises:
        LeftToStock: it is not expected to, and the policy asks for that.
    """
    try:
        _expected(replace(shape, masks=0), device)
    except LeftToStock as miss:
        raise LeftToStock(like(miss.reason, f"adapter with dropout: {miss}")) from None


def check_few_rows(tokens: int | Span | None, plain: bool) -> None:
    """Leave adapters that are not plain to stock for few rows, for which only one operation is measured."""
    few = tokens if isinstance(tokens, int) else tokens.hint if isinstance(tokens, Span) else None
    if not plain and not config.always() and few is not None and few <= FEW_ROWS:
        raise Reason.NOT_MEASURED.left_to_stock(
            f"up to {FEW_ROWS} rows are not measured with an operation between A and B, or after B"
        )


def narrow_kernel(shape: narrow.Shape, tokens: int | Span | None, device: torch.device) -> str:
    """The kernel of a skinny GEMM that stands alone, for the report.

    Args:
        tokens: the rows of x, or its K where x is transposed.

    Raises:
        LeftToStock: it is not expected to pay, and the policy asks for that.
    """
    text = f"{size_text(shape.rows)} x ({size_text(shape.inner)} -> {' + '.join(map(str, shape.ranks))})"
    if None in narrow.key(shape).values():
        tokens = None
    return f"narrow_mm, {text}{_pays(_query('narrow_mm', narrow.key(shape), text), tokens, device)}"


def merged(key: dict[str, Any], tokens: int | Span | None, device: torch.device) -> str:
    """The source of the expected gain of two products for a merged adapter, for the report.

    Args:
        key: the columns of a table's row; None for a symbolic width.
        tokens: rows of the input.

    Raises:
        LeftToStock: they are not expected to pay, and the policy asks for that.
    """
    return _pays(_query("lora_merged", key, ""), None if None in key.values() else tokens, device)


def _query(section: str, key: dict[str, Any], text: str) -> Query:
    """A problem, with how torch multiplies float32 where some of it is."""
    wide = "float32" in (key["dtype"], key.get("adapters"), key.get("narrow"))
    return Query(section, {**key, "tf32": wide and may_use_tf32()}, text=text)


def _pays(query: Query, tokens: int | Span | None, device: torch.device) -> str:
    """Return the source of the expected gain, for the report, or raise if there is none."""
    check_capability(device)
    decision = decide_for_all(query, tokens, device)
    if not decision.measured:
        decision = min(
            (decide_for_all(one, tokens, device) for one in _between(query)),
            key=lambda found: found.lower if found.kernel is not None else 0.0,
        )
    return f", {expected(decision)}"


def _between(query: Query) -> list[Query]:
    """The problems between which one lies that is not measured: each must pay.

    With TF32, stock takes no less for adapters of float32 than for those of 16 bits, and no more than
    without.
    """
    name = "narrow" if query.section == "narrow_mm" else "adapters"
    if not query.row["tf32"] or name not in query.row:
        return [query]
    exact = {**query.row, "tf32": False}
    return [replace(query, row=exact), replace(query, row={**exact, name: query.row["dtype"]})]
