"""DoRA as libraries spell it, in the form that is one product with its vector: `v * (y + s * l)`.

    (v - 1) * y + v * (s * l) + y        torchtune, NVlabs and PEFT: y is the linear, l its adapter

The sum is collected as a polynomial: `v` times what is added, where no y is left beside it. After that the
sum inside is a linear with an adapter as any other, and the vector a loop behind it. These are fewer
operations, so it is no slower where the linear is left to stock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...block_mm import guards
from ...fusion import Candidate
from ...graph.builder import Builder, substitute
from ...graph.products import (
    CASTS,
    MUL,
    RESHAPES,
    Product,
    is_factor,
    product,
    scaled,
    tensor,
    through,
    value,
    widens,
)
from .adapters import adapter_of, has_size_of
from .recognise import additions_behind, summands

aten = torch.ops.aten


@dataclass(frozen=True)
class _Term:
    """`(by * v + alone) * node`, where v is a vector.

    Attributes:
        node: what is added, in the shape of the sum.
        core: the product that it is, without casts and reshapes.
        vector: v, as it is broadcast; or None, where it is multiplied by numbers alone.
    """

    node: fx.Node
    core: fx.Node
    vector: fx.Node | None
    by: float
    alone: float


def candidates(products: Sequence[Product]) -> Iterator[Candidate]:
    """Every sum of a linear, and of it and its adapter times a vector."""
    ups = {p.node for p in products if p.bias is None and adapter_of(p) is not None}
    taken = set[fx.Node]()
    for top in reversed(additions_behind(ups)):
        if top in taken:
            continue
        terms, inner = _terms(top)
        found = _read(top, terms, ups, inner) if terms else None
        if found is not None:
            taken.update(inner)
            yield found


def _terms(top: fx.Node) -> tuple[list[_Term], set[fx.Node]]:
    """What a tree of additions adds up, and the nodes in between; nothing where a term is none of ours."""
    found, inner, waiting = list[_Term](), {top}, [(argument, sign, top) for argument, sign in summands(top)]
    while waiting:
        node, sign, reader = waiting.pop()
        if not has_size_of(node, reader):
            return [], inner
        if len(node.users) == 1 and summands(node):
            inner.add(node)
            waiting += [(argument, sign * by, node) for argument, by in summands(node)]
            continue
        term = _term(node, sign, inner)
        if term is None:
            return [], inner
        found.append(term)
    return found, inner


def _term(node: fx.Node, scale: float, inner: set[fx.Node]) -> _Term | None:
    vector: fx.Node | None = None
    by, alone = 0.0, 1.0
    while product(core := _core(node)) is None:
        step, times = scaled(node), _times_vector(node)
        if len(node.users) != 1:
            return None
        inner.add(node)
        if step is not None:
            node, scale = step[0], scale * step[1]
        elif times is not None and vector is None:
            node, vector, alone = times
            by = 1.0
        else:
            return None
    return _Term(node, core, vector, by * scale, alone * scale)


def _core(node: Any) -> Any:
    """What is reshaped, and cast to a wider dtype."""
    while isinstance(node, fx.Node) and (node.target in RESHAPES or (node.target in CASTS and widens(node))):
        node = node.args[0]
    return node


def _times_vector(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """What a node multiplies by `v + number`, where v is one number for each column; v; and the number."""
    if node.target not in MUL or len(node.args) != 2 or node.kwargs:
        return None
    for x, by in (node.args, node.args[::-1]):
        if not has_size_of(x, node) or not isinstance(x, fx.Node) or not isinstance(by, fx.Node):
            continue
        found = tensor(by)
        if found is None or found.numel() != value(node).shape[-1] or found.shape[-1] != found.numel():
            continue
        offset = 0.0
        inside: Any = by
        if by.target in (aten.sub.Tensor, aten.add.Tensor) and not by.kwargs and is_factor(by.args[1]):
            offset = float(by.args[1]) * (1 if by.target is aten.add.Tensor else -1)
            inside = by.args[0]
        return x, inside, offset
    return None


def _read(top: fx.Node, terms: Sequence[_Term], ups: set[fx.Node], inner: set[fx.Node]) -> Normalised | None:
    """The sum in its other form, where it has one."""
    vectors = {through(term.vector, RESHAPES) for term in terms if term.vector is not None}
    bases = {term.core for term in terms} - ups
    added = [term for term in terms if term.core in ups]
    if len(vectors) != 1 or len(bases) != 1 or len(added) != 1 or added[0].alone != 0:
        return None
    linear = [term for term in terms if term.core in bases]
    by, alone = sum(term.by for term in linear), sum(term.alone for term in linear)
    if len(linear) < 2 or alone != 0 or by == 0:
        return None
    # The linear is read by this sum alone: else it has to be in memory all the same.
    (base,) = bases
    seen, waiting = set[fx.Node](), [base]
    while waiting:
        for user in waiting.pop().users:
            if user in seen or user in inner:
                continue
            if user.target not in RESHAPES and user.target not in CASTS:
                return None
            seen.add(user)
            waiting.append(user)
    return Normalised(top, linear[0], by, added[0])


class Normalised(Candidate):
    """Such a sum, which becomes the product of the vector with a sum.

    Args:
        top: the sum.
        linear: one of the terms of the linear.
        by: how often the vector times the linear is in it.
        added: the term of the adapter.
    """

    reported = False

    def __init__(self, top: fx.Node, linear: _Term, by: float, added: _Term) -> None:
        self.anchor, self.linear, self.by, self.added = top, linear, by, added

    def guard(self) -> None:
        guards.check_device(self.anchor)

    def rewrite(self) -> str:
        top = self.anchor
        make, dtype = Builder(top), value(top).dtype
        total = make.to(self.linear.node, dtype)
        added = make.to(self.added.node, dtype)
        if self.added.by != self.by:
            added = make.call(aten.mul.Tensor, added, self.added.by / self.by)
        total = make.call(aten.add.Tensor, total, added)
        vector = self.added.vector
        assert vector is not None
        total = make.call(aten.mul.Tensor, total, vector)
        substitute(top, total if self.by == 1 else make.call(aten.mul.Tensor, total, self.by))
        return "the vector times the sum"
