"""What is between products of vectors and what reads them."""

from __future__ import annotations

from typing import Any

from ...graph.additions import has_size_of
from ...graph.einsum import equation_of
from ...graph.torch_ops import CASTS, PRODUCTS, Op, read
from .recognise import without_scales

#: What may be computed of each product before they are read.
POINTWISE = CASTS | frozenset(
    "mul div add sub neg relu sigmoid tanh abs exp sqrt pow square clamp clamp_min clamp_max softplus gelu "
    "silu leaky_relu elu hardtanh dropout masked_fill".split()
)


def product_behind(node: Any) -> tuple[Op | None, str]:
    """The product that a node is computed of, element by element, and the last function but scales of it."""
    function = ""
    while (op := read(node)) is not None and op.name not in PRODUCTS - {"linear"}:
        inputs = [x for x in op.node.all_input_nodes if has_size_of(x, op.node)]
        if op.name not in POINTWISE or not inputs:
            return None, ""
        function = function or ("" if without_scales(op.node)[1] or op.name in CASTS else op.said)
        node = op.input if op.input in inputs else inputs[0]
    return op, function


def operands_of(op: Op) -> tuple[list[Any], list[bool]]:
    """Both operands of a product, and whether it keeps the last dim of each, as it was before a transpose."""
    found = None if op.name == "linear" else equation_of(op)
    return ([], []) if found is None else ([found.left, found.right], found.keeps_last)


def are_of_samples(op: Op) -> bool:
    """Whether both operands of a product have its first dim: otherwise one is a weight."""
    found = equation_of(op)
    return found is not None and all(found.result[0] in side for side in (found.first, found.second))


def is_of_one(op: Op) -> bool:
    """Whether a product multiplies vectors with each other, of which one operand may be scaled."""
    one, other = (without_scales(side)[0] for side in operands_of(op)[0])
    return one is other
