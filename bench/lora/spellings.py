"""A linear with adapters as PEFT and autograd spell it, its operands, and its outputs in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.common import DTYPES
from bench.lora.rows import Row
from bench.tuning_linears import checked_rows as rows
from inductor_fusions.worker.linears import KEPT, SCALE, behind_masks

Tensors = list[torch.Tensor]


@dataclass
class Operands:
    """One set of tensors.

    Attributes:
        x: what is read: x, and the base that is in memory; dY of each linear, and the masks of their
            adapters; or the large matrix and the small ones of a gradient, then the masks of the large one
            and what each leaves of it.
        w: weights, shape (out, in).
        a, b: adapters, shapes (r, in) and (out, r).
    """

    x: Tensors
    w: Tensors
    a: Tensors
    b: Tensors

    def flat(self) -> Tensors:
        """Every tensor."""
        return [*self.x, *self.w, *self.a, *self.b]


def make(row: Row, device: str, seed: int) -> Operands:
    """Random operands."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def rand(dtype: str, *shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (made / shape[-1] ** 0.5).to(DTYPES[dtype])

    def mask(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device) < KEPT

    if row.kind == "gradient":
        large = rand(row.large, row.tokens, row.inner)
        small = [rand(row.adapters, row.tokens, r) for r in row.ranks]
        kept = [mask(row.tokens, row.inner) for _ in row.ranks] if row.dropout else []
        left = [large.to(DTYPES[row.adapters]) * each * (1 / KEPT) for each in kept]
        return Operands([large, *small, *kept, *left], [], [], [])
    if row.kind == "down":
        large = rand(row.large, row.tokens, row.inner)
        return Operands([large, *(rand(row.adapters, r, row.inner).t() for r in row.ranks)], [], [], [])
    w = [rand("bfloat16", n, row.inner) for n in row.outer]
    a = [rand(row.adapters, row.rank, row.inner) for _ in row.outer]
    b = [rand(row.adapters, n, row.rank) for n in row.outer]
    widths = row.outer if row.kind in ("backward", "dropped") else (row.inner,)
    found = Operands([rand("bfloat16", row.tokens, width) for width in widths], w, a, b)
    if row.kind == "accumulate":
        found.x.append(rand("bfloat16", row.tokens, row.outer[0]))
        found.w = []
    if row.kind == "dropped":
        found.x += [mask(row.tokens, row.inner) for _ in row.outer]
    if row.trains:
        for t in (*found.x, *found.a, *found.b):
            t.requires_grad_()
    if row.kind == "step":
        found.x.append(rand("bfloat16", row.tokens, row.outer[0]))  # the cotangent
    return found


def forward(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """As PEFT spells it."""
    outputs = []
    for weight, down, up in zip(w, a, b, strict=True):
        base = F.linear(x[0], weight)
        inside = x[0].to(down.dtype)
        if row.dropout:
            inside = F.dropout(inside, row.dropout)
        outputs.append((base + F.linear(F.linear(inside, down), up) * SCALE).to(base.dtype))
    return outputs


def backward(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """The gradient of the input, as autograd spells it."""
    total: torch.Tensor | None = None
    for dy, weight, down, up in zip(x, w, a, b, strict=True):
        through = ((dy.to(up.dtype) * SCALE) @ up) @ down
        part = through.to(dy.dtype) + dy @ weight
        total = part if total is None else total + part
    assert total is not None
    return [total]


def accumulate(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """As PEFT spells it, behind the operation of a quantised weight."""
    (inside, base), (down,), (up,) = x, a, b
    return [(base + F.linear(F.linear(inside.to(down.dtype), down), up) * SCALE).to(base.dtype)]


def dropped(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """The gradient of the input of linears whose adapters have a dropout each, as autograd spells it."""
    return behind_masks(x, w, b, a)


def gradient(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """dB; for dA, the same is stored transposed. Behind a dropout, dA of what it has left."""
    large, *others = x
    if row.dropout:
        count = len(others) // 3
        return [left.t() @ b for left, b in zip(others[2 * count :], others[:count], strict=True)]
    return [(large.to(b.dtype) * SCALE).t() @ b for b in others]


def down(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """What the adapters make of x, which is narrow."""
    large, *small = x
    return [(large.to(each.dtype) * SCALE) @ each for each in small]


def narrow_product(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """A product of `ALONE` as the operation that the fusion puts into graphs."""
    if row.kind == "gradient":
        return narrow_gradient(row, x, w, a, b)
    from inductor_fusions.fusions.lora.op import NARROW_MM

    large, *small = x
    found: Tensors = NARROW_MM(large, small, [SCALE] * len(small), [0.0] * len(small), False, [])
    return found


def narrow_gradient(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """The same as the operation that the fusion puts into graphs."""
    from inductor_fusions.fusions.lora.op import NARROW_MM

    large, *small = x
    scale, kept = SCALE, []
    if row.dropout:
        count = len(small) // 3
        scale, kept = 1 / KEPT, [mask.t() for mask in small[count : 2 * count]]
        small = small[:count]
    count = len(small)
    found: Tensors = NARROW_MM(large.t(), small, [scale] * count, [0.0] * count, False, kept)
    return found


def frozen(row: Row, one: Operands) -> Tensors:
    """The linears without adapters; where there are none, a copy of what is in memory."""
    if row.kind in ("backward", "dropped"):
        return [dy @ weight for dy, weight in zip(one.x, one.w, strict=False)]
    if row.kind == "accumulate":
        return [one.x[1].clone()]
    return [F.linear(one.x[0], weight) for weight in one.w]


FUNCTIONS = {
    "forward": forward, "backward": backward, "gradient": gradient, "step": forward,
    "accumulate": accumulate, "dropped": dropped, "down": down,
}  # fmt: skip
#: Kinds whose up-projections are added to what is in memory.
ADDED = ("accumulate", "dropped")


def reference(row: Row, one: Operands) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
    """The first and the last rows of each output in float64, and how to cut them from outputs."""

    def cut(outputs: Tensors) -> Tensors:
        return [rows(y) for y in outputs]

    def wide(tensors: Tensors) -> Tensors:
        return [t.detach().double() for t in tensors]

    if row.kind == "gradient":
        large, *others = wide(one.x)
        if row.dropout:
            count = len(others) // 3
            kept = [rows((large * mask).t()) for mask in others[count : 2 * count]]
            return [left @ b / KEPT for left, b in zip(kept, others[:count], strict=True)], cut
        return [SCALE * rows(large.t()) @ b for b in others], cut
    if row.kind == "down":
        large, *small = wide(one.x)
        return [SCALE * rows(large) @ each for each in small], cut
    if row.kind == "step":
        # Every gradient of the adapters needs all tokens.
        x, dy = wide(one.x)
        (weight,), (down,), (up,) = wide(one.w), wide(one.a), wide(one.b)
        h, dh = x @ down.t(), SCALE * dy @ up
        exact = [rows(x) @ weight.t() + SCALE * rows(h) @ up.t(), rows(dy) @ weight + rows(dh) @ down]
        exact += [rows(dh.t() @ x), rows(SCALE * dy.t() @ h)]
        return exact, cut
    x = [rows(t.double()) for t in one.x]
    plain = Row(row.kind, row.tokens, row.inner, row.outer, row.rank)
    exact = FUNCTIONS[row.kind](plain, x, wide(one.w), wide(one.a), wide(one.b))
    return exact, cut
