"""The candidates of the fusion: guard and rewrite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ... import operands
from ..._inductor import Match, was_erased
from ...block_mm import emit, guards, units
from ...block_mm.lowering import MOST_PRODUCTS
from ...fusion import Candidate, LeftToStock, Rejected, Scope, nodes_of
from ...graph.builder import Builder, substitute
from ...graph.facts import facts
from ...graph.placement import Place, earliest, find
from ...graph.products import PRODUCTS, Product, operands_of, products_of, scaled
from ...operands import tokens_of, value
from ...reasons import Reason
from . import (
    accumulate_sites,
    downs,
    gather,
    gradients,
    profit,
    round_trips,
    unsupported,
    unsupported_products,
)
from .adapters import Adapter, source, unrounded
from .checks import check_adapter, check_shapes
from .emitter import Emitter
from .groups import adapters_of, bases_of, grouped, is_whole, result_dtypes, shape_of, text_of
from .masks import masked
from .op import LORA_LINEAR
from .recognise import Linear, linears, read_again
from .sums import sums as read_sums
from .sums import without

aten = torch.ops.aten

#: Where products, and adapters that are not fused, are looked for.
ANCHORS = (*PRODUCTS, *unsupported.BASES)


def candidates(scope: Scope, matches: Sequence[Match]) -> Iterator[Candidate]:
    """Linears with adapters, those on one input together; then what is left of the adapters' gradients.

    What all of these read in parts is split up together in the end.
    """
    graph, nodes = scope.graph, nodes_of(matches)
    yield from units.candidates(graph)
    yield from unsupported.candidates([node for node in nodes if node.target in unsupported.BASES])
    products = products_of(node for node in nodes if node.target in PRODUCTS)
    yield from unsupported_products.candidates(products)
    found = linears(products)
    sums = read_sums(found)
    found = without(found, sums)
    # Nothing but functions of skinny GEMMs is added up in the backward of a small MLP.
    sums = [s for s in sums if not s.problem or any(a.middle is None for a in s.adapters)]
    adapters = adapters_of((*found, *sums))
    narrows = gradients.read(
        products, {a.down.node for a in adapters}, [a.middle for a in adapters if a.middle is not None]
    )
    for group in grouped(products, found):
        while group:
            candidate = Adapted(graph, [read_again(linear) for linear in group])
            yield candidate
            group = candidate.left_over
    yield from accumulate_sites.candidates(graph, sums)
    yield from gradients.candidates(graph, [n for n in narrows if not was_erased(n.node)])
    yield from gradients.candidates(graph, gradients.made_before(graph))
    yield from round_trips.candidates(products)
    yield from gather.candidates(graph)


class Adapted(Candidate):
    """Linears on one input, some of them with adapters; or one sum of products with adapters.

    Attributes:
        left_over: members that were not fused with the others.
    """

    def __init__(self, graph: fx.Graph, group: Sequence[Linear]) -> None:
        self.graph, self.group = graph, list(group)
        self.anchor = group[0].root
        self.left_over: list[Linear] = []
        self.downs: list[downs.Down] = []
        self.place: Place | None = None
        self.whole = False
        self.kernel = ""
        self.sizes: dict[fx.Node, list[Any]] = {}

    def describe(self) -> dict[str, str]:
        first = self.group[0]
        if not first.bases:
            return {}
        return {
            "input": guards.text(first.bases[0].a),
            "weights": ", ".join(guards.text(p.b) for p in bases_of(self.group)),
            "adapters": text_of(adapters_of(self.group)),
        }

    def guard(self) -> None:
        """Keep the longest part of the group, from its first linear on, that may be fused."""
        if self.group[0].problem:
            raise LeftToStock(self.group[0].problem)
        operands.check_device(value(self.anchor))
        reason: Rejected | None = None
        for count in range(len(self.group), 0, -1):
            some = self.group[:count]
            if not any(linear.adapters for linear in some):
                continue
            try:
                self._check(some)
            except Rejected as miss:
                reason = reason if reason is not None and count == 1 else miss
            else:
                self.left_over = [x for x in self.group[count:] if x.adapters]
                self.group = some
                return
        self.left_over = [x for x in self.group[1:] if x.adapters]
        assert reason is not None
        raise reason

    def _check(self, group: list[Linear]) -> None:
        bases, adapters = bases_of(group), adapters_of(group)
        if len(bases) + len(adapters) > MOST_PRODUCTS:
            raise Reason.LIMIT.rejected(f"there are more than {MOST_PRODUCTS} products")
        guards.check_products(bases)
        for linear in group:
            self._check_linear(linear)
        if len({value(linear.root).dtype for linear in group} - {torch.float32}) > 1:
            raise Reason.MIXED_DTYPES.rejected("the results have two different 16-bit dtypes")
        for a in adapters:
            self._check_adapter(a, value(bases[0].a))
        self.whole = is_whole(group)
        self.downs = [] if self.whole else downs.narrow_products(a.down for a in adapters)
        self.place = self._place(group)
        plain = all(a.is_plain for a in adapters)
        profit.check_few_rows(tokens_of(value(bases[0].node).shape[0]), plain)
        self.kernel = profit.kernel(shape_of(group), value(self.anchor).device)
        for linear in group:
            self._check_dropouts(linear)

    def _check_linear(self, linear: Linear) -> None:
        if linear.problem:
            raise LeftToStock(linear.problem)
        root, first = linear.root, value(linear.bases[0].node)
        shapes = [tuple(value(p.node).shape) for p in linear.bases]
        for a in linear.adapters:
            rows, columns = value(a.up.node).shape
            shapes.append((rows, columns + sum(a.pad)))
        check_shapes(value(root), shapes)
        guards.check_result(root, linear.bases[0].node)
        if linear.rest is not None and not all(isinstance(size, int) for size in first.shape):
            raise Reason.SYMBOLIC.rejected("the sum has a symbolic size and a term that is not a product")
        self.sizes[root] = emit.sizes_of(root, linear.bases[0].node, linear.inner)

    def _check_adapter(self, a: Adapter, x: torch.Tensor) -> None:
        right, left = value(a.up.b), value(a.down.b)
        if right.dtype != left.dtype:
            raise Reason.MIXED_DTYPES.rejected("the two matrices of an adapter have different dtypes")
        if right.dtype not in (x.dtype, torch.float32):
            raise Reason.MIXED_DTYPES.rejected("the adapters have neither the dtype of the base nor float32")
        if right.dtype != x.dtype and x.dtype != torch.bfloat16:
            raise Reason.MIXED_DTYPES.left_to_stock("the adapters are float32 and the base is float16")
        if 1 not in right.stride():
            raise Reason.LAYOUT.rejected("a matrix of an adapter has no dim of stride 1")
        check_adapter(a, x.dtype)

    def _check_dropouts(self, linear: Linear) -> None:
        """Check the profitability of adapters that read a dropped-out input from memory."""
        base = value(linear.bases[0].b)
        for a in linear.adapters:
            left, tokens = value(a.down.b), tokens_of(value(a.down.a).shape[0])
            read = source(a.down.a).base
            (kept, _) = scaled(read) or (read, 1.0)
            if masked(kept) is not None:
                inner, rank = map(int, left.shape)
                shape = profit.Dropped(tokens, inner, int(base.shape[1]), rank, base.dtype, left.dtype)
                profit.check_dropped(shape, left.device)

    def _place(self, group: list[Linear]) -> Place:
        memory = facts(self.graph).memory
        # The grouped GEMM reads what is behind casts and views, which are made anew.
        terms: list[Product] = []
        for linear in group:
            terms += [replace(p, a=unrounded(p.a).base) for p in linear.bases]
            terms += [replace(a.up, a=a.read) for a in linear.adapters]
        others: list[Any] = []
        roots: dict[fx.Node, fx.Node] = {}
        for linear in group:
            others += [linear.rest, *self.sizes[linear.root]]  # results are reshaped
            for offset in linear.offsets:
                others += [offset.node, offset.factor]
            for p in linear.bases:
                others += unrounded(p.a).sizes  # views are made anew
                roots[p.node] = linear.root
            for a in linear.adapters:
                others += [a.down.b, a.factor, *source(a.down.a).sizes]
                roots[a.up.node] = linear.root
        others = [x for x in others if isinstance(x, fx.Node)]
        # Behind the skinny GEMMs, which stand where their own operands are there.
        after = max((down.place.before for down in self.downs), default=None)
        outputs = [linear.root for linear in group]
        if len(group) > 1:
            place = find([replace(p, node=roots[p.node]) for p in terms], others, after)
            memory.check(terms, place.before, outputs)
            return place
        place = earliest([*operands_of(terms), *others], after)
        try:
            memory.check(terms, place.before, outputs)
        except Rejected:
            place = Place(outputs[0], (), ())
            memory.check(terms, place.before, outputs)
        return place

    def rewrite(self) -> str:
        assert self.place is not None
        # Views move on the way, also those that places are named by.
        wanted = (*(down.place for down in self.downs), self.place)
        *places, place = [downs.marked(self.graph, p) for p in wanted]
        kernel = self._emit(place, [replace(d, place=p) for d, p in zip(self.downs, places, strict=True)])
        for used in (place, *places):
            self.graph.erase_node(used.before)
        return kernel

    def _emit(self, place: Place, narrow: list[downs.Down]) -> str:
        make = Emitter(place.before, self.anchor)
        if self.whole:
            return self._rewrite_whole(make, place)
        made: dict[fx.Node, downs.Made] = {}
        moved: set[fx.Node] = set()
        for down in narrow:
            made |= downs.insert(down, moved, self._further)
        place = place.without(moved).hoist()
        groups = [self._products(linear, make, made) for linear in self.group]
        dtype, wide = result_dtypes(self.group)
        # Results are reshaped before views of them are moved.
        bare = replace(place, sunk=())
        outputs = emit.insert(bare, self.anchor, groups, dtype=dtype, wide=wide)
        self._replace_roots(outputs, place)
        downs.replace_all(made)
        return self.kernel

    def _replace_roots(self, outputs: Sequence[fx.Node], place: Place) -> None:
        roots = [linear.root for linear in self.group]
        shaped = [
            emit.reshaped(Builder(place.before, root), output, self.sizes[root])
            for root, output in zip(roots, outputs, strict=True)
        ]
        place.sink()
        for root, new in zip(roots, shaped, strict=True):
            substitute(root, new)

    def _rewrite_whole(self, make: Emitter, place: Place) -> str:
        """Two kernels: everything in one operation."""
        place = place.hoist()
        bases = [linear.bases[0] for linear in self.group]
        dtype, wide = result_dtypes(self.group)
        adapters = [(g, a) for g, linear in enumerate(self.group) for a in linear.adapters]
        found = [(g, make.bias(linear)) for g, linear in enumerate(self.group)]
        biases = {g: bias for g, bias in found if bias is not None}
        # A kernel reads biases, too, before it waits for the one in front.
        early = [*(p.b for p in bases), *(a.up.b for _, a in adapters), *biases.values()]
        outputs = make.parts(
            LORA_LINEAR,
            make.replay(unrounded(bases[0].a)),
            [p.b for p in bases],
            list(biases.values()),
            list(biases),
            [a.down.b for _, a in adapters],
            [a.up.b for _, a in adapters],
            [g for g, _ in adapters],
            [a.scale * a.down.scale * source(a.down.a).scale for _, a in adapters],
            all(map(gather.is_input, early)),
            dtype,
            *([wide] if wide else []),
        )
        self._replace_roots(outputs, place)
        return self.kernel.replace("narrow_mm and block_mm", "lora_linear")

    def _further(self, down: Product, x: fx.Node) -> float:
        """The factor of the further form of a down-projection of x, or 0 where it is read as it is.

        A float32 one is read in halves. Elsewhere the factor of the adapter is the reason: with it the
        up-projection is one more step of the loop of the base product. float16 has too few exponents for it:
        the product with the factor may overflow where the result does not.
        """
        readers = [a for a in adapters_of(self.group) if a.down.node is down.node]
        scales = [a.scale for a in readers if a.middle is None]
        base, once = value(self.group[0].bases[0].a).dtype, len(readers) == 1
        if not scales or value(x).dtype != base:
            return 0.0
        if value(down.b).dtype == base and (scales[-1] == 1 or not once or base == torch.float16):
            return 0.0
        return scales[-1] if once else 1.0

    def _products(self, linear: Linear, make: Emitter, made: dict[fx.Node, downs.Made]) -> list[Product]:
        """The products of one linear, with operands that the kernel takes."""
        found = [replace(p, a=make.replay(unrounded(p.a)), bias=None) for p in linear.bases]
        found[0] = replace(found[0], bias=make.bias(linear))
        if linear.rest is not None:
            rows = list(value(found[0].node).shape)
            rest = emit.reshaped(Builder(make.before, linear.root), linear.rest, rows)
            found[0] = replace(found[0], bias=rest)
        dtype = value(linear.bases[0].a).dtype
        for a in linear.adapters:
            left, right, scale = downs.operands(make, a, made[a.down.node], dtype)
            left, right = make.aligned(left, right)
            found.append(Product(a.up.node, left, right, None, scale))
        return found
