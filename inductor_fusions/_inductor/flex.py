"""Flex attention: its higher-order operations and block masks."""

from __future__ import annotations

import importlib
from typing import Any

import torch

Pair = tuple[Any, Any]


def flex_attention_op() -> Any:
    """The higher-order operation that `torch.nn.attention.flex_attention` becomes in a graph."""
    return importlib.import_module("torch._higher_order_ops.flex_attention").flex_attention


def flex_backward_op() -> Any:
    """The higher-order operation that computes the gradients of flex attention."""
    return importlib.import_module("torch._higher_order_ops.flex_attention").flex_attention_backward


def flex_block_mask(
    lengths: tuple[Any, Any], rows: Pair, full_rows: Pair, columns: Pair, full_columns: Pair,
    block: int | None, mask_mod: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The tuple that a call of the operation takes in place of a `BlockMask`.

    Args:
        lengths: (q_len, kv_len).
        rows, full_rows: for each block of queries the number of blocks of keys that are partly and wholly
            visible, and their indices first in order.
        columns, full_columns: the reverse, for the backward.
        block: side of a block; None for one block that holds everything.
    """
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    side = flex._LARGE_SPARSE_BLOCK_SIZE if block is None else block
    # Orders of the backward's writes came between the indices and the sizes in 2.12: none is set.
    empty = flex._create_empty_block_mask(torch.empty(1, 1, 1, 1), torch.empty(1, 1, 1, 1)).as_tuple()
    orders = (None,) * (len(empty) - 13)
    return (*lengths, *rows, *full_rows, *columns, *full_columns, *orders, side, side, mask_mod)
