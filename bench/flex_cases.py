"""Attentions whose masks are predicates and whose scores are functions, written out; and in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from bench.attention import rows
from bench.common import DTYPES, relative_error
from inductor_fusions.budget import worst

REFERENCE_BYTES = 2**30
"""In training the float64 reference covers as many heads as keep the scores of a sample under this."""


@dataclass(frozen=True)
class Row(rows.Row):
    """One attention to measure; `window` is the number of keys that a query sees, 0 for all."""

    window: int = 0

    @property
    def key(self) -> str:
        """How `--only` and the progress name it."""
        kind = self.mask + (f" w{self.window}" if self.window else "")
        return (
            f"{self.dtype} {kind} "
            f"b{self.batch} h{self.heads}/{self.kv_heads} s{self.q_len} d{self.head_dim} "
            f"{'train' if self.train else 'infer'}"
        )


def row(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, mask: str, window: int = 0
) -> list[Row]:
    """One shape in inference and in training."""
    return [
        Row(batch, heads, kv_heads, length, length, dim, "bfloat16", mask, train, window)
        for train in (False, True)
    ]


def cuda_rows() -> list[Row]:
    """The grid for a GPU, the most important rows first."""
    found: list[Row] = []
    found += row(2, 16, 8, 4096, 256, "tanh causal")  # Gemma-2
    found += row(2, 64, 8, 4096, 64, "sink causal+window", 128)  # gpt-oss
    found += row(2, 64, 8, 4096, 64, "sink causal")
    found += row(1, 32, 8, 8192, 128, "causal+window", 1024)  # Mistral
    found += row(4, 32, 8, 2048, 64, "causal+pad")  # Llama-1B
    found += row(2, 32, 8, 8192, 64, "causal+pad")
    found += row(1, 32, 8, 8192, 64, "causal+document")
    found += row(4, 32, 8, 2048, 128, "causal+pad")
    found += row(2, 16, 8, 4096, 256, "tanh causal+window", 2048)
    found += row(1, 32, 8, 8192, 128, "causal+document")
    found += row(2, 16, 8, 4096, 256, "causal+window", 1024)  # Gemma-3
    found += row(4, 16, 8, 1024, 256, "tanh causal")
    found += row(2, 64, 8, 1024, 64, "sink causal+window", 128)
    found += row(2, 64, 8, 1024, 64, "sink causal")
    found += row(2, 32, 16, 4096, 128, "tanh causal")
    found += row(4, 32, 8, 2048, 128, "causal+window", 512)
    found += row(4, 32, 8, 512, 64, "causal+pad")
    found += row(4, 32, 8, 512, 128, "causal+pad")
    found += row(4, 32, 8, 512, 128, "causal+document")
    found += row(8, 16, 16, 512, 64, "tanh")
    found += row(8, 16, 16, 1024, 64, "alibi causal+pad")  # BLOOM
    found += row(8, 16, 16, 1024, 64, "alibi causal")
    found += row(2, 32, 32, 2048, 128, "alibi causal+pad")
    found += row(2, 32, 32, 2048, 128, "alibi causal")
    found += row(1, 32, 8, 32768, 128, "causal+window", 1024)
    return found


def cpu_rows() -> list[Row]:
    """The same axes, in sizes that take a second or two."""
    found = [
        *row(1, 8, 4, 512, 64, "tanh causal"),
        *row(1, 8, 4, 256, 64, "tanh"),
        *row(1, 8, 8, 1024, 64, "tanh causal"),
        *row(1, 8, 8, 256, 64, "alibi causal+pad"),
    ]
    found += [*row(1, 8, 4, 512, 64, "sink causal"), *row(1, 8, 4, 1024, 64, "causal+window", 128)]
    return [Row(**{**asdict(r), "dtype": d}) for r in found for d in ("float32", "bfloat16") if not r.train]


# One attention ----------------------------------------------------------------------------------------


def visible(row: Row, data: torch.Tensor) -> torch.Tensor | None:
    """Which keys are seen, (batch or 1, 1, q_len, kv_len); `data` holds padding or document numbers."""
    i = torch.arange(row.q_len, device=data.device)[:, None]
    j = torch.arange(row.kv_len, device=data.device)[None, :]
    seen = None
    if "causal" in row.mask:
        seen = (j <= i)[None, None]
    if "window" in row.mask:
        seen = seen & (j > i - row.window)  # type: ignore[operator]
    if "pad" in row.mask:
        seen = seen & (data != 0)[:, None, None, :]  # type: ignore[operator]
    if "document" in row.mask:
        seen = seen & (data[:, None, :, None] == data[:, None, None, :])  # type: ignore[operator]
    return seen


def alibi(row: Row, data: torch.Tensor) -> torch.Tensor:
    """The bias of each head and key, (batch or 1, heads, 1, kv_len), rounded as models keep it."""
    base = torch.tensor(2.0**-0.5, device=data.device)
    slopes = torch.pow(base, torch.arange(1, row.heads + 1, device=data.device))
    places = torch.arange(row.kv_len, device=data.device)
    if "pad" in row.mask:
        places = ((data.cumsum(-1) - 1) * data)[:, None, None]
    return (slopes[:, None, None] * places).to(DTYPES[row.dtype])


def attention(row: Row) -> Callable[..., torch.Tensor]:
    """The attention of a row, (q, k, v, data, sinks) -> [batch, length, heads * head_dim]."""
    scale, groups = row.head_dim**-0.5, row.heads // row.kv_heads

    def fn(q, k, v, data, sinks):  # type: ignore[no-untyped-def]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        seen = visible(row, data)
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3)) * scale
        if "tanh" in row.mask:
            scores = torch.tanh(scores / 50.0) * 50.0
        if "alibi" in row.mask:
            scores = scores + alibi(row, data).to(q.dtype)
        if seen is not None:
            lowest = max(torch.finfo(q.dtype).min, torch.finfo(torch.float32).min)
            scores = scores + torch.where(seen, 0.0, lowest).to(q.dtype)
        if "sink" in row.mask:
            column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
            scores = torch.cat([scores, column], -1)
            scores = scores - scores.max(-1, keepdim=True).values
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = weights[..., :-1] if "sink" in row.mask else weights
        return (weights @ v).transpose(1, 2).flatten(2)

    return fn


def inputs_of(row: Row, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The arguments of a row's attention, and a cotangent."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[row.dtype])

    q = normal(row.batch, row.q_len, row.heads, row.head_dim)
    k, v = (normal(row.batch, row.kv_len, row.kv_heads, row.head_dim) for _ in range(2))
    sinks = normal(row.heads)
    positions = torch.arange(row.kv_len, device=device).expand(row.batch, -1)
    data = positions * 16 // row.kv_len
    if "pad" in row.mask:
        lengths = torch.linspace(row.kv_len / 2, row.kv_len, row.batch, device=device).long()
        data = (positions < lengths[:, None]).long()
    if row.train:
        for leaf in (q, k, v, sinks):
            leaf.requires_grad_()
    return [q, k, v, data.contiguous(), sinks], normal(row.batch, row.q_len, row.heads * row.head_dim)


def run(
    row: Row, fn: Callable[..., torch.Tensor], inputs: list[torch.Tensor], cotangent: torch.Tensor
) -> list[torch.Tensor]:
    """The output, and the gradients in training."""
    out = fn(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    if not row.train:
        return [out]
    grads = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [out.detach(), *(g for g in grads if g is not None)]


Found = list[torch.Tensor]


def reference(row: Row, inputs: Found, cotangent: torch.Tensor) -> Callable[[Found], float]:
    """Worst relative error against float64, of the first sample and the heads that share the first keys.

    A sink's gradient sums over the batch, so it is left to the tests.
    """
    groups = row.heads // row.kv_heads
    if row.train:  # gradients of keys need every query
        groups = max(1, min(groups, REFERENCE_BYTES // (8 * row.kv_len * row.q_len)))
    small = Row(**{**asdict(row), "batch": 1, "heads": groups, "kv_heads": 1})
    q, k, v, data, sinks = (x.detach() for x in inputs)
    wide = [
        q[:1, :, :groups].double(),
        k[:1, :, :1].double(),
        v[:1, :, :1].double(),
        data[:1],
        sinks[:groups].double(),
    ]
    if row.train:
        for leaf in (wide[0], wide[1], wide[2]):
            leaf.requires_grad_()
    dim = row.head_dim
    exact = run(small, _in_double(small), wide, cotangent[:1, :, : groups * dim].double())
    whole = groups == row.heads // row.kv_heads

    def judge(found: Found) -> float:
        pairs = [(found[0][:1, :, : groups * dim], exact[0])]
        if row.train:
            pairs.append((found[1][:1, :, :groups], exact[1]))
        if row.train and whole:
            pairs += [(found[i][:1, :, :1], exact[i]) for i in (2, 3)]
        return worst(relative_error(x, y) for x, y in pairs)

    return judge


def _in_double(row: Row) -> Callable[..., torch.Tensor]:
    written_out = attention(row)

    def fn(*inputs: torch.Tensor) -> torch.Tensor:
        with _float64_softmax():
            return written_out(*inputs)

    return fn


@contextlib.contextmanager
def _float64_softmax() -> Iterator[None]:
    """The reference has no cast to float32."""
    softmax = F.softmax
    F.softmax = lambda x, dim, dtype=None: softmax(x, dim)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        F.softmax = softmax
