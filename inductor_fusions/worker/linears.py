"""Builds linears and adapters, as autograd and PEFT produce them, from a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..block_mm.op import ACTIVATIONS
from ..decisions.problems import FEW_ROWS, Row, has_adapters
from ..fusions.lora.op import NARROW_MM
from ..ops import block_mm
from .case import Case, Tensors, UnableError, generator

#: Factor of every adapter: lora_alpha / r.
SCALE = 2.0
#: The share of elements that a dropout keeps.
KEPT = 0.9


def products(row: Row, device: str) -> Case:
    """Matrix products as one grouped GEMM.

    Raises:
        UnableError: which operands its products share is not known.
    """
    kind, count = row["kind"], len(row["layout"])
    if kind == "mixed" or has_adapters(row):
        raise UnableError(f"the operands that the products share are not known: {kind}")
    normal = generator(device, getattr(torch, row["dtype"]))

    def matrix(rows: int, columns: int, letter: str, inner: int) -> torch.Tensor:
        shape = (rows, columns) if letter == "n" else (columns, rows)
        made = normal(*shape, scale=inner**-0.5)
        return made if letter == "n" else made.t()

    rows = row["m"] or [row["tokens"]] * len(row["n"])
    inner = row["k"] or [row["tokens"]] * count
    groups = [0] * count if kind == "sum" else list(range(count))
    a: Tensors = []
    b: Tensors = []
    for p, (group, letters) in enumerate(zip(groups, row["layout"], strict=True)):
        left = p == 0 or kind not in ("shared_a", "gated")
        a.append(matrix(rows[group], inner[p], letters[0], inner[p]) if left else a[0])
        right = p == 0 or kind != "shared_b"
        b.append(matrix(inner[p], row["n"][group], letters[1], 1) if right else b[0])
    activation, gated = row.get("activation", ""), kind == "gated"

    def written_out(*given: torch.Tensor) -> Tensors:
        return multiplied(kind, activation, given[:count], given[count:])

    def fused(*given: torch.Tensor) -> Tensors:
        names = [activation, *[""] * groups[-1]]
        return block_mm(given[:count], given[count:], groups=groups, gated=gated, activations=names)

    return Case(written_out, [*a, *b], fused=fused, varied="block_mm")


def multiplied(kind: str, activation: str, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> Tensors:
    """The products of a grouped GEMM as the graph of a model has them, the first with its activation."""
    found = [x @ w for x, w in zip(a, b, strict=True)]
    if kind == "sum":
        total = found[0]
        for product in found[1:]:
            total = total + product
        return [total]
    found[0] = ACTIVATIONS[activation](found[0])
    return [found[0] * found[1]] if kind == "gated" else found


def adapted(row: Row, device: str) -> Case:
    """Linears with adapters: forward, or the gradient of their input."""
    base, own = getattr(torch, row["dtype"]), getattr(torch, row["adapters"])
    normal = generator(device, base)
    varied = "lora_decode" if row["tokens"] <= FEW_ROWS else "block_mm"
    forward = row["layout"] == "t"
    if forward != (len(row["inner"]) == 1) and len(row["outer"]) != 1:
        raise UnableError("the linears are neither a forward nor a gradient")
    x = [normal(row["tokens"], width) for width in row["inner"]]
    if forward:
        (inner,) = row["inner"]
        w = [normal(n, inner, scale=inner**-0.5) for n in row["outer"]]
        sizes = [[(inner, n, r) for r in ranks] for n, ranks in zip(row["outer"], row["ranks"], strict=True)]
    else:
        (width,), ranks = row["outer"], row["ranks"][0]
        w = [normal(n, width, scale=n**-0.5) for n in row["inner"]]
        missing = len(w) - len(ranks)
        sizes = [[(width, n, r)] for n, r in zip(row["inner"], ranks, strict=False)] + [[]] * missing
    down = [[normal(r, k, scale=k**-0.5, dtype=own) for k, _, r in some] for some in sizes]
    up = [[normal(n, r, scale=r**-0.5, dtype=own) for _, n, r in some] for some in sizes]
    given = Operands(x, w, down, up)

    def forward_of(*flat: torch.Tensor) -> Tensors:
        one = given.like(flat)
        outputs = []
        for weight, downs, ups in zip(one.w, one.down, one.up, strict=True):
            total = F.linear(one.x[0], weight)
            for a, b in zip(downs, ups, strict=True):
                inside = one.x[0].to(a.dtype)
                total = (total + F.linear(F.linear(inside, a), b) * SCALE).to(total.dtype)
            outputs.append(total)
        return outputs

    def backward_of(*flat: torch.Tensor) -> Tensors:
        one = given.like(flat)
        total: torch.Tensor | None = None
        for dy, weight, downs, ups in zip(one.x, one.w, one.down, one.up, strict=True):
            part = dy @ weight
            for a, b in zip(downs, ups, strict=True):
                part = (((dy.to(b.dtype) * SCALE) @ b) @ a).to(dy.dtype) + part
            total = part if total is None else total + part
        assert total is not None
        return [total]

    return Case(forward_of if forward else backward_of, given.flat(), varied=varied)


def added(row: Row, device: str) -> Case:
    """Adapters that are added to what is in memory; or, behind masks, to gradients of linears."""
    base, own = getattr(torch, row["dtype"]), getattr(torch, row["adapters"])
    normal, tokens, columns = generator(device, base), row["tokens"], row["columns"]
    masks = row["masks"]
    if masks not in (0, len(row["inner"])):
        raise UnableError("some of the adapters have a dropout mask")
    x = [normal(tokens, width) for width in row["inner"]]
    down = [[normal(k, r, scale=k**-0.5, dtype=own)] for k, r in zip(row["inner"], row["ranks"], strict=True)]
    up = [[normal(r, columns, scale=r**-0.5, dtype=own)] for r in row["ranks"]]
    if not masks:
        x.append(normal(tokens, columns))
        given = Operands(x, [], down, up)

        def accumulated(*flat: torch.Tensor) -> Tensors:
            one = given.like(flat)
            total = one.x[-1]
            for inside, (a,), (b,) in zip(one.x, one.down, one.up, strict=False):
                total = (total + (inside.to(a.dtype) @ a) @ b * SCALE).to(total.dtype)
            return [total]

        return Case(accumulated, given.flat(), varied="lora_accumulate")
    w = [normal(k, columns, scale=k**-0.5) for k in row["inner"]]
    x += [torch.rand(tokens, columns, device=device) < KEPT for _ in row["inner"]]
    given = Operands(x, w, down, up)

    def dropped(*flat: torch.Tensor) -> Tensors:
        one = given.like(flat)
        down, up = ([only for (only,) in some] for some in (one.down, one.up))
        return behind_masks(one.x, one.w, down, up)

    return Case(dropped, given.flat(), varied="lora_accumulate")


def behind_masks(x: Tensors, w: Tensors, down: Tensors, up: Tensors) -> Tensors:
    """The gradient of the input of linears whose adapters have a dropout each, as autograd writes it.

    Args:
        x: dY of each linear, then the mask of each adapter.
        w: weights, shape (out, in).
        down, up: what dY is multiplied by of each adapter, shapes (out, r) and (r, in).
    """
    total: torch.Tensor | None = None
    for dy, kept, weight, a, b in zip(x[: len(w)], x[len(w) :], w, down, up, strict=True):
        through = ((dy.to(a.dtype) * SCALE) @ a) @ b
        through = (through * (kept.to(b.dtype) * (1 / KEPT))).to(dy.dtype)
        part = dy @ weight
        total = through + part if total is None else total + through + part
    assert total is not None
    return [total]


def narrow(row: Row, device: str) -> Case:
    """Products of one matrix with narrow ones: gradients of adapters, and down-projections alone."""
    normal = generator(device, getattr(torch, row["dtype"]))
    own, masks = getattr(torch, row["narrow"]), row.get("masks", 0)
    transposed = row["layout"] == "t"
    tokens, width, count = row["tokens"], row["width"], len(row["ranks"])
    inner = tokens if transposed else width
    large = normal(tokens, width)
    small = [normal(inner, r, scale=inner**-0.5, dtype=own) for r in row["ranks"]]
    kept = [torch.rand(tokens, width, device=device) < KEPT for _ in range(count if masks else 0)]

    def parts(flat: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sequence[torch.Tensor], Tensors]:
        x, right, shown = flat[0], flat[1 : 1 + count], list(flat[1 + count :])
        return (x.t(), right, [mask.t() for mask in shown]) if transposed else (x, right, shown)

    def written_out(*flat: torch.Tensor) -> Tensors:
        x, right, shown = parts(flat)
        if not shown:
            return [(x.to(b.dtype) * SCALE) @ b for b in right]
        return [(x.to(b.dtype) * m * (1 / KEPT)) @ b for b, m in zip(right, shown, strict=True)]

    def fused(*flat: torch.Tensor) -> Tensors:
        x, right, shown = parts(flat)
        scale = 1 / KEPT if shown else SCALE
        made: Any = NARROW_MM(x, list(right), [scale] * count, [0.0] * count, False, shown)
        return list(made)

    return Case(written_out, [large, *small, *kept], fused=fused, varied="narrow_mm")


def outer_product(row: Row, device: str) -> Case:
    """A linear on the flattened outer product of two matrices."""
    normal = generator(device, getattr(torch, row["dtype"]))
    u, v = normal(row["rows"], row["p"]), normal(row["rows"], row["q"])
    w = normal(row["columns"], row["p"] * row["q"], scale=(row["p"] * row["q"]) ** -0.5)

    def written_out(u: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Tensors:
        return [F.linear((u[:, :, None] * v[:, None, :]).flatten(1), w)]

    return Case(written_out, [u, v, w], [u, v, w] if row["train"] else [])


class Operands:
    """Tensors of linears with adapters, flat and in order.

    Args:
        down, up: of each linear, those of its adapters.
    """

    def __init__(self, x: Tensors, w: Tensors, down: list[Tensors], up: list[Tensors]) -> None:
        self.x, self.w, self.down, self.up = x, w, down, up

    def flat(self) -> Tensors:
        """Every tensor."""
        return [*self.x, *self.w, *(t for some in (*self.down, *self.up) for t in some)]

    def like(self, flat: Sequence[torch.Tensor]) -> Operands:
        """Others in the same places."""
        left = iter(flat)

        def take(count: int) -> Tensors:
            return [next(left) for _ in range(count)]

        x, w = take(len(self.x)), take(len(self.w))
        return Operands(x, w, [take(len(s)) for s in self.down], [take(len(s)) for s in self.up])
