"""The roles of the dims of a score tensor: queries, keys, batch and heads, under views.

Models have the scores as (batch, heads, queries, keys), as (queries, keys, batch, heads), as (batch, queries,
heads, keys), or with the dims of an image apart. A reader goes from operation to operation with an
`Arrangement`. It says what the dims of the current tensor are, and brings masks and biases to the order
(*lead, queries, keys).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..._inductor import known_true
from ...fusion import Rejected
from ...graph import torch_ops
from ...graph.dims import permutation
from ...operands import same_shape
from ...reasons import Reason
from .operands import Operand, alignment, product

OWN_VALUES = Reason.NO_PRODUCT(
    "rows of weights that share keys have values of their own, such as those of experts, neighbours or heads"
)
OWN_KEYS = Reason.NO_PRODUCT("each row of weights has keys of its own, but no values of its own")
NOT_OVER_KEYS = Reason.NO_PRODUCT("the softmax is not over the keys")
OVER_ANOTHER_DIM = Reason.NO_PRODUCT("the product after the softmax sums over another dim than the softmax")


class Misplaced(Rejected):
    """A product has its queries and keys elsewhere than they were taken to be, or has none."""


@dataclass(frozen=True)
class Arrangement:
    """Which dims of scores or weights are batch and heads, queries, and keys.

    Attributes:
        lead: batch and heads, in the order in which the attention is read.
        rows: the dims of the queries; several where they are viewed apart, none where there is one query.
        columns: the dims of the keys.
    """

    lead: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, rows: int, columns: int) -> Arrangement:
        """One dim of queries and one of keys; the others in their order."""
        return cls(tuple(d for d in range(rank) if d not in (rows, columns)), (rows,), (columns,))

    @classmethod
    def plain(cls, rank: int) -> Arrangement:
        """The arrangement (*lead, queries, keys) of a tensor of this rank."""
        return cls.of(rank, rank - 2, rank - 1)

    @property
    def order(self) -> tuple[int, ...]:
        """The dims in the order (*lead, queries, keys)."""
        return (*self.lead, *self.rows, *self.columns)

    @property
    def is_plain(self) -> bool:
        """Whether the tensor has this order itself, with one dim for each of queries and keys."""
        single = len(self.rows) == 1 == len(self.columns)
        return single and self.order == tuple(range(len(self.order)))

    def split(self) -> Arrangement:
        """The arrangement in which the last leading dim is that of the queries, which had none."""
        return Arrangement(tuple(_inserted([*self.lead[:-1]], [*self.rows])), self.lead[-1:], self.columns)

    def sizes(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The leading sizes of a shape."""
        return tuple(shape[d] for d in self.lead)

    def above(self, dims: Sequence[int]) -> Arrangement:
        """The arrangement of a tensor that was permuted by `dims` to the one at hand."""
        lead, rows, columns = (
            tuple(dims[d] for d in group) for group in (self.lead, self.rows, self.columns)
        )
        return Arrangement(lead, rows, columns)

    def below(self, dims: Sequence[int]) -> Arrangement:
        """The arrangement of the tensor at hand after it is permuted by `dims`."""
        return self.above([list(dims).index(d) for d in range(len(dims))])

    def viewed(self, own: Sequence[Any], other: Sequence[Any]) -> Arrangement | None:
        """The arrangement of a tensor with the same elements in row-major order.

        Args:
            own: the shape at hand.
            other: the shape of that tensor.

        Returns:
            None where a dim there would be of more than one kind, or the sizes are not known to agree.
        """
        if self.is_plain and len(other) >= 2 and same_shape(own[-2:], other[-2:]):
            return Arrangement.plain(len(other))
        mine, theirs = (
            [d for d, size in enumerate(shape) if not known_true(size == 1)] for shape in (own, other)
        )
        runs = alignment([own[d] for d in mine], [other[d] for d in theirs])
        if runs is None:
            return None
        groups: list[list[int]] = []
        for group in (self.lead, self.rows, self.columns):
            dims = [d for d in group if d in mine]
            found: list[int] = []
            while dims:
                run = next((run for run in runs if mine[run[0].start] == dims[0]), None)
                wanted = [] if run is None else [mine[i] for i in run[0]]
                if run is None or dims[: len(wanted)] != wanted:
                    return None
                found += [theirs[i] for i in run[1]]
                dims = dims[len(wanted) :]
            groups.append(found)
        return _with_units(groups, [d for d in range(len(other)) if d not in theirs])

    def single(self, shape: Sequence[Any]) -> Arrangement | None:
        """The arrangement with one dim of queries and one of keys; further ones of size 1 become leading."""
        spare: list[int] = []
        kept: list[tuple[int, ...]] = []
        for group in (self.rows, self.columns):
            large = [d for d in group if not known_true(shape[d] == 1)] or list(group[-1:])
            if len(large) != 1:
                return None
            kept.append((large[0],))
            spare += [d for d in group if d != large[0]]
        lead = _inserted(list(self.lead), spare)
        return Arrangement(tuple(lead), kept[0], kept[1])

    def seen(self, node: Any, shape: Sequence[Any]) -> Any:
        """A tensor that acts on scores of a shape, seen as (*lead, queries, keys); a number as it is."""
        value = torch_ops.tensor(node)
        if self.is_plain or value is None or value.dim() == 0:
            return node
        operand = Operand.of(node)
        assert operand is not None
        operand = operand.padded(len(shape)).permute(self.order)
        if len(self.rows) == 1 == len(self.columns):
            return operand
        lead, whole, merged = len(self.lead), list(operand.shape), list(operand.shape[: len(self.lead)])
        for first, group in ((lead, self.rows), (lead + len(self.rows), self.columns)):
            places = range(first, first + len(group))
            if all(known_true(whole[i] == 1) for i in places):
                merged.append(1)
                continue
            for i, dim in zip(places, group, strict=True):
                whole[i] = shape[dim]
            merged.append(product([whole[i] for i in places]))
        return operand.expand(whole).reshape(merged)


def is_view(op: torch_ops.Op) -> bool:
    """Whether an operation keeps all elements in their order: `x[:, 0]` of one row, and `x[:, None]`, too."""
    if op.name in torch_ops.VIEWS:
        return True
    index = op["index"] if isinstance(op["index"], tuple) else (op["index"],)
    before, after = torch_ops.tensor(op.input), torch_ops.tensor(op.node)
    if op.name != "getitem" or before is None or after is None:
        return False
    basic = all(i is None or i is Ellipsis or (type(i) is int) or isinstance(i, slice) for i in index)
    return basic and known_true(product(before.shape) == product(after.shape))


def permuted(operand: Operand, order: Sequence[int]) -> Operand:
    """An operand of a product with its dims in another order; a transposition of the graph is taken back."""
    rank = operand.value.dim()
    missing = len(order) - rank
    if missing > 0 and list(order[:missing]) == list(range(missing)):
        order = [d - missing for d in order[missing:]]
    elif missing > 0:
        operand = operand.padded(len(order))
    if list(order) == list(range(len(order))):
        return operand
    op = torch_ops.read(operand.node)
    dims = permutation(op) if op is not None and not operand.steps else None
    base = (
        Operand.of(op.input)
        if op is not None and dims is not None and isinstance(op.input, fx.Node)
        else None
    )
    if dims is None or base is None:
        return operand.permute(order)
    return base.permute([dims[d] for d in order])


def _with_units(groups: list[list[int]], units: list[int]) -> Arrangement | None:
    """Dims of size 1 are leading, but where there is no other dim of queries or keys.

    A single query needs no dim.
    """
    lead, rows, columns = groups
    for group in (columns, rows):
        if not group and units:
            group.append(units.pop())
    if not columns:
        return None
    return Arrangement(tuple(_inserted(lead, units)), tuple(rows), tuple(columns))


def _inserted(lead: list[int], units: list[int]) -> list[int]:
    """Leading dims and others of size 1, in order where they are."""
    return sorted([*lead, *units]) if lead == sorted(lead) else [*units, *lead]
