"""`act(x @ Wg) * (x @ Wu)` as one grouped GEMM with two accumulators.

Both weights may be columns of one. Other factors, such as a mask, are multiplied afterwards, and what
`addcmul` adds is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ... import config, operands
from ..._inductor import Match, was_erased
from ...block_mm import emit, guards, units
from ...block_mm.columns import Columns, columns, halves
from ...block_mm.expressions import (
    NONLINEAR,
    Expressions,
    activation,
    behind,
    between,
    leaves,
    mul,
    same,
)
from ...block_mm.op import ACTIVATIONS
from ...decisions.problems import FEW_ROWS
from ...fusion import Candidate, Fusion, Rejected, Scope
from ...graph.builder import Builder, substitute
from ...graph.facts import facts
from ...graph.placement import Place
from ...graph.products import (
    Product,
    identity,
    product,
    same_sizes,
)
from ...operands import holds, tensor, value
from ...reasons import Reason, Said
from .joined import of_joined
from .unsupported import MOST_STEPS, PRODUCTS, factors_of, may_be_gated, of_glu, share_input
from .unsupported import other as other_pair

aten = torch.ops.aten

#: A product, or columns of one.
Linear = Product | Columns


def _read(expression: Any) -> tuple[str, Linear, Linear] | None:
    """(activation, gate, up) of an expression that is nothing else."""
    if not isinstance(expression, tuple) or expression[0] not in ("mul", "recip"):
        return None
    pair = leaves(expression)
    if len(pair) != 2:
        return None
    first, second = pair
    for gate, up in ((first, second), (second, first)):
        for name in ACTIVATIONS:
            if same(mul(activation(name, gate), up), expression):
                gate_product, up_product = product(gate) or columns(gate), product(up) or columns(up)
                # Linears of different inputs are multiplied for many reasons.
                if not name and not share_input(gate, up):
                    continue
                if gate_product is not None and up_product is not None and gate_product != up_product:
                    return name, gate_product, up_product
    return None


def _expression(root: fx.Node, expressions: Expressions) -> Any:
    """The expression of what a root multiplies or divides; None if there is none."""
    if root.target is not aten.addcmul.default:
        return expressions.of(root)
    factors = [expressions.of(factor) for factor in factors_of(root)]
    return None if any(factor is None for factor in factors) else mul(*factors)


def _among_others(root: fx.Node, expressions: Expressions) -> tuple[str, Linear, Linear, list[Any]] | None:
    """The gated pair in a product of more factors, and the other factors."""
    factors = _factors(root)
    of_leaf = dict[fx.Node, list[Any]]()
    for factor in factors:
        found = tensor(factor)
        expression = expressions.of(factor) if found is not None else None
        inside = leaves(expression)
        if found is not None and len(inside) == 1 and str(found.numel()) == str(value(root).numel()):
            (leaf,) = inside
            of_leaf.setdefault(leaf, []).append((factor, expression))
    if len(of_leaf) < 2 or not 2 < len(factors) <= MOST_STEPS:
        return None
    for up, plain in of_leaf.items():
        for gate, parts in of_leaf.items():
            whole = mul(*(expression for _, expression in parts))
            if gate is up or [expression for _, expression in plain] != [up]:
                continue
            read = _read(mul(whole, up))
            if read is not None and read[0] and share_input(gate, up):
                taken = [node for node, _ in (*parts, *plain)]
                others = [factor for factor in factors if factor not in taken]
                return (*read, others) if others and _sizes_fit(others, root) else None
    return None


def _factors(node: Any, top: bool = True) -> list[Any]:
    """The factors of a tree of multiplications."""
    if isinstance(node, fx.Node) and node.target is aten.mul.Tensor and (top or len(node.users) == 1):
        return [factor for each in node.args for factor in _factors(each, False)]
    return [node]


def _sizes_fit(factors: Sequence[Any], root: fx.Node) -> bool:
    """Whether each factor is a number, or a floating tensor that the product with the pair may be cast to."""
    dtypes = [found.dtype for factor in factors if (found := tensor(factor)) is not None]
    return all(dtype == torch.bool or holds(value(root).dtype, dtype) for dtype in dtypes)


class GatedPair(Candidate):
    """One gate and what it multiplies.

    Args:
        others: what they are multiplied by as well: numbers and nodes.
    """

    def __init__(
        self, graph: fx.Graph, root: fx.Node, name: str, gate: Linear, up: Linear, others: Sequence[Any] = ()
    ) -> None:
        self.graph, self.anchor, self.others = graph, root, others
        self.added = root.args[:1] if root.target is aten.addcmul.default else ()
        self.name, self.linears = name, (gate, up)
        self.pair = tuple(x.planned() if isinstance(x, Columns) else x for x in self.linears)
        self.place = Place(root, (), ())
        self.sizes: list[Any] = []
        self.kernel = ""

    def describe(self) -> dict[str, str]:
        gate, up = self.pair
        return {
            "input": guards.text(gate.a),
            "weights": f"{guards.text(gate.b)}, {guards.text(up.b)}",
            "activation": self.name,
        }

    def guard(self) -> None:
        gate, up = self.pair
        operands.check_device(value(self.anchor))
        if identity(gate.a) != identity(up.a):
            raise Reason.INPUTS.rejected("the gate and the up projection are linears of different inputs")
        up = replace(up, a=gate.a)  # which may have been copied for each of them
        self.pair = gate, up
        guards.check_products(self.pair)
        if not same_sizes(value(gate.node).shape, value(up.node).shape):
            raise Reason.SHAPES.rejected("the gate is broadcast over the up projection")
        if not same_sizes(value(gate.b).stride(), value(up.b).stride()):
            raise Reason.LAYOUT.rejected("the two weights have different strides")
        guards.check_result(self.anchor, gate.node)
        if (self.others or self.added) and value(self.anchor).dtype == torch.float16:
            raise Reason.RANGE.rejected(
                "the pair may overflow in float16 before it is multiplied by its other factors, or added to"
            )
        if str(value(self.anchor).shape[-1]) != str(value(gate.node).shape[1]):
            raise Reason.SHAPES.rejected(
                "the number of columns of the result differs from that of the linears"
            )
        stored = [x.base if isinstance(x, Columns) else x for x in self.linears]
        around = {x for x in (*self.others, *(p.bias for p in stored)) if isinstance(x, fx.Node)}
        read = factors_of(self.anchor) if self.added else self.anchor.all_input_nodes
        inside = {self.anchor}.union(*(between(x, {p.node for p in stored} | around) for x in read)) - around
        if self.added and str(value(self.anchor).numel()) != str(value(gate.node).numel()):
            raise Reason.SHAPES.rejected("the pair is broadcast over what is added to it")
        others = [user for node in inside - {self.anchor} for user in node.users if user not in inside]
        others += [self.anchor for x in self.added if x in inside]
        if others:
            what = "an intermediate value of the gate, or a result of its linears,"
            raise Rejected(
                guards.read_elsewhere(what, others),
                "" if self._is_packed() else "qkv fuses the two linears instead",
            )
        self.sizes = emit.sizes_of(self.anchor, gate.node, inside)
        facts(self.graph).memory.check(stored, self.place.before, [self.anchor])
        self._check_packed()
        self.kernel = guards.kernel([[gate], [up]], True, self.name)

    def _check_packed(self) -> None:
        """Stock computes a packed linear at once: what the tables say is against two products.

        On an H100 the fused kernel was 1.05 to 1.18 times as fast for 16 rows at most, and 0.81 to 0.88 times
        for 8,192.
        """
        if not self._is_packed():
            return
        rows = value(self.pair[0].a).shape[0]
        if not config.always() and not (isinstance(rows, int) and rows <= FEW_ROWS):
            raise Reason.NOT_FASTER.left_to_stock(
                f"gate and up are one linear: for more than {FEW_ROWS} rows stock's single GEMM is as fast"
            )

    def _is_packed(self) -> bool:
        """Whether both are columns of one linear."""
        gate, up = self.linears
        return isinstance(gate, Columns) and isinstance(up, Columns) and gate.base == up.base

    def rewrite(self) -> str:
        root = self.anchor
        build = Builder(self.place.before, root)
        gate, up = (x.built(build) if isinstance(x, Columns) else x for x in self.linears)
        up = Product(up.node, gate.a, up.b, up.bias, up.scale)
        (output,) = emit.insert(self.place, root, [[gate], [up]], [self.name, ""], True, value(root).dtype)
        make = Builder(root)
        output = emit.reshaped(make, output, self.sizes)
        for factor in self.others:
            output = make.call(aten.mul.Tensor, output, factor)
        for term in self.added:
            output = make.call(aten.add.Tensor, output, term)
        substitute(root, output)
        return self.kernel


FUSION = Fusion(
    name="gated_mlp",
    stage="post_grad",
    summary="act(x @ Wg) * (x @ Wu) to one kernel, with silu, gelu, relu, its square, or sigmoid",
)


#: The last operation of a pair; a sigmoid may divide: up / (1 + exp(-gate)).
_ROOTS = (*PRODUCTS, aten.div.Tensor)
#: The last operations of other activations.
_OTHERS = (aten.where.self, aten.log1p.default, aten.expm1.default, aten.clamp_max.default)


@FUSION.group(lambda: [*NONLINEAR, *_OTHERS, aten.glu.default, *PRODUCTS])
def read(scope: Scope, matches: Sequence[Match]) -> Iterator[Candidate]:
    """Every product of one linear, or an activation of it, with another linear on the same input.

    A group: the activations of one graph share what is known of its expressions.
    """
    yield from units.candidates(scope.graph)
    expressions, seen = Expressions(), set[fx.Node]()
    known, others = set[frozenset[fx.Node]](), dict[fx.Node, tuple[frozenset[fx.Node], Said]]()
    around = dict[fx.Node, Any]()
    for match in matches:
        node = match.output_node()
        if was_erased(node):
            continue
        if node.target is aten.glu.default:
            parts = halves(node)
            if parts is not None:
                yield GatedPair(scope.graph, node, "sigmoid", parts[1], parts[0])
            elif (reason := of_glu(node)) is not None:
                yield guards.reported(node, reason)
            continue
        if node.target is aten.mul.Tensor and not may_be_gated(node):
            continue
        for root in [node] if node.target in PRODUCTS else behind(node):
            if root.target not in _ROOTS or root in seen or was_erased(root):
                continue
            seen.add(root)
            expression, multiplies = _expression(root, expressions), root.target in PRODUCTS
            found = _read(expression)
            other = (other_pair(root, expressions) or of_joined(root)) if multiplies else None
            among = _among_others(root, expressions) if found is None and multiplies else None
            if found is not None:
                known.add(frozenset(leaves(expression)))
                # `addcmul` multiplies by a number as well.
                yield GatedPair(scope.graph, root, *found, tuple(root.kwargs.values()))
            elif among is not None:
                around[root] = among
            elif other is not None:
                others[root] = other
    for root, (name, gate, up, factors) in around.items():
        ends = frozenset(x.base.node if isinstance(x, Columns) else x.node for x in (gate, up))
        if not was_erased(root) and ends not in known:
            known.add(ends)
            yield GatedPair(scope.graph, root, name, gate, up, factors)
    for root, (pair, reason) in others.items():
        if not was_erased(root) and pair not in known:
            known.add(pair)
            yield guards.reported(root, reason)
