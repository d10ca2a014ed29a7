"""Masks as predicates, for kernels that skip blocks or support windows.

If all mask terms of an attention can be read, they become one predicate over (batch, head, query, key). The
predicate may hold elements of tensors, such as the padding of a batch or the document of a token. It may not
hold a whole (query, key) matrix: such a mask is data, and is passed on unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ... import config
from ..._inductor import known_true
from ...graph import torch_ops
from ...operands import requires_grad, same_shape
from .masks import (
    Affine,
    And,
    Bool,
    Interpreter,
    NonNegative,
    Not,
    Or,
    classify,
    conjunction,
    dims,
    disjunction,
    elements,
    identity,
    is_causal,
    is_known,
    may_hide_rows,
    negation,
    reduce,
    substitute,
    visibility,
    within,
)
from .mixed_masks import Terms, separated
from .normal_form import Term
from .operands import Operand

BATCH, HEAD, QUERY, KEY = -4, -3, -2, -1

#: A row whose highest bias is below this is fully masked: in float32, -1e8 + score rounds to -1e8 if the
#: score is less than 4 in size.
EMPTY_BELOW = -1e8
#: Added where a key is masked: it absorbs any score, and exp2(x * log2(e)) does not overflow.
MASK_FILL = -1e30


@dataclass(frozen=True)
class Structure:
    """A mask as a predicate.

    Attributes:
        visible: whether a query sees a key, over the dims (BATCH, HEAD, QUERY, KEY).
        number: what hidden scores are, or become by an addition; None for -inf, where a fully masked row
            is zero.
        replaced: whether hidden scores are replaced by `number`, so that no gradient flows into them.
        biases: what else is added to the scores.
        never_empty: whether every query is proved to see a key.
    """

    visible: Bool
    number: float | None
    replaced: bool
    biases: Terms
    never_empty: bool

    @property
    def conjuncts(self) -> tuple[Bool, ...]:
        return self.visible.operands if isinstance(self.visible, And) else (self.visible,)

    @property
    def kind(self) -> str:
        """Name of the class, for tables and reports: causal, window, padding and data, joined by +."""
        names = {self._kind_of(part) for part in self.conjuncts}
        order = ("causal", "window", "pad", "document", "blocks")
        return "+".join(name for name in order if name in names)

    def _kind_of(self, part: Bool) -> str:
        if is_causal(part):
            return "causal"
        if window(part) is not None:
            return "window"
        if dims(part) <= {BATCH, KEY}:
            return "pad"
        return "document" if any(True for _ in elements(part)) else "blocks"


CAUSAL = NonNegative(Affine(0, ((QUERY, 1), (KEY, -1))))


def window(part: Bool) -> int | None:
    """w where a condition says query - key < w, with a fixed number w."""
    if not isinstance(part, NonNegative) or part.value.coeffs != ((QUERY, -1), (KEY, 1)):
        return None
    const = part.value.const
    return const + 1 if isinstance(const, int) and const >= 0 else None


def narrowed(term: Term, interpreter: Interpreter) -> Term:
    """A tensor that was expanded over queries or keys, as one row or column."""
    for dim in (-1, -2):
        own, operand = torch_ops.tensor(term.node), Operand.of(term.node)
        wide = own is not None and own.dim() >= -dim and not known_true(own.shape[dim] == 1)
        if operand is not None and wide and interpreter.is_constant_over(term.node, dim):
            term = replace(term, node=operand.then("narrow", dim, 0, 1))
    return term


def predicate(
    term: Term, interpreter: Interpreter, cancels: bool, trains: bool = True
) -> tuple[Bool, float] | None:
    """The condition under which a term leaves a score as it is, and its number elsewhere; None if it is data.

    Args:
        term: a bias or a fill.
        cancels: whether a number that is added to all scores is not seen.
        trains: whether gradients may be taken of the attention.
    """
    if trains and requires_grad(term.node):
        return None  # a gradient flows into it
    if term.fill is None:
        return visibility(interpreter.read(term.node), term.factor, cancels)
    seen = interpreter.boolean(term.node)
    if seen is None:
        return None
    return negation(seen) if term.hides else seen, term.fill


def remaining(
    terms: Sequence[Term],
    lengths: Sequence[Any],
    interpreter: Interpreter,
    trains: bool,
    cancels: bool = True,
) -> list[Term] | None:
    """The terms without those that hide nothing; None where what is left says exactly "causal".

    Args:
        lengths: (q_len, kv_len).
        trains, cancels: as those of `predicate`.
    """
    left: list[Term] = []
    causal = 0
    for term in terms:
        found = predicate(term, interpreter, cancels, trains)
        kind = classify(None if found is None else found[0], (*term.lead, *lengths))
        if kind == "visible":
            continue
        causal += kind == "causal"
        left.append(term if found is None or term.fill is not None else replace(term, depth=found[1]))
    return None if left and causal == len(left) else left


@dataclass
class _Read:
    """The terms of a mask, read one by one.

    Attributes:
        conditions: under which a term leaves a score as it is.
        biases: what else is added to the scores.
        numbers: what masked scores are elsewhere.
        hiding: places of the terms with a condition.
        unbounded: places of biases that may be so low that they mask keys, but never a query's own.
        added: how many of the terms are added, rather than replace the scores.
        biased_after: whether a bias is added to masked scores.
    """

    conditions: list[Bool] = field(default_factory=list)
    biases: Terms = field(default_factory=list)
    numbers: set[float] = field(default_factory=set)
    hiding: list[int] = field(default_factory=list)
    unbounded: list[int] = field(default_factory=list)
    added: int = 0
    biased_after: bool = False

    @staticmethod
    def of(
        terms: Terms, shape: Sequence[Any], interpreter: Interpreter, cancels: bool, trains: bool
    ) -> _Read | None:
        """The terms, or None where a part of the mask is data."""
        read = _Read()
        for place, (term, operand) in enumerate(terms):
            if term.floor is not None:
                return None
            found = predicate(term, interpreter, cancels, trains)
            if found is not None:
                if not same_shape(term.lead, shape[:2]) and not dims(found[0]) <= {QUERY, KEY}:
                    return None  # its batch and heads are counted in another way
                read.conditions.append(found[0])
                read.numbers.add(found[1])
                read.hiding.append(place)
                read.added += term.fill is None or term.adds
                continue
            if term.fill is not None:
                return None
            if may_hide_rows(term.node):
                if not interpreter.vanishes_at_own_key(term.node):
                    return None
                read.unbounded.append(place)
            read.biases.append((term, operand))
            read.biased_after |= bool(read.conditions)
        return read


def find(
    terms: Terms,
    shape: Sequence[Any],
    interpreter: Interpreter,
    graph: fx.Graph,
    aligned: Callable[[Term], Operand],
    trains: bool,
    cancels: bool = True,
) -> Structure | None:
    """The structure of the mask of an attention, or None where part of it is data.

    Args:
        terms: what is left of biases and fills.
        shape: (batch, heads, q_len, kv_len).
        graph: where code for the mask will be; elements of tensors of other graphs cannot be used.
        aligned: brings a part of a term to the dims of the problem.
        trains, cancels: as those of `predicate`.
    """
    terms = separated(terms, interpreter, aligned, trains)
    read = _Read.of(terms, shape, interpreter, cancels, trains)
    if read is None:
        return None
    if not all(_erases(terms, each, bias) for each in read.hiding for bias in read.unbounded):
        return None
    if not read.conditions:
        if read.unbounded or not read.biases:
            return None  # flex attention takes rows of a mask that hides nothing to have no -inf
        return Structure(True, None, True, read.biases, True)
    if len(read.numbers) != 1:
        return None
    visible = reduce(conjunction(read.conditions), shape)
    if visible is False or not is_usable(visible, graph):
        return None
    if read.unbounded and (visible is True or not _sees_own_key(visible, shape)):
        return None
    (number,) = read.numbers
    # Where each query sees itself, or the first or the last key.
    ends = Affine(0), Affine(shape[KEY] - 1)
    never_empty = _always_sees(visible, shape, *ends) or _sees_own_key(visible, shape)
    if math.isfinite(number) and not never_empty and not _keeps_empty_rows(read, terms, number, trains):
        return None
    return Structure(
        visible=visible,
        number=number if math.isfinite(number) else None,
        replaced=not read.added,
        biases=read.biases,
        never_empty=never_empty,
    )


def _keeps_empty_rows(read: _Read, terms: Terms, number: float, trains: bool) -> bool:
    """Whether the scores of a fully masked row are all equal, or absorbed by the number they get."""
    if not read.added and not read.biased_after:
        return True
    if (read.added and len(read.conditions) > 1) or not _absorbs(number, terms, bool(read.added)):
        return False
    # In such a row a gradient flows into what is added to the number.
    return config.empty_rows == "ignore" or not trains or not any(map(_learns, read.biases))


def _absorbs(number: float, terms: Terms, added: bool) -> bool:
    """Whether the number of masked keys is so low that number + score rounds to it.

    Args:
        added: whether it is added to the scores: the lowest number of float16 is that of a float16 mask.
    """
    masks = [torch_ops.tensor(term.node) for term, _ in terms if term.fill is None or term.adds]
    half = added and all(mask is not None and mask.dtype == torch.float16 for mask in masks)
    return number <= (torch.finfo(torch.float16).min if half else EMPTY_BELOW)


def _learns(bias: tuple[Term, Operand]) -> bool:
    tensor = torch_ops.tensor(bias[0].node)
    return tensor is None or tensor.requires_grad


def is_usable(part: Bool, graph: fx.Graph) -> bool:
    """Whether code can be written for a condition, and says more than a matrix of data would."""
    return (
        is_known(part)
        and all(dim < 0 for dim in dims(part))
        and all(isinstance(c, int) for x in within(part) if isinstance(x, Affine) for _, c in x.coeffs)
        and all(
            element.node.graph is graph and not {QUERY, KEY} <= dims(element) and HEAD not in dims(element)
            for element in elements(part)
        )
    )


def _erases(terms: Terms, place: int, bias: int) -> bool:
    """Whether a fill leaves nothing of a bias at the keys that it hides."""
    fill = terms[place][0]
    filled = place - fill.adds if fill.adds else 0  # the first term that it fills
    return fill.fill is not None and filled <= bias < place


def _sees_own_key(visible: Bool, shape: Sequence[Any]) -> bool:
    """Whether each query sees the key of the same index."""
    return known_true(shape[KEY] >= shape[QUERY]) and _always_sees(visible, shape, Affine(0, ((QUERY, 1),)))


def _always_sees(visible: Bool, shape: Sequence[Any], *keys: Affine) -> bool:
    """Whether each query sees one of some keys, each of one index or one that depends on the query."""

    def at(key: Affine) -> Any:
        return substitute(visible, lambda dim: key if dim == KEY else identity(dim))

    found = [seen for seen in map(at, keys) if isinstance(seen, (bool, NonNegative, And, Or, Not))]
    return disjunction([reduce(seen, shape) for seen in found]) is True
