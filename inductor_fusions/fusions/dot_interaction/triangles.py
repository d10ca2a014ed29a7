"""Proves which pairs of features are selected: whether they are a triangle of all of them, row by row."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...graph.torch_ops import read
from ...operands import tensor

_TRIANGLES = {torch.tril_indices: False, torch.triu_indices: True}
#: What keeps the values of indices.
_SAME = frozenset("to long cuda cpu contiguous clone detach".split())


def triangle(indices: Sequence[Any], features: int) -> tuple[bool, bool] | None:
    """Which triangle some indices are: whether the upper one, and whether with its diagonal.

    None where they are not known to be one, row by row.
    """
    known: list[Any] = [_content(index) for index in indices]
    if len(known) == 1 and known[0] is not None:
        known = [[cell // features for cell in known[0]], [cell % features for cell in known[0]]]
    for upper in (False, True):
        for diagonal in (False, True):
            if known == [list(rows) for rows in _triangle(features, upper, diagonal)]:
                return upper, diagonal
    return None


def _triangle(size: int, upper: bool, diagonal: bool) -> tuple[list[int], list[int]]:
    """Rows and columns of a triangle, row by row."""
    pairs = [
        (i, j) for i in range(size) for j in (range(i + 1 - diagonal, size) if upper else range(i + diagonal))
    ]
    return [i for i, _ in pairs], [j for _, j in pairs]


def _content(index: Any) -> list[int] | None:
    """The numbers of a vector of indices, where the graph has them."""
    while (op := read(index)) is not None and op.name in _SAME:
        if not _holds_indices(op.node) or not isinstance(op.input, fx.Node):
            return None
        index = op.input
    if isinstance(index, (list, tuple)):
        return list(index) if all(type(number) is int for number in index) else None
    if not isinstance(index, fx.Node):
        return None
    if op is not None and op.name == "tensor":
        return _content(op["data"]) if isinstance(op["data"], (list, tuple)) else None
    if index.target is not operator.getitem or not isinstance(index.args[0], fx.Node):
        return None
    source, which = index.args[0], index.args[1]
    return _of_triangle(source, which) if type(which) is int and which in (0, 1) else None


def _holds_indices(node: fx.Node) -> bool:
    """Whether no index is cut off by the dtype of a vector."""
    found = tensor(node)
    return found is not None and found.dtype in (torch.int64, torch.int32)


def _of_triangle(node: fx.Node, which: Any) -> list[int] | None:
    """Rows or columns that `tril_indices` or `triu_indices` give."""
    while (op := read(node)) is not None and op.name in _SAME | {"unbind"} and isinstance(op.input, fx.Node):
        if op.name == "unbind" and op.only("input") != (op.input,):
            return None  # over another dim
        if op.name != "unbind" and not _holds_indices(node):
            return None
        node = op.input
    if node.target not in _TRIANGLES:
        return None
    given: dict[str, Any] = dict(zip(("row", "col", "offset"), node.args, strict=False)) | dict(node.kwargs)
    row, col, offset = given["row"], given["col"], given.get("offset", 0)
    if not all(type(size) is int for size in (row, col, offset)):
        return None
    upper = _TRIANGLES[node.target]
    pairs = [
        (i, j) for i in range(row) for j in range(col) if (j - i >= offset if upper else j - i <= offset)
    ]
    return [pair[which] for pair in pairs]
