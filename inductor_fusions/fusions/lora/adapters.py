"""An adapter, `s * (x @ A) @ B`, read from its second product; matrices in front of casts and views."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..._inductor import remembered
from ...block_mm.columns import columns
from ...graph.additions import has_size_of
from ...graph.products import (
    CASTS,
    RESHAPES,
    VIEWS,
    Product,
    copies,
    is_floating,
    is_pointwise,
    multiplied,
    product,
    restored,
    same_sizes,
    scaled,
    through,
    unpadded,
    users_behind,
    widens,
)
from ...graph.search import reached
from ...operands import holds, tensor, value
from .first_products import (
    MOST_BETWEEN,
    down_projection,
    first_product,
    in_front_of_squares,
    product_in,
    put_back,
)
from .masks import masked
from .op import NARROW_MM

aten = torch.ops.aten

#: The widest matrix in the middle of an adapter.
MOST_RANK = 128
PERMUTES = (aten.permute.default, aten.t.default)


def is_low_rank(rank: Any, *sizes: Any) -> bool:
    """Whether a size may be the rank of an adapter between these sizes, all of which must be known."""
    known = all(isinstance(size, int) for size in (rank, *sizes))
    return known and rank <= MOST_RANK and all(2 * rank <= size for size in sizes)


@dataclass(frozen=True)
class Source:
    """A matrix as it was before it was widened, scaled and viewed.

    Attributes:
        base: the tensor that is in memory.
        views: the views from there on, in order, without casts and factors.
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
    """`scale * (x @ A) @ B`, or `scale * f(x @ A) @ B`.

    Attributes:
        up: the product with B.
        down: the product with A.
        factor: a tensor of one element by which it is multiplied as well, or None; with `over`, one of a
            number for each row (its last dim has size 1), or for each column.
        over: the leading sizes of the result where it is multiplied by that.
        kept: the mask that the result is multiplied by, a bool tensor with as many elements; or None.
        middle: what B multiplies, where f is computed between both: a bias, a mask, a vector, an activation;
            or None.
        pad: how many columns of the result are before and behind those of the product: there it adds nothing.
    """

    up: Product
    down: Product
    scale: float
    factor: fx.Node | None
    middle: fx.Node | None = None
    pad: tuple[int, int] = (0, 0)
    over: tuple[Any, ...] = ()
    kept: fx.Node | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is between A and B, it has every column of the result, and is times no vector."""
        return self.middle is None and self.pad == (0, 0) and not self.over and self.kept is None

    @property
    def read(self) -> fx.Node:
        """The node that must be in memory for the product with B: f(x @ A), or x."""
        return source(self.down.a).base if self.middle is None else self.middle


def source(matrix: fx.Node) -> Source:
    """The matrix that a node casts to a wider dtype, multiplies by numbers, and views.

    A multiple that the graph returns is taken as it is, where what it was before is in memory for nothing
    else: behind a dropout that would be a second copy of the input.
    """
    views: list[fx.Node] = []
    node, scale = matrix, 1.0
    found = Source(matrix, (), 1.0)
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        inner = tensor(node.args[0])
        if inner is None or not inner.is_floating_point():
            break
        if node.target in RESHAPES or node.target in PERMUTES:
            views.append(node)
        elif restored(node) is not None:
            pass
        elif node.target in CASTS and widens(node):
            found = Source(node.args[0], tuple(reversed(views)), scale)
        elif (number := scaled(node)) is not None:
            before = source(number[0]).base
            is_returned = any(user.op == "output" for user in users_behind(node))
            if is_returned and is_pointwise(before) and len(before.users) == 1:
                found = Source(node, tuple(reversed(views)), scale)
                break
            scale *= number[1]
            found = Source(number[0], tuple(reversed(views)), scale)
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
    """The matrix that a node casts to a wider dtype and back, and views."""
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
    operands = unpadded(up.a, up.b)
    if operands is None or not same_sizes(value(operands[0]).shape[:1], value(up.a).shape[:1]):
        return up
    return replace(up, a=operands[0], b=operands[1])


@remembered(spreads=lambda node: True)
def adapter_of(node: fx.Node) -> Adapter | None:
    """The adapter whose second product is `node`, if a first product of low rank is in front of it.

    What is added to the product is not part of the adapter.
    """
    found = product(node)
    if found is None:
        return None
    up = _of_padded_rank(replace(found, bias=None))
    rank = value(up.a).shape[1]
    if not is_low_rank(rank) or _has_adapter(up):
        return None
    read: Any = up.a
    scale, factor = up.scale, None
    casts: list[torch.dtype] = []
    while (below := step(read)) is not None and below.kept is None:
        if below.factor is not None and factor is not None:
            break
        casts += [value(read).dtype] if read.target in CASTS else []
        read, scale, factor = below.inner, scale * below.scale, factor or below.factor
    down = down_projection(read)
    if down is None:
        return _around_function(up)
    out, before = value(down.node), value(up.a)
    if not same_sizes(out.shape, before.shape) or not out.is_floating_point():
        return None
    if not all(holds(cast, out.dtype, before.dtype) for cast in casts):
        return None
    inner = value(down.a).shape[1]
    narrow = not isinstance(inner, int) or inner > rank
    return Adapter(up, down, scale, factor) if narrow else _around_function(up)


def _has_adapter(base: Product) -> bool:
    """Whether an adapter of lower rank reads what a product reads, so that the product is its base.

    In layers of few columns, the base and the linear in front of it are two products of low rank as well.
    """

    def same(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if (on := step(user)) is not None and on.inner is node]

    rank = value(base.a).shape[1]
    for node in reached([through(base.a, RESHAPES | CASTS)], same):
        for user in node.users:
            for result in user.users if user.target is NARROW_MM else (user,):
                down = first_product(result)
                if down is None or down.a is not node or not is_low_rank(value(result).shape[1], rank):
                    continue
                if _is_in_adapter(down):
                    return True
    return False


def _is_in_adapter(down: Product) -> bool:
    """Whether a product is the first one of an adapter."""

    def behind(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if user.target in VIEWS or is_pointwise(user)]

    ups = (user for node in reached([down.node], behind, MOST_BETWEEN) for user in node.users)
    return any((read := adapter_of(up)) is not None and read.down.a is down.a for up in ups)


def _around_function(up: Product) -> Adapter | None:
    """An adapter with a bias or a function between A and B, whose computation stays as it is."""
    if not is_floating(up.a):
        return None
    rank, size = value(up.a).shape[1], str(value(up.a).numel())
    packed = _of_packed(up)
    if packed is not None:
        return packed
    down = product_in(in_front_of_squares(up.a, rank), size)
    if down is None:
        return None
    inner, width = value(down.a).shape[1], value(down.node).shape[1]
    # A small MLP has something between both as well: it is no adapter unless its rank is low.
    narrow = same_sizes(value(down.node).shape[:1], value(up.a).shape[:1]) and is_low_rank(width)
    narrow = narrow and (not isinstance(inner, int) or inner >= 2 * max(rank, width))
    return Adapter(up, down, up.scale, None, up.a) if narrow else None


def _of_packed(up: Product) -> Adapter | None:
    """An adapter whose A is packed with those of others: some columns of one skinny GEMM."""
    part = columns(through(up.a, RESHAPES | CASTS))
    if part is None or part.base.bias is not None or part.count != value(up.a).shape[1]:
        return None
    width, inner = value(part.base.node).shape[1], value(part.base.a).shape[1]
    if not is_low_rank(width) or (isinstance(inner, int) and inner < 2 * width):
        return None
    return Adapter(up, part.base, up.scale, None, up.a)


@dataclass(frozen=True)
class Step:
    """`scale * factor * kept * inner`, of which one at most is not 1; or a view or a cast of `inner`.

    Attributes:
        inner: of a floating dtype, and of as many elements.
        factor: a tensor of one element, or None.
        kept: a mask: a bool tensor with as many elements; or None.
    """

    inner: fx.Node
    scale: float = 1.0
    factor: fx.Node | None = None
    kept: fx.Node | None = None

    @property
    def is_number(self) -> bool:
        """Whether the step is only a multiplication by a number."""
        return self.factor is None and self.kept is None


@remembered(spreads=lambda node: True)
def step(node: fx.Node) -> Step | None:
    """One step from a sum towards its products: how a node is computed from a single other one."""
    if node.op != "call_function":
        return None
    inner: Any = put_back(node)
    if inner is not None or node.target in RESHAPES or node.target in CASTS or copies(node):
        inner = inner or node.args[0]
        return Step(inner) if isinstance(inner, fx.Node) and is_floating(inner) else None
    if (number := scaled(node)) is not None:
        return Step(*number)
    if (by := times_tensor(node)) is not None:
        return Step(by[0], factor=by[1])
    if (mask := masked(node)) is not None:
        return Step(mask[0], mask[2], kept=mask[1])
    return None


def times_tensor(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The tensor that a node multiplies by one of a single element, and that one."""
    for x, by in multiplied(node):
        if isinstance(by, fx.Node) and has_size_of(x, node) and _is_number(by):
            # One of shape (1,) may widen what it multiplies.
            return (x, by) if value(x).dtype == value(node).dtype else None
    return None


@dataclass(frozen=True)
class Weighted:
    """`scale * vector * product`, of a number for each row (gates, masks), or for each column (VeRA).

    Attributes:
        up: the product with B of an adapter.
        vector: the numbers, as they are broadcast.
        over: the leading sizes of what they multiply.
        inner: the nodes from the product on.
    """

    up: Product
    scale: float
    vector: fx.Node
    over: tuple[Any, ...]
    inner: tuple[fx.Node, ...]


def weighted(node: fx.Node) -> Weighted | None:
    """An adapter that a node multiplies by a vector."""
    for x, by in multiplied(node):
        *over, columns = value(node).shape
        found = tensor(by)
        if found is None or not has_size_of(x, node) or value(x).dtype != value(node).dtype:
            continue
        if found.dim() == 0 or not (found.dtype == torch.bool or found.is_floating_point()):
            continue
        inner, core, scale = [node], x, 1.0
        while product(core) is None and isinstance(core, fx.Node) and len(core.users) == 1:
            below = step(core)
            if below is None or not below.is_number:
                break
            inner.append(core)
            core, scale = below.inner, scale * below.scale
        up = product(core)
        if up is None or up.bias is not None or len(up.node.users) != 1 or adapter_of(up.node) is None:
            continue
        last, wide = found.shape[-1], value(up.node).shape[1]
        if not isinstance(last, int) or not isinstance(columns, int) or columns != wide:
            continue
        if last == 1 or (last == columns and same_sizes([found.numel()], [last])):
            return Weighted(up, scale, by, tuple(over), tuple(inner))
    return None


def _is_number(node: fx.Node) -> bool:
    """Whether a node is a tensor of one element, of shape () or (1,)."""
    found = tensor(node)
    if found is None or not found.is_floating_point():
        return False
    return same_sizes(found.shape, ()) or same_sizes(found.shape, (1,))
