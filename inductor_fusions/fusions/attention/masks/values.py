"""Values of the mask algebra: numbers and conditions as functions of indices.

Everything is a function of the indices (..., q, k) of a tensor, whose dims are counted from the right
(-1 is the key). Inside torch.vmap the number of a sample is an index as well, that of its level (1, 2, ...):

    Affine      const + sum(coeff * atom), an atom being the index of a dim or an element of a tensor
    condition   And / Or / Not over `affine >= 0` and over elements of boolean tensors
    Select      one affine value where a condition holds, else another    (where, masked_fill)
    Data        an element of a tensor, such as a float, that nothing can be computed with

An `Element` is data: a tensor read at indices that are affine themselves. Nothing is known of its value, but
it is equal to itself: that is enough to prove "the same document". It varies only over the dims that its
indices depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx

from ...._inductor import known_true

Number = Any  # int, float, SymInt or SymFloat


@dataclass(frozen=True, eq=False)
class Element:
    """`node[index[0], index[1], ...]`, a number or a condition that the interpreter cannot read further."""

    node: fx.Node
    index: tuple[Affine, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Element) and self.node is other.node and self.index == other.index

    def __hash__(self) -> int:
        return hash(self.node)  # a symbolic index has no hash

    @classmethod
    def of(cls, node: fx.Node, tensor: torch.Tensor, over: set[int] | None = None) -> Element:
        """A tensor as an element of itself.

        Args:
            over: the dims over which it may vary; None for all. The index of the others, and of a dim of
                size 1, is 0.
        """
        fixed = [is_unit(tensor, d) or (over is not None and d not in over) for d in range(-tensor.dim(), 0)]
        return cls(node, tuple(Affine(0) if f else identity(d - len(fixed)) for d, f in enumerate(fixed)))


Atom = int | Element  # the index of a dim (negative), the sample of a level of vmap (positive), or an element


def _order(item: tuple[Atom, Number]) -> tuple[Any, ...]:
    atom = item[0]
    return (1, atom.node.name, repr(atom.index)) if isinstance(atom, Element) else (0, atom)


@dataclass(frozen=True, eq=False)
class Affine:
    """`const + sum(coeff * atom)`: an atom is the index of a dim (its number) or an `Element`."""

    const: Number
    coeffs: tuple[tuple[Atom, Number], ...] = ()

    def __eq__(self, other: object) -> bool:
        # Symbolic numbers are equal where they always are, not where their values in this compile are.
        return (
            isinstance(other, Affine)
            and len(self.coeffs) == len(other.coeffs)
            and known_true(self.const == other.const)
            and all(a == b and known_true(c == d)
                    for (a, c), (b, d) in zip(self.coeffs, other.coeffs, strict=True))
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.const, self.coeffs))

    def coeff(self, dim: Atom) -> Number:
        return dict(self.coeffs).get(dim, 0)

    @property
    def is_constant(self) -> bool:
        return not self.coeffs

    def map(self, function: Callable[[Number], Number]) -> Affine:
        """Apply a linear function without constant term to every coefficient."""
        return affine(function(self.const), {d: function(c) for d, c in self.coeffs})

    def __add__(self, other: Affine) -> Affine:
        coeffs = dict(self.coeffs)
        for dim, c in other.coeffs:
            coeffs[dim] = coeffs.get(dim, 0) + c
        return affine(self.const + other.const, coeffs)

    def __sub__(self, other: Affine) -> Affine:
        return self + other.map(lambda c: -c)

    @property
    def elements(self) -> Iterator[Element]:
        return (atom for atom, _ in self.coeffs if isinstance(atom, Element))


def affine(const: Number, coeffs: Mapping[Atom, Number]) -> Affine:
    """An `Affine` without zero coefficients."""
    kept = tuple(sorted(((a, c) for a, c in coeffs.items() if not known_true(c == 0)), key=_order))
    return Affine(const, kept)


@dataclass(frozen=True)
class NonNegative:
    """`value >= 0`, over integers."""

    value: Affine


@dataclass(frozen=True)
class Not:
    operand: Bool


@dataclass(frozen=True)
class And:
    operands: tuple[Bool, ...]


@dataclass(frozen=True)
class Or:
    operands: tuple[Bool, ...]


@dataclass(frozen=True)
class Unknown:
    """A boolean tensor that is overwritten somewhere; equal only to itself, and not known elsewhere."""

    node: fx.Node


@dataclass(frozen=True)
class Data:
    """An element that nothing is computed with: a number that is rounded, or may wrap around."""

    element: Element


@dataclass(frozen=True)
class Select:
    """`then` where `condition` holds, else `otherwise`."""

    condition: Bool
    then: Affine
    otherwise: Affine


Bool = bool | NonNegative | Not | And | Or | Element | Unknown
Value = Affine | Bool | Select | Data | None

BOOL = (bool, NonNegative, Not, And, Or, Element, Unknown)


def is_condition(value: Value) -> TypeGuard[Bool]:
    """Whether a value was read, as a condition."""
    return isinstance(value, BOOL)


def within(value: Any) -> Iterator[Any]:
    """A value, and every value in it."""
    yield value
    inner: Iterable[Any] = ()
    match value:
        case Element():
            inner = value.index
        case Affine():
            inner = value.elements
        case NonNegative():
            inner = (value.value,)
        case Not():
            inner = (value.operand,)
        case Data():
            inner = (value.element,)
        case And() | Or():
            inner = value.operands
        case Select():
            inner = (value.condition, value.then, value.otherwise)
    for each in inner:
        yield from within(each)


def elements(value: Value) -> Iterator[Element]:
    """Every element of a tensor in a value."""
    return (each for each in within(value) if isinstance(each, Element))


def dims(value: Value) -> set[int]:
    """The dims whose index a value depends on."""
    found = (each for each in within(value) if isinstance(each, Affine))
    return {atom for each in found for atom, _ in each.coeffs if isinstance(atom, int)}


def is_known(value: Value) -> bool:
    """Whether a value was read, and nothing in it is unknown."""
    return value is not None and not any(isinstance(each, Unknown) for each in within(value))


def size(value: Value) -> int:
    """How many comparisons, elements and numbers a value is made of."""
    if isinstance(value, (And, Or)):
        return sum(map(size, value.operands))
    if isinstance(value, Not):
        return size(value.operand)
    if isinstance(value, Select):
        return size(value.condition) + size(value.then) + size(value.otherwise)
    return 1


def is_integral(value: Affine) -> bool:
    numbers = [value.const, *(c for _, c in value.coeffs)]
    return all(
        isinstance(n, (int, torch.SymInt)) or (isinstance(n, float) and n.is_integer()) for n in numbers
    )


def is_unit(tensor: torch.Tensor, dim: int) -> bool:
    return 0 < -dim <= tensor.dim() and known_true(tensor.shape[dim] == 1)


def identity(dim: int) -> Affine:
    return Affine(0, ((dim, 1),))


def renamed(mapping: Mapping[int, int]) -> Callable[[int], Affine | None]:
    """Dims that only move: source dim -> result dim; a dim that is gone had one index, 0."""
    return lambda dim: affine(0, {mapping[dim]: 1}) if dim in mapping else Affine(0)
