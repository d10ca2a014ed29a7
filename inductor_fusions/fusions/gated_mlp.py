"""`act(x @ Wg) * (x @ Wu)` as one grouped GEMM with two accumulators.

Both weights may be columns of one. Other factors, such as a mask, are multiplied afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .. import config
from .._inductor import Match, hint, was_erased
from ..block_mm import emit, guards, units
from ..block_mm.columns import Columns, columns, halves, is_apart
from ..block_mm.expressions import (
    NONLINEAR,
    Expressions,
    activation,
    behind,
    between,
    leaves,
    mul,
    named,
    same,
)
from ..block_mm.op import ACTIVATIONS
from ..decisions.problems import FEW_ROWS
from ..fusion import Candidate, Fusion, Rejected, Scope
from ..graph.builder import Builder, substitute
from ..graph.facts import facts
from ..graph.placement import Place
from ..graph.products import (
    CASTS,
    RESHAPES,
    SPLITS,
    Product,
    identity,
    is_pointwise,
    product,
    same_sizes,
    through,
)
from ..operands import holds, tensor, value
from ..reasons import Reason, Said

aten = torch.ops.aten

#: A product, or columns of one.
Linear = Product | Columns
#: Operations between a linear and the product with another one, at most.
MOST_STEPS = 32
_CONVOLUTION = (aten.convolution.default,)
_GROUPED = (aten._grouped_mm.default,)
CONVOLUTION = Reason.NO_MATRIX("gate and up are convolutions, or channels of one; only linears are fused")


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
                if not name and not _share_input(gate, up):
                    continue
                if gate_product is not None and up_product is not None and gate_product != up_product:
                    return name, gate_product, up_product
    return None


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
            if read is not None and read[0] and _share_input(gate, up):
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
        guards.check_device(self.anchor)
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
        if self.others and value(self.anchor).dtype == torch.float16:
            raise Reason.RANGE.rejected(
                "the pair may overflow in float16 before it is multiplied by its other factors"
            )
        if str(value(self.anchor).shape[-1]) != str(value(gate.node).shape[1]):
            raise Reason.SHAPES.rejected(
                "the number of columns of the result differs from that of the linears"
            )
        stored = [x.base if isinstance(x, Columns) else x for x in self.linears]
        around = {x for x in (*self.others, *(p.bias for p in stored)) if isinstance(x, fx.Node)}
        inside = between(self.anchor, {p.node for p in stored} | around) - around
        others = [user for node in inside - {self.anchor} for user in node.users if user not in inside]
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
        if config.policy != "always" and not (isinstance(rows, int) and rows <= FEW_ROWS):
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
        substitute(root, output)
        return self.kernel


def _of_many(node: fx.Node) -> fx.Node | None:
    """The product of many matrices, or the convolution, that a node has all columns of, or some."""
    parts = (*SPLITS, aten.slice.Tensor, aten.select.int, operator.getitem)
    while node.target in parts or (node.target is aten.add.Tensor and not _is_plain(node)):
        (node, *_) = node.all_input_nodes
    many = (aten.bmm.default, aten.baddbmm.default, *_GROUPED, *_CONVOLUTION)
    return node if node.target in many else None


def _is_plain(node: fx.Node) -> bool:
    """Whether what a sum adds to its first operand has the size of that, or is a number."""
    other = tensor(node.args[1])
    return other is None or str(other.numel()) == str(value(node).numel())


def _is_turned(node: fx.Node) -> bool:
    """Whether the last dim of a view of a linear is not that of its columns, which are next to each other."""
    strides = [
        hint(stride)
        for stride, size in zip(value(node).stride(), value(node).shape, strict=True)
        if hint(size) != 1
    ]
    return bool(strides) and strides[-1] != min(strides)


def _is_turned_batch(node: fx.Node) -> bool:
    """Whether a node permutes a batch of products, as an einsum of experts does."""
    return (
        node.target is aten.permute.default and _of_many(through(node, RESHAPES | {node.target})) is not None
    )


def _share_input(first: fx.Node, second: fx.Node) -> bool:
    """Whether linears or columns of them read one input, or batches of products one operand."""
    return bool(_inputs(first) & _inputs(second))


def _inputs(side: fx.Node) -> set[Any]:
    """What identifies the input of a linear, or of columns of one; both operands of a batch of products."""
    found, whole, apart = product(side) or columns(side), _of_many(side), is_apart(side)
    if found is not None:
        return {identity(found.base.a if isinstance(found, Columns) else found.a)}
    source = apart or whole
    assert source is not None
    if source.target in _CONVOLUTION:
        return {identity(source.all_input_nodes[0])}
    operands = source.args[:2] if source.target in _GROUPED else source.args[-2:]
    return {identity(x) for x in operands if isinstance(x, fx.Node)}


def _other(root: fx.Node, expressions: Expressions) -> tuple[frozenset[fx.Node], Said] | None:
    """The two linears of what looks like a gated pair, and why they are left."""
    functions, sides, others = list[str](), list[fx.Node](), set[fx.Node]()
    for argument in root.args:
        waiting, ends, seen, names = [argument], set[fx.Node](), set[fx.Node](), set[str]()
        while waiting and len(ends) < 2:
            node = waiting.pop()
            if not isinstance(node, fx.Node) or node in seen or tensor(node) is None:
                continue
            seen.add(node)
            if len(seen) > MOST_STEPS:
                return None
            if product(node) is not None or columns(node) is not None or _of_many(node) is not None:
                ends.add(node)
            elif node.target in RESHAPES or _is_turned_batch(node):
                waiting.append(node.args[0])
            elif is_pointwise(node):
                if node.target not in CASTS:
                    names.add(str(node.target).split(".")[1])
                waiting += node.all_input_nodes
            elif is_apart(node) is not None:
                ends.add(node)
            else:
                others.add(node)
        if len(ends) != 1:
            return None
        sides += ends
        functions.append(named(expressions.of(argument), *ends) or ", ".join(sorted(names)))
    if sides[0] is sides[1] or not _share_input(*sides):
        return None
    return frozenset(sides), _why(sides, functions, bool(others))


def _why(sides: list[fx.Node], functions: list[str], mixed: bool) -> Said:
    """Why there is no kernel for the product of functions of two linears.

    Args:
        functions: of each linear; "" is none.
        mixed: whether they have other operands: a norm, a vector.
    """
    many = [whole.target for side in sides if (whole := _of_many(side)) is not None]
    if any(target in _CONVOLUTION for target in many):
        return CONVOLUTION
    if many:
        return Reason.LIMIT(
            "gate and up are batches of products with one operand in common (experts, or an input whose rows "
            "are apart in memory), and the kernel supports one matrix each"
        )
    in_rows = all(product(side) or columns(side) for side in sides)
    if not in_rows and (len({is_apart(side) for side in sides}) == 2 or any(map(_is_turned, sides))):
        return Reason.LAYOUT(
            "the results of gate and up are put into another order, as by an einsum that moves large dims"
        )
    if not in_rows:
        return Reason.LAYOUT(
            "gate and up are parts of one linear whose columns are not evenly spaced, such as parts of heads"
        )
    if mixed:
        between = ", ".join(sorted({name for each in functions for name in each.split(", ") if name}))
        return Reason.ACTIVATION(
            f"other tensors, or the norm of a row, are between the linears and their product ({between})"
        )
    if all(functions):
        return Reason.ACTIVATION(
            f"both linears pass through a function ({'; '.join(functions)}), and the kernel supports one, on "
            "the gate"
        )
    return Reason.ACTIVATION(
        "the gate, or the linear that it multiplies, passes through an unsupported function: "
        f"{''.join(functions)}"
    )


FUSION = Fusion(
    name="gated_mlp",
    stage="post_grad",
    summary="act(x @ Wg) * (x @ Wu) to one kernel, with silu, gelu, relu, its square, or sigmoid",
)


#: The last operations of other activations.
_OTHERS = (aten.where.self, aten.log1p.default, aten.expm1.default, aten.clamp_max.default)


def _is_of_linears(node: fx.Node) -> bool:
    """Whether a node multiplies two linears as they are; or convolutions, or batches of products."""
    if node.target is not aten.mul.Tensor:
        return False
    sides = [through(x, RESHAPES | CASTS) if isinstance(x, fx.Node) else None for x in node.args]
    return all(side and (product(side) or columns(side) or _of_many(side)) is not None for side in sides)


@FUSION.group(lambda: [*NONLINEAR, *_OTHERS, aten.glu.default, aten.mul.Tensor])
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
            whole: Any = node.args[0]
            if parts is not None:
                yield GatedPair(scope.graph, node, "sigmoid", parts[1], parts[0])
            elif whole.target in _CONVOLUTION:
                yield guards.reported(node, CONVOLUTION)
            continue
        if node.target is aten.mul.Tensor and not _is_of_linears(node):
            continue
        for root in [node] if node.target is aten.mul.Tensor else behind(node):
            if root.target is not aten.mul.Tensor or root in seen or was_erased(root):
                continue
            seen.add(root)
            expression = expressions.of(root)
            found, other = _read(expression), _other(root, expressions)
            among = _among_others(root, expressions) if found is None else None
            if found is not None:
                known.add(frozenset(leaves(expression)))
                yield GatedPair(scope.graph, root, *found)
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
