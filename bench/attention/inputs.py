"""Inputs of an attention: q, k, v, and its masks for each spelling."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from bench.attention.rows import TAKES_GRADIENT, Row
from bench.attention.spellings import Tensors
from bench.common import DTYPES

SMALL_INPUTS = 64 * 2**20
"""Inputs smaller than this are measured in two sets, in turn, so that caches do not hold them."""


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
