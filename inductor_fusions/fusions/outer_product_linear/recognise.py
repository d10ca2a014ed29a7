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
from ...fusion import Rejected
from ...graph.einsum import equation
from ...graph.torch_ops import CASTS, VIEWS, Op, linear_of, read
from ...operands import same_shape, tensor

OTHER_ROWS = "the factors have different rows, such as all pairs of the rows of two tensors"
_POINTWISE = frozenset("mul div relu tanh sigmoid dropout".split())
BETWEEN = "another operation is between the outer product and the linear"
#: Views that keep the elements in their order. `getitem` is one where it only adds dims.
_VIEWS = VIEWS | {"contiguous"}


@dataclass(frozen=True)
class Site:
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


def site(node: fx.Node) -> Site | None:
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
    return Site(node, u, v, w, by_rows, bias, chain)


def unread(node: fx.Node) -> str:
    """Which other products of several tensors a linear reads, as a flattened row; else ""."""
    found = linear_of(node)
    x: Any = None if found is None else found[0]
    flat = tensor(x)
    while flat is not None and (op := read(x)) is not None and not op.inplace:
        made = tensor(x)
        if made is not None and op.name in ("einsum", "mul"):
            how = _of_other_factors(op, made, flat.shape[-1])
            if how:
                return how
        if op.name not in _VIEWS | CASTS | _POINTWISE:
            break
        x = op.input
    return ""


def _of_other_factors(op: Op, made: torch.Tensor, width: Any) -> str:
    """How the row of products of `width` elements is computed; "" if it is none."""
    if op.name == "mul":
        parts = [tensor(side) for side in (op.input, op["other"])]
        shapes = [part.shape for part in parts if part is not None and part.dim() == made.dim()]
        if len(shapes) != 2 or made.dim() < 3 or not known_true(made.shape[-2] * made.shape[-1] == width):
            return ""
        p, q = made.shape[-2:]
        ends = {tuple(map(str, shape[-2:])) for shape in shapes}
        crossed = ends == {(str(p), "1"), ("1", str(q))} and "1" not in (str(p), str(q))
        if not crossed:
            return ""
        return BETWEEN if same_shape(shapes[0][:-2], shapes[1][:-2]) else OTHER_ROWS
    text = op["equation"]
    if not isinstance(text, str) or "->" not in text:
        return ""
    inputs, _, result = text.replace(" ", "").partition("->")
    factors = inputs.split(",")
    own = [[i for i, factor in enumerate(factors) if letter in factor] for letter in result[-len(factors) :]]
    if len(factors) < 2 or sorted(own) != [[i] for i in range(len(factors))]:
        return ""
    if not known_true(math.prod(made.shape[-len(factors) :]) == width):
        return ""
    if len(factors) > 2:
        return "the linear reads products of more than two tensors"
    if set(inputs) - set(result) - {","}:
        return "outer products are summed before the linear, as in an outer product mean"
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
        factors = _of_einsum(op)
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
    op = read(node)
    if op is None or op.inplace or op.name not in _VIEWS:
        return None
    return op.input if isinstance(op.input, fx.Node) else None


def _of_einsum(op: Op) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """The two factors of an einsum "bi,bj->bij", with any letters, also several for the rows."""
    try:
        found = equation(op)
    except Rejected:
        return None
    if len(found.first) < 2 or found.first[:-1] != found.second[:-1] or found.first == found.second:
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
        op = read(node)
        adds = op is not None and op.name == "getitem" and _adds_dims(op["index"])
        before = op.input if op is not None and adds else _viewed(node)
        if not isinstance(before, fx.Node):
            return None
        views.append(node)
        node = before
        found = tensor(node)
    if found is None or not same_shape(found.shape[:-1], shape[:-2]):
        return None
    return node, views


def _adds_dims(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or part == slice(None) for part in parts)
