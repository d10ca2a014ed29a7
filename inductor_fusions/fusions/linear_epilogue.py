"""A linear and the pointwise operations that follow it, as one kernel.

The linear becomes a grouped GEMM of one group. An activation that is all that reads it goes into the kernel
(`gelu(x @ W + b)`). Whatever else follows stays in the graph, and Inductor's scheduler fuses it into the
kernel's epilogue (`sigmoid(x @ W + m * y + bias)`, or an activation beside a value that a backward needs).

Up to 16 rows, as in decoding, a linear without an activation is a site as well. A kernel of the package may
read the weight faster than the library's GEMM does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .. import config
from .._inductor import Match, known_true, was_erased
from ..block_mm import emit, guards, units
from ..block_mm.expressions import Expressions, behind, between, leaves, named
from ..fusion import Candidate, Fusion, Scope, nodes_of
from ..graph.builder import Builder, substitute
from ..graph.placement import Place
from ..graph.products import (
    CASTS,
    PRODUCTS,
    RESHAPES,
    Product,
    batched_linear,
    is_pointwise,
    product,
    products_of,
    through,
    unviewed,
    users_behind,
)
from ..graph.search import reached
from ..operands import known_size, tensor, value
from ..reasons import Reason

aten = torch.ops.aten

#: Operations that make a pointwise tail worth a look: those of an activation.
_NONLINEAR = frozenset(
    {
        aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.erf.default, aten.exp.default,
        aten.leaky_relu.default, aten.hardtanh.default, aten.clamp_min.default, aten.where.self,
    }
)  # fmt: skip
#: The last operation of an activation of `op.ACTIVATIONS`, or the rounding of its result.
_LAST = CASTS | {
    aten.relu.default, aten.sigmoid.default, aten.reciprocal.default, aten.mul.Tensor, aten.div.Tensor,
    aten.pow.Tensor_Scalar,
}  # fmt: skip
#: How far behind the linear it may be.
_STEPS = 8
_BATCHES = (aten.bmm.default, aten.baddbmm.default)
#: Nodes between two batches of products, at most.
_MOST_STEPS = 32
#: Rows of a linear that is a site without an activation. For more, the library was as fast.
MOST_ROWS = 16


_OF_EXPERTS = Reason.LIMIT(
    "the activation follows a batch of products, such as of experts, and the kernel supports one matrix"
)


def _whole_activation(linear: Product, expressions: Expressions) -> tuple[fx.Node, str] | None:
    """The activation of a linear that it reads and nothing else does: its last node, and its name."""
    found: tuple[fx.Node, str] | None = None
    for node in behind(linear.node, alone=True):
        if node.target not in _LAST:
            continue
        expression = expressions.of(node)
        name = named(expression, linear.node) if leaves(expression) == {linear.node} else None
        inside = between(node, {linear.node}) if name else set()
        if name and all(user in inside for each in inside - {node} for user in each.users):
            # The last one counts: that of silu comes after that of its sigmoid. A cast back to float32 would
            # only make the result twice as large.
            if value(node).dtype.itemsize <= value(linear.node).dtype.itemsize or found is None:
                found = node, name
    return found


def _linears_before(activations: Sequence[fx.Node]) -> list[fx.Node]:
    """The products and batches of them, in graph order, in whose pointwise tails these may be."""
    found, seen, edge = dict[fx.Node, None](), set(activations), list(activations)
    for _ in range(_STEPS + 1):
        sources = [
            through(argument, RESHAPES | CASTS)
            for node in edge
            for argument in node.all_input_nodes
            if tensor(argument) is not None
        ]
        linears = [s for s in sources if product(s) is not None or batched_linear(s) is not None]
        found.update(dict.fromkeys(linears))
        edge = [s for s in dict.fromkeys(sources) if s not in seen and s not in found and is_pointwise(s)]
        seen.update(edge)
    return sorted(found)


def _has_nonlinear_tail(node: fx.Node, steps: int = _STEPS) -> bool:
    """Whether an operation of an activation is among the pointwise ones that follow a node."""
    for user in users_behind(node, RESHAPES | CASTS):
        if not is_pointwise(user):
            continue
        if user.target in _NONLINEAR or (steps and _has_nonlinear_tail(user, steps - 1)):
            return True
    return False


def _expert(node: fx.Node) -> fx.Node | None:
    """The batch of products whose activation is an operand of another batch, which a node is."""
    for operand in node.all_input_nodes[-2:]:
        seen = list(reached([operand], _inputs_of_pointwise, _MOST_STEPS))
        ends = [inner for inner in seen if not _inputs_of_pointwise(inner)]
        found = ends[0] if len(ends) == 1 else None
        if found is not None and found.target in _BATCHES and any(each.target in _NONLINEAR for each in seen):
            scores = _is_turned(found) and not _is_turned(node)
            return None if scores else found
    return None


def _inputs_of_pointwise(node: fx.Node) -> list[fx.Node]:
    """The tensors that a pointwise operation, or what orders elements anew, reads; none of another one."""
    passed = node.target in RESHAPES | {aten.permute.default} or is_pointwise(node)
    return [x for x in node.all_input_nodes if passed and tensor(x) is not None]


def _is_turned(node: fx.Node) -> bool:
    """Whether the matrices on the right are transposed, as keys are in front of values that are not."""
    matrices = tensor(node.args[-1])
    return matrices is not None and not known_true(matrices.stride(-1) == 1)


def _crossed(node: fx.Node) -> Product | None:
    """The linear of `x0 * linear(x) + x`, a cross layer (DCN v2, arXiv:2008.13535), of its multiplication.

    Its bias may be an addition by itself.
    """
    sides = [through(x, RESHAPES | CASTS) if isinstance(x, fx.Node) else None for x in node.args]
    for i, side in enumerate(sides):
        if side is not None and side.target is aten.add.Tensor and isinstance(side.args[0], fx.Node):
            sides[i] = through(side.args[0], RESHAPES | CASTS)
    linears = [p for side in sides if (p := product(side)) is not None]
    if len(linears) != 1 or len(node.users) != 1:
        return None
    (user,) = node.users
    operands = [*node.args, *user.args] if user.target is aten.add.Tensor else []
    count = str(value(node).numel())
    whole = all((found := tensor(x)) is not None and str(found.numel()) == count for x in operands)
    return linears[0] if operands and whole else None


def _check_saving(linear: fx.Node) -> None:
    """Leave a linear to stock if no result of its pointwise tail is stored there.

    Inductor computes pointwise operations in the kernel that reads them, if that is a reduction, `cat` or a
    pointwise operation of another size: the fused kernel would store what stock does not.
    """
    rows = known_size(value(linear).shape[0])
    if config.always() or (rows is not None and rows <= MOST_ROWS):
        return
    ends = _not_stored(linear)
    if ends:
        names = " and ".join(sorted({guards.called(node) for node in ends}))
        raise Reason.NOT_FASTER.left_to_stock(
            f"stock computes the activation in the kernels that read it ({names}), and does not store it"
        )


def _not_stored(linear: fx.Node) -> list[fx.Node]:
    """The ends of a linear's pointwise tail, if stock stores no result of the tail; else nothing."""
    count, tail, ends = str(value(linear).numel()), {linear}, list[fx.Node]()
    waiting, seen = list(users_behind(linear)), set[fx.Node]()
    heapq.heapify(waiting)
    while waiting and len(seen) < _MOST_STEPS:
        node = heapq.heappop(waiting)  # in graph order: all of the tail before it is known
        if node in seen:
            continue
        seen.add(node)
        own = [x for x in node.all_input_nodes if unviewed(x) in tail]
        if is_pointwise(node):
            found = tensor(node)
            whole = found is not None and str(found.numel()) == count
            if whole and not any(_depends(x, tail) for x in node.all_input_nodes if x not in own):
                tail.add(node)
                for user in users_behind(node):
                    heapq.heappush(waiting, user)
                continue
        elif not _is_computed_with_operands(node):
            if any(unviewed(x) is not linear for x in own):
                return []
            continue
        ends.append(node)
    return ends if not waiting else []


def _is_computed_with_operands(node: fx.Node) -> bool:
    """Whether Inductor computes pointwise operands of a node in its kernel."""
    return node.target is aten.cat.default or torch.Tag.reduction in getattr(node.target, "tags", ())


def _depends(node: fx.Node, sources: set[fx.Node]) -> bool:
    """Whether a node is computed from one of these; also if that takes many steps to see."""
    first = min(sources)
    found = list(reached([node], lambda x: [y for y in x.all_input_nodes if not y < first], _MOST_STEPS + 2))
    return len(found) > _MOST_STEPS + 1 or not sources.isdisjoint(found)


class LinearEpilogue(Candidate):
    """A linear with an activation behind it."""

    def __init__(self, graph: fx.Graph, found: Product) -> None:
        self.graph, self.product = graph, found
        self.anchor = found.node
        self.kernel = ""

    def describe(self) -> dict[str, str]:
        return {"input": guards.text(self.product.a), "weight": guards.text(self.product.b)}

    def guard(self) -> None:
        guards.check_products([self.product])
        count = value(self.anchor).numel()
        for user in users_behind(self.anchor, RESHAPES | CASTS):
            if user.op == "output":
                continue
            found = tensor(user)
            if not is_pointwise(user):
                raise Reason.USED_ELSEWHERE.rejected(
                    "an operation that is not pointwise also reads the linear"
                )
            if found is None or str(found.numel()) != str(count):
                raise Reason.SHAPES.rejected("the result of the linear is broadcast")
        _check_saving(self.anchor)
        self.kernel = guards.kernel([[self.product]])

    def rewrite(self) -> str:
        (output,) = emit.insert(Place(self.anchor, (), ()), self.anchor, [[self.product]])
        substitute(self.anchor, output)
        return self.kernel


class Activated(LinearEpilogue):
    """A linear whose result only its activation reads."""

    def __init__(self, graph: fx.Graph, found: Product, root: fx.Node, name: str) -> None:
        super().__init__(graph, found)
        self.root, self.name = root, name
        self.sizes: list[Any] = []

    def describe(self) -> dict[str, str]:
        return {**super().describe(), "activation": self.name}

    def guard(self) -> None:
        guards.check_products([self.product])
        guards.check_result(self.root, self.anchor)
        self.sizes = emit.sizes_of(self.root, self.anchor, between(self.root, {self.anchor}))
        _check_saving(self.anchor)
        self.kernel = guards.kernel([[self.product]], activation=self.name)

    def rewrite(self) -> str:
        root, place = self.root, Place(self.anchor, (), ())
        (output,) = emit.insert(place, root, [[self.product]], [self.name], dtype=value(root).dtype)
        substitute(root, emit.reshaped(Builder(root), output, self.sizes))
        return self.kernel


class FewRows(LinearEpilogue):
    """A linear of a few rows, whatever reads it: its time is that of reading the weight."""

    def guard(self) -> None:
        guards.check_products([self.product])
        self.kernel = guards.kernel([[self.product]])


def _of_few_rows(found: Product) -> bool:
    """Whether a linear is one of few rows: 16 bits, on a CUDA device, its weight (out, in)."""
    a, rows = value(found.a), known_size(value(found.a).shape[0])
    if a.device.type != "cuda" or a.dtype.itemsize != 2 or rows is None or not 0 < rows <= MOST_ROWS:
        return False
    return known_true(value(found.b).stride(0) == 1)


FUSION = Fusion(
    name="linear_epilogue",
    stage="post_grad",
    summary="a linear and the activation after it, or a linear of up to 16 rows, to one kernel",
)


@FUSION.group(lambda: [*_NONLINEAR, aten.mul.Tensor, *PRODUCTS, *_BATCHES])
def read(scope: Scope, matches: Sequence[Match]) -> Iterator[Candidate]:
    """Every linear that an activation follows, every one of a cross layer, and every one of a few rows."""
    yield from units.candidates(scope.graph)
    nodes = nodes_of(matches)
    expressions, linears = Expressions(), _linears_before([n for n in nodes if n.target in _NONLINEAR])
    for node in linears:
        if product(node) is None and _has_nonlinear_tail(node):
            yield guards.reported_batch(node)
    for node in nodes:
        inner = _expert(node) if node.target in _BATCHES else None
        if inner is not None:
            yield guards.reported(inner, _OF_EXPERTS)
    products = [found for node in linears if (found := product(node)) is not None]
    whole = {linear.node: _whole_activation(linear, expressions) for linear in products}
    for node, last in whole.items():
        found = product(node)  # anew: its input may be the activation that the last one has replaced
        if found is None:
            continue
        if last is not None:
            yield Activated(scope.graph, found, *last)
        elif _has_nonlinear_tail(node) and not _of_few_rows(found):
            yield LinearEpilogue(scope.graph, found)
    for node in nodes:
        crossed = _crossed(node) if node.target is aten.mul.Tensor and not was_erased(node) else None
        if crossed is not None and crossed.node not in whole and not _of_few_rows(crossed):
            yield LinearEpilogue(scope.graph, crossed)
    for each in products_of(n for n in nodes if n.target in PRODUCTS and not was_erased(n)):
        found = product(each.node)  # anew: its input may be the linear that the last one has replaced
        if found is not None and whole.get(found.node) is None and _of_few_rows(found):
            yield FewRows(scope.graph, found)
