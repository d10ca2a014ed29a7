"""Permutations of q, k and v, in front of a product and of SDPA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from ...fusion import Candidate
from ...graph.dims import permutation
from ...graph.torch_ops import read
from ...operands import same_shape, tensor
from .equivalent import EquivalentRewrite
from .walk import factors, name_of

#: What may stand between a permutation and the product that reads it, and leaves its dims where they are.
_TRANSPARENT = {"contiguous", "clone", "expand", "to", "float", "half", "bfloat16", "mul", "div"}
#: The dims that stock's patterns take every permutation to have: heads brought forward, k transposed.
_HEADS = (0, 2, 1, 3)


class Permutation(EquivalentRewrite):
    """A permutation of q, k or v that the pattern would take for another one."""

    def __init__(self, anchor: fx.Node, source: fx.Node, steps: list[tuple[int, ...]]) -> None:
        super().__init__(anchor)
        self.source, self.steps = source, steps

    def rewrite(self) -> str:
        result = self.source
        for dims in self.steps:
            result = self.call("permute", result, dims)
        if self.steps:
            result.meta = dict(self.anchor.meta)
        self.anchor.replace_all_uses_with(result)
        self.anchor.graph.erase_node(self.anchor)
        return f"permuted by {' then '.join(map(str, self.steps)) or 'nothing'}"


def permutation_of(node: fx.Node) -> tuple[fx.Node, tuple[int, ...]] | None:
    """(input, dims) of a transpose or permute in any form: result dim i is input dim `dims[i]`."""
    op = read(node)
    dims = permutation(op) if op is not None else None
    if op is None or dims is None or not isinstance(op.input, fx.Node) or tensor(node) is None:
        return None
    return op.input, tuple(dims)


def composed(first: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
    """One permutation for two in a row."""
    return tuple(first[i] for i in then)


def inverse(dims: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that undoes one."""
    return tuple(dims.index(i) for i in range(len(dims)))


def permutations_of(
    operand: Any, copied: bool = True
) -> tuple[fx.Node, fx.Node, list[tuple[int, ...]]] | None:
    """(last node, input, steps) of the permutations, in a row, of an operand of a product or of SDPA.

    Args:
        copied: whether what lies behind them may lay it out anew.
    """
    node = operand
    while isinstance(node, fx.Node) and permutation_of(node) is None:
        op = read(node)
        if op is None or op.name not in _TRANSPARENT:
            return None
        below = op["other"] if op.name == "mul" and tensor(op.input) is None else op.input
        before, after = tensor(below), tensor(node)
        if before is None or after is None or before.dim() != after.dim():
            return None
        if not copied and not same_shape(before.stride(), after.stride()):
            return None
        node = below
    if not isinstance(node, fx.Node):
        return None
    steps: list[tuple[int, ...]] = []
    source = node
    while (found := permutation_of(source)) is not None:
        source = found[0]
        steps.insert(0, found[1])
    return (node, source, steps) if len(steps[0]) in (3, 4) else None


def factor(product: fx.Node, index: int) -> Any:
    """An operand of a product of two matrices; None of another operation."""
    return factors(product)[index] if name_of(product) in ("matmul", "bmm") else None


def permuted(product: fx.Node, output: fx.Node) -> Iterator[Candidate]:
    """The permutations of q, k and v that a pattern would read wrongly. Every pattern wants one of k."""
    if permutations_of(factor(product, 1)) is None:
        return
    for node, index, is_key in ((product, 0, False), (product, 1, True), (output, 1, False)):
        yield from rewrites_of(factor(node, index), transposed=is_key)


def permuted_for(call: fx.Node) -> Iterator[Candidate]:
    """The permutations of q, k and v of an SDPA call, which transposes k itself.

    A copy is left: no pattern has one in front of what SDPA is decomposed to.
    """
    op = read(call)
    assert op is not None
    for name in ("query", "key", "value"):
        operand = op[name]
        result = tensor(operand)
        if result is not None and result.dim() == 4:
            yield from rewrites_of(operand, transposed=False, copied=False)


def rewrites_of(operand: Any, transposed: bool, copied: bool = True) -> Iterator[Candidate]:
    """The permutations of one operand, where its pattern would take them for others.

    Args:
        operand: what a product or SDPA reads.
        transposed: whether the pattern has the transpose of k among them.
    """
    found = permutations_of(operand, copied)
    if found is None:
        return
    last, source, steps = found
    rank = len(steps[0])
    identity = tuple(range(rank))
    known: list[tuple[int, ...]] = [_HEADS] if rank == 4 else []
    if transposed:
        known.append((*identity[:-2], rank - 1, rank - 2))
    whole = identity
    for dims in steps:
        whole = composed(whole, dims)
    wanted = standard(whole, known, identity)
    if steps != wanted:
        yield Permutation(last, source, wanted)


def standard(
    whole: tuple[int, ...], known: list[tuple[int, ...]], identity: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """`whole` as steps of which the last ones are those of `known`, as many as the pattern may see."""
    steps: list[tuple[int, ...]] = []
    rest = whole
    for last in reversed(known):
        if rest == identity:
            break
        # rest = before, then last
        rest = composed(rest, inverse(last))
        steps.insert(0, last)
    return steps if rest == identity else [rest, *steps]
