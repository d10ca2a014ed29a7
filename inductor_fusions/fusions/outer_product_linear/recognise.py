"""Finds a linear on the flattened outer product of two matrices, in Dynamo's torch-level graph.

    F.linear((u[:, :, None] * v[:, None, :]).flatten(1), w, bias)

in any spelling: `mul`, `bmm`, `matmul` and `einsum`; `unsqueeze`, indexing, `view` and `reshape`. All of
these keep the elements in their order, so that shapes alone say what they mean.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..._inductor import known_true
from ...operands import tensor

_LINEAR = frozenset({F.linear, torch._C._nn.linear})
_MATMUL = frozenset({torch.matmul, operator.matmul, torch.mm, "matmul", "mm", "__matmul__"})
_ADDMM = frozenset({torch.addmm, "addmm"})
_MUL = frozenset({torch.mul, torch.multiply, operator.mul, "mul", "multiply", "__mul__"})
_BMM = frozenset({torch.bmm, torch.matmul, operator.matmul, "bmm", "matmul", "__matmul__"})
_EINSUM = frozenset({torch.einsum, torch.functional.einsum})
#: What may be such a linear.
LINEARS = _LINEAR | _MATMUL | _ADDMM
#: Views that keep the elements in their order. `getitem` is one where it only adds dims.
_VIEWS = frozenset(
    {torch.unsqueeze, torch.reshape, torch.flatten, "unsqueeze", "view", "reshape", "flatten", "contiguous"}
)


@dataclass(frozen=True)
class Site:
    """A linear and the outer product that it reads.

    Attributes:
        linear: the node that is replaced.
        u, v: the factors, (rows, P) and (rows, Q).
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
    found = _linear(node)
    if found is None:
        return None
    x, w, by_rows, bias = found
    outer = _outer(x)
    if outer is None:
        return None
    u, v, chain = outer
    return Site(node, u, v, w, by_rows, bias, chain)


def _linear(node: fx.Node) -> tuple[fx.Node, fx.Node, bool, fx.Node | None] | None:
    """(input, weight, whether its rows are those of the output, bias) of a product with a matrix."""
    given = _arguments(node, ("input", "weight", "bias"))
    if node.target in _LINEAR and given is not None:
        x, w, bias = (*given, None)[:3]
        by_rows = True
    elif node.target in _MATMUL and given is not None and len(given) == 2:
        (x, w), bias, by_rows = given, None, False
    elif node.target in _ADDMM and len(node.args) == 3 and not node.kwargs:
        bias, x, w = node.args
        by_rows = False
    else:
        return None
    found = tensor(x), tensor(w)
    if found[0] is None or found[1] is None or found[0].dim() != 2 or found[1].dim() != 2:
        return None
    return x, w, by_rows, bias


def _arguments(node: fx.Node, names: tuple[str, ...]) -> list[Any] | None:
    if set(node.kwargs) - set(names):
        return None
    return [*node.args, *(node.kwargs[name] for name in names[len(node.args) :] if name in node.kwargs)]


def _outer(x: fx.Node) -> tuple[fx.Node, fx.Node, tuple[fx.Node, ...]] | None:
    """The two factors of a flattened outer product, and the nodes that make it of them."""
    chain = [x]
    while x.target in _VIEWS and isinstance(x.args[0], fx.Node):
        x = x.args[0]
        chain.append(x)
    product, flat = tensor(x), tensor(chain[0])
    if len(chain) < 2 or product is None or product.dim() != 3 or flat is None:
        return None
    if not known_true(flat.shape[0] == product.shape[0]):
        return None
    if x.target in _EINSUM:
        factors = _of_einsum(x)
    elif x.target in _MUL or x.target in _BMM:
        if len(x.args) != 2 or x.kwargs or not all(isinstance(a, fx.Node) for a in x.args):
            return None
        first, second = x.args
        factors = _pair(first, second, product)
        if factors is None and x.target in _MUL:
            factors = _pair(second, first, product)
    else:
        return None
    if factors is None:
        return None
    u, v, more = factors
    for factor in (u, v):  # an einsum broadcasts rows
        held = tensor(factor)
        if held is None or held.dim() != 2 or not known_true(held.shape[0] == product.shape[0]):
            return None
    return u, v, (*reversed(more), *reversed(chain))


def _of_einsum(node: fx.Node) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    equation, *operands = node.args
    operands = (
        list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    )
    # "bi,bj->bij", with any letters.
    letters = str(equation).replace(" ", "")
    if len(letters) != 10 or letters[2] != "," or letters[5:7] != "->" or len(operands) != 2:
        return None
    b, p, q = letters[0], letters[1], letters[4]
    if len({b, p, q}) != 3 or letters[3] != b or letters[7:] not in (b + p + q, b + q + p):
        return None
    first, second = operands if letters[7:] == b + p + q else operands[::-1]
    return (first, second, []) if isinstance(first, fx.Node) and isinstance(second, fx.Node) else None


def _pair(first: Any, second: Any, product: torch.Tensor) -> tuple[fx.Node, fx.Node, list[fx.Node]] | None:
    """`first` as (rows, P, 1) and `second` as (rows, 1, Q), both of them views of matrices."""
    rows, p, q = product.shape
    u = _matrix(first, (rows, p, 1))
    v = _matrix(second, (rows, 1, q))
    if u is None or v is None:
        return None
    return u[0], v[0], [*v[1], *u[1]]


def _matrix(node: fx.Node, shape: tuple[Any, ...]) -> tuple[fx.Node, list[fx.Node]] | None:
    """The matrix of which a node is a view of this shape, and the views."""
    found, views = tensor(node), []
    if (
        found is None
        or found.dim() != 3
        or not all(known_true(a == b) for a, b in zip(found.shape, shape, strict=True))
    ):
        return None
    while found is not None and found.dim() == 3:
        if node.target is operator.getitem and not _adds_dims(node.args[1]):
            return None
        if not (node.target in _VIEWS or node.target is operator.getitem) or not isinstance(
            node.args[0], fx.Node
        ):
            return None
        views.append(node)
        node = node.args[0]
        found = tensor(node)
    if found is None or found.dim() != 2 or not known_true(found.shape[0] == shape[0]):
        return None
    return node, views


def _adds_dims(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or part == slice(None) for part in parts)
