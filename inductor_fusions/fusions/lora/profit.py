"""Whether linears with adapters are measured to be faster than stock's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ... import config, tables
from ...fusion import LeftToStock
from ..block_mm.heuristics import capability
from ..block_mm.problem import size_text
from . import narrow


@dataclass(frozen=True)
class Shape:
    """What a table knows linears with adapters by.

    Attributes:
        tokens: rows of the input; None where symbolic.
        inner: K of each base product of the first linear: one forward, several in a sum of gradients.
        outer: N of each linear.
        ranks: of the adapters of each linear.
        dtype, adapters: of the base and of the adapters.
        layout: how the weights lie: "t" forward, "n" backward.
    """

    tokens: int | None
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    adapters: torch.dtype
    layout: str

    @property
    def key(self) -> dict[str, Any]:
        """What a row of a table must agree in."""
        return {
            "inner": list(self.inner),
            "outer": list(self.outer),
            "ranks": [list(ranks) for ranks in self.ranks],
            "dtype": tables.dtype_name(self.dtype),
            "adapters": tables.dtype_name(self.adapters),
            "layout": self.layout,
        }

    def __str__(self) -> str:
        inner, outer = (" + ".join(map(str, sizes)) for sizes in (self.inner, self.outer))
        ranks = " + ".join(str(r) for ranks in self.ranks for r in ranks)
        tokens = "?" if self.tokens is None else self.tokens
        names = f"{tables.dtype_name(self.dtype)}, adapters {tables.dtype_name(self.adapters)}"
        return f"{tokens} x ({inner} -> {outer}), rank {ranks}, {names}"


@dataclass(frozen=True)
class Accumulated:
    """What a table knows a sum of adapters and what is in memory by.

    Attributes:
        tokens: rows of the sum; None where symbolic.
        inner: K of each down-projection.
        columns: of the sum.
        ranks: of the adapters.
        masks: how many of them pass one.
        dtype, adapters: of the sum and of the adapters.
    """

    tokens: int | None
    inner: tuple[int, ...]
    columns: int
    ranks: tuple[int, ...]
    masks: int
    dtype: torch.dtype
    adapters: torch.dtype

    @property
    def key(self) -> dict[str, Any]:
        """What a row of a table must agree in."""
        return {
            "inner": list(self.inner),
            "columns": self.columns,
            "ranks": list(self.ranks),
            "masks": self.masks,
            "dtype": tables.dtype_name(self.dtype),
            "adapters": tables.dtype_name(self.adapters),
        }

    def __str__(self) -> str:
        inner, ranks = (" + ".join(map(str, sizes)) for sizes in (self.inner, self.ranks))
        tokens = "?" if self.tokens is None else self.tokens
        masks = f", {self.masks} mask{'s' * (self.masks > 1)}" if self.masks else ""
        names = f"{tables.dtype_name(self.dtype)}, adapters {tables.dtype_name(self.adapters)}"
        return f"{tokens} x ({inner} -> {self.columns}), rank {ranks}{masks}, {names}"


@dataclass(frozen=True)
class Dropped:
    """What a table knows a linear by whose adapter is behind a dropout: forward and backward together.

    Attributes:
        tokens: M; None where symbolic.
        inner, outer: K and N of the linear.
        rank: of the adapter.
        dtype, adapters: of the base and of the adapter.
    """

    tokens: int | None
    inner: int
    outer: int
    rank: int
    dtype: torch.dtype
    adapters: torch.dtype

    @property
    def key(self) -> dict[str, Any]:
        """What a row of a table must agree in."""
        return {
            "inner": self.inner,
            "outer": self.outer,
            "rank": self.rank,
            "dtype": tables.dtype_name(self.dtype),
            "adapters": tables.dtype_name(self.adapters),
        }

    def __str__(self) -> str:
        tokens = "?" if self.tokens is None else self.tokens
        names = f"{tables.dtype_name(self.dtype)}, adapter {tables.dtype_name(self.adapters)}"
        return f"{tokens} x ({self.inner} -> {self.outer}), rank {self.rank} behind a dropout, {names}"


def dropped_kernel(shape: Dropped, device: torch.device) -> str:
    """The kernels of a linear whose adapter is behind a dropout, for the report.

    Raises:
        LeftToStock: no measurement says that they pay, and the policy asks for that.
    """
    text = f"narrow_mm with a mask, {shape}"
    key = {**shape.key, "masks": 1}
    return f"{text}{_pays('lora_dropout', key, shape.tokens, str(shape), device)}"


def check_dropped(shape: Dropped, device: torch.device) -> None:
    """Leave a linear that reads what a dropout has left in memory to stock, where that does not pay.

    What is not measured counts as without the dropout.

    Raises:
        LeftToStock: it is, and the policy asks for that.
    """
    table = tables.load(tables.device_name(device))
    if table is None or shape.tokens is None or config.policy == "always":
        return
    key = {**shape.key, "masks": 0}
    known = [row for row in table.get("lora_dropout", []) if tables.agrees(row, key)]
    if any(row["gain"] < tables.MARGIN for row in tables.bracket(known, shape.tokens)):
        raise LeftToStock("behind a dropout it is not measured to be faster than stock at this shape")


def kernel(shape: Shape, device: torch.device) -> str:
    """The kernels of linears with adapters, for the report.

    Raises:
        LeftToStock: no measurement says that they pay, and the policy asks for that.
    """
    text = f"narrow_mm and block_mm, {shape}"
    return f"{text}{_pays('lora', shape.key, shape.tokens, str(shape), device)}"


def accumulate_kernel(shape: Accumulated, device: torch.device) -> str:
    """The kernels of a sum of adapters and what is in memory, for the report.

    Raises:
        LeftToStock: no measurement says that they pay, and the policy asks for that.
    """
    text = f"narrow_mm and lora_accumulate, {shape}"
    return f"{text}{_pays('lora_sums', shape.key, shape.tokens, str(shape), device)}"


def narrow_kernel(shape: narrow.Shape, device: torch.device) -> str:
    """The kernel of a narrow product that stands alone, for the report.

    Raises:
        LeftToStock: no measurement says that it pays, and the policy asks for that.
    """
    tokens = shape.inner if shape.layout == "t" else shape.rows
    text = f"{size_text(shape.rows)} x ({size_text(shape.inner)} -> {' + '.join(map(str, shape.ranks))})"
    return f"narrow_mm, {text}{_pays('narrow_mm', narrow.key(shape), tokens, text, device)}"


def _pays(section: str, key: dict[str, Any], tokens: int | None, text: str, device: torch.device) -> str:
    """Where the table of a device has the gain from, for the report.

    A row counts for its own number of tokens; two rows count for those between them where both are faster
    than stock and not further apart than a factor of `tables.BRACKET`.
    """
    if capability(device) < 80:
        raise LeftToStock("the device is older than compute capability 8.0")
    try:
        return f", {_gain(section, key, tokens, text, device):.2f}x measured"
    except LeftToStock:
        if config.policy != "always":
            raise
    return ", not measured"


def _gain(section: str, key: dict[str, Any], tokens: int | None, text: str, device: torch.device) -> float:
    name = tables.device_name(device)
    table = tables.load(name)
    if table is None:
        raise LeftToStock(f"no measurements for the device {name}")
    if tokens is None:
        raise LeftToStock("the number of rows is symbolic: what pays for one may not pay for another")
    known = [row for row in table.get(section, []) if tables.agrees(row, key)]
    around = tables.bracket(known, tokens)
    if not around:
        raise LeftToStock(f"not measured on {name}: {text}")
    gain = min(float(row["gain"]) for row in around)
    if gain < tables.MARGIN:
        raise LeftToStock(f"not measured to be faster than stock on {name} at this shape")
    return gain
