"""Finds a linear on the flattened outer product of two matrices, in Dynamo's torch-level graph.

    F.linear((u[:, :, None] * v[:, None, :]).flatten(1), w, bias)

in any form: `mul`, `bmm`, `matmul` and `einsum`; `unsqueeze`, indexing, `view` and `reshape`. All of these
keep the order of elements, so that the shapes determine what they compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...graph.dims import is_transposed, permutation, selection
from ...graph.einsum import equation_of
from ...graph.search import named_behind
from ...graph.torch_ops import CASTS, TRANSPOSES, VIEWS, Op, linear_of, read
from ...operands import same_shape, tensor

OTHER_ROWS = "the factors have different rows, such as all pairs of the rows of two tensors"
_POINTWISE = frozenset("mul div relu tanh sigmoid dropout".split())
#: Operations that read scores or logits, and operations that may be in between.
_NORMALISED = frozenset("softmax _softmax log_softmax logsumexp cross_entropy exp".split())
_SCORES = VIEWS | CASTS | TRANSPOSES | frozenset("mul div add sub masked_fill where".split())
COLUMNS = "a convolution reads the products of the rows, as channels of each column"
_SUMMED = (
    "outer products are summed before the linear, as in an outer product mean or in a state, which is a sum "
    "over a sequence"
)
_OF_ONE = "u @ w @ u.T multiplies a matrix by one tensor from both sides, as two products of matrices"
_OF_TWO = "u @ w @ v.T multiplies rows of two tensors through a weight, as two products of matrices"
OVER_ROWS = "the linear sums outer products over their rows, and does not read them flattened"
BETWEEN = "another operation is between the outer product and the linear"
#: Views that keep the elements in their order. An index that only adds dims is one as well.
_VIEWS = VIEWS | {"contiguous"}


@dataclass(frozen=True)
class OuterProductSite:
    """A linear and the outer product that it reads.

    Attributes:
        linear: the node that is replaced.
        u, v: the factors, (..., P) and (..., Q), with the same rows.
        w: the weight, and whether it is (N, P * Q) rather than its transpose.
        bias: what is added, or None.
        chain: the nodes between the factors and the linear, in order.
    """

    linear: fx.Node
    u: fx.Node
    v: fx.Node
    w: fx.Node
    by_rows: bool
    bias: fx.Node | None
    chain: tuple[fx.Node, ...]


def site(node: fx.Node) -> OuterProductSite | None:
    """The linear on a flattened outer product that a node is, if it is one."""
    found = linear_of(node)
    if found is None:
        return None
    x, w, by_rows, bias = found
    value = tensor(x)
    if value is None or value.dim() < 2:
        return None
    outer = _outer(x)
    if outer is None:
        return None
    u, v, chain = outer
    return OuterProductSite(node, u, v, w, by_rows, bias, chain)


def unsupported(node: fx.Node) -> str:
    """Which other products of several tensors an operation multiplies by a weight; else ""."""
    op = read(node)
    if op is not None and op.name == "bilinear":
        return "bilinear multiplies two vectors of each row and a weight at once"
    if op is not None and op.name == "einsum":
        return _of_three(op)
    if op is not None and op.name == "matmul" and _is_bilinear(op):
        return _OF_ONE if _is_of_one(op) else _OF_TWO
    x: Any = op.rest[0] if op is not None and op.name == "conv1d" and op.rest else None
    found, dim = linear_of(node), -1
    if x is not None:  # channels are products, of each row (xDeepFM)
        dim = 1
    elif found is not None:
        x = found[0]
        if _has_rows_last(x):
            return OVER_ROWS
    flat = tensor(x)
    width = flat.shape[dim] if flat is not None and flat.dim() > 1 else None
    while width is not None and (by := read(x)) is not None and not by.inplace:
        made = tensor(x)
        how = _of_other_factors(by, made, width, dim == 1) if made is not None else ""
        if how or by.name not in _VIEWS | CASTS | TRANSPOSES | _POINTWISE:
            return how
        x = by.input
    return ""


def _has_rows_last(x: fx.Node) -> bool:
    """Whether a permutation puts rows of an outer product behind it: `outer.permute(0, 2, 3, 1)` (AOANet)."""
    by = read(x)
    dims, outer = (None, None) if by is None else (permutation(by), read(by.input))
    made = None if outer is None else tensor(outer.node)
    if dims is None or outer is None or made is None or dims[-1] >= made.dim() - 2:
        return False
    return _of_other_factors(outer, made, math.prod(made.shape[-2:]), False) == BETWEEN


def _is_bilinear(op: Op) -> bool:
    """Whether a product is `u @ w @ v.T`, with a matrix w, and neither scores of an attention nor logits.

    Or, of one row of u and v each, with a batch of them. Two linears have transposed weights both, or
    neither; where w is narrow, it may be an adapter.
    """
    inner, made = read(op.input), tensor(op.node)
    if made is not None and made.dim() > 2 and all(known_true(size == 1) for size in made.shape[-2:]):
        while inner is not None and inner.name in VIEWS:
            inner = read(inner.input)
        w = None if inner is None or inner.name != "matmul" else tensor(inner["other"])
        return w is not None and not known_true(w.shape[-1] == 1) and not _is_normalised(op)
    if inner is None or inner.name != "matmul" or not is_transposed(op["other"]):
        return False
    w, u, v = tensor(inner["other"]), tensor(inner.input), tensor(op["other"])
    if w is None or u is None or v is None or u.dim() != v.dim():  # v is a weight of all samples
        return False
    if w.dim() != 2 or is_transposed(inner["other"]) or not known_true(2 * w.shape[1] > w.shape[0]):
        return False
    return not _is_normalised(op)


def _is_of_one(op: Op) -> bool:
    """Whether a product `u @ w @ v.T` has one tensor as u and v, such as a permutation of w."""
    inner, turned = read(op.input), read(op["other"])
    return inner is not None and turned is not None and turned.input is inner.input


def _is_normalised(op: Op) -> bool:
    """Whether the result of an operation is scores or logits."""
    return bool(named_behind(op.node, _SCORES, _NORMALISED, 16))


def _of_three(op: Op) -> str:
    """Why an einsum of three tensors is left; "" if in none of them dims are summed with two others."""
    text = op["equation"]
    if not isinstance(text, str) or text.count(",") < 2:
        return ""
    inputs, _, result = text.replace(" ", "").partition("->")
    factors = inputs.split(",")
    for i, weight in enumerate(factors):
        others = [set(each) for each in (*factors[:i], *factors[i + 1 :])]
        summed = {x for x in weight if x not in result and inputs.count(x) == 2}
        rows = set.intersection(*others)
        if sum(bool(summed & each) for each in others) > 1 and not (rows and rows <= set(weight)):
            return f"einsum {text!r} multiplies {len(factors)} tensors at once"
    return ""


def _of_other_factors(op: Op, made: torch.Tensor, width: Any, inner: bool) -> str:
    """How the row of products of `width` elements is computed; "" if it is none.

    Args:
        inner: whether other dims may be behind the products.
    """
    if op.name in ("mul", "matmul", "bmm"):
        return _of_broadcast(op, made, width, inner)
    return _of_other_einsum(op, made, width, inner) if op.name == "einsum" else ""


def _of_broadcast(op: Op, made: torch.Tensor, width: Any, inner: bool) -> str:
    """Why a product of columns and rows that are broadcast against each other is left; else ""."""
    parts = [tensor(side) for side in (op.input, op["other"])]
    shapes = [part.shape for part in parts if part is not None and part.dim() == made.dim()]
    if len(shapes) != 2 or made.dim() < 3:
        return ""
    for end in range(3, made.dim() + 1) if inner and op.name == "mul" else [made.dim()]:
        p, q = made.shape[end - 2 : end]
        ends = {tuple(map(str, shape[end - 2 : end])) for shape in shapes}
        crossed = ends == {(str(p), "1"), ("1", str(q))} and "1" not in (str(p), str(q))
        if crossed and known_true(p * q == width):
            if not same_shape(shapes[0][: end - 2], shapes[1][: end - 2]):
                return OTHER_ROWS
            return COLUMNS if inner else BETWEEN
    return ""


def _of_other_einsum(op: Op, made: torch.Tensor, width: Any, inner: bool) -> str:
    """Why an outer product in an einsum is left; else ""."""
    text = op["equation"]
    if not isinstance(text, str) or "->" not in text or "," not in text:
        return ""
    inputs, _, result = text.replace(" ", "").partition("->")
    factors = inputs.split(",")
    for end in range(len(factors), len(result) + 1) if inner else [len(result)]:
        letters = result[end - len(factors) : end]
        own = [[i for i, factor in enumerate(factors) if letter in factor] for letter in letters]
        at = made.dim() - len(result) + end  # of the dim behind them
        sizes = made.shape[at - len(factors) : at]
        if sorted(own) == [[i] for i in range(len(factors))] and known_true(math.prod(sizes) == width):
            ends = [factors[i] for (i,) in own]
            break
    else:
        return ""
    if len(factors) > 2:
        return "the linear reads products of more than two tensors"
    if set(inputs) - set(result) - {","}:
        # What sums over the dim behind the rows of one factor is a product of matrices, such as a rotation.
        in_rows = all(
            factor.endswith(letter + result[end:]) for factor, letter in zip(ends, letters, strict=True)
        )
        return _SUMMED if in_rows else ""
    if inner:
        return COLUMNS
    shapes = [held.shape for side in op.rest if (held := tensor(side)) is not None]
    rows = {factor.replace(result[-1], "").replace(result[-2], "") for factor in factors}
    same = len(rows) == 1 and len(shapes) == 2 and same_shape(shapes[0][:-1], shapes[1][:-1])
    return BETWEEN if same else OTHER_ROWS


def _outer(x: fx.Node) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]] | None:
    """The two factors of a flattened outer product, and the nodes that make it of them."""
    chain = [x]
    while (view := _viewed(x)) is not None:
        x = view
        chain.append(x)
    product, flat = tensor(x), tensor(chain[0])
    if len(chain) < 2 or product is None or flat is None or product.dim() != flat.dim() + 1:
        return None
    rows = flat.shape[:-1]
    if not same_shape(product.shape[:-2], rows):
        return None
    op, factors = read(x), None
    if op is not None and op.name == "einsum":
        factors = _factors_of_einsum(op)
    elif op is not None and op.name in ("mul", "bmm", "matmul"):
        first, second = op.only("input", "other")
        factors = _pair(first, second, product)
        if factors is None and op.name == "mul":
            factors = _pair(second, first, product)
    if factors is None:
        return None
    u, v, more = factors
    for factor in (u, v):  # an einsum broadcasts rows
        held = tensor(factor)
        if held is None or not same_shape(held.shape[:-1], rows):
            return None
    return u, v, (*reversed(more), *reversed(chain))


def _viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a view of, with its elements in the same order; else None."""
    op, taken = read(node), selection(node, adds=True)
    if op is None or op.inplace or not isinstance(op.input, fx.Node):
        return None
    only_adds = taken is not None and not taken.dims
    return op.input if op.name in _VIEWS or only_adds else None


def _factors_of_einsum(op: Op) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """The two factors of an einsum "bi,bj->bij", with any letters, also several for the rows."""
    found = equation_of(op)
    if (
        found is None
        or len(found.first) < 2
        or found.first[:-1] != found.second[:-1]
        or found.first == found.second
    ):
        return None
    for each in (found, found.turned()):
        if each.result == each.first + each.second[-1]:
            return each.left, each.right, []
    return None


def _pair(first: Any, second: Any, product: torch.Tensor) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """`first` as (..., P, 1) and `second` as (..., 1, Q), both of them views with a dim less."""
    *rows, p, q = product.shape
    u = _matrix(first, (*rows, p, 1))
    v = _matrix(second, (*rows, 1, q))
    if u is None or v is None:
        return None
    return u[0], v[0], [*v[1], *u[1]]


def _matrix(node: fx.Node, shape: tuple[Any, ...]) -> tuple[fx.Node, list[fx.Node]] | None:
    """The tensor with a dim less of which a node is a view of this shape, and the views."""
    found, views = tensor(node), []
    if found is None or not same_shape(found.shape, shape):
        return None
    while found is not None and found.dim() == len(shape):
        before = _viewed(node)
        if before is None:
            return None
        views.append(node)
        node = before
        found = tensor(node)
    if found is None or not same_shape(found.shape[:-1], shape[:-2]):
        return None
    return node, views
