"""What flex attention captures may be computed in any way: for a GPU it is lowered, forward and backward.

Without `layouts.pinning` Inductor raises "convert FlexibleLayout to FixedLayout first" where a
captured value is computed from one that has its own buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from devtools import cuda_codegen
from inductor_fusions import config
from tests.attention.support import TRAIN, cases, check, code_for_a_gpu, flex_everywhere

B, H, S, D = 2, 4, 256, 64
LOWEST = torch.finfo(torch.bfloat16).min


def split(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads, and in each queries, keys and values side by side, as BLOOM has them."""
    fused = (x @ w).view(*x.shape[:2], H, 3, D)
    q, k, v = (fused[..., i, :].transpose(1, 2) for i in range(3))
    return q, k, v


def attend(x: Any, w: Any, change: Callable[[Any], Any], seen: Any = None) -> Any:
    q, k, v = split(x, w)
    scores = change(q @ k.transpose(-1, -2) * 0.125).float()
    if seen is None:
        place = torch.arange(x.shape[1], device=x.device)
        seen = place[:, None] >= place
    scores = scores.masked_fill(~seen, LOWEST)
    return (torch.softmax(scores, -1).to(x.dtype) @ v).transpose(1, 2).flatten(2)


def alibi_of_padded(x, w, pad, table):
    """As BLOOM: a cumulative sum, and the power of two that a head's slope is."""
    slopes = torch.pow(torch.tensor(0.25, device=x.device), torch.arange(1, H + 1, device=x.device))
    positions = (pad.cumsum(-1) - 1) * pad
    bias = (slopes[:, None] * positions[:, None, :]).to(x.dtype).view(*pad.shape[:1], H, 1, pad.shape[1])
    place = torch.arange(x.shape[1], device=x.device)
    seen = (place[:, None] >= place) & (pad != 0)[:, None, None, :]
    for _ in range(2):
        x = x + attend(x, w, lambda scores: scores + bias, seen)
    return x


def documents(x, w, pad, table):
    """Numbers of documents are a cumulative sum, which mask_mod and block mask read."""
    number = pad.cumsum(-1)
    place = torch.arange(x.shape[1], device=x.device)
    seen = (place[:, None] >= place) & (number[:, None, :, None] == number[:, None, None, :])
    return attend(x, w, lambda scores: torch.tanh(scores / 5.0) * 5.0, seen)


def learned_bias(x, w, pad, table):
    """A bias of (heads, keys) that a product gives, and that has a gradient."""
    bias = torch.sigmoid(table @ table[: x.shape[1]].transpose(0, 1))[:H, None, :] * 16.0
    return attend(x, w, lambda scores: torch.tanh(scores / 5.0) * 5.0 + bias)


def normalised_bias(x, w, pad, table):
    """A bias of each key that a reduction over its features gives."""
    bias = torch.softmax(table[: x.shape[1]].float(), -1)[:, 0].to(x.dtype)
    return attend(x, w, lambda scores: scores + bias)


def relative_bias(x, w, pad, table):
    """A bias of (heads, queries, keys): looked up in what a product gives."""
    place = torch.arange(x.shape[1], device=x.device)
    near = (place[:, None] - place).clamp(0, H - 1)
    bias = (table @ table[:D]).t()[:H, :H][:, near]
    return attend(x, w, lambda scores: scores + bias)


CASES = {
    "alibi of padded": alibi_of_padded,
    "documents": documents,
    "learned bias": learned_bias,
    "normalised bias": normalised_bias,
    "relative bias": relative_bias,
}


def inputs(dtype: torch.dtype = torch.bfloat16, grad: bool = False, length: int = S) -> tuple[Any, ...]:
    pad = torch.ones(B, length, dtype=torch.long)
    pad[0, length * 3 // 4 :] = 0
    shapes = ((B, length, H * D), (H * D, 3 * H * D), (S, D))
    x, w, table = ((torch.randn(shape) * 0.05).to(dtype).requires_grad_(grad) for shape in shapes)
    return x, w, pad, table


@pytest.mark.parametrize(("train", "dynamic"), [
    pytest.param(False, False, id="inference-numbers"),
    pytest.param(False, True, id="inference-symbols", marks=pytest.mark.long),
    pytest.param(True, False, id="training-numbers", marks=pytest.mark.long),
    pytest.param(True, True, id="training-symbols"),
])  # fmt: skip
@cases(CASES)
def test_compiles_for_a_gpu(case: Any, train: bool, dynamic: bool) -> None:
    with flex_everywhere("flex"), config.patch(strict=True, policy="always"):
        code = code_for_a_gpu(case, inputs(grad=train), train=train, dynamic=dynamic or None)
    assert len(code.modules) == 1 + train
    for module in code.modules if not dynamic else ():
        assert any(kernel.is_template and "flex_attention" in kernel.name for kernel in module.kernels)


@TRAIN
@cases(CASES)
def test_numbers(case: Any, train: bool) -> None:
    with flex_everywhere("flex"):
        count = 2 if case is alibi_of_padded else 1
        check(case, inputs(torch.float32, train, 48), fused=count, kernel="flex", train=train)


#: Masks of keys that read one place of a range.
ONE_PLACE: dict[str, Callable[[], torch.Tensor]] = {
    "a range of one": lambda: torch.arange(1)[:, None] >= torch.arange(S),
    "the last of a range": lambda: torch.arange(S)[-1:, None] > torch.arange(S),
    "the last row": lambda: torch.ones(S, S).tril(-3)[-1:] > 0,
    "one element": lambda: torch.arange(S) < torch.arange(S)[S // 2],
}


@pytest.mark.parametrize("q_len", [1, S])
@cases(ONE_PLACE)
def test_one_place_of_a_range(case: Any, q_len: int) -> None:
    """Inductor writes that place as a number without the dims of a tile, and fails to broadcast it."""

    def filled(q: Any, k: Any, v: Any) -> Any:
        later = torch.arange(S) > torch.arange(q_len)[:, None]
        return torch.softmax((q @ k.mT).masked_fill(case() | later, -2.0), -1) @ v

    # One head: what many share is computed before the kernel in any case.
    q, k, v = (torch.randn(1, 1, length, D).bfloat16() for length in (q_len, S, S))
    with flex_everywhere("flex"), config.patch(strict=True, policy="always"):
        code = code_for_a_gpu(filled, (q, k, v))
    (kernel,) = [each for each in code.kernels if each.is_template]
    assert "flex_attention" in kernel.name
    cuda_codegen.compile_kernel(kernel.source, 90)


@pytest.mark.parametrize("q_len", [1, 16, 64, 100])
@pytest.mark.parametrize("shared", [1, 2, 4])
def test_few_queries_of_many_heads(q_len: int, shared: int) -> None:
    """The template for few queries has no tile where those of the heads that share keys exceed a block."""

    def padded(q, k, v, pad):
        scores = q @ k.repeat_interleave(4 // shared, 1).transpose(-1, -2) * 0.125
        scores = scores.masked_fill(~(pad != 0)[:, None, None, :], LOWEST)
        return torch.softmax(scores.float(), -1).to(q.dtype) @ v.repeat_interleave(4 // shared, 1)

    q = torch.randn(B, 4, q_len, D).bfloat16()
    k, v = (torch.randn(B, shared, S, D).bfloat16() for _ in range(2))
    with flex_everywhere("flex"), config.patch(strict=True, policy="always"):
        code = code_for_a_gpu(padded, (q, k, v, inputs()[2]))
    assert any(kernel.is_template and "flex" in kernel.name for kernel in code.forward.kernels)
