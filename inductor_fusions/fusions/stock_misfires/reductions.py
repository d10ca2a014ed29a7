"""Softmaxes, and sums of softmaxes that are written out, over another dim than the last one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.dims import reduced
from ...graph.torch_ops import read
from ...operands import tensor
from .equivalent import EquivalentRewrite
from .walk import name_of

#: A softmax, and what is the sum of one that is written out.
REDUCTIONS = ("softmax", "_softmax", "sum")


class Softmax(EquivalentRewrite):
    """A softmax that is not over the last dim."""

    def __init__(self, anchor: fx.Node, dim: int) -> None:
        super().__init__(anchor, None)
        self.dim = dim

    def rewrite(self) -> str:
        self.put_views()
        return f"views behind the softmax over dim {self.dim}"


class Sum(EquivalentRewrite):
    """The sum of a softmax that is written out, not over the last dim."""

    def __init__(self, anchor: fx.Node, source: Any, dims: tuple[int, ...]) -> None:
        super().__init__(anchor, source)
        self.dims = dims

    def rewrite(self) -> str:
        result = self.call(torch.sum, self.source, list(self.dims), **self.dtype_option())
        for dim in self.dims:
            result = self.call("unsqueeze", result, dim)
        self.replace(result)
        return f"sum over dims {list(self.dims)} without keepdim"


def reduction_of(node: fx.Node) -> tuple[fx.Node, tuple[int, ...], int] | None:
    """(input, dims, rank) of a softmax, or of the sum of one that is written out."""
    op = read(node)
    if op is None or op.name not in REDUCTIONS:
        return None
    source, (dims, keeps) = op.input, reduced(op)
    before = tensor(source)
    if not isinstance(source, fx.Node) or before is None or before.dim() < 3 or tensor(node) is None:
        return None
    if not dims or (op.name == "sum" and (name_of(source) != "exp" or not keeps)):
        return None
    return source, dims, before.dim()
