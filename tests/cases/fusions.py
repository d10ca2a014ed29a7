"""Small functions of which each is fused as a whole, each with its nearest twin, which is not.

`tests/properties/test_fusions.py` has what holds of all of them, and `tests/counterexamples` changes one
detail of each at a time: so widths are equal, and most changes of dims still run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from inductor_fusions.reasons import Reason
from tests.block_mm.support import rand as leaf
from tests.lora.spellings import linear, peft_in_float32

WIDTH, RANK, CLASSES = 32, 16, 61

Tensors = list[torch.Tensor]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One function, and what is fused in it.

    Attributes:
        fusion: its name.
        function: of the inputs.
        inputs: makes them, at random. Gradients are taken if one of them takes one.
        twin: of the same inputs: the function with one detail changed, in which nothing of `fusion` is fused.
        reason: of the twin; None where it is no site.
        rows: places of the inputs with any number of rows, the same of all; none: sizes are fixed.
        dims: how many leading dims are rows.
        early: whether it is fused before autograd.
    """

    fusion: str
    function: Function
    inputs: Callable[[], Tensors]
    twin: Function
    reason: Reason | None = None
    rows: tuple[int, ...] = (0,)
    dims: int = 1
    early: bool = False


def frozen(*shape: int) -> torch.Tensor:
    """It can be overwritten between two products."""
    return leaf(*shape, grad=False)


def adapter(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return [leaf(RANK, WIDTH, dtype=dtype), leaf(WIDTH, RANK, dtype=dtype)]


def square(count: int, train: bool = True) -> Tensors:
    """An input, which takes a gradient in training, and frozen weights."""
    return [leaf(WIDTH, WIDTH, grad=train), *(frozen(WIDTH, WIDTH) for _ in range(count))]


def one_row() -> Tensors:
    """An input of one row, a vector for its norm, and a weight."""
    return [frozen(1, WIDTH), frozen(WIDTH), frozen(WIDTH, WIDTH)]


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """An RMSNorm."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain


def leaves(*shapes: tuple[int, ...]) -> Tensors:
    return [leaf(*shape) for shape in shapes]


def one_after_the_other(x: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
    first = F.linear(x, q)
    second = F.linear(first, k, bias)
    return first, second, second @ v.t()


def heads(x: Any, q: Any, k: Any, v: Any) -> Any:
    return tuple(F.linear(x, w).view(2, 16, 4, 8).transpose(1, 2) for w in (q, k, v))


def heads_of_others(x: Any, q: Any, k: Any, v: Any) -> Any:
    return heads(x, q, k, v)[0], F.linear(x.roll(1, 1), k), F.linear(x.roll(2, 1), v)


def whole_mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return F.linear(F.gelu(x @ gate.t(), approximate="tanh") * F.linear(x, up), down)


def clamped_mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return F.linear(F.gelu(x @ gate.t(), approximate="tanh") * F.linear(x, up).clamp(-7, 7), down)


def without_a_base(x: Any, w: Any, a: Any, b: Any) -> Any:
    return F.linear(F.linear(x, a), b) * 2.0 + w[:1, :1]


def scaled_by_alpha(x: Any, w: Any, a: Any, b: Any) -> Any:
    return torch.add(x @ w.t(), (x @ a.t()) @ b.t(), alpha=0.5)


def in_float32_without_a_base(x: Any, w: Any, a: Any, b: Any) -> Any:
    return without_a_base(x, w, a.to(x.dtype), b.to(x.dtype))


def two_adapted(x: Any, w: Any, v: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return linear(x, w, a, b), linear(x, v, c, d)


def two_without_a_base(x: Any, w: Any, v: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return without_a_base(x, w, a, b), without_a_base(x, v, c, d)


def gated_adapted(x: Any, w: Any, v: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return F.silu(linear(x, w, a, b)) * linear(x, v, c, d)


def gated_without_a_base(x: Any, w: Any, v: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return F.silu(without_a_base(x, w, a, b)) * without_a_base(x, v, c, d)


def merged(x: Any, w: Any, a: Any, b: Any) -> Any:
    """An adapter that is merged into a frozen weight in each step."""
    return F.linear(x, w + b @ a * 0.5)


def pairs(dense: Any, t: Any) -> Any:
    first = torch.tensor([i for i in range(4) for _ in range(i)])
    second = torch.tensor([j for i in range(4) for j in range(i)])
    return torch.cat([dense, torch.bmm(t, t.transpose(1, 2))[:, first, second]], dim=1)


def every_pair(t: Any) -> Any:
    first, second = torch.tril_indices(4, 4, offset=0).unbind()
    return torch.einsum("bid,bjd->bij", t, t)[:, first, second]


def attention(x: Any, q: Any, k: Any, v: Any, between: Function = lambda weights: weights) -> Any:
    """A causal layer, with its projections."""
    q, k, v = (F.linear(x, w).unflatten(-1, (4, -1)).transpose(1, 2) for w in (q, k, v))
    place = torch.arange(x.shape[1])
    scores = (q @ k.mT * 0.3).masked_fill(place > place[:, None], torch.finfo(q.dtype).min)
    return (between(torch.softmax(scores, -1)) @ v).transpose(1, 2).flatten(2)


def layers_of_gathers(x: Any, count: int = 2) -> Any:
    """Relative positions, in buckets, that several layers read."""
    i = torch.arange(40)
    far = i[:, None] - i[None, :]
    bucket = torch.where(far.abs() < 4, far, ((far.abs() + 1.0).log() * 2).ceil() * far.sign()).long()
    bucket = (bucket + 8).clamp(0, 15).expand(x.shape[0], -1, -1)
    for _ in range(count):
        x = torch.gather(x @ x.mT[..., :16] * 0.1, -1, bucket).softmax(-1) @ x
    return x


def loss_and_logits(h: Any, w: Any, labels: Any) -> Any:
    logits = F.linear(h, w)
    return F.cross_entropy(logits, labels), logits


def labelled() -> Tensors:
    return [*leaves((18, 24), (CLASSES, 24)), torch.randint(CLASSES, (18,))]


def weights_of_attention() -> Tensors:
    return [(torch.randn(WIDTH, WIDTH) / 6).bfloat16().requires_grad_() for _ in range(3)]


CASES = {
    "shared": Case(
        "qkv", lambda x, q, k, v, bias: (F.linear(x, q), F.linear(x, k, bias), x @ v.t()),
        lambda: [*square(3), frozen(WIDTH)], one_after_the_other,
    ),
    "heads": Case("qkv", heads, lambda: [leaf(2, 16, WIDTH), *square(3)[1:]], heads_of_others, rows=()),
    "gated": Case(
        "gated_mlp", lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up),
        lambda: square(2, train=False),
        lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up).clamp(-7, 7), Reason.ACTIVATION,
    ),
    "whole_mlp": Case(
        "gated_mlp", whole_mlp, lambda: square(3, train=False), clamped_mlp, Reason.ACTIVATION
    ),
    "epilogue": Case(
        "linear_epilogue",
        lambda x, w, bias, residual: torch.sigmoid(F.linear(x, w, bias) * 0.3 + residual),
        lambda: [*square(1), frozen(WIDTH), leaf(WIDTH, WIDTH)],
        lambda x, w, bias, residual: F.linear(x, w, bias) * 0.3 + residual, rows=(0, 3),
    ),
    "activated": Case(
        "linear_epilogue", lambda x, w: F.gelu(torch.matmul(x, w.mT)), lambda: square(1),
        lambda x, w: torch.matmul(x, w.mT).cumsum(-1),
    ),
    "adapted": Case("lora", linear, lambda: [*square(1), *adapter()], without_a_base, Reason.NO_BASE),
    "scaled_by_alpha": Case(
        "lora", scaled_by_alpha, lambda: [*square(1), *adapter()], without_a_base, Reason.NO_BASE
    ),
    "in_float32": Case(
        "lora", peft_in_float32, lambda: [*square(1), *adapter(torch.float32)], in_float32_without_a_base,
        Reason.NO_BASE,
    ),
    "two_adapted": Case(
        "lora", two_adapted, lambda: [*square(2), *adapter(), *adapter()], two_without_a_base, Reason.NO_BASE
    ),
    "gated_adapted": Case(
        "lora", gated_adapted, lambda: [*square(2), *adapter(), *adapter()], gated_without_a_base,
        Reason.NO_BASE,
    ),
    "outer": Case(
        "outer_product_linear", lambda u, v, w: F.linear((u[:, :, None] * v[:, None, :]).flatten(1), w),
        lambda: leaves((8, 8), (8, 8), (8, 64)),
        lambda u, v, w: F.linear((u[:, :, None] + v[:, None, :]).flatten(1), w), rows=(0, 1), early=True,
    ),
    "outer_and_bias": Case(
        "outer_product_linear",
        lambda u, v, w, bias: (
            torch.bmm(u.unsqueeze(2), v.unsqueeze(1)).reshape(-1, w.shape[1]) @ w.t() + bias
        ),
        lambda: leaves((8, 8), (8, 8), (8, 64), (8,)),
        lambda u, v, w, bias: (u[:, :, None] * v[:, None, :]).mT.flatten(1) @ w.t() + bias, rows=(0, 1),
        early=True,
    ),
    "pairs": Case(
        "dot_interaction", pairs, lambda: leaves((4, 4), (4, 4, 4)),
        lambda dense, t: torch.cat(
            [dense, torch.bmm(t, (t + 1).transpose(1, 2))[:, [1, 2, 2], [0, 0, 1]]], dim=1
        ), Reason.PAIRS, rows=(), early=True,
    ),
    "every_pair": Case(
        "dot_interaction", every_pair, lambda: leaves((4, 4, 4)),
        lambda t: torch.einsum("bid,bjd->ijb", t, t)[:, [1, 2], [0, 0]], early=True,
    ),
    "attention": Case(
        "attention", attention, lambda: [leaf(2, 12, WIDTH), *weights_of_attention()],
        lambda x, q, k, v: attention(x, q, k, v, lambda weights: weights.cumsum(-1)), Reason.IN_BETWEEN,
        dims=2, early=True,
    ),
    "merged": Case(
        "lora_input", merged, lambda: [*square(1), *adapter()],
        lambda x, w, a, b: F.linear(x, w + (b @ a).tanh() * (b @ a)), Reason.MERGED, early=True,
    ),
    "gathers": Case(
        "stored_indices", layers_of_gathers, lambda: [leaf(8, 40, 24)], lambda x: layers_of_gathers(x, 1),
    ),
    "normed": Case(
        "norm_linear", lambda x, gain, w: F.linear(normed(x, gain), w), one_row,
        lambda x, gain, w: (y := normed(x, gain), F.linear(y, w)), Reason.USED_ELSEWHERE, rows=(),
    ),
    "diagonal": Case(
        "product_diagonal", lambda a, b: torch.diagonal(a @ b.t()) + 1, lambda: leaves((16, 24), (16, 24)),
        lambda a, b: (product := a @ b.t()).diagonal() + product.sum(), Reason.NEAR_MISS, rows=(),
    ),
    "loss": Case(
        "linear_cross_entropy", lambda h, w, labels: F.cross_entropy(F.linear(h, w), labels), labelled,
        loss_and_logits, Reason.USED_ELSEWHERE, rows=(0, 2), early=True,
    ),
}  # fmt: skip
