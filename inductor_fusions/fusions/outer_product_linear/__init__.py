"""Fuses a linear on a flattened outer product without materialising the outer product.

This is the interaction of all pairs of features, as in a DLRM with the full outer product. One linear, and
nothing else, reads a row of P * Q products. It becomes `inductor_fusions::outer_product_linear`, whose kernel
computes the products in registers. The backward computes some of them at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ... import config
from ..._inductor import Match
from ...decisions import Query, decide, tables
from ...effects.liveness import are_read_elsewhere, replace
from ...effects.scope import DynamoScope
from ...effects.writes import storage
from ...fusion import Candidate, Fusion, Reported
from ...graph.builder import Builder
from ...graph.torch_ops import forms
from ...layouts.keeping import Keeping
from ...operands import check_device, check_kind, profitable, requires_grad, tensor, text, value
from ...reasons import Reason
from . import recognise
from .op import OUTER_PRODUCT_LINEAR, dtypes, outer_products
from .recognise import OuterProductSite

__all__ = ["FUSION", "outer_products"]


class OuterProductLinear(Candidate):
    """A linear that reads every product of two features."""

    def __init__(self, scope: DynamoScope, site: OuterProductSite) -> None:
        self.scope, self.site, self.anchor = scope, site, site.linear
        self.note = ""

    def describe(self) -> dict[str, str]:
        return {name: text(tensor(getattr(self.site, name))) for name in ("u", "v", "w")}

    def savings(self) -> dict[str, int]:
        u, v = value(self.site.u), value(self.site.v)
        if not all(isinstance(size, int) for size in (*u.shape, *v.shape)):
            return {}
        # The row of products is written once, and read once.
        return {"bytes": 2 * u.numel() * v.shape[-1] * u.element_size(), "flops": 0}

    def guard(self) -> None:
        site = self.site
        out, *operands = (tensor(node) for node in (site.linear, site.u, site.v, site.w))
        assert out is not None
        check_kind(out, *operands)
        if are_read_elsewhere(site.chain, {*site.chain, site.linear}):
            raise Reason.USED_ELSEWHERE.rejected(
                "the outer product is also used elsewhere", "let only the linear read the outer product"
            )
        if any(t is None or t.dtype != out.dtype for t in operands):
            raise Reason.MIXED_DTYPES.rejected("the operands have different dtypes, or autocast is on")
        if site.bias is not None and ((bias := tensor(site.bias)) is None or bias.dtype != out.dtype):
            raise Reason.MIXED_DTYPES.rejected("the operands have different dtypes, or autocast is on")
        where = "the outer product and the linear"
        self.scope.check_replaced(site.chain, site.linear, where, [site.u, site.v, site.w])
        check_kernel(out)
        if not config.always():
            self.note = measured(out, operands)

    def rewrite(self) -> str:
        site, out = self.site, value(self.anchor)
        keeping, factors = Keeping(self.scope.graph), (site.u, site.v)
        # The multiplication keeps a factor where the other one takes a gradient.
        trained = [requires_grad(node) for node in factors]
        by_eager = {storage(node) for node, other in zip(factors, reversed(trained), strict=True) if other}
        u, v = factors
        if out.requires_grad:
            u, v = (keeping.kept(node, self.anchor, lambda: by_eager) for node in factors)
        build = Builder(self.anchor)
        w, held = site.w, value(site.w)
        if not site.by_rows:
            w = build.given(held.t(), "t", w)
        # Its shape, dtype, and whether it takes a gradient, are those of what it replaces.
        if out.dim() == 2:
            new = build.given(out, OUTER_PRODUCT_LINEAR, u, v, w)
        else:
            u, v = (build.given(_as_matrix(build.value(x)), "reshape", x, _rows(build, x)) for x in (u, v))
            new = build.given(_as_matrix(out), OUTER_PRODUCT_LINEAR, u, v, w)
            new = build.given(out, "reshape", new, tuple(out.shape))
        if site.bias is not None:
            new = build.given(out, torch.add, new, site.bias)
        replace(self.anchor, new, site.chain)
        return f"outer_product_linear{self.note}"


def _as_matrix(found: torch.Tensor) -> torch.Tensor:
    return found.reshape(-1, found.shape[-1])


def _rows(build: Builder, node: fx.Node) -> tuple[Any, Any]:
    return -1, build.value(node).shape[-1]


def check_kernel(out: torch.Tensor) -> None:
    """Leave results that there is no kernel for to stock.

    Raises:
        LeftToStock: another device than CUDA, another dtype, or float32 where torch may not use TF32.
    """
    if out.device.type == "cuda" and out.dtype == torch.float32 and out.dtype not in dtypes():
        raise Reason.TF32.left_to_stock(
            "the operands are float32 and TF32 is off, which no kernel supports",
            'torch.set_float32_matmul_precision("high")',
        )
    check_device(out, dtypes())


def measured(out: torch.Tensor, operands: list[Any]) -> str:
    """A note for a shape, from the table of the device.

    Raises:
        LeftToStock: it is not measured, or not faster.
    """
    u, v, _ = operands
    rows, columns = u.numel() // u.shape[-1], out.shape[-1]
    if not all(isinstance(size, int) for size in (rows, columns, u.shape[-1], v.shape[-1])):
        raise Reason.SYMBOLIC.left_to_stock("the number of rows is symbolic")
    # An input takes no gradient where none is taken of the result.
    trains = out.requires_grad and any(t.requires_grad for t in operands)
    wanted = {
        "dtype": tables.dtype_name(out.dtype), "train": trains,
        "p": u.shape[-1], "q": v.shape[-1], "columns": columns, "rows": rows,
    }  # fmt: skip
    return f", {profitable(decide(Query('outer_product_linear', wanted), out.device)).note}"


FUSION = Fusion(
    name="outer_product_linear",
    stage="pre_grad",
    summary="a linear on the flattened outer product of two matrices, without materialising it",
    scope=DynamoScope,
)


@FUSION.anchor(lambda: [*forms("linear", "matmul", "addmm", "einsum"), F.bilinear, torch.conv1d])
def read(scope: DynamoScope, match: Match) -> Candidate | None:
    """A linear on a flattened outer product, and what computes the same otherwise."""
    node = match.output_node()
    site = recognise.site(node)
    if site is not None:
        return OuterProductLinear(scope, site)
    how = recognise.unsupported(node)
    details = {"result": text(tensor(node))}
    return Reported(node, Reason.OUTER_PRODUCT.rejected(how), details) if how else None
