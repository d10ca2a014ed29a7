"""Finds the entropy of each row of logits x, in Dynamo's torch-level graph.

    -(log_softmax(x, -1).exp() * log_softmax(x, -1)).sum(-1)
    x.logsumexp(-1) - (softmax(x, -1) * x).sum(-1)

and `torch.distributions.Categorical(logits=x).entropy()`, which subtracts the logsumexp and clamps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...graph.dims import is_over_last, unbroadcast
from ...graph.torch_ops import CASTS, Op, read, scaled_by
from ...operands import holds, same_shape, tensor
from .log_probabilities import normalised, summed_rows, viewed
from .logits import is_as_wide


@dataclass(frozen=True)
class Entropy:
    """The entropy of each row of a matrix of logits.

    Attributes:
        node: the result.
        logits: the matrix.
        path: the nodes behind it, without the result.
        negates: whether the result is the negative of the entropy.
        clamped: whether a class of probability 0 adds 0, also if its logit is -inf; else that gives NaN.
    """

    node: fx.Node
    logits: fx.Node
    path: tuple[fx.Node, ...]
    negates: bool
    clamped: bool = False


@dataclass(frozen=True)
class _Matrix:
    """Probabilities, or their logarithms.

    Attributes:
        logits: of which they are, without casts.
        path: the nodes behind the logits, with the result.
        clamped: as `Entropy` has it.
    """

    logits: fx.Node
    path: tuple[fx.Node, ...]
    clamped: bool = False


def of(op: Op) -> Entropy | None:
    """The entropy that an operation gives; the matrix is not read yet."""
    found = _difference(op) if op.name == "sub" else _summed(op)
    # A part that is a constant for autograd would have another gradient.
    return None if found is None or (_trains(op.node) and not all(map(_trains, found.path))) else found


def logs_of(node: Any) -> _Matrix | None:
    """The logarithms of probabilities that a node holds."""
    return _matrix(node, _logs)


def _matrix(node: Any, of: Callable[[Op], _Matrix | None]) -> _Matrix | None:
    """What `of` reads in front of casts to wider dtypes."""
    inner, casts = _without_casts(node)
    op = read(inner)
    found = None if op is None or op.inplace else of(op)
    return found and replace(found, path=(*found.path, *casts))


def _logs(op: Op) -> _Matrix | None:
    if op.name == "clamp":
        x, least = op.only("input", "min")
        found, value = logs_of(x), tensor(x)
        at_least = found is not None and value is not None and least == torch.finfo(value.dtype).min
        return _behind(found, op, clamped=True) if at_least else None
    if op.name == "log_softmax":
        return _of_softmax(op)
    x, nodes = normalised(op)
    if x is None:
        return None
    logits, casts = _without_casts(x)
    return _Matrix(logits, (*casts, *nodes, op.node))


def _probabilities(op: Op) -> _Matrix | None:
    if op.name == "exp":
        found = logs_of(op.input)
        return None if found is None or found.clamped else _behind(found, op)
    if op.name != "softmax" or (own := _of_softmax(op)) is None:
        return None
    found = logs_of(own.logits)  # whose softmax is that of the logits
    return own if found is None or found.clamped else _Matrix(found.logits, (*found.path, *own.path))


def _of_softmax(op: Op) -> _Matrix | None:
    """What a softmax or a log_softmax gives."""
    x, _, dtype = op.only("input", "dim", "dtype")
    value = tensor(x)
    if value is None or not is_over_last(op) or (dtype is not None and not holds(dtype, value.dtype)):
        return None
    logits, casts = _without_casts(x)
    return _Matrix(logits, (*casts, op.node))


def _behind(found: _Matrix | None, op: Op, clamped: bool = False) -> _Matrix | None:
    return found and replace(found, path=(*found.path, op.node), clamped=found.clamped or clamped)


def _without_casts(node: Any) -> tuple[Any, list[fx.Node]]:
    """A matrix in front of casts to wider dtypes, and the casts; and of `broadcast_tensors`."""
    casts: list[fx.Node] = []
    while (op := read(node)) is not None:
        equal = unbroadcast(node)
        if equal is None and not (op.name in CASTS and is_as_wide(op)):
            break
        node, behind = equal or (op.input, (node,))
        casts += behind
    return node, casts


def _factors(op: Op | None) -> tuple[list[Any], bool, list[fx.Node]] | None:
    """Return the factors of a product, if `op` sums that product or its negative over the last dim.

    Returns:
        The factors, whether the negative is summed, and the nodes between the factors and `op`.
    """
    if op is None or op.name != "sum" or not is_over_last(op):
        return None
    node, path, negates = op.only("input", "dim", "keepdim")[0], list[fx.Node](), False

    def unsigned(node: Any) -> Any:
        nonlocal negates
        while (by := read(node)) is not None and not by.inplace and (scaled := scaled_by(by)):
            if scaled[1] != -1.0:
                break
            negates = not negates
            path.append(node)
            node = scaled[0]
        return node

    product = read(unsigned(node))
    if product is None or product.name != "mul":
        return None
    path.append(product.node)
    return [unsigned(each) for each in product.only("input", "other")], negates, path


def _summed(op: Op) -> Entropy | None:
    """The sum of probabilities times their logarithms."""
    found = _factors(op)
    if found is None:
        return None
    (first, second), negates, path = found
    for one, other in ((first, second), (second, first)):
        p, logs = _matrix(one, _probabilities), logs_of(other)
        if p is not None and logs is not None and p.logits is logs.logits:
            return _entropy(op.node, p.logits, (*p.path, *logs.path, *path), not negates, logs.clamped)
    return None


def _difference(op: Op) -> Entropy | None:
    """A logsumexp, less the sum of probabilities times logits."""
    first, second = op.only("input", "other")
    by = read(second)
    found, own, held = _factors(by), tensor(op.node), tensor(first)
    if found is None or by is None or own is None or held is None or not same_shape(own.shape, held.shape):
        return None
    factors, negates, path = found
    summed, views = viewed(first)
    whole, rows = summed_rows(summed)
    if negates or whole is None:
        return None
    logits, casts = _without_casts(whole)
    for one, other in (factors, factors[::-1]):
        p, (x, others) = _matrix(one, _probabilities), _without_casts(other)
        if p is not None and p.logits is logits and x is logits:
            nodes = (*casts, *others, *rows, summed, *views, *p.path, *path, by.node)
            return _entropy(op.node, logits, nodes, False)
    return None


def _entropy(
    node: fx.Node, logits: fx.Node, path: tuple[fx.Node, ...], negates: bool, clamped: bool = False
) -> Entropy:
    return Entropy(node, logits, tuple(sorted({*path} - {logits})), negates, clamped)


def _trains(node: fx.Node) -> bool:
    value = tensor(node)
    return value is None or value.requires_grad
