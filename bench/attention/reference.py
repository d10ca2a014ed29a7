"""An attention in float64, and how far results are from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.attention.inputs import Inputs
from bench.attention.rows import TAKES_GRADIENT, Row
from bench.attention.spellings import Tensors, repeat_kv
from bench.common import Json, relative_error

REFERENCE_LIMIT = 2**30
"""It covers as much of batch and heads as keeps its scores under so many bytes."""


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
