"""Sections of the tables: columns, keys and sizes of each kind of problem.

One definition of each section is used by whoever checks a table, reads it, estimates between its rows, and
reports. A row is a JSON object; a problem that is asked for has the same columns, without those measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import attention_rows
from .estimating import Process
from .gemm_times import of_row, speedup
from .schema import (
    ACCUMULATE,
    BLOCK_MM,
    DECODE,
    DECODE_ATTENTION,
    NARROW,
    NARROWEST,
    Check,
    are_grouped,
    equally_long,
    half,
    is_count,
    is_dtype,
    is_flag,
    is_gain,
    is_gains,
    is_layout,
    is_options,
    is_size,
    is_text,
    list_of,
    maybe,
    padded,
)

#: Kernels that gain nothing but time must be measured or expected to be this much faster than stock.
MARGIN = 1.03

Row = Mapping[str, Any]

#: Rows that are one tile: up to so many, linears with adapters are a pair of kernels that read weights once.
FEW_ROWS = 64
#: Rows up to which kernels multiply without tensor cores.
SINGLE_ROWS = 4
#: The largest K of the second product of an adapter: a rank of 128 in three summands.
MOST_INNER = 3 * 128


#: How speedups vary: of linears; of attention, whose kernels differ more, and from shape to shape; and of
#: adapters with dropout.
_LINEARS = Process(deviation=0.08, length=20.0, noise=0.02)
_ATTENTION = Process(deviation=0.32, length=5.0, noise=0.1)
_DROPOUT = Process(deviation=0.15, length=4.0, noise=0.03)


@dataclass(frozen=True)
class Section:
    """One kind of problem.

    Attributes:
        name: of the list in a table.
        columns: the columns that describe the problem of a row: name -> check.
        may: optional ones: name -> (check, the value that a missing column stands for).
        measured: the columns of measured values, which a query does not have.
        needed: those of them that every row has.
        same: what two problems must agree in to be comparable at all.
        sizes: positive numbers whose ratios give the distance of two problems; the number of tokens is last.
        weights: the weight of a doubling of each size in the distance.
        agree: whether the columns of a row that are lists fit together.
        along: the column with the number of tokens, rows or samples.
        reach: problems at a larger distance say nothing about each other.
        margin: a kernel is chosen if its gain is at least this; below 1 if it saves memory.
        doubt: of an estimate for a problem: the standard deviation of the logarithm of its gain.
        process: how gains vary over the problems.
        gains: whether rows have gains; else they have only tiles.
        untuned: the logarithm of what a configuration that is not measured loses of an estimated gain.
        fills: what a kernel gains as a model of its time has it, such as by how it fills a device, given a
            problem, the kernel and the number of multiprocessors: a logarithm, which estimates correct the
            gains of rows by.
    """

    name: str
    columns: Mapping[str, Check]
    same: Callable[[Row], tuple[Hashable, ...]]
    sizes: Callable[[Row], tuple[float, ...]]
    weights: tuple[float, ...]
    agree: Callable[[Row], bool] = lambda row: True
    along: str = "tokens"
    reach: float = 6.0
    margin: float = MARGIN
    doubt: Callable[[Row], float] = lambda row: 0.0
    process: Process = _LINEARS
    may: Mapping[str, tuple[Check, Any]] = field(default_factory=dict)
    measured: Mapping[str, Check] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    gains: bool = True
    untuned: Callable[[Row], float] = lambda row: 0.0
    fills: Callable[[Row, str, int], float] = lambda row, kernel, processors: 0.0

    def check(self, row: Any, is_problem: bool = False) -> None:
        """Refuse an object that is no row of this section; or no problem, a row without measured columns."""
        measured, needed = ({}, ()) if is_problem else (self.measured, self.needed)
        if type(row) is not dict:
            raise ValueError(f"{row!r} is not an object")
        known = {**self.columns, **{n: c for n, (c, _) in self.may.items()}, **measured}
        for name in (*self.columns, *needed):
            if name not in row:
                raise ValueError(f"{name} is missing")
        for name, value in row.items():
            if name not in known:
                raise ValueError(f"unknown column {name}")
            if not known[name](value):
                raise ValueError(f"{name} = {value!r} is invalid")
        if not self.agree(row):
            lists = ", ".join(f"{name} = {value}" for name, value in row.items() if type(value) is list)
            raise ValueError(f"the lists do not fit together: {lists}")

    def value(self, row: Row, name: str) -> Any:
        """The value of a row in a column, or what a missing column stands for."""
        return row[name] if name in row else self.may[name][1]

    def key(self, row: Row) -> tuple[Hashable, ...]:
        """The problem of a row without the number of tokens: equal if kernels compute the same.

        16-bit dtypes are equal, and so are ranks that are padded to the same tile.
        """
        if not self.along:
            return self.same(row) + self.sizes(row)
        found = [(n, self.value(row, n)) for n in (*self.columns, *self.may) if n != self.along]
        return tuple(_canonical(name, value) for name, value in found)

    def place(self, row: Row) -> tuple[float, ...]:
        """The logarithms, to the base of 2, of the sizes of a row, weighted."""
        return tuple(w * math.log2(size) for w, size in zip(self.weights, self.sizes(row), strict=True))

    def is_same(self, row: Row, other: Row) -> bool:
        """Whether two rows have the same problem, with the same number of tokens."""
        return self.key(row) == self.key(other) and self.sizes(row) == self.sizes(other)


def _canonical(name: str, value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(_canonical(name, item) for item in value)
    if name in ("rank", "ranks"):
        return padded(value)
    return half(value) if isinstance(value, str) else value


def _adapter_products(row: Row) -> list[int]:
    """K of the products of a grouped GEMM that belong to adapters: much smaller than that of the others."""
    inner = row["k"] or []
    return [k for k in inner if k <= MOST_INNER and 4 * k <= max(inner)]


def has_adapters(row: Row) -> bool:
    """Whether a grouped GEMM has products of adapters: then its gain is in a row of "lora"."""
    return bool(_adapter_products(row))


def _block_same(row: Row) -> tuple[Hashable, ...]:
    layouts = tuple(sorted(set(row["layout"])))
    # Sums of products with and without adapters, and linears with and without activations, are other kernels.
    return row["kind"], layouts, bool(row.get("activation")), has_adapters(row), half(row["dtype"])


def _block_sizes(row: Row) -> tuple[float, ...]:
    inner, small = row["k"] or row["m"], _adapter_products(row)
    base = sum(inner) - sum(small)
    widths = sum(row["n"]), base, len(row["n"]), len(inner), NARROWEST + sum(small)
    return _ACTIVATIONS.get(row.get("activation", ""), 1.0), *widths, *_rows(row)


#: Square roots of the approximate number of instructions of an activation.
_ACTIVATIONS: Mapping[str, float] = {
    "silu": 1.4, "sigmoid": 1.4, "gelu_quick": 1.4, "gelu_tanh": 1.7, "gelu": 2.0
}  # fmt: skip


def _rows(row: Row) -> tuple[float, float]:
    """The number of tokens, and in front of it a number for the kernels that exist for so many."""
    tokens = row["tokens"]
    return 1 if tokens <= SINGLE_ROWS else 2 if tokens <= FEW_ROWS else 4, tokens


# The gain of a row is that of its fastest configuration; `bench.tile_model` has what the choice loses.
def _untuned(row: Row) -> float:
    return 0.02 if row["tokens"] > FEW_ROWS else 0.0


def _block_fills(row: Row, kernel: str, processors: int) -> float:
    return 0.0 if row["tokens"] <= FEW_ROWS else speedup(of_row(row), processors)


def _padded(ranks: Sequence[int]) -> int:
    """The width of the tiles of all adapters together; 0 if one of them is empty."""
    return sum(map(padded, ranks)) if all(ranks) else 0


def _lora_same(row: Row) -> tuple[Hashable, ...]:
    few = row["tokens"] <= FEW_ROWS
    return half(row["dtype"]), half(row["adapters"]), row["layout"], row.get("tf32", False), few


def _lora_sizes(row: Row) -> tuple[float, ...]:
    ranks = _padded([rank for ranks in row["ranks"] for rank in ranks])
    count = len(row["inner"]) + len(row["outer"]) - 1
    return sum(row["inner"]), sum(row["outer"]), ranks, count, row["tokens"]


def _sums_same(row: Row) -> tuple[Hashable, ...]:
    return half(row["dtype"]), half(row["adapters"]), row["masks"] > 0, row.get("tf32", False)


def _sums_sizes(row: Row) -> tuple[float, ...]:
    ranks = _padded(row["ranks"])
    return sum(row["inner"]), row["columns"], ranks, len(row["inner"]), 1 + row["masks"], row["tokens"]


def _narrow_same(row: Row) -> tuple[Hashable, ...]:
    masked, tf32 = row.get("masks", 0) > 0, row.get("tf32", False)
    return half(row["dtype"]), half(row["narrow"]), row["layout"], masked, tf32


def _narrow_sizes(row: Row) -> tuple[float, ...]:
    count = len(row["ranks"])
    return row["width"], _padded(row["ranks"]) / count, count, row["tokens"]


def _linear_sizes(row: Row) -> tuple[float, ...]:
    return row["inner"], row["outer"], _padded([row["rank"]]), row["tokens"]


def _dropout_same(row: Row) -> tuple[Hashable, ...]:
    return half(row["dtype"]), half(row["adapters"]), row["masks"], row.get("tf32", False)


def _merged_same(row: Row) -> tuple[Hashable, ...]:
    return half(row["dtype"]), row["base"], row["train"], row.get("tf32", False)


#: The columns of one linear with one adapter.
_LINEAR = dict(inner=is_size, outer=is_size, rank=is_size, dtype=is_dtype, tokens=is_size)
_TF32: Mapping[str, tuple[Check, Any]] = {"tf32": (is_flag, False)}
_MASKS: Mapping[str, tuple[Check, Any]] = {"masks": (is_count, 0)}
_GAIN: Mapping[str, Check] = {"gain": is_gain}

SECTIONS: Mapping[str, Section] = {
    section.name: section
    for section in (
        Section(
            "attention",
            dict(
                batch=is_size, heads=is_size, q_len=is_size, kv_len=is_size, head_dim=is_size, dtype=is_dtype,
                mask=is_text, train=is_flag,
            ),
            attention_rows.same, attention_rows.sizes, (1.0, 1.0, 0.5, 1.0, 0.5), along="", reach=8.0,
            doubt=attention_rows.doubt, process=_ATTENTION, fills=attention_rows.idle_multiprocessors,
            may=_TF32,
            measured=dict(
                gain=is_gains, options=is_options, gemm_backward=is_count, visible=is_gain,
            ),
            needed=("gain",),
        ),
        Section(
            "decode_attention",
            dict(
                batch=is_size, heads=is_size, kv_heads=is_size, q_len=is_size, kv_len=is_size,
                head_dim=is_size, dtype=is_dtype,
                mask=lambda v: v in ("none", "causal", "boolean", "additive"),
            ),
            lambda row: (half(row["dtype"]), row["mask"], row["q_len"]),
            lambda row: (
                row["head_dim"], row["heads"] // row["kv_heads"], row["kv_heads"], row["kv_len"],
                row["batch"],
            ),
            # A short cache is read in the time that a launch takes: long ones say nothing of it.
            (1.0, 1.0, 0.5, 2.0, 0.5), along="batch", reach=3.0, process=_ATTENTION,
            # Over the best SDPA: the mean of a cache that fills, if a full one loses nothing.
            measured={**_GAIN, "config": maybe(DECODE_ATTENTION)}, needed=("gain", "config"),
        ),
        Section(
            "block_mm",
            dict(
                kind=lambda v: v in ("gated", "shared_a", "shared_b", "sum", "linear", "mixed"),
                n=list_of(is_size), m=maybe(list_of(is_size)), k=maybe(list_of(is_size)),
                layout=list_of(lambda v: v in ("nn", "nt", "tn", "tt")), dtype=is_dtype, tokens=is_size,
            ),
            _block_same, _block_sizes, (1.0, 0.7, 0.7, 2.0, 2.0, 0.5, 1.0, 0.7), reach=4.0,
            agree=are_grouped, untuned=_untuned, doubt=lambda row: 2 * _untuned(row), fills=_block_fills,
            may={"activation": (is_text, ""), "groups": (list_of(is_count), [])},
            measured={"gain": is_gain, "config": maybe(BLOCK_MM), "capability": list_of(is_count)},
            needed=("gain", "config"),
        ),
        Section(
            "lora",
            dict(
                inner=list_of(is_size), outer=list_of(is_size), ranks=list_of(list_of(is_size, 0)),
                dtype=is_dtype, adapters=is_dtype, layout=is_layout, tokens=is_size,
            ),
            _lora_same, _lora_sizes, (1.0,) * 5, may=_TF32, measured=_GAIN, needed=("gain",),
            agree=equally_long("outer", "ranks"),
            # Skinny GEMMs take the rest of the time.
            fills=lambda row, kernel, processors: _block_fills(row, kernel, processors) / 2,
        ),
        Section(
            "lora_sums",
            dict(
                inner=list_of(is_size), columns=is_size, ranks=list_of(is_size), masks=is_count,
                dtype=is_dtype, adapters=is_dtype, tokens=is_size,
            ),
            _sums_same, _sums_sizes, (1.0,) * 6, may=_TF32, measured=_GAIN, needed=("gain",),
            agree=equally_long("inner", "ranks"),
        ),
        Section(
            "lora_dropout",
            {**_LINEAR, "adapters": is_dtype, "masks": is_count}, _dropout_same, _linear_sizes,
            (1.0,) * 4, process=_DROPOUT, may=_TF32, measured=_GAIN, needed=("gain",),
        ),
        Section(
            "lora_merged",
            {**_LINEAR, "base": is_flag, "train": is_flag}, _merged_same, _linear_sizes,
            (1.0,) * 4, reach=4.0, process=_DROPOUT, may=_TF32, measured=_GAIN, needed=("gain",),
        ),
        Section(
            "narrow_mm",
            dict(
                width=is_size, ranks=list_of(is_size), layout=is_layout, dtype=is_dtype, narrow=is_dtype,
                tokens=is_size,
            ),
            # The library is slow where a product has few columns, and gains with each doubling of them.
            _narrow_same, _narrow_sizes, (1.0, 4.0, 1.0, 1.0), may={**_MASKS, **_TF32},
            # Tiles that were fastest as a part of a linear have no gain of their own.
            measured={**_GAIN, "config": maybe(NARROW)}, needed=("config",),
        ),
        Section(
            "lora_accumulate",
            dict(
                columns=is_size, inner=list_of(is_size), masks=is_count, dtype=is_dtype, narrow=is_dtype,
                tokens=is_size,
            ),
            lambda row: (half(row["dtype"]), half(row["narrow"]), row["masks"]),
            lambda row: (row["columns"], sum(row["inner"]), len(row["inner"]), row["tokens"]),
            (1.0,) * 4, measured={**_GAIN, "config": maybe(ACCUMULATE)}, needed=("config",), gains=False,
        ),
        Section(
            "lora_decode",
            dict(
                inner=is_size, columns=list_of(is_size), ranks=list_of(is_size), dtype=is_dtype,
                adapters=is_dtype, tokens=is_size,
            ),
            lambda row: (half(row["dtype"]), half(row["adapters"])),
            lambda row: (
                row["inner"], sum(row["columns"]), sum(map(padded, row["ranks"])), len(row["columns"]),
                row["tokens"],
            ),
            (1.0,) * 5, measured={"config": maybe(DECODE)}, needed=("config",), gains=False,
            agree=equally_long("columns", "ranks"),
        ),
        Section(
            "outer_product_linear",
            dict(dtype=is_dtype, train=is_flag, p=is_size, q=is_size, columns=is_size, rows=is_size),
            lambda row: (half(row["dtype"]), row["train"]),
            lambda row: (row["p"], row["q"], row["columns"], row["rows"]),
            (4.0, 4.0, 4.0, 1.0), along="rows", reach=1.0, measured=_GAIN, needed=("gain",),
        ),
        Section(
            "dot_interaction",
            dict(
                dtype=is_dtype, train=is_flag, features=is_size, width=is_size, dense=is_flag, samples=is_size
            ),
            lambda row: (half(row["dtype"]), row["train"], row["dense"], row.get("pairs", "triangle")),
            lambda row: (row["features"], row["width"], row["samples"]),
            (1.0,) * 3, along="samples", reach=1.0,
            may={"pairs": (lambda v: v in ("triangle", "given", "gathered"), "triangle")},
            measured={**_GAIN, "tiles": list_of(is_size)}, needed=("gain", "tiles"),
        ),
        Section(
            "linear_cross_entropy",
            dict(
                dtype=is_dtype, train=is_flag, frozen=is_flag, reduced=is_flag, width=is_size,
                classes=is_size, tokens=is_size,
            ),
            lambda row: (half(row["dtype"]), row["train"], row["frozen"], row["reduced"]),
            lambda row: (row["width"], row["classes"], row["tokens"]),
            (1.0,) * 3, reach=3.0, margin=0.97, measured=_GAIN, needed=("gain",),
        ),
    )
}  # fmt: skip
