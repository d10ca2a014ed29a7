"""Measure every candidate way to compute `softmax(scale * q @ k.T + mask) @ v`, over a grid of shapes.

The result is a JSON table from which the package decides which kernel to emit for an attention site, or
to leave the site to stock. Every candidate is compiled by stock `torch.compile` (this script never imports
`inductor_fusions`), starts from q, k, v laid out [batch, length, heads, head_dim], as projections leave
them, and ends in `.transpose(1, 2).contiguous()`:

    unfused     the attention written out as in Hugging Face's eager spelling
    sdpa        F.scaled_dot_product_attention, with the backend that PyTorch picks
    flash, efficient, cudnn
                the same with one backend forced
    short       `inductor_fusions.ops.short_attention`, up to 128 queries and keys; its masks are those of
                unfused, not summed. With --plans, short_w4_t8 as well: 4 warps, 8 samples for a program
    *_repeat    with heads != kv_heads only: the same on K and V repeated to all heads (the others take
                `enable_gqa`; unfused always repeats)

Masks:

    none        no mask
    causal      unfused: dense additive [1, 1, Q, K]; others: is_causal
    pad         additive [B, 1, 1, K], finfo.min on the padding; others: the same expanded, as a view
    bias        additive [1, H, Q, K]; bias_grad: the same, and it takes a gradient
    bias_batch  additive [B, 1, Q, K], causal and padding (OPT)
    bias_full   additive [B, H, Q, K] (DeBERTa); full_grad: the same, and it takes a gradient
    bool4d      boolean [B, 1, Q, K], causal and padding
    alibi       unfused: alibi [B * H, 1, K] in a baddbmm, then + [B, 1, Q, K] (BLOOM); others: their sum
                [B, H, Q, K], made outside, since all layers share it
    window      unfused: + bias [1, H, Q, K], then + mask [windows, 1, Q, K] (Swin); others: their sum
                over the batch, made inside, since the bias is each layer's own; window_grad: the same, and
                the bias takes a gradient

A row of the JSON holds the median time of each candidate in `times_us` and its interquartile range over
the median in `spread`; `device_us` is the time on the device alone (launches queued beforehand), where a
call is so short that launching it counts; `peak_mib` is memory beyond the inputs; `error` is the worst
relative error of output and gradients against float64, over a slice, and `errors` has the parts; `kernels`
names the attention ops in the compiled graph; `wrong` holds candidates whose error exceeds 1.5 times that
of `unfused` plus eps (they have no time, so that no one picks them); `skipped` says why others are absent.

Compilation dominates, so worker processes (`--jobs`) compile rows side by side while one at a time has the
device to itself for checking and timing.

    python -m bench.tune_attention --out bench/results/attention_h200.json --budget 560
    python -m bench.tune_attention --device cpu --out bench/results/attention_cpu.json
    python -m bench.tune_attention --quick --only 'pad.*d64 infer' --out /tmp/try.json
"""

from __future__ import annotations

import functools
import gc
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import tuning
from bench.common import (
    DTYPES,
    Json,
    error_limit,
    interleave,
    is_fatal,
    one_line,
    peak_bytes,
    relative_error,
)
from bench.pool import FileLock

GIB = 2**30
UNFUSED_LIMIT = 8 * GIB
"""`unfused` is skipped where its scores alone take more than this."""
REFERENCE_LIMIT = GIB
"""The float64 reference covers as much of batch and heads as keeps its scores under this."""
SMALL_INPUTS = 64 * 2**20
"""Inputs smaller than this are measured in two sets, in turn, so that caches do not hold them."""
SHORT_CALL_US = 1500.0
"""Where a call takes less, launching may be what takes the time, and `device_us` is measured as well."""

BACKENDS = {
    "flash": (SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, "_scaled_dot_product_efficient_attention"),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "_scaled_dot_product_cudnn_attention"),
}
TAKES_GRADIENT = ("bias_grad", "full_grad", "window_grad")
SHORT = 128
"""Queries and keys of an attention that `short` takes."""

Tensors = tuple[torch.Tensor, ...]


# The grid --------------------------------------------------------------------------------------------


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
        [(8, 12, 512, 64), (2, 16, 1024, 64), (8, 12, 128, 64)], ["none", "pad", "bias"], dtype="float32"
    )
    return list(dict.fromkeys(rows))


def cpu_rows() -> list[Row]:
    """The grid for a CPU: the same axes, in sizes that take a second or two."""
    rows: list[Row] = []
    rows += rows_of([(2, 12, 128, 64), (1, 12, 512, 64)], ["pad", "none", "causal", "bias"], dtype="float32")
    rows += rows_of([(1, 32, 256, 64)], ["causal", "bias_batch"], dtype="float32", kv_heads=8)
    rows += rows_of([(1, 12, 1024, 64), (1, 12, 32, 64)], ["none", "causal", "pad", "bias"], dtype="float32")
    rows += rows_of([(4, 12, 64, 64), (1, 4, 256, 64)], ["none", "pad", "bias"], dtype="float32")
    rows += rows_of([(16, 3, 49, 32)], ["bias", "window"], dtype="float32")
    rows += rows_of([(1, 12, 256, 32), (1, 12, 256, 128)], ["none", "pad", "bias"], dtype="float32")
    rows += rows_of(
        [(2, 12, 128, 64)], ["bias_batch", "bias_full", "bool4d", "alibi", "bias_grad"], dtype="float32"
    )
    shapes = [(2, 12, 128, 64), (1, 12, 512, 64), (1, 12, 1024, 64), (1, 12, 32, 64)]
    rows += rows_of(shapes, ["none", "causal", "pad", "bias"], dtype="bfloat16")
    rows += rows_of([(1, 16, 512, 64), (1, 16, 1024, 64)], ["none", "pad"], "float32", [False], q_len=1)
    return list(dict.fromkeys(rows))


# One attention, written out, fused, and in float64 ------------------------------------------------------


def repeat_kv(x: torch.Tensor, times: int) -> torch.Tensor:
    """Each head `times` times, as Hugging Face does it."""
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, times, length, dim).reshape(batch, heads * times, length, dim)


def unfused(
    row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor
) -> torch.Tensor:
    """Attention in Hugging Face's eager spelling; [batch, length, heads, head_dim] in and out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if row.heads != row.kv_heads:
        k, v = (repeat_kv(x, row.heads // row.kv_heads) for x in (k, v))
    scale = row.head_dim**-0.5
    if row.mask == "alibi":
        flat = (row.batch * row.heads, -1, row.head_dim)
        scores = masks[0].baddbmm(q.reshape(flat), k.reshape(flat).transpose(1, 2), beta=1.0, alpha=scale)
        scores = scores.view(row.batch, row.heads, row.q_len, row.kv_len) + masks[1]
    else:
        scores = torch.matmul(q, k.transpose(2, 3)) * scale
        if row.mask == "bool4d":
            scores = torch.where(masks[0], scores, torch.finfo(scores.dtype).min)
        elif row.mask.startswith("window"):
            windows = masks[1].shape[0]
            scores = (scores + masks[0]).view(-1, windows, row.heads, row.q_len, row.kv_len)
            scores = (scores + masks[1][None]).view(-1, row.heads, row.q_len, row.kv_len)
        elif masks:
            scores = scores + masks[0]
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def fused(
    row: Row, repeat: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor
) -> torch.Tensor:
    """The same as one SDPA; with `repeat`, on K and V repeated to all heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = row.heads != row.kv_heads
    if grouped and repeat:
        k, v = (repeat_kv(x, row.heads // row.kv_heads) for x in (k, v))
    mask = None
    if row.mask.startswith("window"):
        mask = (
            (masks[0] + masks[1])[None].expand(row.batch // masks[1].shape[0], -1, -1, -1, -1).flatten(0, 1)
        )
    elif masks:
        mask = masks[0].expand(row.batch, row.heads, row.q_len, row.kv_len)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=row.mask == "causal", enable_gqa=grouped and not repeat
    )
    return out.transpose(1, 2).contiguous()


def short(row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
    """The same as the operation of the package."""
    from inductor_fusions import ops

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    given, numbers = list(masks), [1.0] * len(masks)
    if row.mask == "alibi":
        given[0] = masks[0].view(row.batch, row.heads, 1, row.kv_len)
    elif row.mask == "bool4d":
        numbers = [torch.finfo(q.dtype).min]
    out = ops.short_attention(q, k, v, given, numbers=numbers, causal=row.mask == "causal")
    return out.transpose(1, 2).contiguous()


def additive(row: Row, masks: Tensors, batch: slice, heads: slice) -> torch.Tensor | None:
    """The mask of a slice as one additive float64 tensor. `masks` are those of `unfused`."""
    if not masks:
        return None
    if row.mask == "alibi":
        alibi = masks[0].view(row.batch, row.heads, 1, row.kv_len)
        return alibi[batch, heads].double() + masks[1][batch].double()
    if row.mask.startswith("window"):
        chosen = torch.arange(row.batch, device=masks[0].device)[batch] % masks[1].shape[0]
        return masks[0][:, heads].double() + masks[1].double()[chosen]
    mask = masks[0]
    if mask.shape[0] > 1:
        mask = mask[batch]
    if mask.shape[1] > 1:
        mask = mask[:, heads]
    if row.mask == "bool4d":
        return torch.zeros(mask.shape, dtype=torch.float64, device=mask.device).masked_fill_(~mask, -1e300)
    return mask.double()


def float64_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """The reference; float64 [batch, length, heads, head_dim] in and out."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    times = q.shape[1] // k.shape[1]
    k, v = repeat_kv(k, times), repeat_kv(v, times)
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    out: torch.Tensor = (scores.softmax(-1) @ v).transpose(1, 2)
    return out


# Inputs ------------------------------------------------------------------------------------------------


@dataclass
class Inputs:
    """One set of inputs of a row; `unfused_masks` and `fused_masks` mean the same."""

    qkv: Tensors
    unfused_masks: Tensors
    fused_masks: Tensors
    cotangent: torch.Tensor

    def arguments(self, candidate: str) -> Tensors:
        """What a candidate is called with."""
        if candidate == "unfused" or (candidate.startswith("short") and self.fused_masks):
            return self.qkv + self.unfused_masks
        return self.qkv + self.fused_masks

    def leaves(self, row: Row) -> Tensors:
        """What takes a gradient."""
        return self.qkv + (self.unfused_masks[:1] if row.mask in TAKES_GRADIENT else ())

    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(x.nbytes for x in {*self.qkv, *self.unfused_masks, *self.fused_masks, self.cotangent})


def mask_shapes(row: Row) -> tuple[tuple[int, ...], ...]:
    """Shapes of the masks of `unfused`."""
    b, h, q, k = row.batch, row.heads, row.q_len, row.kv_len
    full = {
        "none": (),
        "causal": ((1, 1, q, k),),
        "pad": ((b, 1, 1, k),),
        "bias": ((1, h, q, k),),
        "bias_grad": ((1, h, q, k),),
        "bias_batch": ((b, 1, q, k),),
        "bool4d": ((b, 1, q, k),),
        "bias_full": ((b, h, q, k),),
        "full_grad": ((b, h, q, k),),
        "alibi": ((b * h, 1, k), (b, 1, q, k)),
        "window": ((1, h, q, k), (max(1, b // 64), 1, q, k)),
        "window_grad": ((1, h, q, k), (max(1, b // 64), 1, q, k)),
    }
    return full[row.mask]


def allocate(row: Row, device: str) -> Inputs:
    """Inputs without values: allocating takes no device time from a row that is being measured."""
    dtype = DTYPES[row.dtype]
    empty = functools.partial(torch.empty, dtype=dtype, device=device)
    q = empty(row.batch, row.q_len, row.heads, row.head_dim)
    k = empty(row.batch, row.kv_len, row.kv_heads, row.head_dim)
    masks = tuple(
        empty(shape, dtype=torch.bool if row.mask == "bool4d" else dtype) for shape in mask_shapes(row)
    )
    fused_masks = masks
    if row.mask == "causal":
        fused_masks = ()
    elif row.mask == "alibi":
        fused_masks = (empty(row.batch, row.heads, row.q_len, row.kv_len),)
    inputs = Inputs((q, k, torch.empty_like(k)), masks, fused_masks, torch.empty_like(q))
    if row.train:
        for leaf in inputs.leaves(row):
            leaf.requires_grad_()
    return inputs


@torch.no_grad()
def fill(row: Row, inputs: Inputs, seed: int) -> None:
    """Give the inputs their values."""
    device = inputs.cotangent.device
    generator = torch.Generator(device).manual_seed(seed)
    for x in (*inputs.qkv, inputs.cotangent):
        x.normal_(generator=generator)
    if not inputs.unfused_masks:
        return
    lowest = torch.finfo(DTYPES[row.dtype]).min
    keys = torch.arange(row.kv_len, device=device)
    queries = torch.arange(row.kv_len - row.q_len, row.kv_len, device=device)
    lengths = torch.linspace(max(1, row.kv_len // 2), row.kv_len, row.batch, device=device).long()
    padding = (keys >= lengths[:, None])[:, None, None]
    future = (keys > queries[:, None])[None, None]
    first, last = inputs.unfused_masks[0], inputs.unfused_masks[-1]
    if row.mask == "causal":
        first.zero_().masked_fill_(future, lowest)
    elif row.mask == "pad":
        first.zero_().masked_fill_(padding, lowest)
    elif row.mask == "bool4d":
        first.fill_(True).masked_fill_(padding | future, False)
    elif row.mask == "bias_batch":
        first.zero_().masked_fill_(padding | future, lowest)
    elif row.mask == "alibi":
        slopes = torch.linspace(0.5, 0.01, row.heads, device=device).repeat(row.batch)
        first.copy_(slopes[:, None, None] * keys)
        last.zero_().masked_fill_(padding | future, lowest)
        alibi = first.view(row.batch, row.heads, 1, row.kv_len)
        inputs.fused_masks[0].copy_((alibi.float() + last.float()).clamp_(min=lowest))
    elif row.mask.startswith("window"):
        first.normal_(generator=generator)
        last.bernoulli_(0.3, generator=generator).mul_(-100)
    else:
        first.normal_(generator=generator)


# Compiling ---------------------------------------------------------------------------------------------


class CompiledOnlyError(Exception):
    """Raised in place of the first run: everything is compiled, nothing has run."""


class Backend:
    """Inductor as a backend that can stop before the first run, and that notes the attention ops it saw.

    Each candidate has one of its own: Dynamo shares compiled code between equal backends only.
    """

    def __init__(self) -> None:
        self.armed = False
        self.compiled = False
        self.ops: set[str] = set()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        if self.compiled:  # outside of sdpa_kernel: it would be another kernel that runs
            raise RuntimeError("compiled a second time")
        self.compiled = True

        def inner(graph: torch.fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            found = (re.search(r"_scaled_dot_product\w*", str(node.target)) for node in graph.graph.nodes)
            self.ops |= {match[0] for match in found if match and not match[0].endswith("_backward")}
            return compile_fx_inner(graph, inputs, *args, **kwargs)

        compiled: Any = compile_fx(gm, example_inputs, inner_compile=inner)

        def run(*args: Any) -> Any:
            if not self.armed:
                raise CompiledOnlyError
            return compiled(*args)

        return run


class RefusedError(RuntimeError):
    """A candidate that cannot be compiled, with the reasons that PyTorch gave as warnings."""

    def __init__(self, error: BaseException, warned: Sequence[warnings.WarningMessage]) -> None:
        while error.__cause__ is not None:
            error = error.__cause__
        reasons = dict.fromkeys(str(w.message).partition("(Triggered")[0].strip() for w in warned)
        idle = ("kernel not used because", "has been runtime disabled")
        told = [reason for reason in reasons if reason and not any(text in reason for text in idle)]
        within = re.search(r": got (\w+)\((['\"])(.*?)\2\)", str(error))  # as Dynamo quotes it
        text = f"{within[1]}: {within[3]}" if within else one_line(error)
        super().__init__("; ".join([text, *told])[:400])


@dataclass
class Candidate:
    """One compiled way to compute a row."""

    function: Callable[..., torch.Tensor]
    backend: Backend

    def run(self, row: Row, name: str, inputs: Inputs) -> Tensors:
        """Output, and in training the gradients."""
        with torch.set_grad_enabled(row.train):  # as when it was compiled: Dynamo guards on it
            out = self.function(*inputs.arguments(name))
            if not row.train:
                return (out,)
            return (out, *torch.autograd.grad(out, inputs.leaves(row), inputs.cotangent))


def candidate_names(row: Row, device: str, plans: bool = False) -> list[str]:
    """The candidates of a row; with `plans`, those of `short` with tiles of its own too."""
    names = ["sdpa", *BACKENDS] if device == "cuda" else ["sdpa"]
    if row.heads != row.kv_heads:
        names += [f"{name}_repeat" for name in names]
    elif max(row.q_len, row.kv_len) <= SHORT:
        names.append("short")
        if plans:
            names += [f"short_w{warps}_t{windows}" for warps in (1, 2, 4, 8) for windows in (1, 4, 8)]
    return ["unfused", *names]


def with_plan(name: str) -> AbstractContextManager[Any]:
    """Inside, the kernels of `short` have the warps and samples that the name says."""
    if "_" not in name:
        return nullcontext()
    from inductor_fusions.fusions.attention.short import plan

    warps, windows = (int(part[1:]) for part in name.split("_")[1:])
    stack = ExitStack()
    for each in ("forward", "backward"):
        usual = getattr(plan, each)

        def chosen(*args: Any, usual: Any = usual) -> Any:
            return replace(usual(*args), num_warps=warps)

        stack.enter_context(mock.patch.object(plan, each, chosen))

    def several(q_shape: Sequence[int], kv_len: int, period: int) -> int:
        return min(windows, q_shape[0] // period) if max(q_shape[2], kv_len) <= 64 else 1

    stack.enter_context(mock.patch.object(plan, "windows_of", several))
    return stack


def compile_candidate(row: Row, name: str, inputs: Inputs) -> Candidate:
    """Compile, forward and backward, without running anything.

    Raises:
        RefusedError: it cannot be compiled, as where the forced backend cannot do it.
        RuntimeError: PyTorch took another backend.
    """
    base, _, repeat = name.partition("_")
    backend = Backend()

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        if base == "short":
            return short(row, q, k, v, *masks)
        return (
            unfused(row, q, k, v, *masks) if base == "unfused" else fused(row, bool(repeat), q, k, v, *masks)
        )

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    chosen: AbstractContextManager[None] = nullcontext()
    if base in BACKENDS:
        chosen = sdpa_kernel([BACKENDS[base][0]])
    elif base == "short":
        chosen = with_plan(name)
    with chosen, torch.set_grad_enabled(row.train), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            compiled(*inputs.arguments(name))
        except CompiledOnlyError:
            pass
        except Exception as error:
            raise RefusedError(error, said) from error
    if base in BACKENDS and BACKENDS[base][1] not in backend.ops:
        raise RuntimeError(f"compiled to {', '.join(sorted(backend.ops)) or 'math'}")
    backend.armed = True
    return Candidate(compiled, backend)


# Measuring ---------------------------------------------------------------------------------------------


def reference_slices(row: Row) -> tuple[int, int]:
    """How many samples and heads the reference covers."""
    one = row.q_len * row.kv_len * 8
    group = row.heads // row.kv_heads
    heads = (
        row.heads
        if row.heads * one <= REFERENCE_LIMIT
        else max(group, REFERENCE_LIMIT // one // group * group)
    )
    return max(1, min(row.batch, REFERENCE_LIMIT // (heads * one))), min(heads, row.heads)


def reference(row: Row, inputs: Inputs) -> tuple[list[torch.Tensor], Callable[[Tensors], list[torch.Tensor]]]:
    """Output and gradients in float64 over a slice, and what cuts the same slice out of a result."""
    samples, heads = reference_slices(row)
    group = row.heads // row.kv_heads
    head_slices = [slice(heads), slice(heads // group), slice(heads // group)]
    results: list[torch.Tensor] = []
    mask_gradients: list[torch.Tensor] = []
    starts = range(0, row.batch, samples) if row.mask in TAKES_GRADIENT else [0]
    for start in starts:  # a mask's gradient needs every sample, the rest the first ones only
        batch = slice(start, min(row.batch, start + samples))
        leaves = [x.detach()[batch, :, h].double() for x, h in zip(inputs.qkv, head_slices, strict=True)]
        mask = additive(row, tuple(m.detach() for m in inputs.unfused_masks), batch, slice(heads))
        if row.mask == "causal" and mask is None:
            raise AssertionError("a causal row has a dense mask")
        if row.mask in TAKES_GRADIENT and mask is not None:
            leaves.append(mask)
        if row.train:
            for leaf in leaves:
                leaf.requires_grad_()
        out = float64_attention(leaves[0], leaves[1], leaves[2], mask)
        gradients: Tensors = ()
        if row.train:
            gradients = torch.autograd.grad(out, leaves, inputs.cotangent[batch, :, :heads].double())
            mask_gradients += gradients[3:]
        if start == 0:
            results = [out.detach(), *gradients[:3]]
    if mask_gradients:
        if row.mask == "full_grad":
            results.append(torch.cat(mask_gradients))
        else:
            results.append(torch.stack([part.sum(0, keepdim=True) for part in mask_gradients]).sum(0))

    def cut(values: Tensors) -> list[torch.Tensor]:
        slices = [head_slices[0], *head_slices]
        cuts = [x[:samples, :, h] for x, h in zip(values[:4], slices, strict=False)]
        return cuts + [x[:, :heads] for x in values[4:]]

    return results, cut


def check(
    row: Row, run: Callable[[], Tensors], expected: list[torch.Tensor], cut: Callable[..., Any]
) -> Json:
    """Relative errors of the output and of each gradient."""
    names = ["out", "dq", "dk", "dv", "dmask"]
    found = cut(run())
    return {n: relative_error(x, y) for n, x, y in zip(names, found, expected, strict=False)}


def calls_over(row: Row, name: str, candidate: Candidate, sets: list[Inputs]) -> Callable[[], Tensors]:
    """A call that takes the sets of inputs in turn."""
    state = {"next": 0}

    def call() -> Tensors:
        state["next"] = (state["next"] + 1) % len(sets)
        return candidate.run(row, name, sets[state["next"]])

    return call


def worst(errors: Json) -> float:
    """The largest error; NaN wins."""
    values = [float(x) for x in errors.values()]
    return float("nan") if any(x != x for x in values) else max(values)


def measure(
    row: Row, device: str, quick: bool, lock: AbstractContextManager[Any], plans: bool = False
) -> Json:
    """Compile, check and time every candidate of a row."""
    torch._dynamo.reset()
    result: Json = {name: {} for name in ("times_us", "device_us", "spread", "peak_mib", "error", "errors")}
    result |= {"kernels": {}, "wrong": {}, "skipped": {}}
    skipped = result["skipped"]
    inputs = allocate(row, device)
    sets = [inputs] if inputs.nbytes() > SMALL_INPUTS else [inputs, allocate(row, device)]
    start = time.monotonic()
    candidates: dict[str, Candidate] = {}
    for name in candidate_names(row, device, plans):
        if name == "unfused" and row.score_bytes > UNFUSED_LIMIT:
            skipped[name] = f"the scores alone take {row.score_bytes / GIB:.1f} GiB"
            continue
        try:
            candidates[name] = compile_candidate(row, name, inputs)
            ops = candidates[name].backend.ops
            result["kernels"][name] = sorted(ops) or ["math"]
        except Exception as error:
            skipped[name] = str(error) if isinstance(error, RefusedError) else one_line(error)
    result["compile_s"] = round(time.monotonic() - start, 2)
    with lock:
        start = time.monotonic()
        for seed, one in enumerate(sets):
            fill(row, one, seed)
        expected, cut = reference(row, inputs)
        calls: dict[str, Callable[[], object]] = {}
        for name, candidate in candidates.items():
            try:
                run = functools.partial(candidate.run, row, name, inputs)
                errors = check(row, run, expected, cut)
                peak = peak_bytes(run, device)
            except torch.OutOfMemoryError:
                skipped[name] = "out of memory"
                continue
            except Exception as error:
                if is_fatal(error):
                    raise
                skipped[name] = one_line(error)
                continue
            result["error"][name] = worst(errors)
            result["errors"][name] = errors
            if peak is not None:
                result["peak_mib"][name] = round(peak / 2**20, 1)
            calls[name] = calls_over(row, name, candidate, sets)
        del expected
        limit = error_limit(result["error"].get("unfused"), DTYPES[row.dtype])
        for name in [n for n in calls if not result["error"][n] <= limit]:
            result["wrong"][name] = f"error {result['error'][name]:.2e}, allowed {limit:.2e}"
            if name != "unfused":
                del calls[name]
        rounds, block = (3, 1e-3) if quick else (12, 4e-3 if device == "cuda" else 3e-2)
        for name, timing in interleave(calls, device, rounds, block).items() if calls else ():
            result["times_us"][name] = round(timing.median * 1e6, 2)
            result["spread"][name] = round(timing.spread, 4)
        if device == "cuda" and min(result["times_us"].values(), default=1e9) < SHORT_CALL_US:
            times = interleave(calls, device, min(rounds, 10), 1e-3, max_calls=8, run_ahead=True)
            result["device_us"] = {name: round(timing.median * 1e6, 2) for name, timing in times.items()}
        result["measure_s"] = round(time.monotonic() - start, 2)
        del calls, candidates, sets, inputs
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return result


def set_up(device: str) -> None:
    """Settings of the process that measures."""
    import torch._dynamo.config
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    # AOTAutograd's cache does not know which SDPA backend is forced, and would mix the candidates up.
    functorch.enable_autograd_cache = False
    # And Inductor's does not know of tiles that --plans asks for.
    inductor.fx_graph_cache = False
    from inductor_fusions import config

    config.enabled = False
    functorch.force_non_lazy_backward_lowering = True
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = 32  # of one function, which each candidate compiles anew
    if device == "cuda":
        inductor.compile_threads = 1  # the workers are parallel as it is


def work(task: tuple[Row, str, bool, bool], lock: Path) -> tuple[Json | None, bool]:
    """In a worker: measure one row."""
    row, device, quick, plans = task
    set_up(device)
    try:
        return measure(row, device, quick, FileLock(lock), plans), True
    except Exception as error:
        return {"failed": one_line(error)}, not is_fatal(error)


# The command -------------------------------------------------------------------------------------------


def describe(result: Json) -> str:
    """A row's outcome in a few words."""
    times = result["times_us"]
    text = " ".join(f"{name} {value:.0f}" for name, value in sorted(times.items(), key=lambda x: x[1]))
    if result["wrong"]:
        text += " wrong: " + ", ".join(result["wrong"])
    return text + f" (compile {result['compile_s']:.1f} s, measure {result['measure_s']:.1f} s)"


def print_summary(rows: list[Json]) -> None:
    """Which candidate wins how often, by mask, and where `unfused` is not beaten."""
    from rich.console import Console
    from rich.table import Table

    wins: Counter[tuple[str, str]] = Counter()
    kept: list[str] = []
    for row in rows:
        times = row.get("times_us", {})
        if not times:
            continue
        best = min(times, key=times.__getitem__)
        wins[row["mask"], best] += 1
        if times.get("unfused", 1e18) <= 1.02 * times[best]:
            kept.append(Row(**{name: row[name] for name in Row.__dataclass_fields__}).key)
    names = sorted({name for _, name in wins})
    table = Table("mask", *names, title="fastest candidate, rows")
    for mask in sorted({mask for mask, _ in wins}):
        table.add_row(mask, *(str(wins[mask, name] or "") for name in names))
    console = Console(width=110)
    console.print(table)
    console.print(
        f"unfused within 2% of the fastest in {len(kept)} of {len(rows)} rows:", *kept[:60], sep="\n  "
    )


def main() -> None:
    """The command line."""
    parser = tuning.parser("bench.tune_attention", __doc__)
    parser.add_argument("--plans", action="store_true", help="measure `short` with other tiles as well")
    options = parser.parse_args()
    device: str = options.device
    rows = tuning.select(cuda_rows() if device == "cuda" else cpu_rows(), options)
    results, failed = tuning.measure(
        "bench.tune_attention",
        options,
        [[row] for row in rows],
        work,
        lambda group: (group[0], device, options.quick, options.plans),
        describe,
        jobs=tuning.processes(options, most=8),
        seconds=5.0,
    )
    print_summary([row for row in results.rows if row["key"] in {r.key for r in rows}])
    tuning.end(failed)


if __name__ == "__main__":
    main()
