"""The backward of a fused attention as matrix products, if its kernel fails to compile.

They are of the size of the scores: no part of a compile that does not fail.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from .._inductor import flex_backward_op, hint
from ..fusions.attention.flex_backward import FlexBackward
from ..fusions.kernel_defects.attention_gradients import SDPA_BACKWARDS, gradients
from ..graph.inlined import put_in_place
from ..tags import is_ours

#: Names of arguments of SDPA's backwards -> names that are used here.
_NAMES = {
    "grad_out": "grad", "grad_out_": "grad", "query": "q", "key": "k", "value": "v", "attn_bias": "bias",
    "attn_mask": "bias", "dropout_p": "dropout", "is_causal": "causal",
}  # fmt: skip


def backwards(graph: fx.Graph) -> list[fx.Node]:
    """The backwards of attentions in an aten graph that a fusion of this package has put there."""
    ours = [node for node in graph.nodes if node.op == "call_function" and is_ours(node)]
    return [node for node in ours if node.target in SDPA_BACKWARDS or node.target is flex_backward_op()]


def write_out(graph: fx.Graph) -> None:
    """Put products in the place of these, in the graph.

    Raises:
        Rejected, ValueError: one cannot be written so.
    """
    for node in backwards(graph):
        if node.target is flex_backward_op():
            attention = FlexBackward(graph, node)
            attention.chunk = hint(attention.given.q.meta["val"].shape[2])
            attention.rewrite()
        else:
            _write(node)
    graph.lint()


def _write(node: fx.Node) -> None:
    target: Any = node.target
    names = [_NAMES.get(argument.name, argument.name) for argument in target._schema.arguments]
    given = {
        **dict(zip(names, node.args, strict=False)),
        **{_NAMES.get(k, k): v for k, v in node.kwargs.items()},
    }
    if given.get("dropout"):
        raise ValueError("the refused kernel draws its dropout")
    operands = [given.get(name) for name in ("grad", "q", "k", "v", "bias", "scale")]
    put_in_place(node, gradients, (*operands, bool(given.get("causal"))))
