"""Puts the operations of the loss head into Dynamo's graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...graph.builder import Builder
from ...graph.dims import WHOLE, per_dim
from ...graph.torch_ops import VIEWS, read
from ...operands import requires_grad, tensor, value
from .op import LINEAR_CROSS_ENTROPY, SOFTMAX_ROWS
from .recognise import LossSite
from .statistics import Statistic


def loss(site: LossSite, wants: list[bool], raw: fx.Node | None = None) -> fx.Node:
    """One number, with gradients that the forward makes. In front of the loss, for it.

    Args:
        wants: whether the gradients of h, w and the bias are wanted.
        raw: all logits, as the linear gives them, where they are there.
    """
    build = Builder(site.loss)
    h, w, bias = _operands(build, site)
    assert site.labels is not None
    if raw is not None:
        raw = build.call("reshape", raw, (-1, build.value(raw).shape[-1]))
    made = build.parts(
        LINEAR_CROSS_ENTROPY, h, w, bias, _labels(build, site.labels), site.weights, raw, site.bend.scale,
        site.bend.cap, site.ignore_index, site.smoothing, site.reduction == "mean", wants,
    )  # fmt: skip
    return _as_before(build, site, made[0], site.loss)


def detached(site: LossSite) -> fx.Node:
    """The linear without gradients, which takes its place for those who read its result beside the loss."""
    build, linear = Builder(site.linear), site.linear
    apart = {node: build.call("detach", node) for node in linear.all_input_nodes}
    args, kwargs = fx.node.map_arg((linear.args, linear.kwargs), apart.__getitem__)
    value = tensor(linear)
    assert value is not None
    target: Any = linear.target
    raw = build.given(value.detach(), target, *args, **kwargs)
    linear.replace_all_uses_with(raw)
    return raw


def rows(site: LossSite, before: fx.Node, statistics: Sequence[Statistic]) -> dict[fx.Node, fx.Node]:
    """Add the operation for losses of each row and log-probabilities, and the sum or mean of its results.

    Args:
        before: in front of which node.
        statistics: which are wanted as well.

    Returns:
        What takes the place of the loss and of each of `statistics`.
    """
    build = Builder(before, like=site.loss)
    h, w, bias = _operands(build, site)
    classes = build.value(w).shape[0]
    if site.labels is None:
        count, device = build.value(h).shape[0], build.value(h).device
        labels = build.call(torch.zeros, (count,), dtype=torch.int64, device=device)
    else:
        labels = _labels(build, site.labels)
    if site.wraps == "all":
        labels = build.call(torch.remainder, labels, classes)
    elif site.wraps:
        labels = build.call(
            torch.where, build.call(torch.lt, labels, 0), build.call(torch.add, labels, classes), labels
        )
    there = None if site.gathers else build.call(torch.ne, labels, site.ignore_index)
    # A negative label is out of bounds now; -1 says that a row is left out. Its logsumexp is not.
    labels = build.call(torch.where, build.call(torch.lt, labels, 0), classes, labels)
    if there is not None:
        labels = build.call(torch.where, there, labels, 0 if statistics else -1)
    smooth = site.smoothing != 0
    entropies = [each.entropy for each in statistics if each.entropy is not None]
    log_p, lse, total, entropy = build.parts(
        SOFTMAX_ROWS, h, w, bias, labels, site.weights if smooth else None, site.bend.scale, site.bend.cap,
        smooth, bool(entropies), any(each.clamped for each in entropies),
    )  # fmt: skip
    taken: dict[Any, fx.Node] = {}
    results = {
        each.node: _statistic(build, site, each, entropy if each.entropy else lse, taken)
        for each in statistics
    }
    if site.labels is not None:
        found = _weighed(build, site, labels, there, log_p, lse, total)
        results[site.loss] = _as_before(build, site, found, site.loss)
    return results


def _weighed(
    build: Builder, site: LossSite, labels: fx.Node, there: fx.Node | None, log_p: fx.Node, lse: fx.Node,
    total: fx.Node,
) -> fx.Node:  # fmt: skip
    """The loss, of what the operation gives for each row.

    Args:
        labels: what the operation reads.
        there: which rows count; None: all of a gather.
    """
    if there is None and site.raw:
        return build.call(torch.add, build.call(torch.add, log_p, lse), site.offset)
    if there is None:
        return build.call(torch.neg, log_p) if site.negates else log_p
    found = build.call(torch.neg, log_p)
    own = there
    whole = site.classes
    if site.weights is not None:
        known = build.call(torch.clamp, labels, min=0)
        own = build.call(torch.mul, build.call("__getitem__", site.weights, known), there)
        found = build.call(torch.mul, found, own)
        whole = build.call(torch.sum, site.weights)
    if site.smoothing:
        even = build.call(torch.sub, build.call(torch.mul, lse, whole), total)
        even = build.call(torch.mul, even, site.smoothing / int(site.classes))
        found = build.call(torch.add, build.call(torch.mul, found, 1 - site.smoothing), even)
    # Where all logits of a row that is left out are infinite, its loss is 0 in stock as well.
    found = build.call(torch.where, there, found, 0.0)
    if site.reduction != "none":
        found = build.call(torch.sum, found)
    if site.reduction == "mean":
        found = build.call(torch.div, found, build.call(torch.sum, own))
    return found


def _statistic(
    build: Builder, site: LossSite, one: Statistic, whole: fx.Node, taken: dict[Any, fx.Node]
) -> fx.Node:
    """The result of a statistic, from that of all rows.

    Args:
        taken: the rows that were taken before, of each result and behind each node.
    """
    found, fresh = whole, not one.rest and (whole, whole) not in taken
    taken[whole, whole] = whole
    if one.rest:
        found = build.call("reshape", found, (*value(one.base).shape[:-1], 1))
        for node in one.rest:
            if (whole, node) not in taken:
                taken[whole, node] = _replayed(build, site, node, found)
            found = taken[whole, node]
    if one.entropy is None:
        found = build.call(torch.add, found, one.offset) if one.offset else found
    elif one.entropy.negates:
        found = build.call(torch.neg, found)
    if not fresh:  # each has memory of its own, which the graph may overwrite
        found = build.call("clone", found)
    return _as_before(build, site, found, one.node)


def _operands(build: Builder, site: LossSite) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """h of the rows that the loss reads, as a matrix, w and bias, in the dtype of the logits."""
    logits = value(site.linear)
    h, w = site.h, site.w
    for node in site.replayed:
        h = _replayed(build, site, node, h)
    if build.value(h).dim() != 2:
        h = build.call("reshape", h, (-1, build.value(h).shape[-1]))
    if not site.by_rows:
        w = build.call("t", w)
    bias = None if site.bias is None else build.to(site.bias, logits.dtype)
    if site.columns is not None:
        start, count = site.columns
        if bias is not None and build.value(bias).shape[0] == build.value(w).shape[0]:
            bias = build.call("narrow", bias, 0, start, count)
        w = build.call("narrow", w, 0, start, count)
    if site.shift:
        number = build.call(
            torch.full, (build.value(w).shape[0],), site.shift, dtype=logits.dtype, device=logits.device
        )
        bias = number if bias is None else build.call(torch.add, bias, number)
    # What autocast does to the operands of a linear.
    return build.to(h, logits.dtype), build.to(w, logits.dtype), bias


def _replayed(build: Builder, site: LossSite, node: fx.Node, h: fx.Node) -> fx.Node:
    """Apply to h an operation that takes or reorders rows of the logits.

    h has one head where the logits have several.
    """
    op, after, head = read(node), tensor(node), site.head
    assert op is not None
    if head is not None and node is head.opened:
        if op.name == "stack":
            return build.call("unsqueeze", h, op["dim"] or 0)
        assert after is not None
        return build.call("reshape", h, (*after.shape[:-2], 1, build.value(h).shape[-1]))
    if op.name in VIEWS:
        assert after is not None
        return build.call("reshape", h, (*after.shape[:-1], build.value(h).shape[-1]))
    of_head = head is not None and node is head.taken
    if op.name == "getitem":
        index, given = op["index"], tensor(op.input)
        parts = None if given is None else per_dim(index, given.dim())
        if parts is not None:  # the classes are not those of h
            index = (*parts[:-1], WHOLE)
        if head is not None and of_head:
            index = 0 if parts is None else (*index[: head.dim], 0, *index[head.dim + 1 :])
        return build.call(operator.getitem, h, index)
    if of_head:
        return build.call("select", h, op["dim"], 0)
    kwargs = {name: h if name in ("input", "self") else value for name, value in node.kwargs.items()}
    target: Any = node.target
    return build.call(target, *(h if i == 0 else value for i, value in enumerate(node.args)), **kwargs)


def _labels(build: Builder, labels: fx.Node) -> fx.Node:
    labels = build.to(labels, torch.int64)
    return labels if build.value(labels).dim() == 1 else build.call("reshape", labels, (-1,))


def _as_before(build: Builder, site: LossSite, found: fx.Node, replaced: fx.Node) -> fx.Node:
    """A result in the shape and dtype of what it replaces."""
    out = value(replaced)
    found = build.to(found, out.dtype)
    if len(build.value(found).shape) != out.dim():
        found = build.call("reshape", found, tuple(out.shape))
    # The loss says it as well: operands that are copied for the backward do not.
    given = (site.loss, site.h, site.w, site.bias)
    if not out.requires_grad and any(map(requires_grad, given)):
        found = build.call("detach", found)
    found.meta[build.key] = out  # which takes a gradient
    return found
