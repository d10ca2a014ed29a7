"""The diagonal of a matrix product as dot products.

`torch.diagonal(a @ b)` is a row of dot products: n * k multiplications, where the product has n * n * k and
writes n * n numbers. The scores of pairs (`torch.diag(queries @ documents.T)`) and traces of products are
written so. Two functions say what is replaced by what.
"""

from __future__ import annotations

import torch
from torch import fx

from .._inductor import Match, known_true
from ..fusion import Fusion, Scope
from ..operands import tensor
from ..reasons import Reason


def of_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The form to find, for matrices (n, k) and (k, n)."""
    return torch.diagonal(torch.mm(a, b))


def of_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The same for batches of matrices."""
    return torch.diagonal(torch.bmm(a, b), dim1=-2, dim2=-1)


def dot_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The replacement: each row of `a` times that column of `b`, added up in float32 at least."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return (a.to(dtype) * b.mT.to(dtype)).sum(-1).to(a.dtype)


def check(match: Match) -> None:
    """A sum of integers has another dtype, a product that is not square has more rows or columns, and one of
    different dtypes raises.

    Raises:
        Rejected: one of these.
    """
    a, b = tensor(match.kwargs["a"]), tensor(match.kwargs["b"])
    if a is None or b is None or not a.is_floating_point():
        raise Reason.DTYPE.rejected("the product is not floating point")
    if a.dtype != b.dtype:
        raise Reason.MIXED_DTYPES.rejected("the operands have different dtypes")
    if not known_true(a.shape[-2] == b.shape[-1]):
        raise Reason.SHAPES.rejected("the product is not proved to be square")


def scope_of(graph: fx.Graph) -> Scope | None:
    """None without a diagonal: then both functions need not be traced."""
    diagonals = graph.find_nodes(op="call_function", target=torch.ops.aten.diagonal.default, sort=False)
    return Scope(graph) if diagonals else None


FUSION = Fusion(
    name="product_diagonal",
    stage="post_grad",
    summary="the diagonal of a matrix product to dot products, without the other elements",
    scope=scope_of,
)
FUSION.replacement(
    of_product, dot_products, inputs=lambda: [torch.empty(4, 8), torch.empty(8, 4)], check=check
)
FUSION.replacement(
    of_products, dot_products, inputs=lambda: [torch.empty(2, 4, 8), torch.empty(2, 8, 4)], check=check
)
