"""Gradients of adapters as skinny GEMMs over all tokens: `dY^T h`, `dh^T x`, `dY B`."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ... import operands
from ...block_mm import guards
from ...decisions.tables import dtype_name
from ...fusion import Candidate, Rejected
from ...graph.builder import substitute
from ...graph.facts import facts
from ...graph.placement import Place, find
from ...graph.products import RESHAPES, Product, product, restored, scaled, users_behind
from ...operands import known_size, tokens_of, value
from ...reasons import Reason
from . import narrow, profit
from .adapters import PERMUTES, is_low_rank, source, unrounded
from .emitter import Emitter
from .op import NARROW_MM

aten = torch.ops.aten


@dataclass(frozen=True)
class NarrowProduct:
    """A product with a narrow matrix: `scale * x @ b`, or the same transposed.

    Attributes:
        node: the mm, or the result of a skinny GEMM.
        x: the large operand, shape (M, K); of an mm that is transposed, its transpose.
        b: the narrow one, shape (K, r), likewise.
        transposed: whether `node` is the transposed product.
        scale: factor of a skinny GEMM.
        kept: the mask that one has of x, or None.
    """

    node: fx.Node
    x: fx.Node
    b: fx.Node
    transposed: bool
    scale: float = 1.0
    kept: fx.Node | None = None

    @property
    def call(self) -> fx.Node | None:
        """The call of the skinny GEMM, if the product is one already."""
        made = self.node.args[0] if self.node.target is operator.getitem else None
        return made if isinstance(made, fx.Node) else None


def read(
    products: Sequence[Product], downs: set[fx.Node], middles: Sequence[fx.Node] = ()
) -> list[NarrowProduct]:
    """The products of a backward that are no part of a sum: `dY @ B`, `dY^T @ h` and `dh^T @ x`.

    Args:
        downs: the down-projections that it has, in whatever direction.
        middles: what is computed of some of them, and multiplied by the other matrix of an adapter.
    """
    found = []
    alone = {p.node for p in products if _only_for_weights(p)}
    downs = {node for node in downs if product(node) is not None} | alone
    # A symbolic size has no hash.
    ranks = [rank for rank in (value(node).shape[1] for node in downs) if isinstance(rank, int)]
    lefts = {source(p.a).base for p in map(product, downs) if p is not None}
    narrow_ones = downs | {_plain(middle) for middle in middles}
    for p in products:
        node = p.node
        if p.bias is not None or p.scale != 1:
            continue
        if node in downs:
            # What is left of them after the sums: the input is read without its casts and factors.
            if source(p.a).base is not p.a:
                found.append(NarrowProduct(node, p.a, p.b, False))
        elif p.a.target in PERMUTES and _plain(p.a.args[0]) in narrow_ones:
            found.append(NarrowProduct(node, p.b, p.a, True))
        elif (
            p.a.target in PERMUTES and known_size(value(p.b).shape[1]) in ranks and source(p.a).base in lefts
        ):
            found.append(NarrowProduct(node, p.a, p.b, False))
    return found


def made_before(graph: fx.Graph) -> list[NarrowProduct]:
    """The gradients of A that were made skinny GEMMs before autograd: several may read one input."""
    found = []
    for call in graph.find_nodes(op="call_function", target=NARROW_MM):
        arguments: tuple[Any, ...] = call.args
        x, b, scales, further, transposed, kept = arguments
        users = list(call.users)
        if transposed and len(b) == len(users) == 1 and not any(further):
            found.append(NarrowProduct(users[0], x, b[0], True, scales[0], *kept))
    return found


def _only_for_weights(down: Product) -> bool:
    """Whether a product is `dY @ B` of an adapter whose input has no gradient."""
    node = down.node
    if down.bias is not None:
        return False
    rank, inner = value(node).shape[1], value(down.a).shape[1]
    if not is_low_rank(rank) or (isinstance(inner, int) and inner <= 2 * rank):
        return False
    for user in users_behind(node, RESHAPES):
        if user.target is NARROW_MM and user.args[4]:
            return True
        for reader in user.users if user.target in PERMUTES else ():
            p = product(reader)
            if p is not None and p.a is user and str(value(p.b).shape[1]) != str(rank):
                return True
    return False


def _plain(node: Any) -> Any:
    """The node that a node multiplies by numbers, reshapes, and casts to a wider dtype and back."""
    while isinstance(node, fx.Node):
        step, origin = scaled(node), restored(node)
        if origin is not None:
            node = origin
        elif step is not None or node.target in RESHAPES:
            node = step[0] if step is not None else node.args[0]
        else:
            break
    return node


# -- candidates ---------------------------------------------------------------------------------------


def candidates(graph: fx.Graph, narrows: Sequence[NarrowProduct]) -> Iterator[Candidate]:
    """One candidate for all that read one matrix; none for a single skinny GEMM."""
    groups: dict[Any, list[NarrowProduct]] = {}
    for n in narrows:
        groups.setdefault(_key(n), []).append(n)
    for members in groups.values():
        members = [_as_it_is(n) for n in members]
        while len(members) > 1 or any(n.call is None for n in members):
            gradient = Gradients(graph, members)
            yield gradient
            members = gradient.left_over


def _as_it_is(n: NarrowProduct) -> NarrowProduct:
    """The product with its present operands: those that it was read with may be replaced."""
    p = product(n.node) if n.call is None else None
    return n if p is None else replace(n, x=p.b if n.transposed else p.a, b=p.a if n.transposed else p.b)


def _key(n: NarrowProduct) -> tuple[Any, ...]:
    base = source(n.x)
    views = tuple(str(view.args[1:]) for view in base.views)
    return (base.base, n.transposed, n.call is None, n.kept is None, views)


def _check_operands(n: NarrowProduct) -> None:
    """Refuse matrices that the kernel does not read."""
    x, b = value(source(n.x).base), value(n.b)
    for found, what in ((x, "a matrix"), (b, "a low-rank matrix")):
        if found.dtype not in guards.DTYPES:
            name = dtype_name(found.dtype)
            raise Reason.DTYPE.rejected(f"{what} has dtype {name}, which no kernel supports")
    if b.dtype not in (x.dtype, torch.float32):
        raise Reason.MIXED_DTYPES.rejected("the matrices have two different 16-bit dtypes")
    if 1 not in x.stride():
        raise Reason.LAYOUT.rejected("a matrix has no dim of stride 1")
    rank = b.shape[0 if n.transposed and n.call is None else 1]
    if not isinstance(rank, int) or rank > narrow.MOST_COLUMNS:
        raise Reason.LIMIT.rejected(f"a rank is above {narrow.MOST_COLUMNS}")


class Gradients(Candidate):
    """Skinny GEMMs that are in no sum: gradients of adapters that read one large matrix."""

    def __init__(self, graph: fx.Graph, members: Sequence[NarrowProduct]) -> None:
        self.graph, self.members = graph, list(members)
        self.anchor = members[0].node
        self.place: Place | None = None
        self.kernel = ""
        self.left_over: list[NarrowProduct] = []

    def describe(self) -> dict[str, str]:
        return {
            "input": guards.text(self.members[0].x),
            "narrow": ", ".join(guards.text(n.b) for n in self.members),
        }

    def guard(self) -> None:
        operands.check_device(value(self.anchor))
        self.left_over = self.members[1:]
        for n in self.members:
            _check_operands(n)
        reason = None
        everything = self.members
        # What is a skinny GEMM already gains nothing by itself.
        fewest = 1 if everything[0].call is None else 2
        for count in range(len(everything), fewest - 1, -1):
            self.members, self.left_over = everything[:count], everything[count:]
            try:
                self._check()
            except Rejected as miss:
                reason = reason or miss
            else:
                return
        self.members, self.left_over = everything[:1], everything[1:]
        assert reason is not None
        raise reason

    def _check(self) -> None:
        if len({value(n.b).dtype for n in self.members}) > 1:
            raise Reason.MIXED_DTYPES.rejected("the gradients have different dtypes")
        if sum(narrow.padded(r) for r in self._shape().ranks) > narrow.MOST_TOGETHER:
            raise Reason.LIMIT.rejected("the ranks sum to more columns than one kernel supports")
        reading = [Product(n.node, source(n.x).base, n.b) for n in self.members]
        self.place = find(reading, [*source(self.members[0].x).sizes, *self._masks()])
        facts(self.graph).memory.check(reading, self.place.before)
        shape, (rows, inner) = self._shape(), self._sizes()
        tokens = tokens_of(rows if shape.layout == "n" else inner)
        self.kernel = profit.narrow_kernel(shape, tokens, value(self.anchor).device)

    def _masks(self) -> list[fx.Node]:
        return [n.kept for n in self.members if n.kept is not None]

    @property
    def _turned(self) -> bool:
        """Whether the product is that of the transposed matrices."""
        return self.members[0].transposed and self.members[0].call is None

    def _sizes(self) -> tuple[Any, Any]:
        """Rows and columns of the large matrix."""
        first, second = value(self.members[0].x).shape
        return (second, first) if self._turned else (first, second)

    def _shape(self) -> narrow.Shape:
        first = self.members[0]
        x, origin = value(first.x), source(first.x)
        rows, inner = self._sizes()
        return narrow.Shape(
            known_size(rows),
            known_size(inner),
            tuple(min(int(s) for s in value(n.b).shape if isinstance(s, int)) for n in self.members),
            "t" if (x.stride(1) == 1) == self._turned else "n",
            value(origin.base).dtype,
            value(first.b).dtype,
            masks=len(self._masks()),
        )

    def rewrite(self) -> str:
        assert self.place is not None
        first, place = self.members[0], self.place.hoist()
        make = Emitter(place.before, self.anchor)
        origins = [source(n.x) for n in self.members]
        x = make.replay(origins[0])
        right = [make.replay(unrounded(n.b)) for n in self.members]
        if first.transposed and first.call is None:
            x = make.call(aten.permute.default, x, [1, 0])
            right = [make.call(aten.permute.default, b, [1, 0]) for b in right]
        scales = [origin.scale * n.scale for origin, n in zip(origins, self.members, strict=True)]
        outputs = make.parts(NARROW_MM, x, right, scales, [0.0] * len(right), first.transposed, self._masks())
        place.sink()
        for n, output in zip(self.members, outputs, strict=True):
            substitute(n.node, output)
        return self.kernel
