"""Builds a hand-written attention from a row of a table."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..decisions.problems import Row
from .case import Case, UnableError, generator

#: Masks that are tensors: the dims of (batch, heads, q_len, kv_len) that they vary along.
DENSE = {
    "pad": (0, 3), "bias_batch": (0, 2, 3), "bias": (1, 2, 3), "bias_full": (0, 1, 2, 3),
}  # fmt: skip
#: Parts of the name of a mask that is computed in the graph.
STRUCTURED = frozenset({"causal", "window", "pad", "document", "tanh", "alibi", "sink"})
#: Suffix of the name of a mask that requires a gradient.
LEARNT = "_grad"
#: Keys that a query sees through a window, as a share of all: tables do not say how many.
WINDOW = 0.25


def visible(row: Any, data: torch.Tensor) -> torch.Tensor | None:
    """Which keys are seen, (batch or 1, 1, q_len, kv_len); `data` holds padding or document numbers."""
    i = torch.arange(row.q_len, device=data.device)[:, None]
    j = torch.arange(row.kv_len, device=data.device)[None, :]
    parts = []
    if "causal" in row.mask:
        parts.append((j <= i)[None, None])
    if "window" in row.mask:
        parts.append((j > i - row.window)[None, None])
    if "pad" in row.mask:
        parts.append((data != 0)[:, None, None, :])
    if "document" in row.mask:
        parts.append(data[:, None, :, None] == data[:, None, None, :])
    return functools.reduce(operator.and_, parts) if parts else None


def alibi(row: Any, data: torch.Tensor) -> torch.Tensor:
    """The bias of each head and key, (batch or 1, heads, 1, kv_len), rounded as models keep it."""
    base = torch.tensor(2.0**-0.5, device=data.device)
    slopes = torch.pow(base, torch.arange(1, row.heads + 1, device=data.device))
    places = torch.arange(row.kv_len, device=data.device)
    if "pad" in row.mask:
        places = ((data.cumsum(-1) - 1) * data)[:, None, None]
    return (slopes[:, None, None] * places).to(getattr(torch, row.dtype))


def attention(row: Any) -> Callable[..., torch.Tensor]:
    """The attention of a row, (q, k, v, data, sinks) -> [batch, length, heads * head_dim].

    `data` holds padding or document numbers, or is a mask that is added to the scores.

    Args:
        row: batch, heads, kv_heads, q_len, kv_len, head_dim, dtype; mask: functions of the scores and classes
            of the mask, by name; window: the keys that a query sees.
    """
    scale, groups = row.head_dim**-0.5, row.heads // row.kv_heads

    def fn(q, k, v, data, sinks):  # type: ignore[no-untyped-def]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        seen = None if data.is_floating_point() else visible(row, data)
        if groups > 1:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3)) * scale
        if "tanh" in row.mask:
            scores = torch.tanh(scores / 50.0) * 50.0
        if "alibi" in row.mask:
            scores = scores + alibi(row, data).to(q.dtype)
        if data.is_floating_point():
            scores = scores + data
        elif seen is not None:
            lowest = max(torch.finfo(q.dtype).min, torch.finfo(torch.float32).min)
            scores = scores + torch.where(seen, 0.0, lowest).to(q.dtype)
        if "sink" in row.mask:
            column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
            scores = torch.cat([scores, column], -1)
            scores = scores - scores.max(-1, keepdim=True).values
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = F.softmax(scores, dim=-1, dtype=wide).to(q.dtype)
        weights = weights[..., :-1] if "sink" in row.mask else weights
        return (weights @ v).transpose(1, 2).flatten(2)

    return fn


def case(given: Row, device: str) -> Case:
    """The attention of a row of a table, with its operands.

    Raises:
        UnableError: its mask has a name that says too little.
    """
    kind = given["mask"].removesuffix(LEARNT)
    window = max(1, int(WINDOW * given["kv_len"]))
    row = types.SimpleNamespace(**{**given, "mask": kind, "kv_heads": given["heads"], "window": window})
    names = set(kind.replace("+", " ").split())
    if kind not in (*DENSE, "none") and not names <= STRUCTURED:
        raise UnableError(f"the mask {given['mask']} is not described well enough to build a test case")
    if "alibi" in names and row.heads == 1:
        raise UnableError("the number of heads of the biases is not known")
    normal = generator(device, getattr(torch, row.dtype))
    sizes = row.batch, row.heads, row.q_len, row.kv_len
    q = normal(row.batch, row.q_len, row.heads, row.head_dim)
    k, v = (normal(row.batch, row.kv_len, row.heads, row.head_dim) for _ in range(2))
    positions = torch.arange(row.kv_len, device=device).expand(row.batch, -1)
    data = (positions * 16 // row.kv_len).contiguous()
    lengths = torch.linspace(row.kv_len / 2, row.kv_len, row.batch, device=device).long().clamp(min=1)
    if kind in DENSE:
        row.mask = ""
        data = normal(*(size if dim in DENSE[kind] else 1 for dim, size in enumerate(sizes)))
        hidden = (positions >= lengths[:, None])[:, None, None]
        if kind in ("pad", "bias_batch") and not given["mask"].endswith(LEARNT):
            data = torch.zeros_like(data).masked_fill_(hidden, torch.finfo(data.dtype).min)
    elif "pad" in names:
        data = (positions < lengths[:, None]).long()
    sinks = normal(row.heads)
    leaves = [q, k, v]
    if given["mask"].endswith(LEARNT):
        leaves.append(data)
    if "sink" in names:
        leaves.append(sinks)
    fn = attention(row)
    # The gradient of what samples share is a sum over all of them.
    apart = not given["train"] or len(leaves) == 3
    inputs = [q, k, v, data, *([sinks] if "sink" in names else [])]
    return Case(
        lambda q, k, v, data, sinks=None: [fn(q, k, v, data, sinks)],
        inputs,
        leaves if given["train"] else [],
        samples=apart and "sink" not in names,
    )
