"""Softmaxes, and sums of softmaxes that are written out, over another dim than the last one."""

from __future__ import annotations

from torch import fx

from ...graph.dims import reduced
from ...graph.torch_ops import read
from ...operands import tensor
from .equivalent import EquivalentRewrite
from .walk import name_of

#: A softmax, and what is the sum of one that is written out.
REDUCTIONS = ("softmax", "_softmax", "sum")


class OverOtherDims(EquivalentRewrite):
    """A softmax, or the sum of one that is written out, that is not over the last dim."""

    def __init__(self, anchor: fx.Node, dims: tuple[int, ...]) -> None:
        super().__init__(anchor)
        self.dims = dims

    def rewrite(self) -> str:
        self.put_views()
        return f"views behind the {name_of(self.anchor).lstrip('_')} over dims {list(self.dims)}"


def softmax_dims(node: fx.Node) -> tuple[tuple[int, ...], int] | None:
    """(dims, rank) of a softmax, or of the sum of one that is written out."""
    op = read(node)
    if op is None or op.name not in REDUCTIONS:
        return None
    source, (dims, keeps) = op.input, reduced(op)
    before = tensor(source)
    if not isinstance(source, fx.Node) or before is None or before.dim() < 3 or tensor(node) is None:
        return None
    if not dims or (op.name == "sum" and (name_of(source) != "exp" or not keeps)):
        return None
    return dims, before.dim()
