"""Adapters of some columns, put beside each other or between zeros: by `cat`, or by padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.concatenation import joined
from ...graph.products import product
from ...operands import value
from .adapters import adapter_of, step

aten = torch.ops.aten


def parts_of(node: fx.Node) -> list[tuple[fx.Node, int, int]] | None:
    """Adapters that a node puts beside each other or between zeros, along its last dim.

    Returns:
        Each with the number of columns before and behind it; None of any other node.
    """
    found = _of_cat(node) if node.target is aten.cat.default else _of_padding(node)
    return found if found and all(_is_whole_adapter(part) for part, _, _ in found) else None


def _of_cat(node: fx.Node) -> list[tuple[fx.Node, int, int]] | None:
    parts, dim = joined(node)
    widths = [value(part).shape[-1] for part in parts]
    if dim != value(node).dim() - 1 or not all(isinstance(width, int) for width in widths):
        return None
    return [
        (part, sum(widths[:i]), sum(widths[i + 1 :])) for i, part in enumerate(parts) if not _is_zero(part)
    ]


def _of_padding(node: fx.Node) -> list[tuple[fx.Node, int, int]] | None:
    if node.target is not aten.constant_pad_nd.default or node.kwargs:
        return None
    arguments: tuple[Any, ...] = node.args
    source, pads, fill = (*arguments, 0)[:3]
    if len(pads) != 2 or fill != 0 or not all(isinstance(pad, int) and pad >= 0 for pad in pads):
        return None
    return [(source, *pads)]


def _is_zero(node: fx.Node) -> bool:
    """Whether a node is made of zeros alone."""
    return node.target is aten.full.default and len(node.args) == 2 and node.args[1] in (0,)


def _is_whole_adapter(node: Any) -> bool:
    """Whether a node, that nothing else reads, is an adapter behind casts, reshapes and factors.

    It has the columns of the adapter's product: else those beside it would stand elsewhere.
    """
    columns = value(node).shape[-1]
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        found = product(node)
        if found is not None:
            own = found.bias is None and str(value(node).shape[1]) == str(columns)
            return own and adapter_of(node) is not None
        below = step(node)
        if below is None or below.kept is not None:
            return False
        node = below.inner
    return False
