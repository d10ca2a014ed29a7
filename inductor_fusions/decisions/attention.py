"""Attention: which kernel, and the tiles of flex attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ..reasons import Reason
from . import tables
from .attention_rows import slowed
from .deciding import Decision, Query, asked, decide
from .devices import sources
from .estimating import distance
from .problems import MARGIN, SECTIONS, Row
from .schema import half

#: Rows further than this say nothing of the tiles of a backward in chunks.
REACH = 3.0


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
    tf32: bool = False,
    heads: int = 1,
    beside: int = 0,
) -> Decision:
    """Whether an attention of this shape pays on this device, and as which kernel.

    Args:
        dtype: dtype of q, k and v.
        mask: "none", "causal", "pad" (varies over keys), "bias_batch" (and queries), "bias" (and heads),
            "bias_full" (and the batch); the last two end in "_grad" where the mask takes a gradient. Or a
            class that flex attention is told, such as "causal+window", "causal+pad", "tanh causal", or
            "alibi causal+pad" where a bias of each key is beside it.
        train: whether there is a backward.
        batch_heads, q_len, kv_len, head_dim: sizes; batch times heads of q.
        candidates: kernels that take it.
        tf32: whether torch may multiply float32 as TF32.
        heads: of q, for a measurement: masks are shared between them.
        beside: bytes that every kernel but "short" reads and writes beside what was measured, for the
            gradient of fully masked rows; 0: none.
    """
    row = _row(dtype, batch_heads, q_len, kv_len, head_dim)
    if heads > 1 and batch_heads % heads == 0:
        row |= {"batch": batch_heads // heads, "heads": heads}
    row |= {"mask": mask, "train": train, "tf32": tf32 and dtype == torch.float32}
    text = f"{tables.dtype_name(dtype)}, mask {mask}, shapes like this"
    found = decide(Query("attention", row, tuple(candidates), text), device)
    if not beside or found.kernel in (None, "short"):
        return found
    found = _slowed(found, row, beside)
    if "short" not in candidates:
        return found
    short = decide(Query("attention", row, ("short",), text), device, may_measure=False)
    return max(found, short, key=lambda each: each.lower if each.kernel else 0.0)


def _slowed(found: Decision, row: Row, beside: int) -> Decision:
    """A decision for a kernel with more kernels beside it, whose times are estimated."""
    gain, lower = (slowed(row, speedup, beside) for speedup in (found.gain, found.lower))
    if gain >= MARGIN and lower >= 1:
        return replace(found, source="estimated" if found.measured else found.source, gain=gain, lower=lower)
    reason = Reason.NOT_FASTER(
        "not expected to be faster than stock at this shape beside the gradient of fully masked rows"
    )
    return Decision(None, "estimated", gain, lower, found.rows, reason=reason, near=found.near)


def flex_options(
    *, device: torch.device, dtype: torch.dtype, mask: str, batch_heads: int, q_len: int, kv_len: int,
    head_dim: int,
) -> dict[str, int]:  # fmt: skip
    """The tiles of flex attention that are measured to be fastest near a shape: its `kernel_options`.

    Those of the forward are named `fwd_...`, those of the backward `bwd_...`. They fit the shared memory of
    a device for one head dim and dtype, so only rows that agree in these count, of devices of one compute
    capability. The nearest one decides: without options in it, Inductor's own tiles were faster.
    """
    wanted = _row(dtype, batch_heads, q_len, kv_len, head_dim)
    for rows in _rows(device, wanted, "options"):
        near = sorted(rows, key=lambda row: (row["mask"] != mask, _apart(wanted, row)))
        found: dict[str, int] = {}
        for train in (False, True):  # the forward is searched in inference, the backward in training
            found.update(next((row["options"] for row in near if row["train"] == train), {}))
        if near:
            return found
    return {}


def flex_backward(
    *, device: torch.device, dtype: torch.dtype, batch_heads: int, q_len: int, kv_len: int, head_dim: int,
    visible: float,
) -> int:  # fmt: skip
    """How many queries a chunk of the backward of flex attention has; 0: its own template is faster.

    Args:
        visible: the share of the scores that the mask leaves, between 0 and 1.
    """
    wanted = _row(dtype, batch_heads, q_len, kv_len, head_dim)
    for rows in _rows(device, wanted, "gemm_backward"):
        near = [
            (_apart(wanted, row) + abs(math.log2(max(visible, 1e-3) / row["visible"])), row["gemm_backward"])
            for row in rows
        ]
        away, chunk = min(near, default=(math.inf, 0))
        if near:
            return int(chunk) if away <= REACH else 0
    return 0


def _row(dtype: torch.dtype, batch_heads: int, q_len: int, kv_len: int, head_dim: int) -> dict[str, object]:
    return {
        "batch": batch_heads, "heads": 1, "q_len": max(q_len, 1), "kv_len": max(kv_len, 1),
        "head_dim": head_dim, "dtype": tables.dtype_name(dtype),
    }  # fmt: skip


def _rows(device: torch.device, wanted: Row, column: str) -> Iterator[list[Row]]:
    """The rows with a column for a head dim and dtype: of the device, then of those with its capability."""

    def agrees(row: Row) -> bool:
        same = row["head_dim"] == wanted["head_dim"] and half(row["dtype"]) == half(wanted["dtype"])
        return same and column in row

    for some in asked(sources, device):
        alike = [source.table.rows("attention") for source in some if source.is_alike]
        yield [item.row for item in itertools.chain(*alike) if agrees(item.row)]


def _apart(a: Row, b: Row) -> float:
    section = SECTIONS["attention"]
    return distance(section.place(a), section.place(b))
