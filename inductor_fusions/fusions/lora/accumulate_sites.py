"""Adapters whose sum is no grouped GEMM, as `lora_accumulate` on the base in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ... import operands
from ..._inductor import was_erased
from ...block_mm import emit, guards
from ...decisions.tables import dtype_name
from ...fusion import Candidate, LeftToStock
from ...graph.builder import substitute
from ...graph.facts import facts
from ...graph.products import CASTS, RESHAPES, Product, restored, same_sizes, widens
from ...operands import tokens_of, value
from ...reasons import Reason
from . import accumulate_kernel, downs, profit
from .accumulate import LORA_ACCUMULATE
from .adapters import Adapter, source
from .checks import check_adapter, check_shapes
from .emitter import Emitter
from .groups import text_of
from .recognise import Linear
from .sums import sum_at

aten = torch.ops.aten


def candidates(graph: fx.Graph, found: Sequence[Linear]) -> Iterator[Candidate]:
    """One for each sum; they are read anew, since others may have replaced what they add up."""
    for each in found:
        if each.top is not None and not was_erased(each.top):
            read = sum_at(each.top)
            if read.adapters:
                yield AdapterSum(graph, read)


class AdapterSum(Candidate):
    """A sum with adapters, as one operation on the sum without them."""

    def __init__(self, graph: fx.Graph, found: Linear) -> None:
        self.graph, self.sum = graph, found
        self.anchor = found.root
        self.downs: list[downs.Down] = []
        self.sizes: list[Any] = []
        self.halves = False
        self.kernel = ""

    def describe(self) -> dict[str, str]:
        return {
            "base": ", ".join(guards.text(term.node) for term in self.sum.terms),
            "adapters": text_of(self.sum.adapters),
            "masks": str(sum(a.kept is not None for a in self.sum.adapters)),
        }

    def guard(self) -> None:
        if self.sum.problem:
            raise LeftToStock(self.sum.problem)
        operands.check_device(value(self.anchor))
        root, adapters = value(self.sum.root), self.sum.adapters
        if len(adapters) > accumulate_kernel.MOST_PRODUCTS:
            raise Reason.LIMIT.rejected(
                f"there are more than {accumulate_kernel.MOST_PRODUCTS} adapters in one sum"
            )
        for node in (self.sum.root, *(term.node for term in self.sum.terms)):
            if value(node).dtype not in guards.DTYPES:
                raise Reason.DTYPE.rejected(
                    f"a term of the sum has dtype {dtype_name(value(node).dtype)}, which no kernel supports"
                )
        check_shapes(root, [tuple(value(a.up.node).shape) for a in adapters])
        if not isinstance(root.shape[-1], int):
            raise Reason.SYMBOLIC.rejected("the sum has a symbolic number of columns")
        self._check_adapters(adapters)
        self._check_writes()
        self.sizes = emit.sizes_of(self.sum.root, adapters[0].up.node, self.sum.inner)
        self.downs = downs.narrow_products(a.down for a in adapters)
        self.kernel = profit.kernel(self._shape(), root.device)

    def _check_adapters(self, adapters: Sequence[Adapter]) -> None:
        kinds = {value(x).dtype for a in adapters for x in (a.up.b, a.down.b)}
        if len(kinds) > 1 or not kinds <= set(guards.DTYPES):
            raise Reason.MIXED_DTYPES.rejected(
                "the adapters have different dtypes, or one that no kernel supports"
            )
        (kind,) = kinds
        read = {value(source(a.down.a).base).dtype for a in adapters}
        around = {value(self.sum.root).dtype, *(value(term.node).dtype for term in self.sum.terms)}
        self.halves = kind == torch.float32 and torch.bfloat16 in read | around
        if kind == torch.float32 and torch.float16 in read | around:
            raise Reason.MIXED_DTYPES.left_to_stock("the adapters are float32 and the base is float16")
        if kind != torch.float32 and not read <= {kind}:
            raise Reason.MIXED_DTYPES.rejected(
                "the adapters have neither the dtype of their input nor float32"
            )
        for a in adapters:
            check_adapter(a, kind)

    def _check_writes(self) -> None:
        """Nothing is overwritten between the products and the sum, where they are read now."""
        first = min(a.up.node for a in self.sum.adapters)
        for node in facts(self.graph).writers:
            if first < node and node < self.sum.root:
                raise Reason.OVERWRITTEN.rejected(
                    f"{node.name} writes in place between the products of the adapter and their sum"
                )

    def _shape(self) -> profit.Accumulated:
        adapters = self.sum.adapters
        ups = [value(a.up.a) for a in adapters]
        return profit.Accumulated(
            tokens=tokens_of(ups[0].shape[0]),
            inner=tuple(int(value(a.down.b).shape[0]) for a in adapters),
            columns=int(value(adapters[0].up.b).shape[1]),
            ranks=tuple(int(up.shape[1]) for up in ups),
            masks=sum(a.kept is not None for a in adapters),
            dtype=value(self.sum.root).dtype,
            adapters=value(adapters[0].up.b).dtype,
        )

    def rewrite(self) -> str:
        root = self.sum.root
        places = [downs.marked(self.graph, down.place) for down in self.downs]
        moved: set[fx.Node] = set()
        made: dict[fx.Node, downs.Made] = {}
        for down, place in zip(self.downs, places, strict=True):
            made |= downs.insert(replace(down, place=place), moved, self._further)
        make = Emitter(root)
        adapters = self.sum.adapters
        pairs = [self._operands(make, a, made[a.down.node]) for a in adapters]
        kept = [(i, a.kept) for i, a in enumerate(adapters) if a.kept is not None]
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
        substitute(root, emit.reshaped(make, new, self.sizes))
        downs.replace_all(made)
        for place in places:
            self.graph.erase_node(place.before)
        return self.kernel

    def _further(self, down: Product, x: fx.Node) -> float:
        """The factor of the further form of a down-projection: halves, where the kernel reads those."""
        is_read = any(a.middle is None for a in self.sum.adapters if a.down.node is down.node)
        return 1.0 if is_read and self.halves and value(x).dtype == torch.bfloat16 else 0.0

    def _operands(self, make: Emitter, a: Adapter, made: downs.Made) -> tuple[fx.Node, fx.Node]:
        """Both operands of a product of the kernel, in one dtype."""
        dtype = torch.bfloat16 if self.halves else value(a.up.b).dtype
        left, right, _ = downs.operands(make, a, made, dtype)
        return make.aligned(left, right) if self.halves else (left, right)

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
            total = make.plus(total, node, term)
        assert total is not None
        return self._matrix(make, total)

    def _matrix(self, make: Emitter, node: fx.Node) -> fx.Node:
        """A tensor with the sizes of the products."""
        wanted = value(self.sum.adapters[0].up.node).shape
        if same_sizes(value(node).shape, wanted):
            return node
        return make.call(aten.reshape.default, node, [-1, int(wanted[1])])


def _unwidened(node: fx.Node) -> fx.Node:
    """The value in memory that a node casts to a wider dtype, and perhaps back."""
    while node.op == "call_function" and isinstance(node.args[0], fx.Node):
        node = restored(node) or node
        if node.op != "call_function" or not isinstance(node.args[0], fx.Node):
            break
        if node.target not in RESHAPES and not (node.target in CASTS and widens(node)):
            break
        inner = node.args[0]
        if value(inner).dtype not in guards.DTYPES:
            break
        node = inner
    return node
