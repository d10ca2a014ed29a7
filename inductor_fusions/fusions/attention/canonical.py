"""Canonicalises the normal form of an attention to a kernel's problem.

`Attention` keeps the leading dims that the user wrote (one, two or three of them, merged and split along
the way). Here they become (batch, heads), repeated keys and values are looked through, dtypes are
settled, and the mask algebra says what is left of the mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...decisions.tables import dtype_name
from ...graph import torch_ops
from ...operands import holds, is_differentiated
from ...reasons import Reason
from . import structure
from .aliasing import Mutations
from .masks import Interpreter, elements
from .normal_form import Attention, Stage, Term
from .operands import Operand, alignment, product, regroup, unrepeated
from .problem import Problem, Scaler, is_number
from .structure import Structure
from .zeroed import check_hidden_rows, finite, zeroed_fills


def canonicalise(site: Attention, interpreter: Interpreter) -> Problem:
    """The problem that a recognised attention poses.

    Raises:
        Rejected: where dims do not line up, or dtypes cannot be settled.
    """
    q, k, v, dtype = _settled(site, interpreter.mutations)
    lead, grouped = _batch_and_heads(site)
    target = (*lead[:-2], product(lead[-2:])) if grouped else lead
    q = _moved(q.expand((*site.lead, *q.shape[-2:])), site.lead, target)
    split = _grouped(k, v, lead, target) if grouped else _ungrouped(site, k, v, target, interpreter.mutations)
    (short_k, short_v), (full_k, full_v) = split
    zeroed = zeroed_fills(site, interpreter)
    value_scalers, behind = _by_keys(_scalers(site.behind, target))
    hides_rows = any(kind in ("hide", "show") for kind, _ in behind)
    if hides_rows:
        check_hidden_rows(site)
    trains, lengths = _trains(site), (q.shape[-2], k.shape[-2])
    left = structure.remaining(site.terms, lengths, interpreter, trains, site.sink is None)
    terms = [(t, _term_operand(t, target, interpreter)) for t in left or []]
    parts: list[Stage | Attention] = [*site.stages, site]
    scalers, *late_scalers = [_scalers(part.scalers, target) for part in parts]
    key_scalers, scalers = _by_keys(scalers)
    if key_scalers or value_scalers:
        if dtype == torch.float16:
            raise Reason.RANGE.rejected(
                "keys or values may overflow in float16 when factors are applied to them"
            )
        short_k, short_v = full_k, full_v
    problem = Problem(
        q=q, k=short_k, v=short_v, full_k=full_k, full_v=full_v, scale=site.scale, dropout=site.dropout,
        causal=left is None, dtype=dtype, results=site.results,
        terms=[
            (finite(t) if t in zeroed or (hides_rows and t.fill is not None) else t, operand)
            for t, operand in terms
        ],
        scalers=scalers, late_scalers=late_scalers, behind=behind, key_scalers=key_scalers,
        value_scalers=value_scalers,
        train=trains,
        stages=[_stage(stage, target, interpreter) for stage in site.stages],
        sink=_sink(site, target, interpreter),
        # Where masked scores are -inf, a fully masked row is zero.
        structure=_structure(
            left is None,
            [(replace(t, fill=-math.inf) if t in zeroed else t, operand) for t, operand in terms],
            site, target, interpreter, trains,
        ),
        zeros=_together([(operand, t.hides) for t, operand in terms if t in zeroed]),
        overwritten=interpreter.mutations.touch,
        version=interpreter.mutations.last,
    )  # fmt: skip
    if any(value.device != q.value.device for value in _added(problem)):
        raise Reason.MASK.rejected("a mask or a bias is a scalar tensor on another device")
    return problem


def _settled(site: Attention, mutations: Mutations) -> tuple[Operand, Operand, Operand, torch.dtype]:
    """q, k and v of fitting sizes, and the dtype to compute in."""
    q, k, v = site.q, site.k, site.v
    if not known_true(q.shape[-1] == k.shape[-1]) or not known_true(k.shape[-2] == v.shape[-2]):
        raise Reason.SHAPES.rejected("the sizes of q, k and v do not match")
    dtype = torch_ops.value(site.product).dtype
    if dtype == torch.promote_types(q.value.dtype, k.value.dtype):  # else the product ran under autocast
        q, k, v = _one_dtype(q, k, v, mutations, site.output)
        dtype = q.value.dtype
    _check_casts(site, dtype, torch_ops.value(site.output).dtype)
    return q, k, v, dtype


def _grouped(
    k: Operand, v: Operand, lead: Sequence[Any], target: Sequence[Any]
) -> tuple[Sequence[Operand], Sequence[Operand]]:
    """k and v with their own heads, and repeated, if the last leading dim holds heads of q that share one."""
    k, v = (t.padded(len(lead) + 2) for t in (k, v))
    own = [t.then("squeeze", -3).expand((*lead[:-1], *t.shape[-2:])) for t in (k, v)]
    wide = [t.expand((*lead, *t.shape[-2:])) for t in (k, v)]
    return own, [t.reshape((*target, *t.shape[-2:])) for t in wide]


def _ungrouped(
    site: Attention, k: Operand, v: Operand, target: Sequence[Any], mutations: Mutations
) -> tuple[Sequence[Operand], Sequence[Operand]]:
    """k and v with their own heads, and with as many as q has."""
    k, v = _moved(k, site.lead, target), _moved(v, site.results[0].lead, target)
    wide = [t.expand((*target, *t.shape[-2:])) for t in (k, v)]
    return own_heads(k, v, target, mutations, site.output), wide


def _trains(site: Attention) -> bool:
    """Whether a gradient flows into q, k or v, or into anything else that the results are made of."""
    return is_differentiated(site.outputs, (site.q.node, site.k.node, *(r.v.node for r in site.results)))


def _check_casts(site: Attention, *dtypes: torch.dtype) -> None:
    """Reject scores or weights that are cast to less precision than q and k, or the output, have."""
    for node in site.chain:
        op, rounded = torch_ops.read(node), torch_ops.tensor(node)
        if op is None or rounded is None or not (op.name in torch_ops.CASTS or node is site.softmax):
            continue
        if not holds(rounded.dtype, *dtypes):
            raise Reason.ROUNDED.rejected(
                f"the scores or the weights are rounded to {dtype_name(rounded.dtype)} in between"
            )


def _together(masks: list[tuple[Operand, bool]]) -> tuple[Operand, bool] | None:
    """One mask that hides what any of these do, each with whether it hides where it is true."""
    if len(masks) < 2:
        return masks[0] if masks else None
    first, *others = (mask if hides else mask.then(torch.logical_not) for mask, hides in masks)
    for other in others:
        first = first.then(torch.logical_or, other)
    return first, True


def _added(problem: Problem) -> Iterator[torch.Tensor]:
    """The tensors that the kernel reads beside q, k and v, without scalers that are numbers."""
    yield from (operand.value for _, operand in problem.terms)
    for _, biases, other in problem.stages:
        yield from (operand.value for _, operand in biases)
        yield from (other.value,) if other is not None else ()
    scaled = (*problem.late_scalers, problem.behind, problem.key_scalers, problem.value_scalers)
    for _, by in itertools.chain(*scaled):
        yield from (by.value,) if isinstance(by, Operand) and not is_number(by) else ()
    if problem.sink is not None:
        yield problem.sink[0].value
    for element in elements(problem.structure.visible) if problem.structure is not None else ():
        value = torch_ops.tensor(element.node)
        yield from (value,) if value is not None else ()


def _scalers(scalers: Sequence[tuple[str, fx.Node, tuple[Any, ...]]], target: Sequence[Any]) -> list[Scaler]:
    found: list[Scaler] = []
    for kind, node, lead in scalers:
        operand = Operand.of(node)
        moved = operand is not None and not is_number(operand)  # a number may be on another device
        found.append((kind, node if operand is None else _moved(operand, lead, target) if moved else operand))
    return found


def _by_keys(scalers: Sequence[Scaler]) -> tuple[list[Scaler], list[Scaler]]:
    """The scalers that vary over the keys, as (batch, heads, keys, 1), and the others."""
    of_keys: list[Scaler] = []
    others: list[Scaler] = []
    for kind, by in scalers:
        if isinstance(by, Operand) and not is_number(by) and not known_true(by.shape[-1] == 1):
            of_keys.append((kind, by.then("transpose", -1, -2)))
        else:
            others.append((kind, by))
    return of_keys, others


def _stage(
    stage: Stage, target: Sequence[Any], interpreter: Interpreter
) -> tuple[Stage, list[tuple[float, Operand]], Operand | None]:
    if any(term.fill is not None or term.floor is not None for term in stage.terms):
        raise Reason.MASK.rejected(f"the scores are masked before {stage.called}")
    biases = [(term.factor, _term_operand(term, target, interpreter)) for term in stage.terms]
    operand = None if stage.operand is None else _term_operand(stage.operand, target, interpreter)
    return stage, biases, operand


def _sink(site: Attention, target: Sequence[Any], interpreter: Interpreter) -> tuple[Operand, float] | None:
    if site.sink is None:
        return None
    term, operand = site.sink.term, Operand.of(site.sink.term.node)
    if site.sink.has_column or operand is None:
        return _term_operand(term, target, interpreter), term.factor
    return _moved(operand.then("unsqueeze", -1), term.lead, target), term.factor


def _structure(
    causal: bool,
    terms: list[tuple[Term, Operand]],
    site: Attention,
    target: Sequence[Any],
    interpreter: Interpreter,
    trains: bool,
) -> Structure | None:
    if causal:
        return Structure(structure.CAUSAL, None, True, [], True)
    shape = (*target, site.q.shape[-2], site.k.shape[-2])
    if len(target) != 2:
        return None
    return structure.find(
        terms, shape, interpreter, site.product.graph,
        lambda term: _term_operand(term, target, interpreter), trains, cancels=site.sink is None,
    )  # fmt: skip


def _one_dtype(
    q: Operand, k: Operand, v: Operand, mutations: Mutations, reader: fx.Node
) -> tuple[Operand, Operand, Operand]:
    """Bring q, k and v to one dtype without losing a bit of any of them."""
    if q.value.dtype != k.value.dtype:
        raise Reason.MIXED_DTYPES.rejected("q and k have different dtypes")
    if q.value.dtype == v.value.dtype:
        return q, k, v
    # Scores of values in bf16, computed in fp32, are what a kernel for bf16 accumulates anyway.
    narrow_q, narrow_k = _before_upcast(q, v.value.dtype), _before_upcast(k, v.value.dtype)
    if (
        narrow_q is not None
        and narrow_k is not None
        and _still_equal(q.node, narrow_q.node, mutations, reader)
        and _still_equal(k.node, narrow_k.node, mutations, reader)
    ):
        return narrow_q, narrow_k, v
    wide = torch.promote_types(q.value.dtype, v.value.dtype)
    return q.to(wide), k.to(wide), v.to(wide)


def _before_upcast(operand: Operand, dtype: torch.dtype) -> Operand | None:
    """The operand before a cast from `dtype`, through views, or None."""
    op = torch_ops.read(operand.node)
    source = torch_ops.tensor(op.input) if op is not None else None
    if op is None or op.name not in torch_ops.CASTS or source is None or source.dtype != dtype:
        return None
    if not holds(operand.value.dtype, dtype):
        return None
    base = Operand.of(op.input)
    for method, args in operand.steps:
        base = None if base is None or method == "to" else base.then(method, *args)
    return base


def _batch_and_heads(site: Attention) -> tuple[tuple[Any, ...], bool]:
    """Leading dims to compute with, and whether the last of them holds groups that share a key."""
    stages = [site.lead, site.softmax_lead, site.results[0].lead, *(t.lead for t in site.terms)]
    two = [lead for lead in stages if len(lead) == 2]
    if two:
        return two[0], False
    lead = max(stages, key=len)
    if len(lead) == 3 and all(t.value.dim() == 5 and known_true(t.shape[-3] == 1) for t in (site.k, site.v)):
        return lead, True
    if len(lead) <= 1:
        return (1, *(lead or (1,))), False
    return (product(lead[:-1]), lead[-1]), False


def _moved(operand: Operand, lead: Sequence[Any], target: Sequence[Any]) -> Operand:
    if len(lead) < 2 and alignment(lead, target) is None:
        operand = operand.padded(len(target) + 2)
        found: Operand | None = operand
        if not all(
            known_true(a == 1) or known_true(a == b) for a, b in zip(operand.shape, target, strict=False)
        ):
            found = None
    else:
        found = regroup(operand, lead, target)
    if found is None:
        raise Reason.SHAPES.rejected("the batch and head dims of the operands do not match")
    return found


def own_heads(
    k: Operand, v: Operand, lead: Sequence[Any], mutations: Mutations, reader: fx.Node
) -> tuple[Operand, Operand]:
    """Keys and values with the heads that they had before they were repeated, batch expanded.

    Not where those or the repeated ones are overwritten between the repetition and their reader.
    """
    found_k, found_v = unrepeated(k), unrepeated(v)
    if found_k is not None and found_v is not None and found_k[1] == found_v[1]:
        pairs = ((k.node, found_k[0].node), (v.node, found_v[0].node))
        if all(_still_equal(copy, base, mutations, reader) for copy, base in pairs):
            k, v = found_k[0], found_v[0]
    if not known_true(k.shape[1] == v.shape[1]):
        k, v = (t.expand((t.shape[0], lead[1], *t.shape[-2:])) for t in (k, v))
    k, v = (t.expand((lead[0], *t.shape[1:])) for t in (k, v))
    return k, v


def _still_equal(copy: fx.Node, base: fx.Node, mutations: Mutations, reader: fx.Node) -> bool:
    """Whether neither a value nor the one that it was made of is written to until they are read."""
    node = copy
    while node is not base:
        if mutations.between(node, node, reader) or mutations.between(base, node, reader):
            return False
        op = torch_ops.read(node)
        if op is None or not isinstance(op.input, fx.Node):
            return False
        node = op.input
    return True


def _term_operand(term: Term, target: Sequence[Any], interpreter: Interpreter) -> Operand:
    """The mask or bias on (batch, heads, q, k); one row of it where all queries have the same."""
    operand = Operand.of(term.node)
    if operand is None:
        raise Reason.NOT_A_TENSOR.rejected("a mask or a bias is not a tensor")
    operand = _moved(operand, term.lead, target)
    rows = operand.shape[-2]
    if not known_true(rows <= 1) and interpreter.is_constant_over(term.node, -2):
        operand = operand.then("narrow", -2, 0, 1)
    return operand
