"""Mask algebra: proves which keys a mask shows, from the graph that computes it.

A mask is a function of the indices (..., q, k). `Interpreter` reads the subgraph that computes it into the
values of `values`. These are numbers that are affine in the indices, conditions on them, and elements of
tensors that cannot be read further. If something is overwritten, the result is None. Sizes may be symbolic:
every comparison uses `known_true`, which adds no guard. A mask gets a class only by proof. Contents of
buffers are never read: compiled code is cached without them.

    values        numbers and conditions
    algebra       arithmetic and logic on them
    dtypes        what of it a tensor's dtype holds
    interpreter   from the graph into the algebra, by a rule for each operation
    operations    rules for arithmetic, comparisons, casts, and tensors that are made
    views         rules for indexing and reshaping
    proofs        classes of predicates
    contents      fills and data in a bias whose value cannot be read
"""

from . import operations, views  # they register their rules
from .algebra import conjunction, disjunction, is_one_or_zero, negation, substitute
from .contents import holds_fills_alone, may_be_low, may_hide_rows
from .dtypes import rounded
from .interpreter import Interpreter
from .proofs import classify, is_causal, is_fill, reduce, visibility
from .values import (
    Affine,
    And,
    Bool,
    Element,
    NonNegative,
    Not,
    Or,
    Unknown,
    affine,
    dims,
    elements,
    identity,
    is_condition,
    is_known,
    within,
)
