"""Tensors that eager autograd saves for a hand-written attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from ..._inductor import computing_fakes
from ...graph import torch_ops
from ...graph.torch_ops import Op
from ...writes import memory, storage


def remembered(nodes: Iterable[fx.Node], fake_mode: Any) -> set[object]:
    """Memory that eager keeps for the backward of some nodes.

    Args:
        nodes: the products and what is between them.
        fake_mode: the mode of their values.
    """
    found: set[object] = set()
    with torch.no_grad(), computing_fakes(fake_mode):
        for node in nodes:
            op = torch_ops.read(node)
            if op is not None:
                found.update(_kept(op))
    return found - {None}


def _kept(op: Op) -> Iterator[object]:
    if op.name in torch_ops.PRODUCTS:
        yield from _of_product(op)
    elif op.name in ("masked_fill", "where"):
        yield storage_of(op["mask"] if op.name == "masked_fill" else op["condition"])
    elif op.name in ("mul", "div"):
        one, other = op.input, op["other"]
        for kept, partner in ((one, other), (other, one)):
            if _trained(partner):
                yield storage_of(kept)


def _of_product(op: Op) -> Iterator[object]:
    """The operands, as the product of batches reads them, of which the other one takes a gradient."""
    if op.name == "tensordot":
        return
    if op.name == "einsum":
        given = op.rest[0] if op.rest and isinstance(op.rest[0], (tuple, list)) else op.rest
        subscripts = op["equation"]
        if len(given) != 2 or not isinstance(subscripts, str):
            return
        read = _permuted(subscripts, *(torch_ops.tensor(x) for x in given))
    else:
        given = (op.input, op["weight"] if op.name == "linear" else op["other"])
        read = tuple(_in_one_batch(torch_ops.tensor(x), torch_ops.tensor(op.node)) for x in given)
    for i, kept in enumerate(read):
        if kept is not None and _trained(given[1 - i]):
            yield memory(kept)


def _in_one_batch(value: torch.Tensor | None, result: torch.Tensor | None) -> torch.Tensor | None:
    """An operand with its leading dims as one, as `matmul` has it: it may be a copy."""
    if value is None or result is None or value.dim() < 3:
        return value
    lead = tuple(result.shape[:-2])
    return value.expand(*lead, *value.shape[-2:]).flatten(0, -3)


def _permuted(
    subscripts: str, left: torch.Tensor | None, right: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The operands of an einsum of two with their dims as three, as it has them."""
    terms, arrow, out = subscripts.replace(" ", "").partition("->")
    one, _, other = terms.partition(",")
    if not arrow or "." in subscripts or left is None or right is None:
        return ()
    batch = [c for c in out if c in one and c in other]
    summed = [c for c in one if c in other and c not in out]
    parts = (
        (left, one, (batch, [c for c in out if c in one and c not in other], summed)),
        (right, other, (batch, summed, [c for c in out if c in other and c not in one])),
    )
    read: list[torch.Tensor | None] = []
    for value, letters, groups in parts:
        order = [letters.index(c) for group in groups for c in group]
        if len(order) != value.dim() or len(letters) != value.dim():
            return ()
        turned = value.permute(order)
        sizes, at = [], 0
        for group in groups:
            size: Any = 1
            for each in turned.shape[at : at + len(group)]:
                size = size * each
            sizes.append(size)
            at += len(group)
        read.append(turned.reshape(sizes))
    return tuple(read)


def storage_of(node: Any) -> object:
    """The memory of an argument; None of what is no tensor."""
    return storage(node) if torch_ops.tensor(node) is not None else None


def _trained(node: Any) -> bool:
    value = torch_ops.tensor(node)
    return value is not None and value.requires_grad
