"""Linears with adapters, read from a post-grad graph.

Forward, an adapter is `s * (x @ A) @ B`, added to `x @ W`. Backward, the gradient of the input is a sum of
the same form: `s * (dY @ B^T) @ A^T`, added to `dY @ W^T`. So one reading serves both. Casts on the way are
looked through where their dtype holds that of the products or of the result: what they round is kept exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...operands import holds
from ..block_mm.normal_form import (
    CASTS,
    MUL,
    RESHAPES,
    Product,
    is_factor,
    is_floating,
    product,
    same_sizes,
    scaled,
    tensor,
    value,
    widens,
    zero_padding,
)
from .masks import narrow_product

aten = torch.ops.aten

#: The widest matrix in the middle of an adapter.
MOST_RANK = 128
NO_PRODUCT = "nothing is added to the adapter but what is no product: a quantised base, perhaps"
PERMUTES = (aten.permute.default, aten.t.default)


@dataclass(frozen=True)
class Source:
    """A matrix as it was before it was widened, scaled and viewed.

    Attributes:
        base: the tensor that is in memory.
        views: the views from there on, in order, without casts and factors.
        scale: product of the factors.
    """

    base: fx.Node
    views: tuple[fx.Node, ...]
    scale: float

    @property
    def sizes(self) -> list[fx.Node]:
        """The symbolic sizes that the views name."""
        return [size for view in self.views for size in view.all_input_nodes[1:]]


@dataclass(frozen=True)
class Adapter:
    """`scale * (x @ A) @ B`.

    Attributes:
        up: the product with B.
        down: the product with A.
        scale: its factor.
        factor: a tensor of one element by which it is multiplied as well, or None.
    """

    up: Product
    down: Product
    scale: float
    factor: fx.Node | None


@dataclass(frozen=True)
class Offset:
    """`scale * vector`, added to each row.

    Attributes:
        vector: a bias that an adapter has, or a second one of the bases; shape (N,).
        scale: its factor.
        factor: a tensor of one element by which it is multiplied as well, or None.
    """

    vector: fx.Node
    scale: float
    factor: fx.Node | None


@dataclass
class Linear:
    """A sum of products, some of which are adapters.

    Attributes:
        root: the node that holds it.
        bases: products that are no adapters, with their factors in `scale`; one may have a bias.
        adapters: the adapters.
        offsets: vectors that are added beside the bias of the bases.
        rest: what else is added; or None.
        inner: the nodes between the products and the root.
        problem: why it is not a block GEMM, or "".
    """

    root: fx.Node
    bases: list[Product] = field(default_factory=list)
    adapters: list[Adapter] = field(default_factory=list)
    offsets: list[Offset] = field(default_factory=list)
    rest: fx.Node | None = None
    inner: list[fx.Node] = field(default_factory=list)
    problem: str = ""


def source(matrix: fx.Node) -> Source:
    """What a matrix was before it was cast to a wider dtype, multiplied by numbers, and viewed."""
    views: list[fx.Node] = []
    node, scale = matrix, 1.0
    found = Source(matrix, (), 1.0)
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        inner = tensor(node.args[0])
        if inner is None or not inner.is_floating_point():
            break
        step = scaled(node)
        if node.target in RESHAPES or node.target in PERMUTES:
            views.append(node)
        elif node.target in CASTS and widens(node):
            found = Source(node.args[0], tuple(reversed(views)), scale)
        elif step is not None:
            scale *= step[1]
            found = Source(node.args[0], tuple(reversed(views)), scale)
        else:
            break
        node = node.args[0]
    # As far up as views go: equal matrices are one then.
    extra: list[fx.Node] = []
    node = found.base
    while node.target in RESHAPES and isinstance(node.args[0], fx.Node):
        extra.append(node)
        node = node.args[0]
    return Source(node, (*reversed(extra), *found.views), found.scale)


def unrounded(matrix: fx.Node) -> Source:
    """What a matrix was before it was cast to a wider dtype and back, and viewed."""
    views: list[fx.Node] = []
    node, found = matrix, Source(matrix, (), 1.0)
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        inner = tensor(node.args[0])
        if inner is None or inner.dtype not in (value(matrix).dtype, torch.float32):
            break
        if node.target in RESHAPES or node.target in PERMUTES:
            views.append(node)
        elif node.target not in CASTS:
            break
        elif inner.dtype == value(matrix).dtype:
            found = Source(node.args[0], tuple(reversed(views)), 1.0)
        node = node.args[0]
    return found


def _of_padded_rank(up: Product) -> Product:
    """A product without the zeros that Inductor pads its K with, where that is faster (pad_mm.py)."""
    left, right = zero_padding(up.a), zero_padding(up.b)
    if left is None or right is None:
        return up
    (a, k, rows), (b, columns, same) = left, right
    padded = isinstance(k, int) and k == same and rows == 0 == columns
    return replace(up, a=a, b=b) if padded else up


def _of_padded_columns(node: fx.Node) -> Product | None:
    """The product of which a node has the first columns: the others are those of zeros."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or node.kwargs or node.args[1:3] != (1, 0):
        return None
    padded = product(node.args[0])
    found = zero_padding(padded.b) if padded is not None and padded.bias is None else None
    if padded is None or found is None or found[2] != 0:
        return None
    own = same_sizes(value(found[0]).shape[1:], value(node).shape[1:])
    return Product(node, padded.a, found[0], None, padded.scale) if own else None


def adapter(up: Product) -> Adapter | None:
    """What a product is of an adapter, where there is another one in front of it that makes it one."""
    rank = value(up.a).shape[1]
    if not isinstance(rank, int) or rank > MOST_RANK:
        return None
    node: Any = up.a
    scale, factor = up.scale, None
    casts: list[torch.dtype] = []
    while node.op == "call_function":
        step, by = scaled(node), times_tensor(node) if factor is None else None
        if node.target in RESHAPES or node.target in CASTS:
            casts += [value(node).dtype] if node.target in CASTS else []
            node = node.args[0]
        elif step is not None:
            node, scale = step[0], scale * step[1]
        elif by is not None:
            node, factor = by
        else:
            break
    down = product(node) or _of_padded_columns(node) or narrow_product(node)
    if down is None or down.bias is not None:
        return None
    out, before = value(down.node), value(up.a)
    if not same_sizes(out.shape, before.shape) or not out.is_floating_point():
        return None
    if not all(holds(cast, out.dtype, before.dtype) for cast in casts):
        return None
    inner = value(down.a).shape[1]
    narrow = not isinstance(inner, int) or inner > rank
    return Adapter(up, down, scale, factor) if narrow else None


def times_tensor(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The tensor that a node multiplies by one without dims, and that one."""
    if node.target not in MUL or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    for x, by in ((first, second), (second, first)):
        if isinstance(x, fx.Node) and isinstance(by, fx.Node) and _full(x, node) and _is_number(by):
            return x, by
    return None


def linears(graph: fx.Graph) -> list[Linear]:
    """Every sum with an adapter in it, in the order of the graph; and every adapter that is in none."""
    found: list[Linear] = []
    taken: set[fx.Node] = set()
    problems: dict[fx.Node, str] = {}
    for node in reversed(list(graph.nodes)):
        if node not in taken and is_sum(node):
            read = _Reader(node).read()
            if read.problem:  # perhaps what it adds is a linear
                # Of sums around each other, the reason of the innermost one with a base.
                known = {} if read.bases else problems
                problems.update({a.up.node: read.problem for a in read.adapters if a.up.node not in known})
            elif read.adapters and not _is_around(read, node):
                taken.update(read.inner)
                found.append(read)
    inside = {a.up.node for linear in found for a in linear.adapters}
    for node in graph.nodes:
        up = product(node)
        if up is not None and node not in inside and adapter_of(up) is not None:
            found.append(Linear(node, problem=problems.get(node) or alone(node)))
    order = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(found, key=lambda linear: order[linear.root])


def summands(node: fx.Node) -> list[tuple[Any, float]]:
    """What an addition or a subtraction adds up, with the factor of each; nothing for other nodes."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor) or not is_floating(node):
        return []
    alpha = node.kwargs.get("alpha", 1)
    if not is_factor(alpha):
        return []
    sign = 1.0 if node.target is aten.add.Tensor else -1.0
    return [(node.args[0], 1.0), (node.args[1], sign * float(alpha))]


def added_matrix(found: Product | None) -> fx.Node | None:
    """The matrix that an addmm adds to its product."""
    bias = found.bias if found is not None else None
    return bias if bias is not None and value(bias).dim() == 2 else None


def is_sum(node: fx.Node) -> bool:
    return bool(summands(node)) or added_matrix(product(node)) is not None


def _is_around(read: Linear, top: fx.Node) -> bool:
    """Whether the last addition only adds something to a linear, such as a residual: a pointwise tail."""
    arguments = [x for x, _ in summands(top)] or top.args[:1]
    for node in arguments if read.rest is not None else ():
        while isinstance(node, fx.Node) and len(node.users) == 1 and node.target in (*RESHAPES, *CASTS):
            node = node.args[0]
        if not isinstance(node, fx.Node) or len(node.users) != 1 or not is_sum(node):
            continue
        inner = _Reader(node).read()
        whole = (len(read.adapters), len(read.bases), "")
        if inner.rest is None and (len(inner.adapters), len(inner.bases), inner.problem) == whole:
            return True
    return False


class _Reader:
    """Reads a tree of additions and subtractions."""

    def __init__(self, top: fx.Node) -> None:
        self.linear = Linear(cast_behind(top))
        self.top = top

    def read(self) -> Linear:
        """The tree as a linear, with a problem where it is none."""
        linear = self.linear
        if linear.root is not self.top:
            linear.inner.append(self.top)
        found = product(self.top)
        if found is not None:
            self._product(found, 1.0, None)
        else:
            self._add(self.top, 1.0)
        if not linear.adapters:
            return linear
        # What rounds the sum on its way, to less than the products have and the result.
        dtypes = [value(node).dtype for node in (linear.root, *(base.node for base in linear.bases))]
        casts = [value(node).dtype for node in linear.inner if node.target in CASTS]
        if not all(holds(cast, *dtypes) for cast in casts):
            linear.problem = "the sum is rounded to another dtype on its way"
        elif not linear.bases:
            linear.problem = NO_PRODUCT
        elif _two_biases(linear):
            linear.problem = linear.problem or "a bias and another term"
        # One order for all sums of the same products: tables know them by it.
        linear.bases.sort(key=_inner, reverse=True)
        return linear

    def _add(self, node: fx.Node, scale: float) -> None:
        for argument, sign in summands(node):
            self._visit(argument, scale * sign, None)

    def _visit(self, node: Any, scale: float, factor: fx.Node | None) -> None:
        linear = self.linear
        if not isinstance(node, fx.Node) or len(node.users) != 1:
            return self._rest(node, scale, factor)
        found = product(node)
        if found is not None:
            return self._product(found, scale, factor)
        if node.op == "call_function" and is_floating(node) and _leads_to_products(node):
            inner = node.args[0] if node.args else None
            if factor is None and summands(node) and all(_full(argument, node) for argument in node.args):
                linear.inner.append(node)
                return self._add(node, scale)
            if (node.target in RESHAPES or node.target in CASTS) and is_floating(inner):
                linear.inner.append(node)
                return self._visit(inner, scale, factor)
            step, by = scaled(node), times_tensor(node)
            if step is not None:
                linear.inner.append(node)
                return self._visit(step[0], scale * step[1], factor)
            if by is not None:
                linear.inner.append(node)
                self._one_tensor(factor)
                return self._visit(by[0], scale, by[1])
        return self._rest(node, scale, factor)

    def _product(self, found: Product, scale: float, factor: fx.Node | None) -> None:
        linear, bias = self.linear, found.bias
        read = adapter_of(replace(found, bias=None))
        if read is None and factor is not None:
            return self._rest(found.node, scale, factor)
        if read is not None and read.factor is not None:
            self._one_tensor(factor)
        matrix = added_matrix(found)
        taken = any(base.bias is not None for base in linear.bases)
        if matrix is not None and (read is not None or _is_term(matrix)):
            if found.node is not self.top:
                linear.inner.append(found.node)
            self._visit(matrix, scale, factor)
            bias = None
        elif matrix is not None and (taken or scale != 1):
            return self._rest(found.node, scale, factor)
        elif matrix is None and bias is not None and (read is not None or taken or scale != 1):
            linear.offsets.append(Offset(bias, scale, factor))
            bias = None
        if read is None:
            linear.bases.append(replace(found, bias=bias, scale=scale * found.scale))
        else:
            linear.adapters.append(replace(read, scale=scale * read.scale, factor=factor or read.factor))
        return None

    def _one_tensor(self, factor: fx.Node | None) -> None:
        if factor is not None:
            self.linear.problem = self.linear.problem or "the adapter is multiplied by more than one tensor"

    def _rest(self, node: Any, scale: float, factor: fx.Node | None) -> None:
        linear = self.linear
        if linear.rest is not None:
            linear.problem = linear.problem or "more than one term that is no product is added to the adapter"
        elif scale != 1 or factor is not None or not isinstance(node, fx.Node):
            linear.problem = linear.problem or "a term that is no product is scaled"
        elif not _full(node, linear.root, count=True):
            linear.problem = linear.problem or "a term that is broadcast is added to the adapter"
        else:
            linear.rest = node


def _two_biases(linear: Linear) -> bool:
    """Whether a matrix is added, and something else: the operation has one bias."""
    biases = [p.bias for p in linear.bases if p.bias is not None]
    matrices = [bias for bias in biases if value(bias).dim() == 2]
    others = len(biases) - len(matrices) + len(linear.offsets)
    return (linear.rest is not None and bool(biases or others)) or (bool(matrices) and others > 0)


def _inner(p: Product) -> int:
    size = value(p.a).shape[1]
    return size if isinstance(size, int) else 0


def _leads_to_products(node: fx.Node) -> bool:
    """Whether there is a product or a sum behind casts, reshapes and factors."""
    while node.op == "call_function" and product(node) is None and not summands(node):
        by = scaled(node) or times_tensor(node)
        if node.target in RESHAPES or node.target in CASTS:
            step = node.args[0]
        elif by is not None:
            step = by[0]
        else:
            return False
        if not isinstance(step, fx.Node) or len(step.users) != 1:
            return False
        node = step
    return node.op == "call_function"


def _is_term(node: fx.Node) -> bool:
    return len(node.users) == 1 and _leads_to_products(node)


def alone(up: fx.Node) -> str:
    """Why the result of an adapter is not part of a sum of products."""
    node, steps = up, 0
    while steps < 8:
        users = [user for user in node.users if user.op != "output"]
        if len(users) != 1 or len(users) != len(node.users):
            return "the result of the adapter is used elsewhere as well"
        user = users[0]
        if user.target in MUL and user.args[0] is not user.args[1]:
            by = user.args[1] if user.args[0] is node else user.args[0]
            found = tensor(by)
            if found is not None and found.numel() != 1:
                if any(reader.dtype == torch.bool for reader in _sources(by)):
                    return "the gradient of the adapter passes a dropout of its own"
                return "the adapter is multiplied by a tensor before it is added (DoRA)"
        elif user.target is aten.where.self:
            return "the adapter passes a selection, which keeps out what is no number"
        elif summands(user) or added_matrix(product(user)) is node:
            return NO_PRODUCT
        elif user.target not in RESHAPES and user.target not in CASTS and scaled(user) is None:
            return "nothing is added to the adapter"
        node, steps = user, steps + 1
    return "nothing is added to the adapter"


def _sources(node: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    found = tensor(node)
    if found is not None:
        yield found
        if depth:
            for other in node.all_input_nodes:
                yield from _sources(other, depth - 1)


def adapter_of(up: Product) -> Adapter | None:
    """As `adapter`, also where Inductor has padded the rank."""
    return adapter(_of_padded_rank(up))


def cast_behind(top: fx.Node) -> fx.Node:
    """The narrowing cast that is all that reads a sum, or the sum."""
    node = top
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function" or not (user.target in RESHAPES or user.target in CASTS):
            break
        if not is_floating(user):
            break
        node = user
        if user.target in CASTS:
            narrows = holds(value(top).dtype, value(node).dtype) and value(node).dtype != value(top).dtype
            return node if narrows else top
    return top


def _full(argument: Any, node: fx.Node, count: bool = False) -> bool:
    """Whether an operand has the shape of the result, or its number of elements: nothing is broadcast."""
    found = tensor(argument)
    if found is None or not found.is_floating_point():
        return False
    if count:
        return str(found.numel()) == str(value(node).numel())
    return same_sizes(found.shape, value(node).shape)


def _is_number(node: fx.Node) -> bool:
    """Whether a node is a tensor of one element, without dims."""
    found = tensor(node)
    return found is not None and found.dim() == 0 and found.is_floating_point()


def is_row_major(found: torch.Tensor) -> bool:
    """Whether a tensor is row-major, without gaps."""
    wanted: Any = 1
    for length, stride in zip(reversed(found.shape), reversed(found.stride()), strict=True):
        if not known_true(length == 1) and not known_true(stride == wanted):
            return False
        wanted = wanted * length
    return True
