"""A causal mask beside one row of biases for all queries: padding and ALiBi, through cuDNN's operation.

The operation has no kernel for a CPU. The one that is registered here does what cuDNN does: a logsumexp of
the forward, from which the backward computes the weights anew.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from inductor_fusions import config, tables, testing
from inductor_fusions.fusions.attention import row_bias
from tests.attention.support import check, flex_everywhere, qkv, rand
from tests.attention.test_block_masks import LOWEST

B, H, S = 3, 2, 24


def _scores(q: Any, k: Any, bias: Any, scale: float | None) -> torch.Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q.float() @ k.float().mT * scale + bias.float().expand(*q.shape[:3], k.shape[2])
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)


def _forward(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False, *, scale):
    assert is_causal and dropout_p == 0.0 and attn_bias.dtype == q.dtype and q.shape[1] == k.shape[1]
    scores = _scores(q, k, attn_bias, scale)
    lse = scores.logsumexp(-1, keepdim=True)
    out = torch.empty_like(q[..., :1].expand_as(v)).copy_((scores - lse).exp() @ v.float())
    seed = torch.zeros((), dtype=torch.long)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, seed.clone(), None


def _backward(grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, p, causal, *, scale):
    weights = (_scores(q, k, bias, scale) - lse).exp()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    change = grad.float() @ v.float().mT - (grad.float() * out.float()).sum(-1, keepdim=True)
    change = weights * change * scale
    found = change @ k.float(), change.mT @ q.float(), weights.mT @ grad.float()
    return tuple(torch.empty_like(x).copy_(g) for x, g in zip((q, k, v), found, strict=True))


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    library.impl("_scaled_dot_product_cudnn_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", _backward, "CPU")
    yield
    library._destroy()


@contextlib.contextmanager
def everywhere() -> Iterator[None]:
    """The kernel wherever it can be, on the CPU and in float32 too."""
    wide = mock.patch.dict(row_bias.HIDDEN, {torch.float32: -(2.0**20)})
    devices = mock.patch.object(row_bias, "DEVICES", frozenset({"cpu"}))
    with flex_everywhere("cudnn"), wide, devices, config.patch(attention_kernel="cudnn"):
        yield


def rows_and_keys(length: int = S) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)[None, :]


def causal(length: int = S) -> torch.Tensor:
    i, j = rows_and_keys(length)
    return j <= i


def padding(side: str) -> torch.Tensor:
    """(B, S), 0 where padded: nothing, three keys, and nearly all."""
    found = torch.ones(B, S, dtype=torch.long)
    for sample, count in ((1, 3), (2, S - 2)):
        found[sample, (slice(count) if side == "left" else slice(S - count, S))] = 0
    return found


def seen(pad: torch.Tensor) -> torch.Tensor:
    return causal() & (pad != 0)[:, None, None, :]


def slopes() -> torch.Tensor:
    """Of each head, computed in the graph: an input might be a mask."""
    return torch.pow(torch.tensor(0.25), torch.arange(1, H + 1))


def bloom(q, k, v, pad):
    """As BLOOM spells it: ALiBi of the positions that are no padding, in a baddbmm."""
    places = ((pad.cumsum(-1) - 1) * pad)[:, None, :]
    alibi = (slopes()[..., None] * places).reshape(B * H, 1, S).to(q.dtype)
    flat = (B * H, S, -1)
    scores = alibi.baddbmm(q.reshape(flat), k.reshape(flat).mT, beta=1.0, alpha=0.25)
    scores = scores.view(B, H, S, S) + torch.where(seen(pad), 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def padded(q, k, v, pad):
    scores = (q @ k.mT) * 0.25
    return torch.softmax(scores.masked_fill(~seen(pad), torch.finfo(q.dtype).min), -1) @ v


def added(q, k, v, pad):
    scores = (q @ k.mT) * 0.25 + torch.where(seen(pad), 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    return torch.softmax(scores, -1) @ v


def alibi_alone(q, k, v, pad):
    """As MPT: keys counted from the last one, and no padding."""
    bias = (torch.arange(1 - S, 1) * slopes()[:, None]).view(1, H, 1, S).to(q.dtype)
    scores = (q @ k.mT) * 0.25 + bias
    return torch.softmax(scores.masked_fill(~causal(), torch.finfo(q.dtype).min), -1) @ v


MODELS = {"bloom": bloom, "padded": padded, "added": added, "alibi alone": alibi_alone}


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", list(MODELS))
def test_model(name: str, side: str, train: bool) -> None:
    """Values and gradients, those of rows that see no key included."""
    inputs = (*qkv(S, S, batch=B, heads=H, grad=train), padding(side))
    with everywhere():
        check(MODELS[name], inputs, train=train, kernel="cudnn, is_causal, one row of biases")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_half_precision(dtype: torch.dtype, side: str) -> None:
    inputs = (*qkv(S, S, batch=B, heads=H, dtype=dtype), padding(side))
    with everywhere():
        check(bloom, inputs, kernel="cudnn", dtype=dtype)


def test_the_row_is_all_that_is_read() -> None:
    """One bias for all layers, of one row; and no mask of (query, key)."""

    def layers(q, k, v, pad):
        return bloom(bloom(q, k, v, pad), k, v, pad)

    inputs = (*qkv(S, S, batch=B, heads=H, grad=False), padding("right"))
    with everywhere():
        run = check(layers, inputs, fused=2, train=False, kernel="cudnn")
    calls = run.ours.calls("_scaled_dot_product_cudnn_attention")
    biases = {call.args[3] for call in calls}
    assert len(calls) == 2 and len(biases) == 1
    assert biases.pop().meta["val"].shape == (B, H, 1, S)
