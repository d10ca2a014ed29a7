"""A function of each fusion before autograd, in two halves: between both, eager mode has a value in memory.

What the caller or the graph does there, or to what a half has read, decides whether they may become one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

FEATURES = 5
I, J = ([pair[side] for pair in torch.tril_indices(FEATURES, FEATURES, -1).T.tolist()] for side in (0, 1))


@dataclass(frozen=True)
class Case:
    """Two halves that become one operation.

    Attributes:
        fusion: its name.
        first: of the inputs; it reads the first of them.
        rest: of what `first` gives, and of the inputs.
        shapes: of the inputs that are numbers, of which all take gradients but those in `frozen`.
        frozen: places of inputs that take none.
        labels: whether a vector of classes is behind them.
    """

    fusion: str
    first: Callable[..., Any]
    rest: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    frozen: tuple[int, ...] = ()
    labels: bool = False

    def __call__(self, *inputs: Any) -> Any:
        return self.rest(self.first(*inputs), *inputs)

    def inputs(self, grad: bool = True) -> tuple[torch.Tensor, ...]:
        """Random ones, the same at each call."""
        torch.manual_seed(0)
        found = [torch.randn(shape) * 0.7 for shape in self.shapes]
        for place, each in enumerate(found):
            each.requires_grad_(grad and place not in self.frozen)
        classes = (torch.randint(self.shapes[1][0], self.shapes[0][:1]),) if self.labels else ()
        return (*found, *classes)


CASES = {
    "attention": Case(
        "attention", lambda q, k, v: q @ k.mT * 0.25, lambda s, q, k, v: torch.softmax(s, -1) @ v,
        ((2, 3, 7, 16), (2, 3, 9, 16), (2, 3, 9, 16)),
    ),
    "pairs of features": Case(
        "dot_interaction", lambda t, x: torch.bmm(t, t.mT), lambda z, t, x: torch.cat([x, z[:, I, J]], 1),
        ((6, FEATURES, 8), (6, 8)),
    ),
    "given pairs": Case(
        "dot_interaction", lambda t, x: torch.bmm(t, t.mT),
        lambda z, t, x: torch.cat([x, z[:, [1, 2, 2], [0, 0, 0]]], 1), ((6, FEATURES, 8), (6, 8)),
    ),
    "gathered pairs": Case(
        "dot_interaction", lambda t, x: t[:, I] * t[:, J], lambda z, t, x: torch.cat([x, z.sum(-1)], 1),
        ((6, FEATURES, 8), (6, 8)),
    ),
    "outer product": Case(
        "outer_product_linear", lambda u, v, w, b: (u[:, :, None] * v[:, None, :]).flatten(1),
        lambda z, u, v, w, b: F.linear(z, w, b), ((6, 5), (6, 7), (9, 35), (9,)),
    ),
    "loss": Case(
        "linear_cross_entropy", lambda h, w, labels: F.linear(h, w),
        lambda logits, h, w, labels: F.cross_entropy(logits, labels), ((18, 24), (61, 24)), labels=True,
    ),
    "loss of each row": Case(
        "linear_cross_entropy", lambda h, w, b, labels: F.linear(h, w, b),
        lambda logits, h, w, b, labels: F.cross_entropy(logits, labels, reduction="none"),
        ((18, 24), (61, 24), (61,)), labels=True,
    ),
    "merged adapter": Case(
        "lora_input", lambda a, b, x, w: b @ a, lambda d, a, b, x, w: F.linear(x, w + d * 0.5),
        ((4, 32), (48, 4), (3, 8, 32), (48, 32)), frozen=(3,),
    ),
}  # fmt: skip
