"""A linear and the pointwise operations that follow it, as one kernel.

The linear becomes a block GEMM of one group. What follows it stays in the graph: Inductor's scheduler
fuses it into the kernel's epilogue, whatever it is (`relu(x @ W + b)`, `sigmoid(x + m * y + bias)`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from ..fusion import Candidate, Fusion, Rejected
from .block_mm import emit, guards
from .block_mm.normal_form import CASTS, RESHAPES, Product, products, readers, tensor, value
from .block_mm.placement import Place

aten = torch.ops.aten

#: Operations that make a pointwise tail worth a look: those of an activation.
_NONLINEAR = frozenset(
    {
        aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.erf.default, aten.exp.default,
        aten.leaky_relu.default, aten.hardtanh.default, aten.clamp_min.default, aten.where.self,
    }
)  # fmt: skip
#: How far behind the linear it may be.
_STEPS = 8


def candidates(graph: fx.Graph) -> Iterator[Candidate]:
    """Every linear that an activation follows."""
    for found in products(graph):
        if _activated(found.node):
            yield LinearEpilogue(graph, found)


def _activated(node: fx.Node, steps: int = _STEPS) -> bool:
    for user in readers(node, RESHAPES | CASTS):
        if user.op != "call_function" or not _is_pointwise(user):
            continue
        if user.target in _NONLINEAR or (steps and _activated(user, steps - 1)):
            return True
    return False


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


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
        for user in readers(self.anchor, RESHAPES | CASTS):
            if user.op == "output":
                continue
            found = tensor(user)
            if not _is_pointwise(user):
                raise Rejected("something that is not pointwise reads the linear as well")
            if found is None or str(found.numel()) != str(count):
                raise Rejected("the linear is broadcast by what follows it")
        self.kernel = guards.kernel([[self.product]])

    def rewrite(self) -> str:
        (output,) = emit.insert(self.graph, Place(self.anchor, (), ()), self.anchor, [[self.product]])
        emit.replace(self.graph, self.anchor, output)
        return self.kernel


FUSION = Fusion(
    name="linear_epilogue",
    stage="post_grad",
    summary="a linear and the activation behind it to one kernel",
    recognise=candidates,
)
