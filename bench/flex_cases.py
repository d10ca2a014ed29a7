"""Attentions whose masks are predicates and whose scores are functions, written out; and in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from bench.attention import rows
from bench.common import DTYPES, relative_error
from inductor_fusions.checking.budget import worst
from inductor_fusions.worker.attention import attention

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
    # Near shapes that had no neighbour.
    found += row(1, 32, 8, 4096, 64, "causal+document")
    found += row(1, 32, 8, 16384, 64, "causal+document")
    found += row(1, 32, 8, 4096, 128, "causal+document")
    found += row(2, 32, 8, 4096, 64, "causal+pad")
    found += row(2, 32, 8, 4096, 128, "causal+pad")
    found += row(1, 16, 8, 8192, 256, "tanh causal")
    found += row(1, 16, 8, 8192, 256, "tanh causal+window", 2048)
    found += row(1, 16, 8, 8192, 256, "causal+window", 1024)
    found += row(2, 32, 16, 2048, 128, "tanh causal")
    found += row(8, 16, 16, 1024, 64, "tanh")
    found += row(4, 32, 32, 1024, 128, "alibi causal+pad")
    found += row(4, 32, 32, 1024, 128, "alibi causal")
    found += row(1, 32, 32, 4096, 128, "alibi causal+pad")
    found += row(1, 32, 32, 4096, 128, "alibi causal")
    found += row(2, 16, 8, 1024, 256, "tanh causal")
    found += row(4, 16, 8, 2048, 256, "tanh causal")
    found += row(2, 32, 8, 512, 128, "causal+document")
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
    exact = run(small, attention(small), wide, cotangent[:1, :, : groups * dim].double())
    whole = groups == row.heads // row.kv_heads

    def judge(found: Found) -> float:
        pairs = [(found[0][:1, :, : groups * dim], exact[0])]
        if row.train:
            pairs.append((found[1][:1, :, :groups], exact[1]))
        if row.train and whole:
            pairs += [(found[i][:1, :, :1], exact[i]) for i in (2, 3)]
        return worst(relative_error(x, y) for x, y in pairs)

    return judge
