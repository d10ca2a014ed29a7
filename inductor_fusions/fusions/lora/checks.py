"""What sums with adapters are refused for, whether or not a product is among their terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...block_mm import guards
from ...graph.products import same_sizes
from ...operands import is_row_major, value
from ...reasons import Reason
from .adapters import Adapter


def check_shapes(root: torch.Tensor, terms: Sequence[tuple[Any, ...]]) -> None:
    """Refuse a sum that is no row-major matrix of the shape that all of its terms have."""
    if not all(same_sizes(shape, terms[0]) for shape in terms):
        raise Reason.SHAPES.rejected("the terms of the sum have different shapes")
    if str(root.shape[-1]) != str(terms[0][1]):
        raise Reason.SHAPES.rejected("the number of columns of the sum differs from that of its terms")
    if not is_row_major(root):
        raise Reason.LAYOUT.rejected("the result is not row-major")


def check_adapter(a: Adapter, dtype: torch.dtype) -> None:
    """Refuse an adapter whose operands no kernel reads, in a sum that is computed in a dtype."""
    if a.factor is not None and dtype == torch.float16:
        reason = "a float16 adapter is multiplied by a tensor: x @ A may overflow where the result does not"
        raise Reason.RANGE.left_to_stock(reason)
    if a.middle is not None and not is_row_major(value(a.middle)) and value(a.middle).dtype == dtype:
        guards.check_layout(value(a.middle))  # some columns of a packed A, read where they are
    if 1 not in value(a.down.a).stride():
        raise Reason.LAYOUT.rejected("an input has no dim of stride 1")
