"""Arithmetic and logic of the mask algebra: simplified conditions, choices, comparisons, and substitution."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ...._inductor import known_true
from .values import (
    BOOL,
    Affine,
    And,
    Atom,
    Bool,
    Data,
    Element,
    NonNegative,
    Not,
    Or,
    Select,
    Value,
    affine,
    identity,
    is_integral,
)


def is_one_or_zero(value: Value) -> bool:
    """Whether a number is proved to be 1 or 0 everywhere."""
    parts = branches(as_number(value))
    return bool(parts) and all(part.is_constant and part.const in (0, 1) for part in parts)


def conjunction(operands: Sequence[Bool]) -> Bool:
    """The simplified And."""
    flat = _flattened(operands, And)
    if False in flat:
        return False
    flat = [part for part in flat if not any(_implies(other, part) for other in flat if other is not part)]
    if any(_are_opposite(first, second, covering=False) for first, second in itertools.combinations(flat, 2)):
        return False
    if not flat:
        return True
    return flat[0] if len(flat) == 1 else And(tuple(flat))


def _implies(first: Bool, second: Bool) -> bool:
    """Whether one comparison holds wherever another does: the same slopes and a larger constant."""
    return (
        isinstance(first, NonNegative)
        and isinstance(second, NonNegative)
        and Affine(0, first.value.coeffs) == Affine(0, second.value.coeffs)
        and known_true(first.value.const < second.value.const)
    )


def _are_opposite(first: Bool, second: Bool, covering: bool) -> bool:
    """Whether two comparisons bound one value from both sides, and at least one always holds (`covering`, as
    x >= 2 or x <= 4), or never both hold (x >= 4 and x <= 2)."""
    if not isinstance(first, NonNegative) or not isinstance(second, NonNegative):
        return False
    slopes = [c for part in (first, second) for _, c in part.value.coeffs[:1]]
    if all(isinstance(c, int) for c in slopes) and sum(slopes):  # most pairs
        return False
    total = first.value + second.value
    return total.is_constant and known_true(total.const >= -1 if covering else total.const < 0)


def negation(operand: Bool) -> Bool:
    """The simplified Not, pushed down to comparisons (over integers, not x >= 0 is -x - 1 >= 0)."""
    if isinstance(operand, bool):
        return not operand
    if isinstance(operand, Not):
        return operand.operand
    if isinstance(operand, NonNegative):
        flipped = operand.value.map(lambda c: -c)
        return NonNegative(Affine(flipped.const - 1, flipped.coeffs))
    if isinstance(operand, And):
        return disjunction([negation(part) for part in operand.operands])
    if isinstance(operand, Or):
        return conjunction([negation(part) for part in operand.operands])
    return Not(operand)


def disjunction(operands: Sequence[Bool]) -> Bool:
    """The simplified Or."""
    flat = _flattened(operands, Or)
    if True in flat:
        return True
    kept: list[Bool] = []
    for part in flat:
        if not any(_follows(other, part) for other in kept):
            kept = [*(other for other in kept if not _follows(part, other)), part]
    if any(_are_opposite(first, second, covering=True) for first, second in itertools.combinations(kept, 2)):
        return True
    if not kept:
        return False
    return kept[0] if len(kept) == 1 else Or(tuple(kept))


def _follows(second: Bool, first: Bool) -> bool:
    """Whether `first` is seen to be a special case of `second`: each conjunct follows from one of its own."""
    own, wanted = (part.operands if isinstance(part, And) else (part,) for part in (first, second))
    return all(any(each == part or _implies(each, part) for each in own) for part in wanted)


def _flattened(operands: Sequence[Bool], join: type[And] | type[Or]) -> list[Bool]:
    """The operands of one join: nested ones opened, each once, without the one that changes nothing."""
    flat: list[Bool] = []
    for operand in operands:
        for part in operand.operands if isinstance(operand, join) else (operand,):
            if part is not (join is And) and part not in flat:
                flat.append(part)
    return flat


def as_bool(value: Value) -> Bool | None:
    """`value != 0`."""
    if isinstance(value, BOOL):
        return value
    if value is None:
        return None
    return negation_of(compare("eq", value, Affine(0)))


def negation_of(value: Bool | None) -> Bool | None:
    return None if value is None else negation(value)


def as_number(value: Value) -> Affine | Select | None:
    """A condition as 1 and 0."""
    if isinstance(value, bool):
        return Affine(int(value))
    if isinstance(value, BOOL):
        return Select(value, Affine(1), Affine(0))
    return None if isinstance(value, Data) else value


def choose(condition: Bool | None, then: Value, otherwise: Value) -> Value:
    """where(condition, then, otherwise)."""
    if condition is None:
        return None
    if condition is True:
        return then
    if condition is False:
        return otherwise
    if isinstance(then, BOOL) and isinstance(otherwise, BOOL):
        return disjunction([conjunction([condition, then]), conjunction([negation(condition), otherwise])])
    then, otherwise = as_number(then), as_number(otherwise)
    # A branch that chooses by the same condition again has chosen already.
    if isinstance(then, Select) and then.condition in (condition, negation(condition)):
        then = then.then if then.condition == condition else then.otherwise
    if isinstance(otherwise, Select) and otherwise.condition in (condition, negation(condition)):
        otherwise = otherwise.otherwise if otherwise.condition == condition else otherwise.then
    # A nested choice of the same outer value: where(a, where(b, x, y), y) is where(a and b, x, y).
    if isinstance(then, Select) and isinstance(otherwise, Affine):
        if then.otherwise == otherwise:
            return choose(conjunction([condition, then.condition]), then.then, otherwise)
        if then.then == otherwise:
            return choose(conjunction([condition, negation(then.condition)]), then.otherwise, otherwise)
    if isinstance(otherwise, Select) and isinstance(then, Affine):
        return choose(negation(condition), otherwise, then)
    if isinstance(then, Affine) and isinstance(otherwise, Affine):
        return then if then == otherwise else Select(condition, then, otherwise)
    # Two choices of the same two values are one: where(c, where(a, x, y), where(b, x, y)).
    if isinstance(then, Select) and isinstance(otherwise, Select):
        if (then.then, then.otherwise) == (otherwise.otherwise, otherwise.then):
            otherwise = Select(negation(otherwise.condition), otherwise.otherwise, otherwise.then)
        if (then.then, then.otherwise) == (otherwise.then, otherwise.otherwise):
            return choose(as_bool(choose(condition, then.condition, otherwise.condition)), *branches(then))
    return None


def branches(value: Value) -> tuple[Affine, ...]:
    """The affine values that a number may have: one, or the two of a choice; none of anything else."""
    if isinstance(value, Select):
        return (value.then, value.otherwise)
    return (value,) if isinstance(value, Affine) else ()


def map_parts(value: Value, function: Callable[[Affine], Affine | None]) -> Value:
    """Apply a function to an affine value, or to both branches of a choice."""
    value = as_number(value)
    if isinstance(value, Affine):
        return function(value)
    if isinstance(value, Select):
        return choose(value.condition, function(value.then), function(value.otherwise))
    return None


def combine(left: Value, right: Value, function: Callable[[Affine, Affine], Affine | None]) -> Value:
    """Apply a function of two affine values, also where they are choices, if two values come of it."""
    left, right = as_number(left), as_number(right)
    if isinstance(left, Select):
        then, otherwise = (combine(branch, right, function) for branch in (left.then, left.otherwise))
        return choose(left.condition, then, otherwise)
    return map_parts(right, lambda r: function(left, r)) if isinstance(left, Affine) else None


def compare(name: str, left: Value, right: Value) -> Bool | None:
    """A comparison as a predicate."""
    if name == "gt":
        return compare("lt", right, left)
    if name == "ge":
        return compare("le", right, left)
    if name == "ne":
        return negation_of(compare("eq", left, right))
    if isinstance(left, BOOL) and isinstance(right, BOOL) and name == "eq":
        return choose(left, right, negation(right))  # type: ignore[return-value]
    left, right = as_number(left), as_number(right)
    if left is None or right is None:
        return None
    if isinstance(left, Select):
        return _compared(name, left, True, lambda branch: compare(name, branch, right))
    if isinstance(right, Select):
        return _compared(name, right, False, lambda branch: compare(name, left, branch))
    if left.is_constant and right.is_constant and isinstance(left.const, (int, float)):
        if isinstance(right.const, (int, float)):
            x, y = left.const, right.const
            return {"lt": x < y, "le": x <= y, "eq": x == y}[name]
    difference = right - left  # left <= right where this is >= 0
    if not is_integral(difference):
        return None
    if name == "lt":
        return NonNegative(Affine(difference.const - 1, difference.coeffs))
    if name == "le":
        return NonNegative(difference)
    reverse = difference.map(lambda c: -c)
    return conjunction([settled(NonNegative(difference)), settled(NonNegative(reverse))])


def _compared(name: str, value: Select, left: bool, of: Callable[[Affine], Bool | None]) -> Bool | None:
    """A comparison of a choice, from that of each branch.

    Args:
        left: whether the choice is the left operand.
        of: compares a branch.
    """
    then, otherwise = of(value.then), of(value.otherwise)
    if then is None or otherwise is None:
        return None
    larger = _is_larger(value) if name != "eq" else None
    if larger is None:
        return as_bool(choose(value.condition, then, otherwise))
    # The larger one is below a bound where both are: |x| <= w is x <= w and -x <= w.
    return (conjunction if larger == left else disjunction)([then, otherwise])


def _is_larger(value: Select) -> bool | None:
    """Whether a choice is the larger of its branches, as |x| is; False for the smaller, None for neither."""
    difference = value.then - value.otherwise
    if not isinstance(value.condition, NonNegative) or value.condition.value.is_constant:
        return None
    sign = value.condition.value
    atom, slope = sign.coeffs[0]
    steep = difference.coeff(atom)
    if not isinstance(slope, int) or not isinstance(steep, (int, float)):
        return None
    scaled = difference.map(partial(operator.mul, slope))
    for bound in (sign, Affine(sign.const + 1, sign.coeffs)):  # sign >= 0, or sign + 1 > 0
        if scaled == bound.map(partial(operator.mul, steep)) and steep != 0:
            return (steep > 0) == (slope > 0)
    return None


def magnitude(value: Value) -> Value:
    """|value|, over integers; of an integer of the data it may wrap around."""
    value = as_number(value)
    if isinstance(value, Select):
        return choose(value.condition, magnitude(value.then), magnitude(value.otherwise))
    if not isinstance(value, Affine):
        return None
    if value.is_constant and isinstance(value.const, (int, float)):
        return Affine(abs(value.const))
    if not is_integral(value) or any(True for _ in value.elements):
        return None
    return choose(settled(NonNegative(value)), value, value.map(lambda c: -c))


def settled(condition: NonNegative) -> Bool:
    if condition.value.is_constant:
        if known_true(condition.value.const >= 0):
            return True
        if known_true(condition.value.const < 0):
            return False
    return condition


def substitute(
    value: Value, index: Callable[[int], Affine | None], samples: Mapping[int, Affine] | None = None
) -> Value:
    """The value whose index[d] is given by `index(d)`; None where that is unknown.

    `samples` does the same for levels of vmap; those that it lacks stay as they are.
    """
    samples = samples or {}

    def of_atom(atom: Atom) -> Affine | Element | None:
        if isinstance(atom, Element):
            return of_element(atom)
        return index(atom) if atom < 0 else samples.get(atom, identity(atom))

    def of_affine(x: Affine) -> Affine | None:
        total = Affine(x.const)
        for atom, c in x.coeffs:
            inner = of_atom(atom)
            if inner is None:
                return None
            inner = affine(0, {inner: 1}) if isinstance(inner, Element) else inner
            total = total + inner.map(partial(operator.mul, c))
        return total

    def of_element(x: Element) -> Element | None:
        inner = [of_affine(i) for i in x.index]
        known = tuple(i for i in inner if i is not None)
        return Element(x.node, known) if len(known) == len(inner) else None

    def of_leaf(x: Bool) -> Bool | None:
        if isinstance(x, NonNegative):
            inner = of_affine(x.value)
            return None if inner is None else settled(NonNegative(inner))
        return of_element(x) if isinstance(x, Element) else None  # elsewhere it is another unknown

    if isinstance(value, Select):
        condition = rebuilt(value.condition, of_leaf)
        return choose(condition, of_affine(value.then), of_affine(value.otherwise))
    if isinstance(value, Affine):
        return of_affine(value)
    if isinstance(value, Data):
        element = of_element(value.element)
        return None if element is None else Data(element)
    return rebuilt(value, of_leaf) if isinstance(value, BOOL) else None


def rebuilt(part: Bool, leaf: Callable[[Bool], Bool | None]) -> Bool | None:
    """A condition with what `leaf` gives for each comparison and element; None where that is None."""
    if isinstance(part, bool):
        return part
    if isinstance(part, Not):
        return negation_of(rebuilt(part.operand, leaf))
    if isinstance(part, (And, Or)):
        found = [rebuilt(operand, leaf) for operand in part.operands]
        known = [operand for operand in found if operand is not None]
        join = conjunction if isinstance(part, And) else disjunction
        return join(known) if len(known) == len(found) else None
    return leaf(part)
