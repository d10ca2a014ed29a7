"""Checks of the columns of tables; dtypes, and sizes of tiles, that count as one in them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]

#: Columns that a tile needs at least: ranks up to it are computed, and read, as it is.
NARROWEST = 16


def is_size(value: Any) -> bool:
    """A positive integer."""
    return type(value) is int and value > 0


def is_count(value: Any) -> bool:
    """An integer that is not negative."""
    return type(value) is int and value >= 0


def is_gain(value: Any) -> bool:
    """A finite number that is not negative."""
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def is_text(value: Any) -> bool:
    """A string."""
    return type(value) is str


def is_flag(value: Any) -> bool:
    """True or False."""
    return type(value) is bool


def is_dtype(value: Any) -> bool:
    """The name of a dtype that there are kernels for."""
    return value in ("float16", "bfloat16", "float32")


def half(dtype: str) -> str:
    """One name for the dtypes of 16 bits, which cost the same."""
    return "half" if dtype in ("float16", "bfloat16") else dtype


def padded(size: int, least: int = NARROWEST) -> int:
    """The side of a tile that holds so many rows or columns: a power of two, enough for `tl.dot`."""
    return max(least, 1 << max(0, size - 1).bit_length())


def is_tile(value: Any) -> bool:
    """The side of a tile: a power of two, or three times one."""
    return is_size(value) and value <= 8192 and bin(value // 3 if value % 3 == 0 else value).count("1") == 1


def is_layout(value: Any) -> bool:
    """How a matrix lies: in order ("n") or transposed ("t")."""
    return value in ("n", "t")


def list_of(check: Check, least: int = 1) -> Check:
    """A list whose elements pass a check."""
    return lambda value: type(value) is list and len(value) >= least and all(map(check, value))


def maybe(check: Check) -> Check:
    """None, or what passes a check."""
    return lambda value: value is None or check(value)


def object_of(must: Mapping[str, Check], may: Mapping[str, Check] | None = None) -> Check:
    """An object with these columns, and no others."""
    known = {**must, **(may or {})}

    def check(value: Any) -> bool:
        return (
            type(value) is dict
            and must.keys() <= value.keys() <= known.keys()
            and all(known[name](item) for name, item in value.items())
        )

    return check


def equally_long(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Rows whose lists in these columns have as many elements as each other."""
    return lambda row: len({len(row[name]) for name in names}) == 1


def are_grouped(row: Mapping[str, Any]) -> bool:
    """Whether each product of a grouped GEMM has a layout, an inner size and a result.

    Of gradients of weights (`shared_b`) the inner size is the number of tokens, and `m` has their rows. The
    products of a sum have one result; `groups` says which result those of `mixed` belong to, in order.
    """
    kind, columns, count = row["kind"], len(row["n"]), len(row["layout"])
    inner, groups = row["m" if kind == "shared_b" else "k"], row.get("groups") or []
    if inner is None or len(inner) != count:
        return False
    if kind == "mixed":
        return len(groups) == count and groups == sorted(groups) and {*groups} == {*range(columns)}
    return columns == (1 if kind == "sum" else count) and not groups


_WARPS: Mapping[str, Check] = {
    "num_warps": lambda value: value in (1, 2, 4, 8, 16, 32),
    "num_stages": lambda value: is_size(value) and value <= 16,
}
BLOCK_MM = object_of(
    {
        "template": lambda value: value in ("tiled", "persistent", "row"),
        "block_m": is_tile, "block_n": is_tile, "block_k": is_tile, **_WARPS,
    },
    {"group_m": is_size, "subtiles": is_tile, "per_processor": is_size, "across": is_flag},
)  # fmt: skip
NARROW = object_of({"block_m": is_tile, "block_k": is_tile, "splits": is_size, **_WARPS})
ACCUMULATE = object_of({"block_m": is_tile, "block_n": is_tile, "num_warps": _WARPS["num_warps"]})
DECODE = object_of({"block_n": is_tile, "block_k": is_tile, **_WARPS, "splits": is_size}, {"lanes": is_size})
DECODE_ATTENTION = object_of({"block_n": is_tile, "programs": is_size, **_WARPS})


def is_options(value: Any) -> bool:
    """Tiles of flex attention: "fwd_BLOCK_M", "bwd_num_warps"."""
    return type(value) is dict and all(
        is_text(name) and re.fullmatch(r"(fwd|bwd)_\w+", name) is not None and is_size(item)
        for name, item in value.items()
    )


#: Kernels of attention that have gains; SDPA chooses flash and cuDNN by itself.
KERNELS = ("sdpa", "efficient", "flex", "row_bias", "short")


def is_gains(value: Any) -> bool:
    """Gains of kernels of attention, by name."""
    return type(value) is dict and all(name in KERNELS and is_gain(gain) for name, gain in value.items())
