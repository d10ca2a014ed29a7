"""Tensors that eager autograd saves for a hand-written attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from ..._inductor import computing_fakes
from ...effects.writes import memory, storage
from ...graph import torch_ops
from ...graph.einsum import Equation, equation
from ...graph.torch_ops import Op
from ...operands import requires_grad
from .operands import product


def remembered(nodes: Iterable[fx.Node], fake_mode: Any) -> set[object]:
    """Memory that eager keeps for the backward of some nodes.

    Args:
        nodes: the products and what is between them.
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
            if requires_grad(partner):
                yield storage_of(kept)


def _of_product(op: Op) -> Iterator[object]:
    """The operands, as the product of batches reads them, of which the other one takes a gradient."""
    if op.name == "tensordot":
        return
    if op.name == "einsum":
        found = equation(op)
        given, read = (found.left, found.right), _permuted(found)
    else:
        given = (op.input, op["weight"] if op.name == "linear" else op["other"])
        read = tuple(_in_one_batch(torch_ops.tensor(x), torch_ops.tensor(op.node)) for x in given)
    for i, kept in enumerate(read):
        if kept is not None and requires_grad(given[1 - i]):
            yield memory(kept)


def _in_one_batch(value: torch.Tensor | None, result: torch.Tensor | None) -> torch.Tensor | None:
    """An operand with its leading dims as one, as `matmul` has it: it may be a copy."""
    if value is None or result is None or value.dim() < 3:
        return value
    if value.dim() > result.dim():  # times a vector
        return value.flatten(0, -2)
    lead = tuple(result.shape[:-2])
    return value.expand(*lead, *value.shape[-2:]).flatten(0, -3)


def _permuted(found: Equation) -> tuple[torch.Tensor | None, ...]:
    """The operands of an einsum of two with their dims as three, as it has them."""
    batch = [c for c in found.result if c in found.first and c in found.second]
    own = [c for c in found.result if c in found.first and c not in batch]
    other = [c for c in found.result if c in found.second and c not in batch]
    read: list[torch.Tensor | None] = []
    for node, letters, groups in (
        (found.left, found.first, (batch, own, found.summed)),
        (found.right, found.second, (batch, found.summed, other)),
    ):
        value, order = torch_ops.value(node), [letters.index(c) for c in itertools.chain(*groups)]
        if len(order) != value.dim():
            return ()
        sizes = dict(zip(letters, value.shape, strict=True))
        shape = [product([sizes[c] for c in group]) for group in groups]
        read.append(value.permute(order).reshape(shape))
    return tuple(read)


def storage_of(node: Any) -> object:
    """The memory of an argument; None of what is no tensor."""
    return storage(node) if torch_ops.tensor(node) is not None else None
