"""Tables of measurements: `configs/devices/<device>.json`, one a device.

Whether a fusion pays is looked up, never guessed: a shape that the table does not cover is left to stock.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

log = logging.getLogger(__name__)

#: Version of the JSON format that is read.
SCHEMA = 1
#: Measured rows further than this (a sum of log2 distances over the sizes) say nothing of a shape.
REACH = 3.0
#: A kernel must be measured this much faster than what stock emits.
MARGIN = 1.03
#: How many times more or fewer rows (or samples) than a measured number are covered by it, in `nearest`.
COVERED = 2.0
#: How far apart two measured numbers of rows may be for one between them to count as covered, in `bracket`.
BRACKET = 8


@dataclass(frozen=True)
class Verdict:
    """What a table says: the kernel to emit, or None and why."""

    kernel: str | None
    reason: str = ""
    note: str = ""
    measured: bool = False  # whether there are rows for shapes like this


def folder() -> Any:
    """Where the tables are: in the installed package, or beside it in a checkout."""
    root = resources.files("inductor_fusions")
    return next((d for d in (root / "configs", root / ".." / "configs") if d.is_dir()), root)


@functools.lru_cache
def digest() -> str:
    """Hash of all tables, for cache keys."""
    found = hashlib.sha256()
    devices = folder() / "devices"
    if devices.is_dir():
        for entry in sorted(devices.iterdir(), key=lambda e: e.name):
            if entry.name.endswith(".json"):
                found.update(entry.name.encode() + _content(entry))
    return found.hexdigest()


def _content(entry: Any) -> bytes:
    """The bytes of a file; none where it cannot be read: it is not used then either."""
    try:
        return bytes(entry.read_bytes())
    except OSError:
        return b""


def device_name(device: torch.device) -> str:
    """Name of a device's table: "nvidia_h200", "cpu"."""
    if device.type != "cuda":
        return device.type
    return _slug(torch.cuda.get_device_name(device))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as tables and reports have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _slug(text: str) -> str:
    return re.sub(r"\W+", "_", text.lower())


@functools.lru_cache
def load(name: str) -> dict[str, Any] | None:
    """The table of a device; None, with a warning where it is broken, if there is none to use."""
    entry = folder() / "devices" / f"{name}.json"
    if not entry.is_file():
        return None
    try:
        table: dict[str, Any] = json.loads(entry.read_text("utf-8"))
        check(table, name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        log.warning("the table %s.json is not usable (%s); its device is left to stock", name, why)
        return None
    return table


#: What a row of each section has, besides gains and configurations: name -> type.
_ATTENTION = dict(batch=int, heads=int, q_len=int, kv_len=int, head_dim=int, dtype=str, mask=str, train=bool)
_BLOCK_MM = dict(kind=str, n=list, layout=list, dtype=str, tokens=int, capability=list)
_CONFIG = dict(template=str, block_m=int, block_n=int, block_k=int, num_warps=int, num_stages=int)
_CONFIG_MAY = dict(group_m=int, subtiles=int, per_processor=int, across=bool)


def check(table: Any, name: str) -> None:
    """Refuse what is no table of a device.

    Args:
        table: the content of `<name>.json`.
        name: of the device, as `device_name` gives it.

    Raises:
        ValueError, KeyError, TypeError: what is wrong. A table says with which device and torch, and when, it
            was measured, and the device of a GPU's table is the one that it is named after.
    """
    if table["schema"] != SCHEMA:
        raise ValueError(f"schema {table['schema']}, not {SCHEMA}")
    if not all(isinstance(table[what], str) for what in ("device", "torch", "date")):
        raise ValueError("device, torch and date are no texts")
    if name != "cpu" and _slug(table["device"]) != name:
        raise ValueError(f"it was measured on {table['device']}")
    for row in table["attention"]:
        _check_row(row, _ATTENTION)
        if not all(map(_is_gain, row["gain"].values())):
            raise ValueError("a gain is no number")
        if not all(_is_size(value) for value in row.get("options", {}).values()):
            raise ValueError("an option of flex attention is no positive number")
    for row in table.get("block_mm", ()):
        _check_row(row, _BLOCK_MM)
        if not _is_gain(row["gain"]):
            raise ValueError("a gain is no number")
        if not all(row[column] is None or isinstance(row[column], list) for column in ("m", "k")):
            raise ValueError("m or k is no list")
        if row["config"] is not None:
            may = {name: kind for name, kind in _CONFIG_MAY.items() if name in row["config"]}
            _check_row(row["config"], _CONFIG | may)
            if unknown := row["config"].keys() - _CONFIG.keys() - may.keys():
                raise ValueError(f"a configuration has {min(unknown)}")


def _check_row(row: dict[str, Any], columns: dict[str, type]) -> None:
    for column, kind in columns.items():
        value = row[column]
        if not (_is_size(value) if kind is int else type(value) is kind):
            raise ValueError(f"{column} = {value!r} in a row")


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_gain(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def attention(
    *,
    device: torch.device,
    dtype: torch.dtype,
    mask: str,
    train: bool,
    batch_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    candidates: Sequence[str],
) -> Verdict:
    """Whether an attention of this shape pays on this device, and as which kernel.

    Args:
        device: where it runs.
        dtype: dtype of q, k and v.
        mask: "none", "causal", "pad" (varies over keys), "bias_batch" (and queries), "bias" (and heads),
            "bias_full" (and the batch); the last two end in "_grad" where the mask takes a gradient. Or a
            class that flex attention is told, such as "causal+window", "causal+pad", "tanh causal", or
            "alibi causal+pad" where a bias of each key is beside it.
        train: whether there is a backward.
        batch_heads, q_len, kv_len, head_dim: sizes; batch times heads of q.
        candidates: kernels that take it.
    """
    name = device_name(device)
    table = load(name)
    if table is None:
        return Verdict(None, f"no measurements for the device {name}")
    precision = dtype_name(dtype)
    wanted = (batch_heads, q_len, kv_len, head_dim)
    near: list[tuple[float, dict[str, Any]]] = []
    for row in table["attention"]:
        if (row["dtype"], row["mask"], row["train"]) != (precision, mask, train):
            continue
        sizes = (row["batch"] * row["heads"], row["q_len"], row["kv_len"], row["head_dim"])
        near.append((_distance(wanted, sizes), row))
    near = sorted((item for item in near if item[0] <= REACH), key=lambda item: item[0])[:3]
    if not near:
        return Verdict(None, f"not measured on {name} for {precision}, mask {mask}, shapes like this")
    best, gain = None, 0.0
    for kernel in candidates:
        found = [(d, row["gain"][kernel]) for d, row in near if kernel in row["gain"]]
        # This very shape, with whatever masks of the kind were measured, needs no neighbours.
        exact = [item for item in found if item[0] == 0.0]
        found = exact or found
        if not found or any(ratio < 1.0 for _, ratio in exact or found[:1]):
            continue
        ratios = [(1 / (0.25 + d), ratio) for d, ratio in found]
        mean = math.exp(sum(w * math.log(r) for w, r in ratios) / sum(w for w, _ in ratios))
        if mean > gain:
            best, gain = kernel, mean
    if best is None or gain < MARGIN:
        return Verdict(
            None, f"no kernel is measured to be faster than stock on {name} at this shape", measured=True
        )
    by = "" if best == "sdpa" else f" ({best})"
    return Verdict(best, note=f"{by}, {gain:.2f}x measured", measured=True)


def nearest(
    section: str, device: torch.device, wanted: Mapping[str, Any], along: str, size: int
) -> tuple[Verdict, dict[str, Any]]:
    """Whether a shape is measured to be faster, and the row that is measured nearest to it, or {}.

    Args:
        section: of the table, also the name of the kernel; its rows have one `gain`.
        device: where it runs.
        wanted: what a row must have, by the names of its columns.
        along: the column of the size that may differ, by `COVERED` times.
        size: how large it is.
    """
    name = device_name(device)
    near = [
        row
        for row in (load(name) or {}).get(section, [])
        if all(row[column] == value for column, value in wanted.items())
        and 1 / COVERED <= size / row[along] <= COVERED
    ]
    if not near:
        return Verdict(None, f"not measured on {name} for this shape"), {}
    # Both neighbours must agree: what pays for more rows may not pay for fewer.
    gain = min(row["gain"] for row in near)
    row = min(near, key=lambda row: abs(row[along] - size))
    if gain < MARGIN:
        return Verdict(None, "not measured to be faster for this shape", measured=True), row
    return Verdict(section, note=f", {gain:.2f}x measured", measured=True), row


def agrees(row: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    """Whether a row is one of a problem: what it says nothing of is 0 there."""
    return all(row.get(name, 0) == wanted for name, wanted in key.items())


def bracket(rows: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """The rows next to a number of tokens, below and above; none where one is missing or far away."""
    below = [row for row in rows if row["tokens"] <= tokens]
    above = [row for row in rows if row["tokens"] >= tokens]
    if not below or not above:
        return []
    low = max(below, key=lambda row: row["tokens"])
    high = min(above, key=lambda row: row["tokens"])
    return [low, high] if high["tokens"] <= BRACKET * low["tokens"] else []


def flex_options(
    *, device: torch.device, dtype: torch.dtype, mask: str, batch_heads: int, q_len: int, kv_len: int,
    head_dim: int,
) -> dict[str, int]:  # fmt: skip
    """The tiles of flex attention that are measured to be fastest near a shape: its `kernel_options`.

    Those of the forward are named `fwd_...`, those of the backward `bwd_...`. They fit the shared memory of
    a device for one head dim and dtype, so only rows that agree in these count. The nearest one decides:
    without options in it, Inductor's own tiles were faster.

    Args:
        device, dtype, mask, batch_heads, q_len, kv_len, head_dim: as in `attention`.
    """
    table = load(device_name(device))
    if table is None:
        return {}
    precision = dtype_name(dtype)
    wanted = (batch_heads, q_len, kv_len, head_dim)
    near: list[tuple[bool, float, bool, dict[str, int]]] = []
    for row in table["attention"]:
        if (row["dtype"], row["head_dim"]) == (precision, head_dim) and "options" in row:
            sizes = (row["batch"] * row["heads"], row["q_len"], row["kv_len"], row["head_dim"])
            near.append((row["mask"] != mask, _distance(wanted, sizes), row["train"], row["options"]))
    near.sort(key=lambda item: item[:2])
    found: dict[str, int] = {}
    for train in (False, True):  # the forward is searched in inference, the backward in training
        found.update(next((options for _, _, of, options in near if of == train), {}))
    return found


def flex_backward(
    *, device: torch.device, dtype: torch.dtype, batch_heads: int, q_len: int, kv_len: int, head_dim: int,
    visible: float,
) -> int:  # fmt: skip
    """Into chunks of how many queries the backward of flex attention is cut; 0: its own template is faster.

    Args:
        device, dtype, batch_heads, q_len, kv_len, head_dim: as in `attention`.
        visible: the share of the scores that the mask leaves, between 0 and 1.
    """
    table = load(device_name(device))
    precision = dtype_name(dtype)
    wanted = (batch_heads, q_len, kv_len, head_dim)
    near: list[tuple[float, int]] = []
    for row in table["attention"] if table is not None else ():
        if (row["dtype"], row["head_dim"]) == (precision, head_dim) and "gemm_backward" in row:
            sizes = (row["batch"] * row["heads"], row["q_len"], row["kv_len"], row["head_dim"])
            apart = _distance(wanted, sizes) + abs(math.log2(max(visible, 1e-3) / row["visible"]))
            near.append((apart, row["gemm_backward"]))
    distance, chunk = min(near, default=(math.inf, 0))
    return chunk if distance <= REACH else 0


def _distance(wanted: Sequence[int], measured: Sequence[int]) -> float:
    """How far two shapes are apart: doublings of each size; beyond a full GPU, batch matters less."""
    parts = [abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(wanted, measured, strict=True)]
    return 0.5 * parts[0] + parts[1] + parts[2] * 0.5 + parts[3]
