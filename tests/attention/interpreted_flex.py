"""Errors of flex attention's templates, for Triton's interpreter.

What is run is all that Inductor writes for a GPU: the block mask, the template, what is around it.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch._dynamo

from devtools import cuda_codegen
from inductor_fusions import config, decisions
from tests.attention.support import flex_everywhere
from tests.support.errors import relative

#: Two blocks of queries and of keys, the second not whole; several samples, which share no mask.
B, H, S, D = 2, 2, 200, 16
#: Most that an output or gradient may differ from float64, relatively: float32 has 1e-7.
LIMIT = 3e-6
#: Of the backward, as bfloat16 has them on Hopper: those of float32 are so small that it takes minutes.
TILES = {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64}


def indices(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(q.shape[-2])
    return places[:, None], places[None, :]


def softmax(scores: torch.Tensor, seen: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(scores.masked_fill(~seen, torch.finfo(v.dtype).min), -1) @ v


def padding(q, k, v, data, sinks):
    i, j = indices(q)
    return softmax(q @ k.mT * 0.1, (j <= i) & (data[:, None, None, :] != 0), v)


def window(q, k, v, data, sinks):
    i, j = indices(q)
    return softmax(q @ k.mT * 0.1, (j <= i) & (j > i - 70), v)


def documents(q, k, v, data, sinks):
    i, j = indices(q)
    same = data[:, None, :, None] == data[:, None, None, :]
    return softmax(q @ k.mT * 0.1, (j <= i) & same, v)


def softcap(q, k, v, data, sinks):
    i, j = indices(q)
    return softmax(torch.tanh(q @ k.mT * 0.02) * 5.0, (j <= i) & (j > i - 70), v)


def sink(q, k, v, data, sinks):
    i, j = indices(q)
    scores = (q @ k.mT * 0.1).masked_fill((j > i) | (j <= i - 70), torch.finfo(q.dtype).min)
    column = sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v


CASES = {f.__name__: f for f in (padding, window, documents, softcap, sink)}


def errors(name: str) -> list[float]:
    """Relative errors of the output and of the gradients in training, which has the forward in it."""
    fn: Any = CASES[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, S, H, D).transpose(1, 2).detach().requires_grad_() for _ in range(3))
    lengths = torch.tensor([110, S])
    data = torch.where(torch.arange(S) < lengths[:, None], 1 + torch.arange(S) // 90, 0)
    sinks = torch.randn(H, requires_grad=True)
    tiles = mock.patch.object(decisions, "flex_options", lambda **shape: TILES)
    with tiles, flex_everywhere("flex"), config.patch(strict=True):
        made = cuda_codegen.generate(fn, (q, k, v, data, sinks), train=True, interpreted=True)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    exact = fn(*wide[:3], data, wide[3])
    grads = torch.autograd.grad(exact, wide, torch.ones_like(exact), allow_unused=True)
    expected = [exact.detach(), *(g for g in grads if g is not None)]
    found = [made.outputs, *(g for g in made.grads if g is not None)]
    return [relative(x, y) for x, y in zip(found, expected, strict=True)]
