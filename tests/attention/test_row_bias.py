"""A causal mask beside one row of biases for all queries: padding and ALiBi, through cuDNN's operation.

The operation has no kernel for a CPU. The one that is registered here does what cuDNN does: a logsumexp of
the forward, from which the backward computes the weights anew.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from inductor_fusions import config
from inductor_fusions.fusions.attention import row_bias
from tests.attention.support import TRAIN, capture, check, code_for_a_gpu, flex_everywhere, qkv
from tests.attention.test_block_masks import LOWEST

B, H, S = 3, 2, 24
OPERATION = "_scaled_dot_product_cudnn_attention.default"


def _wide(q: Any, shared: Any) -> torch.Tensor:
    """Keys or values with as many heads as q has."""
    return shared.float().repeat_interleave(q.shape[1] // shared.shape[1], 1)


def _scores(q: Any, k: Any, bias: Any, scale: float | None) -> torch.Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q.float() @ _wide(q, k).mT * scale + bias.float().expand(*q.shape[:3], k.shape[2])
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)


def _forward(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False, *, scale):
    assert is_causal and dropout_p == 0.0 and attn_bias.dtype == q.dtype
    scores = _scores(q, k, attn_bias, scale)
    lse = scores.logsumexp(-1, keepdim=True)
    out = torch.empty_like(q).copy_((scores - lse).exp() @ _wide(q, v))
    seed = torch.zeros((), dtype=torch.long)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, seed.clone(), None


def _backward(grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, p, causal, *, scale):
    weights = (_scores(q, k, bias, scale) - lse).exp()
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    change = grad.float() @ _wide(q, v).mT - (grad.float() * out.float()).sum(-1, keepdim=True)
    change = weights * change * scale
    found = [change @ _wide(q, k)]
    for wide in (change.mT @ q.float(), weights.mT @ grad.float()):
        found.append(wide.unflatten(1, (k.shape[1], -1)).sum(2))
    return tuple(torch.empty_like(x).copy_(g) for x, g in zip((q, k, v), found, strict=True))


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", _backward, "CPU")
    yield
    library._destroy()


@contextlib.contextmanager
def everywhere() -> Iterator[None]:
    """The kernel wherever it can be, on the CPU and in float32 too."""
    wide = mock.patch.dict(row_bias.HIDDEN, {torch.float32: -(2.0**20)})
    devices = mock.patch.object(row_bias, "DEVICES", frozenset({"cpu"}))
    with flex_everywhere("row_bias"), wide, devices, config.patch(attention_kernel="row_bias"):
        yield


def causal(length: int) -> torch.Tensor:
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    return j <= i


def padding(side: str, length: int = S) -> torch.Tensor:
    """(B, length), 0 where padded: nothing, three keys, and nearly all."""
    found = torch.ones(B, length, dtype=torch.long)
    for sample, count in ((1, 3), (2, length - 2)):
        found[sample, (slice(count) if side == "left" else slice(length - count, length))] = 0
    return found


def seen(pad: torch.Tensor) -> torch.Tensor:
    return causal(pad.shape[1]) & (pad != 0)[:, None, None, :]


def slopes() -> torch.Tensor:
    """Of each head, computed in the graph: an input might be a mask."""
    return torch.pow(torch.tensor(0.25), torch.arange(1, H + 1))


def bloom(q, k, v, pad):
    """As BLOOM spells it: ALiBi of the positions that are no padding, in a baddbmm."""
    places = ((pad.cumsum(-1) - 1) * pad)[:, None, :]
    alibi = (slopes()[..., None] * places).reshape(B * H, 1, -1).to(q.dtype)
    flat = (B * H, pad.shape[1], -1)
    scores = alibi.baddbmm(q.reshape(flat), k.reshape(flat).mT, beta=1.0, alpha=0.25)
    scores = scores.view(B, H, *scores.shape[1:]) + torch.where(seen(pad), 0.0, torch.finfo(q.dtype).min).to(
        q.dtype
    )
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def padded(q, k, v, pad):
    scores = (q @ k.mT) * 0.25
    return torch.softmax(scores.masked_fill(~seen(pad), torch.finfo(q.dtype).min), -1) @ v


def added(q, k, v, pad):
    scores = (q @ k.mT) * 0.25 + torch.where(seen(pad), 0.0, torch.finfo(q.dtype).min).to(q.dtype)
    return torch.softmax(scores, -1) @ v


def alibi_alone(q, k, v, pad):
    """As MPT: keys counted from the last one, and no padding."""
    length = pad.shape[1]
    bias = (torch.arange(1 - length, 1) * slopes()[:, None]).view(1, H, 1, length).to(q.dtype)
    scores = (q @ k.mT) * 0.25 + bias
    return torch.softmax(scores.masked_fill(~causal(length), torch.finfo(q.dtype).min), -1) @ v


MODELS = {"bloom": bloom, "padded": padded, "added": added, "alibi alone": alibi_alone}


@TRAIN
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", list(MODELS))
def test_model(name: str, side: str, train: bool) -> None:
    """Values and gradients, those of fully masked rows included."""
    inputs = (*qkv(S, S, batch=B, heads=H, grad=train), padding(side))
    with everywhere():
        check(MODELS[name], inputs, train=train, kernel="row_bias, is_causal through cuDNN")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_half_precision(dtype: torch.dtype, side: str) -> None:
    inputs = (*qkv(S, S, batch=B, heads=H, dtype=dtype), padding(side))
    with everywhere():
        check(bloom, inputs, kernel="row_bias", dtype=dtype)


def layers(q, k, v, pad):
    return bloom(bloom(q, k, v, pad), k, v, pad)


def test_heads_that_share_keys() -> None:
    def fn(q, k, v, pad):
        return padded(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), pad)

    with everywhere():
        found = check(fn, (*qkv(S, S, batch=B, heads=4, kv_heads=2), padding("left")), kernel="row_bias")
    (call,) = found.ours.calls(OPERATION)
    assert call.args[1].meta["example_value"].shape[1] == 2


@pytest.mark.parametrize("form", ["boolean", "additive"])
def test_call_of_sdpa(form: str) -> None:
    """SDPA gives zeros where a boolean mask hides every key of a row, and the mean of values elsewhere."""

    def fn(q, k, v, pad):
        mask = seen(pad).expand(B, 1, *pad.shape[1:], pad.shape[1])
        mask = mask if form == "boolean" else torch.where(mask, 0.0, LOWEST)
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.25)

    inputs = (*qkv(S, S, batch=B, heads=H), padding("left" if form == "boolean" else "right"))
    with everywhere():
        check(fn, inputs, kernel="row_bias, is_causal through cuDNN")


def spelled(q, k, v, mask, bias=0.0):
    return torch.softmax((q @ k.mT + bias).masked_fill(~mask, LOWEST), -1) @ v


def distances() -> torch.Tensor:
    """ALiBi as a slope times (key - query)."""
    return slopes()[:, None, None] * (torch.arange(S) - torch.arange(S)[:, None])


#: What is one step beside a case that is taken, and why it is not.
OTHERS = {
    "a gradient": (
        lambda q, k, v, pad: spelled(q, k, v, seen(pad), q.mean((0, 2, 3))[:, None, None].expand(H, 1, S)),
        "requires a gradient",
    ),
    "a bias of each pair": (
        lambda q, k, v, pad: spelled(q, k, v, seen(pad), distances()),
        "its bias varies over queries",
    ),
    "a window": (
        lambda q, k, v, pad: spelled(q, k, v, seen(pad) & ~causal(S).tril(-5)),
        "its other mask varies over queries",
    ),
    "padding alone": (
        lambda q, k, v, pad: spelled(q, k, v, (pad != 0)[:, None, None].expand(B, 1, S, S)),
        "is not causal",
    ),
    "causal alone": (lambda q, k, v, pad: spelled(q, k, v, causal(S)), "not a causal mask combined"),
    "a length": (
        lambda q, k, v, pad: spelled(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], seen(pad[:, 1:])),
        "multiple of 8",
    ),
    "dropout": (
        lambda q, k, v, pad: (
            nn.functional.dropout(torch.softmax((q @ k.mT).masked_fill(~seen(pad), LOWEST), -1), 0.1) @ v
        ),
        "dropout",
    ),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_not_taken(name: str) -> None:
    fn, reason = OTHERS[name]
    reasons = []
    refused = row_bias.refused

    def listened(problem: Any) -> str:
        reasons.append(refused(problem))
        return reasons[-1]

    inputs = (*qkv(S, S, batch=B, heads=H), padding("right"))
    with everywhere(), mock.patch.object(row_bias, "refused", listened):
        run = capture(fn, *inputs, train=True)
    assert reason in reasons[0] and not run.calls(OPERATION)


def test_a_bias_with_more_digits_than_the_kernel() -> None:
    """MPT's ALiBi is in float32: rounded to the dtype of q it would say the same of neighbouring keys."""

    def fn(q, k, v, pad):
        bias = slopes()[:, None, None] * torch.arange(S)
        scores = (q @ k.mT + bias).masked_fill(~seen(pad), torch.finfo(q.dtype).min)
        return torch.softmax(scores.float(), -1).to(q.dtype) @ v

    inputs = (*qkv(S, S, batch=B, heads=H, dtype=torch.bfloat16), padding("right"))
    with everywhere():
        run = capture(fn, *inputs, train=True)
    (site,) = run.sites
    assert site.verdict == "rejected" and "which SDPA would round to bfloat16" in site.reason


@pytest.mark.parametrize("gain", [0.0, 9.0])
def test_the_table_decides(gain: float, shelf: Callable[..., None]) -> None:
    """By default it is taken where it is measured to be the fastest, of this mask with a bias."""
    sizes = dict(batch=B, heads=H, q_len=S, kv_len=S, head_dim=16, dtype="bfloat16", train=False)
    rows = [
        {**sizes, "mask": "causal+pad", "gain": {"sdpa": 2.0, "flex": 3.0}},
        {**sizes, "mask": "alibi causal+pad", "gain": {"sdpa": 2.0, "flex": 4.0, "row_bias": gain}},
    ]
    shelf(on="cpu", cpu={"attention": rows})
    inputs = (*qkv(S, S, batch=B, heads=H, dtype=torch.bfloat16, grad=False), padding("right"))
    with everywhere(), config.patch(attention_kernel="auto"):
        run = capture(bloom, *inputs, policy="profitable")
    (site,) = run.sites
    assert site.kernel.startswith("row_bias" if gain else "flex") and "measured" in site.kernel


def test_deterministic_training_keeps_another_kernel() -> None:
    inputs = (*qkv(S, S, batch=B, heads=H), padding("right"))
    torch.use_deterministic_algorithms(True)
    try:
        with everywhere():
            check(padded, inputs, kernel="sdpa")
    finally:
        torch.use_deterministic_algorithms(False)


@TRAIN
def test_generated_code_holds_no_mask_of_pairs(train: bool) -> None:
    """The row alone is passed to the operation, which expands it; no buffer has a column for each query."""
    length, dim = 512, 16
    inputs = (*qkv(length, length, batch=B, heads=H, dim=dim, dtype=torch.bfloat16, grad=train),)
    with everywhere():
        code = code_for_a_gpu(layers, (*inputs, padding("left", length)), train=train)
    calls = [call for module in code.modules for call in module.extern_calls if "cudnn" in call]
    assert len(calls) == (4 if train else 2)
    assert max(max(module.buffers) for module in code.modules) <= B * H * length * dim


def test_the_row_is_all_that_is_read() -> None:
    """One bias for all layers, of one row; and no mask of (query, key)."""
    inputs = (*qkv(S, S, batch=B, heads=H, grad=False), padding("right"))
    with everywhere():
        found = check(
            lambda q, k, v, pad: padded(padded(q, k, v, pad), k, v, pad),
            inputs, fused=2, train=False, kernel="row_bias",
        )  # fmt: skip
    calls = found.ours.calls(OPERATION)
    biases = {call.args[3] for call in calls}
    assert len(calls) == 2 and len(biases) == 1
    assert biases.pop().meta["example_value"].shape == (B, H, 1, S)
