"""The matrix products of a functional aten graph in a normal form.

A product is an `mm` or `addmm`; a linear on an input of more dims is one between two reshapes. Reshapes and
casts are looked through, so that two forms of one value are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import fx

from ..operands import holds, tensor, value
from .equal import first_equal

aten = torch.ops.aten

#: Views that keep the elements in their order.
RESHAPES = frozenset(
    {
        aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.squeeze.default,
        aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.alias.default,
    }
)  # fmt: skip
#: Every view: it has no memory of its own and may be moved.
VIEWS = RESHAPES | {
    aten.permute.default, aten.t.default, aten.transpose.int, aten.slice.Tensor, aten.select.int,
    aten.expand.default, aten.detach.default,
}  # fmt: skip
#: Give all parts of a tensor, which are views of it.
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})
CASTS = frozenset({torch.ops.prims.convert_element_type.default, aten._to_copy.default})
#: Operations with a kernel of their own, which read and write memory.
_KERNELS = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten.convolution.default,
    }
)  # fmt: skip
MUL = (aten.mul.Tensor, aten.mul.Scalar)
DIV = (aten.div.Tensor, aten.div.Scalar)


@dataclass(frozen=True)
class Product:
    """`scale * a @ b (+ bias)`, one node of the graph.

    Attributes:
        node: the mm or addmm.
        a, b: its operands, matrices (M, K) and (K, N) of one dtype.
        bias: added to it, of shape (N,) or (M, N); or None.
        scale: the factor of the product.
    """

    node: fx.Node
    a: fx.Node
    b: fx.Node
    bias: fx.Node | None = None
    scale: float = 1.0

    @property
    def inner(self) -> int:
        """K; 0 if it is symbolic."""
        size = value(self.a).shape[1]
        return size if isinstance(size, int) else 0


def operands_of(products: Iterable[Product]) -> list[fx.Node]:
    """What products read: both matrices of each, and its bias if it has one."""
    return [x for p in products for x in (p.a, p.b, p.bias) if x is not None]


class Kind(NamedTuple):
    """Whether an operation is a view, a split, pointwise, a kernel, or an attention (forward), whatever its
    arguments are.
    """

    view: bool
    split: bool
    pointwise: bool
    kernel: bool
    attention: bool


_NO_CALL = Kind(False, False, False, False, False)
#: By the id of a target: the hash of an operator is computed in Python.
_KINDS: dict[int, tuple[Any, Kind]] = {}


def _kind_of(target: Any) -> Kind:
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ()) or target in CASTS
    space = getattr(target, "namespace", "")
    own = space not in ("aten", "prims", "_operator")
    name = str(target)
    kernel = target in _KERNELS or own or "scaled_dot" in name
    attention = kernel and "attention" in name and "backward" not in name
    return Kind(target in VIEWS, target in SPLITS, pointwise, kernel, attention)


def kind(node: fx.Node) -> Kind:
    """The kind of a node's operation."""
    if node.op != "call_function":
        return _NO_CALL
    target = node.target
    found = _KINDS.get(id(target))
    if found is None or found[0] is not target:
        found = _KINDS[id(target)] = (target, _kind_of(target))
    return found[1]


def product(node: Any) -> Product | None:
    """Read an mm or an addmm; None for other nodes.

    Inductor may pad the rows of a product to a multiple of 8, K with them, and slice the result
    (torch/_inductor/fx_passes/pad_mm.py). The slice is then the product of the matrices without padding.
    """
    if not isinstance(node, fx.Node) or tensor(node) is None:
        return None
    inner = _of_padded_rows(node)
    if inner is not None:
        return _without_padding(node, inner)
    if node.target is aten.mm.default and len(node.args) == 2 and not node.kwargs:
        a, b = _nodes(node)
        return Product(node, a, b)
    if node.target is not aten.addmm.default or len(node.args) != 3:
        return None
    bias, a, b = _nodes(node)
    scale, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    if not is_factor(scale) or not isinstance(beta, (int, float)) or beta != 1:
        return None
    out, offset = value(node), value(bias)
    whole = offset.dim() == 2 and same_sizes(offset.shape, out.shape)
    if not whole and not (offset.dim() == 1 and _same(offset.shape[0], out.shape[1])):
        return None
    return Product(node, a, b, bias, float(scale))


def is_factor(argument: Any) -> TypeGuard[float]:
    """Whether an argument is a finite number, so that a kernel may apply it elsewhere as a factor."""
    return isinstance(argument, (int, float)) and math.isfinite(argument)


def scaled(node: fx.Node) -> tuple[fx.Node, float] | None:
    """The floating-point tensor that a node multiplies by a number, and that number; None for other nodes.

    A division by a number, a negation and an addition of 0 (Python's `sum`) count as multiplications.
    """
    if node.op != "call_function" or node.kwargs or len(node.args) > 2:
        return None
    x, *by = node.args
    if node.target is aten.add.Tensor and by and is_factor(by[0]) and by[0] == 0:
        return (x, 1.0) if isinstance(x, fx.Node) and is_floating(x) else None
    if node.target in MUL and is_factor(x):
        x, by = by[0], [x]
    if not isinstance(x, fx.Node) or not is_floating(x) or not all(map(is_factor, by)):
        return None
    numbers = [float(number) for number in by if is_factor(number)]
    if node.target is aten.neg.default and not numbers:
        return x, -1.0
    if node.target in MUL and numbers:
        return x, numbers[0]
    if node.target in DIV and numbers and numbers[0] and math.isfinite(1 / numbers[0]):
        return x, 1 / numbers[0]
    return None


def multiplied(node: fx.Node) -> list[tuple[fx.Node, Any]]:
    """Both readings of a multiplication: what it multiplies, which is a node, and what by."""
    if node.target not in MUL or len(node.args) != 2 or node.kwargs:
        return []
    first, second = node.args
    return [(x, by) for x, by in ((first, second), (second, first)) if isinstance(x, fx.Node)]


def _of_padded_rows(node: fx.Node) -> fx.Node | None:
    """The product whose first rows a node is, or None."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or node.kwargs or node.args[1:3] != (0, 0):
        return None
    inner = node.args[0]
    if isinstance(inner, fx.Node) and inner.target in (aten.mm.default, aten.addmm.default):
        return inner
    return None


def _without_padding(node: fx.Node, inner: fx.Node) -> Product | None:
    padded = product(inner)
    operands = unpadded(padded.a, padded.b) if padded is not None else None
    if padded is None or operands is None or not _same(value(operands[0]).shape[0], value(node).shape[0]):
        return None
    a, b = operands
    bias = padded.bias
    if bias is not None and value(bias).dim() == 2:
        bias = _without_rows(bias)
        if bias is None or not _same(value(bias).shape[0], value(a).shape[0]):
            return None
    return Product(node, a, b, bias, padded.scale)


def unpadded(a: fx.Node, b: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Both operands of a product without the zeros behind the rows of a and behind K; None if a has none."""
    of_a = zero_padding(a)
    if of_a is None:
        return None
    whole, columns, _ = of_a
    if _same(columns, 0):
        return whole, b
    of_b = zero_padding(b)
    fits = of_b is not None and _same(of_b[1], 0) and _same(of_b[2], columns)
    return (whole, of_b[0]) if of_b is not None and fits else None


def _without_rows(node: fx.Node) -> fx.Node | None:
    """The matrix that a node pads with rows of zeros at its end, or None."""
    found = zero_padding(node)
    return found[0] if found is not None and _same(found[1], 0) else None


def zero_padding(node: fx.Node) -> tuple[fx.Node, Any, Any] | None:
    """The matrix that a node pads with zeros at its end, and the numbers of rows and columns; or None."""
    if node.target is not aten.constant_pad_nd.default or node.kwargs or value(node).dim() != 2:
        return None
    source, pads, *fill = node.args
    if not isinstance(source, fx.Node) or fill not in ([], [0], [0.0]) or not isinstance(pads, (list, tuple)):
        return None
    left, right, above, below = (*pads, 0, 0)[:4] if len(pads) in (2, 4) else (1, 0, 0, 0)
    cropped = any(isinstance(pad, int) and pad < 0 for pad in (right, below))
    return (source, right, below) if left == 0 == above and not cropped else None


def _nodes(node: fx.Node) -> list[fx.Node]:
    return [argument for argument in node.args if isinstance(argument, fx.Node)]


def batched_linear(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """The input and the matrix of a linear that is a batch of products, as its input is no view of a matrix.

    A linear with a frozen weight becomes that. None of other nodes.
    """
    if not isinstance(node, fx.Node) or node.target is not aten.bmm.default:
        return None
    x, matrices = _nodes(node)
    matrix = repeated_matrix(matrices)
    if matrix is None:
        return None
    samples, rows, _ = value(x).stride()
    return None if _same(samples, value(x).shape[1] * rows) else (x, matrix)


def repeated_matrix(matrices: Any) -> fx.Node | None:
    """The one matrix that a batch of matrices repeats, or None."""
    expanded = isinstance(matrices, fx.Node) and matrices.target is aten.expand.default
    matrix = matrices.args[0] if expanded else None
    return matrix if isinstance(matrix, fx.Node) and value(matrix).dim() == 2 else None


#: Anchors of products: `products_of` finds what Inductor has padded.
PRODUCTS = (aten.mm.default, aten.addmm.default)


def products(graph: fx.Graph) -> list[Product]:
    """The products of a graph, in its order."""
    return products_of(n for target in PRODUCTS for n in graph.find_nodes(op="call_function", target=target))


def products_of(nodes: Iterable[fx.Node]) -> list[Product]:
    """The products at these nodes, which match `PRODUCTS`, in the order of the graph.

    A padded product is returned without its padding, and as it is only if other nodes read it.
    """
    found: list[Product] = []
    for node in nodes:
        slices = [user for user in node.users if _of_padded_rows(user) is not None]
        sliced = [read for user in slices if (read := product(user)) is not None]
        whole = product(node)
        if whole is not None and (not sliced or len(sliced) < len(node.users)):
            found.append(whole)
        found += sliced
    return sorted(found, key=lambda p: p.node)


def _same(first: Any, second: Any) -> bool:
    return str(first) == str(second)


def same_sizes(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether sizes are equal as text: a comparison of symbols would add a guard."""
    return [str(size) for size in first] == [str(size) for size in second]


def through(node: fx.Node, targets: frozenset[Any] | set[Any]) -> fx.Node:
    """The node itself, or the first one upstream that is not a call of `targets`, by first arguments."""
    while node.op == "call_function" and node.target in targets and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def unviewed(node: fx.Node) -> fx.Node:
    """The node that a node is a view of, through all views; itself if it is not a view."""
    return through(node, VIEWS)


def transpose_of(node: fx.Node) -> fx.Node | None:
    """The matrix that a node transposes, or None."""
    if node.target is not aten.permute.default or node.args[1:] != ([1, 0],):
        return None
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def copies(node: fx.Node) -> bool:
    """Whether a node copies a tensor, or expands it to its own size.

    A linear on an input that is not contiguous copies the input, or becomes a batched product.
    """
    source = node.args[0] if node.target in (aten.clone.default, aten.expand.default) else None
    return isinstance(source, fx.Node) and same_sizes(value(source).shape, value(node).shape)


def identity(node: fx.Node) -> tuple[Any, ...]:
    """A key: two nodes with equal keys hold the same matrix.

    Copies and reshapes keep the order of elements and are skipped. The key has the source, its casts and the
    shape. Equal paddings are equal, because Inductor pads each product on its own.
    """
    casts: list[torch.dtype] = []
    shape = tuple(str(size) for size in value(node).shape)
    base: Any = node
    while base.op == "call_function" and isinstance(base.args[0] if base.args else None, fx.Node):
        if base.target in CASTS:
            origin = restored(base)
            if origin is not None:
                base = origin
                continue
            if not casts or casts[-1] != value(base).dtype:
                casts.append(value(base).dtype)
        elif base.target not in RESHAPES and not copies(base):
            break
        base = base.args[0]
    if base.op == "call_function" and base.target in (aten.permute.default, aten.t.default):
        dims = tuple(base.args[1]) if len(base.args) > 1 else (1, 0)
        return ("permute", dims, identity(base.args[0]), tuple(casts), shape)
    if base.op == "call_function" and base.target is aten.constant_pad_nd.default and not base.kwargs:
        pads = tuple(str(rest) for rest in base.args[1:])
        return ("pad", pads, identity(base.args[0]), tuple(casts), shape)
    return (first_equal(base), tuple(casts), shape)


def users_behind(node: fx.Node, targets: frozenset[Any] = VIEWS) -> Iterator[fx.Node]:
    """The users of a value, through operations of `targets`, which are not yielded.

    `sharing.readers` says what reads the memory of a value: through all of its views and parts.
    """
    for user in node.users:
        if user.op == "call_function" and user.target in targets and user.args[0] is node:
            yield from users_behind(user, targets)
        else:
            yield user


def is_pointwise(node: fx.Node) -> bool:
    """Whether a node is computed element by element."""
    return kind(node).pointwise


def is_floating(node: Any) -> bool:
    """Whether a node is a floating-point tensor."""
    found = tensor(node)
    return found is not None and found.is_floating_point()


def restored(node: Any) -> fx.Node | None:
    """The source of a cast to a wider dtype and back, of which a node is a copy; None for other nodes.

    The strides must be equal: a cast makes its result dense, and later views may require that.
    """
    wide: Any = node.args[0] if isinstance(node, fx.Node) and node.target in CASTS else None
    if not isinstance(wide, fx.Node) or wide.target not in CASTS or not widens(wide):
        return None
    origin: Any = wide.args[0]
    before, behind = value(origin), value(node)
    same = before.dtype == behind.dtype and same_sizes(before.stride(), behind.stride())
    return origin if same else None


def widens(cast: fx.Node) -> bool:
    """Whether a cast is exact for every number, between dtypes that kernels compute in."""
    inner = tensor(cast.args[0])
    return inner is not None and holds(value(cast).dtype, inner.dtype)
