"""Zeros that a fusion added to a value for their gradient alone, which need not be computed.

Before autograd, `a - a.detach()` is 0 and has the gradient of `a`. A fusion adds products of such zeros to a
result, so that a gradient flows through them. After autograd the backward has operations of its own. Those of
the forward compute zeros, which Inductor does not see.
"""

from __future__ import annotations

import torch
from torch import fx

from .. import tags
from ..effects.writes import memory_chain
from ..graph.builder import Builder, substitute
from ..operands import tensor

aten = torch.ops.aten
#: Operations whose result is 0 if the first operand is.
_OF_ONE = (aten.view.default, aten.reshape.default, aten.expand.default, aten.permute.default,
           aten.transpose.int, aten.clone.default, aten._unsafe_view.default,
           aten._to_copy.default, torch.ops.prims.convert_element_type.default)  # fmt: skip
#: Operations whose result is 0 if one of two operands is. In these zeros NaN and infinity do not count: those
#: of the same operands are in the result that the zeros are added to.
_PRODUCTS = (aten.mul.Tensor, aten.mm.default, aten.bmm.default)


def drop(graph: fx.Graph) -> None:
    """Remove zeros from sums, and the operations that compute nothing else, in a graph after autograd.

    A value that leaves the graph stays a result of its own: the caller may write to it, and the other operand
    may be kept for the backward.
    """
    zeros: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function" or not tags.is_ours(node):
            continue
        if _is_zero(node, zeros):
            zeros.add(node)
        elif node.target is aten.add.Tensor and not node.kwargs and not zeros.isdisjoint(node.args):
            _replace(node, node.args[1] if node.args[0] in zeros else node.args[0])


def _is_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Whether the result of an operation is 0, given those that are."""
    operands = node.args[:2]
    if node.target is aten.sub.Tensor:
        return operands[0] is operands[1] and not node.kwargs
    if node.target in _OF_ONE:
        return operands[0] in zeros
    if node.target in _PRODUCTS:
        return not zeros.isdisjoint(operands)
    return node.target is aten.add.Tensor and zeros.issuperset(operands)


def _replace(total: fx.Node, value: fx.Node) -> None:
    whole, part = tensor(total), tensor(value)
    if whole is None or part is None or whole.dtype != part.dtype:
        return
    build = Builder(total)
    if whole.shape != part.shape:
        value = build.call(aten.expand.default, value, list(whole.shape))
    if _leaves(total):
        value = build.call(aten.add.Tensor, value, 0)
    substitute(total, value)


def _leaves(node: fx.Node) -> bool:
    """Whether a value or a view of it is an output of the graph."""
    return any(node in memory_chain(each) for each in node.graph.output_node().all_input_nodes)
