"""Adapters that are added to what is in memory: sums that are no block GEMM.

Either no product is added to the adapters, as with a quantised base, whose operation is its own; or masks are
between their products and the sum, as in the backward of a dropout in front of each adapter. All terms that
are no adapters are the base; what is added around the adapters and the products is left outside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..._inductor import was_erased
from ...fusion import Candidate, LeftToStock, Rejected
from ...operands import holds, known_size
from ...tables import dtype_name
from ..block_mm import emit, guards
from ..block_mm.normal_form import (
    CASTS,
    RESHAPES,
    Product,
    is_floating,
    product,
    same_sizes,
    scaled,
    tensor,
    value,
    widens,
)
from . import accumulate_kernel, downs, profit
from .accumulate import LORA_ACCUMULATE
from .emitter import Emitter
from .masks import masked
from .recognise import (
    NO_PRODUCT,
    Adapter,
    Linear,
    adapter_of,
    added_matrix,
    cast_behind,
    is_row_major,
    is_sum,
    source,
    summands,
    times_tensor,
)

aten = torch.ops.aten

TWO_TENSORS = "the adapter is multiplied by more than one tensor"


@dataclass(frozen=True)
class Term:
    """`scale * factor * node`, which is no adapter.

    Attributes:
        node: what is added: of the size of the sum; or a vector, which is added to each row.
        scale: its factor.
        factor: a tensor of one element by which it is multiplied as well, or None.
    """

    node: fx.Node
    scale: float
    factor: fx.Node | None = None

    @property
    def is_bias(self) -> bool:
        """Whether it is a vector: an adapter's bias."""
        return value(self.node).dim() == 1


@dataclass(frozen=True)
class Added:
    """An adapter behind its mask.

    Attributes:
        adapter: with all its factors.
        kept: the mask, a bool tensor with as many elements as the result; or None.
    """

    adapter: Adapter
    kept: fx.Node | None


@dataclass
class Sum:
    """A sum with adapters in it.

    Attributes:
        top: the last addition.
        root: the node that holds the sum: a cast behind it, or itself.
        added: the adapters.
        terms: what else is added.
        inner: the nodes in between.
        problem: why it is not read, or "".
    """

    top: fx.Node
    root: fx.Node
    added: list[Added] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    inner: list[fx.Node] = field(default_factory=list)
    problem: str = ""


def sums(graph: fx.Graph, found: Sequence[Linear]) -> list[Sum]:
    """The sums whose adapters pass a mask, or have no product beside them, in the order of the graph.

    Args:
        graph: a post-grad graph.
        found: what it has of linears with adapters; those that are part of a sum here have a problem there,
            or are added to what passes a mask.
    """
    if not found:
        return []  # there is no adapter at all
    alone = {linear.root for linear in found if linear.problem == NO_PRODUCT}
    result: list[Sum] = []
    taken: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in taken or not is_sum(node):
            continue
        read = innermost(node)
        if not read.added or read.top in taken:
            continue
        has_masks = any(one.kept is not None for one in read.added)
        if has_masks or all(one.adapter.up.node in alone for one in read.added):
            taken.update((read.top, *read.inner))
            result.append(read)
    return result[::-1]


def without(found: Sequence[Linear], taken: Sequence[Sum]) -> list[Linear]:
    """The linears that have no part in a sum of these."""
    ups = {one.adapter.up.node for each in taken for one in each.added}
    return [
        linear
        for linear in found
        if linear.root not in ups and not any(a.up.node in ups for a in linear.adapters)
    ]


def innermost(top: fx.Node) -> Sum:
    """The smallest sum in a tree of additions that has all of its adapters and of its products."""
    while True:
        read = _read(top)
        if read.problem == "" and not read.added:
            return read
        arguments = [x for x, _ in summands(top)] or list(top.args[:1])
        parts = [(x, _Reader().visit(x, 1.0)) for x in arguments]
        inside = [x for x, part in parts if part.added]
        others = [x for x, part in parts if not part.added]
        if len(inside) != 1 or len(others) != 1 or _leads_to_product(others[0]):
            return read
        deeper = _sum_in(inside[0])
        if deeper is None:
            return read
        top = deeper


def _sum_in(node: Any) -> fx.Node | None:
    """The addition behind casts and reshapes."""
    while isinstance(node, fx.Node) and len(node.users) == 1 and not is_sum(node):
        if node.target not in RESHAPES and node.target not in CASTS:
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) and len(node.users) == 1 else None


def _leads_to_product(node: Any) -> bool:
    """Whether a term is a product, or a sum with one."""
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        if product(node) is not None:
            return True
        if summands(node):
            return any(_leads_to_product(x) for x, _ in summands(node))
        step = scaled(node)
        if step is None and node.target not in RESHAPES and node.target not in CASTS:
            return False
        node = step[0] if step is not None else node.args[0]
    return False


def _read(top: fx.Node) -> Sum:
    """The tree of additions under a node."""
    found = _Reader().sum(top, 1.0)
    root = cast_behind(top)
    inner = [*found.inner, *([top] if root is not top else [])]
    read = Sum(top, root, found.added, found.terms, inner, found.problem)
    if not read.added or read.problem:
        return read
    ups = [one.adapter.up.node for one in read.added]
    size = str(value(root).numel())
    if any(str(value(node).numel()) != size for node in ups):
        read.problem = "terms of different shapes"
    elif any(not term.is_bias and str(value(term.node).numel()) != size for term in read.terms):
        read.problem = "a term that is broadcast is added to the adapter"
    elif all(term.is_bias for term in read.terms):
        read.problem = "nothing is added to the adapter"
    else:
        # What rounds the sum on its way, to less than its terms have and the result.
        dtypes = [value(node).dtype for node in (root, *ups, *(term.node for term in read.terms))]
        casts = [value(node).dtype for node in inner if node.target in CASTS]
        if not all(holds(cast, *dtypes) for cast in casts):
            read.problem = "the sum is rounded to another dtype on its way"
    return read


@dataclass
class _Part:
    """What is read of a part of a tree."""

    added: list[Added] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    inner: list[fx.Node] = field(default_factory=list)
    problem: str = ""

    def with_part(self, other: _Part) -> _Part:
        """Both."""
        return _Part(
            self.added + other.added,
            self.terms + other.terms,
            self.inner + other.inner,
            self.problem or other.problem,
        )


class _Reader:
    """Reads a tree of additions: what has no adapter in it is one term."""

    def sum(self, node: fx.Node, scale: float) -> _Part:
        """An addition."""
        found = product(node)
        matrix = added_matrix(found)
        if found is not None and matrix is not None:
            up = self._adapter(replace(found, bias=None), scale, None, None, [])
            return _Part() if up is None else up.with_part(self.visit(matrix, scale))
        part = _Part()
        for argument, sign in summands(node):
            if not _has_size_of(argument, node):
                part = part.with_part(_Part(problem="a term that is broadcast is added to the adapter"))
            else:
                part = part.with_part(self.visit(argument, scale * sign))
        return part

    def visit(self, node: Any, scale: float) -> _Part:
        """What is added."""
        return self._with_adapters(node, scale) or _Part(terms=[Term(node, scale)])

    def _with_adapters(self, node: Any, scale: float) -> _Part | None:
        if not isinstance(node, fx.Node) or node.op != "call_function" or len(node.users) != 1:
            return None
        if is_sum(node):
            found = self.sum(node, scale)
            return replace(found, inner=[*found.inner, node]) if found.added else None
        chain = self._chain(node, scale)
        if chain is not None:
            return chain
        step = scaled(node)
        if step is None and (node.target not in RESHAPES and node.target not in CASTS):
            return None
        inner, by = step if step is not None else (node.args[0], 1.0)
        read = self._with_adapters(inner, scale * by) if is_floating(inner) else None
        return None if read is None else replace(read, inner=[*read.inner, node])

    def _chain(self, node: Any, scale: float) -> _Part | None:
        """An adapter behind casts, reshapes, factors and a mask."""
        factor: fx.Node | None = None
        kept: fx.Node | None = None
        inner: list[fx.Node] = []
        problem = ""
        while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
            found = product(node)
            if found is not None:
                if added_matrix(found) is not None:
                    return None
                read = self._adapter(found, scale, factor, kept, inner)
                return None if read is None else replace(read, problem=problem or read.problem)
            step, by, mask = scaled(node), times_tensor(node), masked(node)
            inner.append(node)
            if step is not None:
                node, scale = step[0], scale * step[1]
            elif by is not None:
                problem = problem or (TWO_TENSORS if factor is not None else "")
                node, factor = by
            elif mask is not None:
                if kept is not None:
                    problem = problem or "the adapter passes two masks"
                node, kept, times = mask
                scale *= times
            elif (node.target in RESHAPES or node.target in CASTS) and is_floating(node.args[0]):
                node = node.args[0]
            else:
                return None
        return None

    def _adapter(
        self,
        up: Product,
        scale: float,
        factor: fx.Node | None,
        kept: fx.Node | None,
        inner: list[fx.Node],
    ) -> _Part | None:
        """An adapter, where a product is the second one of one."""
        read = adapter_of(replace(up, bias=None))
        if read is None:
            return None
        part = _Part(inner=list(inner))
        if factor is not None and read.factor is not None:
            part.problem = TWO_TENSORS
        factor = factor or read.factor
        if up.bias is not None:
            part.terms.append(Term(up.bias, scale, factor))
            if kept is not None:
                part.problem = part.problem or "an adapter with a bias passes a mask"
        part.added.append(Added(replace(read, scale=scale * read.scale, factor=factor), kept))
        return part


def _has_size_of(argument: Any, node: fx.Node) -> bool:
    found = tensor(argument)
    return found is not None and found.is_floating_point() and same_sizes(found.shape, value(node).shape)


# -- candidates ---------------------------------------------------------------------------------------


def candidates(graph: fx.Graph, found: Sequence[Sum]) -> Iterator[Candidate]:
    """One for each sum; they are read anew, since others may have replaced what they add up."""
    for each in found:
        if not was_erased(each.top):
            read = _read(each.top)
            if read.added:
                yield Accumulated(graph, read)


class Accumulated(Candidate):
    """A sum with adapters, as one operation on the sum without them.

    Args:
        graph: the graph.
        found: the sum.
    """

    def __init__(self, graph: fx.Graph, found: Sum) -> None:
        self.graph, self.sum = graph, found
        self.anchor = found.root
        self.downs: list[downs.Down] = []
        self.sizes: list[Any] = []
        self.halves = False
        self.kernel = ""

    def describe(self) -> dict[str, str]:
        return {
            "base": ", ".join(guards.text(term.node) for term in self.sum.terms),
            "adapters": ", ".join(
                f"{guards.text(a.down.b)} x {guards.text(a.up.b)}" for a in self._adapters()
            ),
            "masks": str(sum(one.kept is not None for one in self.sum.added)),
        }

    def _adapters(self) -> list[Adapter]:
        return [one.adapter for one in self.sum.added]

    def guard(self) -> None:
        if self.sum.problem:
            raise LeftToStock(self.sum.problem)
        guards.check_device(self.anchor)
        root, adapters = value(self.sum.root), self._adapters()
        if len(adapters) > accumulate_kernel.MOST_PRODUCTS:
            raise Rejected(f"more than {accumulate_kernel.MOST_PRODUCTS} adapters in one sum")
        for node in (self.sum.root, *(term.node for term in self.sum.terms)):
            if value(node).dtype not in guards.DTYPES:
                raise Rejected(f"a sum with a term of dtype {dtype_name(value(node).dtype)}")
        first = value(adapters[0].up.node)
        columns = first.shape[1]
        if any(not same_sizes(value(a.up.node).shape, first.shape) for a in adapters):
            raise Rejected("terms of different shapes")
        if not isinstance(columns, int) or str(root.shape[-1]) != str(columns):
            raise Rejected("the sum has other columns than its terms")
        if not is_row_major(root):
            raise Rejected("the result is not row-major")
        self._check_adapters(adapters)
        self._check_writes()
        self.sizes = emit.sizes_of(self.sum.root, adapters[0].up.node, self.sum.inner)
        self.downs = downs.find(self.graph, (a.down for a in adapters))
        self.kernel = profit.accumulate_kernel(self._shape(), root.device)

    def _check_adapters(self, adapters: Sequence[Adapter]) -> None:
        kinds = {value(x).dtype for a in adapters for x in (a.up.b, a.down.b)}
        if len(kinds) > 1 or not kinds <= set(guards.DTYPES):
            raise Rejected("adapters of several dtypes, or of one without a kernel")
        (kind,) = kinds
        read = {value(source(a.down.a).base).dtype for a in adapters}
        around = {value(self.sum.root).dtype, *(value(term.node).dtype for term in self.sum.terms)}
        self.halves = kind == torch.float32 and torch.bfloat16 in read | around
        if kind == torch.float32 and torch.float16 in read | around:
            raise LeftToStock("float32 adapters on a base of float16")
        if kind != torch.float32 and not read <= {kind}:
            raise Rejected("adapters of another dtype than their input and float32")
        for a in adapters:
            if a.factor is not None and kind == torch.float16:
                raise LeftToStock(
                    "a float16 adapter times a tensor: what A gives may overflow where the result does not"
                )
            if 1 not in value(a.down.a).stride():
                raise Rejected("an input whose elements are not next to each other in either direction")

    def _check_writes(self) -> None:
        """Nothing is overwritten between the products and the sum, where they are read now."""
        ups = {a.up.node for a in self._adapters()}
        begun = False
        for node in self.graph.nodes:
            begun = begun or node in ups
            if node is self.sum.root:
                return
            schema = getattr(node.target, "_schema", None)
            if begun and schema is not None and schema.is_mutable:
                raise Rejected(f"{node.name} writes in place between the adapter's products and their sum")

    def _shape(self) -> profit.Accumulated:
        adapters = self._adapters()
        ups = [value(a.up.a) for a in adapters]
        return profit.Accumulated(
            tokens=known_size(ups[0].shape[0]),
            inner=tuple(int(value(a.down.b).shape[0]) for a in adapters),
            columns=int(value(adapters[0].up.b).shape[1]),
            ranks=tuple(int(up.shape[1]) for up in ups),
            masks=sum(one.kept is not None for one in self.sum.added),
            dtype=value(self.sum.root).dtype,
            adapters=value(adapters[0].up.b).dtype,
        )

    def rewrite(self) -> str:
        root = self.sum.root
        places = [downs.marked(self.graph, down.place) for down in self.downs]
        moved: set[fx.Node] = set()
        made: dict[fx.Node, downs.Made] = {}
        for down, place in zip(self.downs, places, strict=True):
            made |= downs.insert(self.graph, replace(down, place=place), moved, self._further)
        make = Emitter(self.graph, root, root)
        adapters = self._adapters()
        pairs = [self._operands(make, a, made[a.down.node]) for a in adapters]
        kept = [(i, one.kept) for i, one in enumerate(self.sum.added) if one.kept is not None]
        new = make.call(
            LORA_ACCUMULATE,
            self._base(make),
            [left for left, _ in pairs],
            [right for _, right in pairs],
            [a.scale for a in adapters],
            [self._matrix(make, mask) for _, mask in kept],
            [i for i, _ in kept],
            value(root).dtype,
        )
        emit.replace(self.graph, root, emit.reshaped(self.graph, root, new, self.sizes, root))
        for node, one in made.items():
            downs.replace_one(self.graph, node, one.output)
        for place in places:
            self.graph.erase_node(place.before)
        return self.kernel

    def _further(self, down: Product, x: fx.Node) -> float:
        """The factor of the further form of a down-projection: halves, where the kernel reads those."""
        return 1.0 if self.halves and value(x).dtype == torch.bfloat16 else 0.0

    def _operands(self, make: Emitter, a: Adapter, made: downs.Made) -> tuple[fx.Node, fx.Node]:
        """What the kernel multiplies, of one dtype."""
        left, form, right = made.output, made.form, a.up.b
        if a.factor is not None:
            left, form = make.times(left, a.factor), None
        if not self.halves:
            return left, right
        left = form if form is not None else make.left_halves(left, torch.bfloat16)
        return make.aligned(left, make.right_halves(right, torch.bfloat16))

    def _base(self, make: Emitter) -> fx.Node:
        """The sum without the adapters, as a matrix."""
        terms = sorted(self.sum.terms, key=lambda term: term.is_bias)
        whole = [term for term in terms if not term.is_bias]
        if len(terms) == 1 and terms[0].scale == 1 and terms[0].factor is None:
            return self._matrix(make, _unwidened(terms[0].node))
        # They are added as they are in the graph, with its sizes: what other fusions read.
        sizes = {str(list(value(term.node).shape)) for term in whole}
        dtype = value(self.sum.root).dtype
        total: fx.Node | None = None
        for term in terms:
            node = term.node if term.is_bias or len(sizes) == 1 else self._matrix(make, term.node)
            if value(node).dtype.itemsize < dtype.itemsize:
                node = make.call(torch.ops.prims.convert_element_type.default, node, dtype)
            if term.scale != 1:
                node = make.call(aten.mul.Tensor, node, term.scale)
            if term.factor is not None:
                node = make.call(aten.mul.Tensor, node, term.factor)
            total = node if total is None else make.call(aten.add.Tensor, total, node)
        assert total is not None
        return self._matrix(make, total)

    def _matrix(self, make: Emitter, node: fx.Node) -> fx.Node:
        """A tensor with the sizes of the products."""
        wanted = value(self._adapters()[0].up.node).shape
        if same_sizes(value(node).shape, wanted):
            return node
        return make.call(aten.reshape.default, node, [-1, int(wanted[1])])


def _unwidened(node: fx.Node) -> fx.Node:
    """What was cast to a wider dtype, as it is in memory."""
    while node.op == "call_function" and isinstance(node.args[0], fx.Node):
        if node.target not in RESHAPES and not (node.target in CASTS and widens(node)):
            break
        inner = node.args[0]
        if value(inner).dtype not in guards.DTYPES:
            break
        node = inner
    return node


def downs_of(found: Collection[Sum]) -> set[fx.Node]:
    """The down-projections of their adapters."""
    return {one.adapter.down.node for each in found for one in each.added}
