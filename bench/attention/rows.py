"""The attentions that are measured: shapes, masks and dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.common import DTYPES

TAKES_GRADIENT = ("bias_grad", "full_grad", "window_grad")
"""Masks that take a gradient."""


@dataclass(frozen=True)
class Row:
    """One attention to measure."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    mask: str
    train: bool

    @property
    def key(self) -> str:
        """How `--only` and the progress name it."""
        return (
            f"{self.dtype} {self.mask} b{self.batch} h{self.heads}/{self.kv_heads} q{self.q_len} "
            f"k{self.kv_len} d{self.head_dim} {'train' if self.train else 'infer'}"
        )

    @property
    def score_bytes(self) -> int:
        """Bytes of the scores."""
        return self.batch * self.heads * self.q_len * self.kv_len * DTYPES[self.dtype].itemsize


Shape = tuple[int, int, int, int]


def rows_of(
    shapes: Iterable[Shape],
    masks: Sequence[str],
    dtype: str = "bfloat16",
    trains: Sequence[bool] = (False, True),
    kv_heads: int | None = None,
    q_len: int | None = None,
) -> list[Row]:
    """Each (batch, heads, length, head_dim) with each mask, in inference and in training."""
    return [
        Row(b, h, kv_heads or h, q_len or s, s, d, dtype, mask, train)
        for b, h, s, d in shapes
        for mask in masks
        for train in trains
        if train or mask not in TAKES_GRADIENT
    ]


def whole_models() -> list[Row]:
    """The attentions of the models that the whole-model benchmark runs."""
    rows: list[Row] = []
    rows += rows_of([(32, 12, 512, 64)], ["pad", "none"])  # BERT
    rows += rows_of([(16, 12, 1024, 64)], ["causal"])  # GPT-2
    rows += rows_of([(64, 12, 197, 64)], ["none"])  # ViT
    rows += rows_of([(16, 12, 512, 64)], ["bias", "bias_grad"])  # T5
    swin = [(4096, 3, 49, 32), (1024, 6, 49, 32), (256, 12, 49, 32), (64, 24, 49, 32)]
    rows += rows_of(swin, ["bias", "bias_grad"])
    rows += rows_of(swin[:3], ["window", "window_grad"])
    second = [(4096, 3, 64, 32), (1024, 6, 64, 32), (256, 12, 64, 32), (64, 24, 64, 32)]  # Swin V2
    rows += rows_of(second, ["bias", "bias_grad"])
    rows += rows_of(second[:3], ["window", "window_grad"])
    rows += rows_of([(64, 6, 50, 64), (64, 12, 50, 64), (8, 12, 50, 64)], ["none"])  # ViT, patches of 32
    rows += rows_of([(8, 16, 1024, 64)], ["bias_batch", "alibi"])  # OPT, BLOOM
    rows += rows_of([(32, 12, 384, 64)], ["bias", "bias_grad"])  # MPNet
    rows += rows_of([(8, 12, 384, 64)], ["bias_full", "full_grad"])  # DeBERTa
    llama = [(4, 32, 2048, 64), (1, 32, 8192, 64), (4, 32, 2048, 128), (1, 32, 8192, 128)]
    rows += rows_of(llama, ["causal"], kv_heads=8)
    rows += rows_of([(2, 32, 2048, 64)], ["causal", "bias_batch"], kv_heads=8)
    rows += rows_of([(1, 12, 128, 64), (64, 12, 128, 64)], ["pad", "none"])  # BERT
    rows += rows_of([(8, 12, 1024, 64)], ["bias"])
    return rows


def cuda_rows() -> list[Row]:
    """The grid for a GPU, the most important rows first."""
    rows = whole_models()
    rows += rows_of([(8, 12, 512, 64), (1, 16, 2048, 64), (8, 16, 256, 64)], ["none", "causal", "pad"])
    rows += rows_of([(8, 12, 128, 64), (2, 16, 2048, 64)], ["bias", "bias_batch", "bool4d"])
    rows += rows_of([(8, 12, 512, 64), (1, 12, 512, 64)], ["bias", "bias_full", "bool4d"])
    rows += rows_of(
        [(1, 12, 1024, 64), (1, 16, 4096, 64), (512, 12, 64, 64)], ["none", "causal", "pad", "bias"]
    )
    rows += rows_of([(16, 12, 64, 64), (1, 12, 64, 64), (1, 12, 256, 64)], ["none", "pad", "bias"])
    rows += rows_of([(8, 16, 1024, 64)], ["none", "pad", "bool4d", "bias_full", "full_grad"])
    rows += rows_of([(64, 12, 197, 64)], ["bias", "bias_full"])
    for d in (32, 80, 128, 256):
        rows += rows_of([(8, 16, 1024, d)], ["none", "pad", "bias"])
    for d in (32, 128):
        rows += rows_of([(8, 16, 256, d)], ["none", "pad", "bias"])
    for d in (80, 128, 256):
        rows += rows_of([(1, 16, 2048, d)], ["causal", "bias_batch"])
    rows += rows_of([(1, 32, 1024, 128), (1, 32, 512, 64)], ["causal", "bias_batch"], kv_heads=8)
    rows += rows_of([(1, 32, 4096, 128)], ["causal", "bias_batch"], kv_heads=8)
    for b in (1, 32):
        decode = [(b, 32, k, 128) for k in (512, 2048, 8192)]
        rows += rows_of(decode, ["none", "pad"], trains=[False], kv_heads=8, q_len=1)
        decode = [(b, 16, k, 64) for k in (512, 2048, 8192)]
        rows += rows_of(decode, ["none", "pad"], trains=[False], q_len=1)
    rows += rows_of([(512, 8, 49, 32), (512, 12, 128, 64), (64, 16, 256, 64)], ["none", "bias", "bias_batch"])
    rows += rows_of([(1, 16, 8192, 64), (2, 32, 4096, 128)], ["none", "causal", "bias_batch"])
    rows += rows_of([(32, 12, 384, 64)], ["none", "pad", "bool4d"])
    rows += rows_of([(32, 12, 512, 64), (8, 16, 1024, 64)], ["none", "pad", "bias"], dtype="float16")
    rows += rows_of(
        [(8, 12, 512, 64), (2, 16, 1024, 64), (8, 12, 128, 64)], ["none", "pad", "bias", "causal"], "float32"
    )
    # The forward alone gains in float32: SDPA's backward is behind two products of the library.
    wide = [(8, 12, 512, 64), (2, 16, 1024, 64), (8, 12, 128, 64), (1, 16, 2048, 64), (512, 12, 64, 64)]
    wide += [(8, 8, 1024, 32), (8, 16, 256, 128), (1, 12, 256, 64), (8, 16, 1024, 64)]
    masks = ["none", "causal", "pad", "bias", "bias_full", "bias_batch", "bool4d"]
    rows += rows_of(wide, masks, "float32", [False])
    rows += rows_of([(1, 16, 2048, 64), (8, 8, 1024, 32)], ["causal"], "float32", [True])
    rows += few_queries_or_keys() + neighbours() + cross_attention() + other_head_dims()
    return list(dict.fromkeys(rows))


def neighbours() -> list[Row]:
    """Shapes near those that had no neighbour, so that each can be estimated from the others."""
    rows = rows_of([(256, 12, 64, 64)], ["none", "causal", "pad", "bias"])
    rows += rows_of([(2, 12, 64, 64), (2, 12, 160, 64)], ["none", "pad", "bias"])
    rows += rows_of([(256, 12, 128, 64), (16, 12, 128, 64)], ["none", "pad", "bias", "bias_batch"])
    rows += rows_of([(8, 12, 1024, 64)], ["causal"])
    rows += rows_of([(2, 32, 768, 64), (1, 32, 768, 128)], ["causal"], kv_heads=8)
    rows += rows_of([(2, 16, 2048, 256)], ["causal"])
    masks = ["none", "pad", "bias", "bias_full", "bias_batch"]
    rows += rows_of([(16, 12, 128, 64), (4, 12, 256, 64)], masks, "float32", [False])
    rows += rows_of([(16, 12, 128, 64), (16, 12, 512, 64)], ["pad", "causal"], "float32", [True])
    for queries, shapes in {
        1: [(16384, 1, 16, 96), (32, 12, 197, 64), (16, 12, 1024, 64)],
        4: [(64, 8, 256, 64), (512, 8, 32, 32)],
        16: [(32, 8, 64, 64), (16, 8, 2048, 64)],
        32: [(8, 8, 2048, 64)],
        64: [(8, 16, 1088, 64), (8, 8, 2048, 64)],
        512: [(4, 8, 4096, 64)],
        1024: [(8, 8, 77, 80), (8, 16, 32, 64)],
        4096: [(4, 8, 77, 40)],
    }.items():
        rows += rows_of(shapes, ["none", "pad"], q_len=queries)
        rows += rows_of(shapes, ["none", "pad"], "float32", [False], q_len=queries)
    rows += rows_of([(8, 8, 2048, 64), (32, 8, 64, 64)], ["bias", "bias_batch"], q_len=16)
    rows += rows_of([(16, 16, 16, 64), (8, 16, 32, 64)], ["bias"], q_len=1024)
    rows += rows_of([(2, 12, 512, 64), (4, 12, 512, 64)], ["bias_batch"])
    rows += rows_of([(4, 8, 1024, 160), (8, 8, 512, 160), (32, 8, 196, 16)], ["none", "pad", "bias"])
    rows += rows_of([(32, 12, 256, 64), (128, 12, 128, 64)], ["causal", "bias_batch"])
    rows += rows_of([(8, 12, 256, 64)], masks, "float32", [False])
    decode = [(4, 32, 4096, 128), (4, 32, 8192, 128), (1, 32, 4096, 128)]
    rows += rows_of(decode, ["none", "pad"], trains=[False], kv_heads=8, q_len=1)
    return rows + rows_of([(2, 16, 4096, 64), (4, 16, 8192, 64)], ["none", "pad"], trains=[False], q_len=1)


def cross_attention() -> list[Row]:
    """Queries beside a longer or shorter sequence of keys: learned queries, decoders, captions."""
    # (batch, heads, keys, head_dim) by the number of queries
    shapes: dict[int, list[Shape]] = {
        32: [(32, 12, 257, 64)],
        64: [(16, 16, 1088, 64), (4, 8, 4096, 64)],
        100: [(8, 8, 1050, 32)],
        128: [(64, 8, 512, 64)],
        256: [(8, 8, 4096, 64), (32, 12, 1024, 64)],
        448: [(8, 12, 1500, 64)],
        512: [(2, 8, 8192, 64)],
        1024: [(8, 20, 77, 64), (16, 16, 64, 64)],
        4096: [(8, 10, 77, 64), (8, 8, 256, 64)],
    }
    rows: list[Row] = []
    for queries, some in shapes.items():
        rows += rows_of(some, ["none", "pad"], q_len=queries)
    for queries, some in shapes.items():
        rows += rows_of(some[:1], ["bias"], q_len=queries)
        rows += rows_of(some[:1], ["none", "pad"], "float32", [False], q_len=queries)
    return rows


def other_head_dims() -> list[Row]:
    """Head dims beside 32, 64, 80, 128 and 256: diffusion models, vision encoders, Phi-3."""
    small = [(64, 8, 196, 16), (8, 8, 1024, 16)]
    diffusion = [(2, 8, 4096, 40), (8, 8, 1024, 40), (8, 8, 256, 160), (2, 8, 1024, 160)]
    vision = [(32, 16, 256, 72), (4, 16, 729, 72), (32, 8, 196, 96), (8, 12, 1024, 96)]
    rows = rows_of(small + diffusion + vision, ["none", "pad", "bias"])
    return rows + rows_of([(2, 32, 2048, 96)], ["causal", "bias_batch"])


def few_queries_or_keys() -> list[Row]:
    """Attentions whose queries or keys fill a part of a tile: neighbours, pooling tokens, captions."""
    rows: list[Row] = []
    # (batch, heads, keys, head_dim) by the number of queries
    few: dict[int, list[Shape]] = {
        1: [(8192, 1, 16, 96), (4096, 1, 100, 64), (64, 12, 197, 64), (8, 12, 1024, 64)],
        4: [(1024, 8, 32, 32), (32, 8, 256, 64)],
        16: [(64, 8, 64, 64), (16, 8, 1024, 64)],
        32: [(8, 8, 4096, 64)],
        1024: [(4, 8, 77, 80), (8, 16, 16, 64)],
        4096: [(2, 8, 77, 40), (2, 8, 4, 64)],
    }
    for queries, shapes in few.items():
        rows += rows_of(shapes, ["none", "pad"], q_len=queries)
        # Both of these masks are causal as well: with more queries than keys they would mask whole rows.
        masks = ["bias", *(["bias_batch", "bool4d"] if queries <= min(shape[2] for shape in shapes) else [])]
        rows += rows_of(shapes[:2], masks, q_len=queries)
        rows += rows_of(shapes, ["none", "pad"], "float32", [False], q_len=queries)
    return rows


def cpu_rows() -> list[Row]:
    """The grid for a CPU: the same axes, in sizes that take a second or two."""
    rows: list[Row] = []
    rows += rows_of([(2, 12, 128, 64), (1, 12, 512, 64)], ["pad", "none", "causal", "bias"], dtype="float32")
    rows += rows_of([(1, 32, 256, 64)], ["causal", "bias_batch"], dtype="float32", kv_heads=8)
    rows += rows_of([(1, 12, 1024, 64), (1, 12, 32, 64)], ["none", "causal", "pad", "bias"], dtype="float32")
    rows += rows_of([(4, 12, 64, 64), (1, 4, 256, 64)], ["none", "pad", "bias"], dtype="float32")
    shapes = [(2, 12, 512, 64), (8, 12, 128, 64), (4, 12, 256, 64), (8, 12, 197, 64), (1, 16, 577, 64)]
    rows += rows_of(shapes, ["none", "causal", "pad", "bias"], dtype="float32")
    shapes = [(1, 32, 512, 64), (1, 32, 1024, 64), (1, 16, 1024, 128)]
    rows += rows_of(shapes, ["none", "causal", "bias_batch"], dtype="float32", kv_heads=8)
    rows += rows_of([(1, 12, 2048, 64)], ["none", "causal", "pad", "bias"], dtype="float32", trains=[False])
    rows += rows_of([(16, 3, 49, 32)], ["bias", "window"], dtype="float32")
    rows += rows_of([(1, 12, 256, 32), (1, 12, 256, 128)], ["none", "pad", "bias"], dtype="float32")
    rows += rows_of(
        [(2, 12, 128, 64)], ["bias_batch", "bias_full", "bool4d", "alibi", "bias_grad"], dtype="float32"
    )
    shapes = [(2, 12, 128, 64), (1, 12, 512, 64), (1, 12, 1024, 64), (1, 12, 32, 64)]
    rows += rows_of(shapes, ["none", "causal", "pad", "bias"], dtype="bfloat16")
    rows += rows_of([(1, 16, 512, 64), (1, 16, 1024, 64)], ["none", "pad"], "float32", [False], q_len=1)
    return list(dict.fromkeys(rows))
