"""Says why a product of two linears, or of what is computed of them, is no pair that a kernel computes."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..._inductor import hint
from ...block_mm.columns import Columns, columns, is_apart
from ...block_mm.expressions import NONLINEAR, Expressions, named
from ...graph.additions import has_size_of
from ...graph.concatenation import taken_apart
from ...graph.products import (
    CASTS,
    RESHAPES,
    SPLITS,
    VIEWS,
    identity,
    is_pointwise,
    kind,
    product,
    same_sizes,
    through,
    users_behind,
)
from ...graph.search import reached
from ...operands import tensor, value
from ...reasons import Reason, Said

aten = torch.ops.aten

#: What multiplies two tensors: aten.addcmul(t, x, y) is t + x * y.
PRODUCTS = (aten.mul.Tensor, aten.addcmul.default)
#: Operations between a linear and the product with another one, at most.
MOST_STEPS = 32
CONVOLUTION = Reason.NO_MATRIX(
    "gate and up are convolutions, channels of one, or sums of these; only linears are fused"
)
_OF_LINEARS = Reason.LIMIT(
    "the gate, or what it multiplies, is a sum of linears (as in a cell of an LSTM or a GRU), and the kernel "
    "supports one linear each"
)
_OF_ANOTHER = Reason.INPUTS(
    "the gate, or what it multiplies, is no linear of the input of the other one, but computed of a further "
    "product or convolution of what is computed of such a linear (as in a spatial gating unit, or a gate "
    "behind an attention)"
)
_OF_OTHERS = Reason.INPUTS(
    "functions of two linears of different inputs are multiplied, so one kernel saves no reads, and each "
    "linear is compiled on its own"
)
_OF_RANKS = Reason.INPUTS(
    "linears of different inputs are multiplied, and their products summed or multiplied by a further linear "
    "(as in a low-rank fusion), so one kernel saves no reads, and each linear is compiled on its own"
)
_CONVOLUTION = (aten.convolution.default,)
_GROUPED = (aten._grouped_mm.default,)
_SELECTIONS = (aten.slice.Tensor, aten.select.int, operator.getitem)
#: What keeps elements, in this order or another one.
_ORDERED = RESHAPES | CASTS | {aten.permute.default, aten.clone.default}
_PARTS = frozenset({*SPLITS, *_SELECTIONS})
_EXPAND, _NUMBER = aten.expand.default, aten.full.default


@dataclass
class Side:
    """What one factor of a product is computed of.

    Attributes:
        ends: linears, columns of one, sums of two, and batches of products.
        part: what takes a part of something that is computed of them, or None.
        names: of the pointwise functions behind them.
        bends: whether one of these functions is not linear.
        biased: whether a smaller input of the graph is added, such as a bias of each token.
        mixed: whether other operands take part, such as the norm of a row.
    """

    ends: set[fx.Node] = field(default_factory=set)
    part: fx.Node | None = None
    names: set[str] = field(default_factory=set)
    bends: bool = False
    biased: bool = False
    mixed: bool = False

    @property
    def end(self) -> fx.Node:
        """The only one."""
        (end,) = self.ends
        return end


def other(root: fx.Node, expressions: Expressions) -> tuple[frozenset[fx.Node], Said] | None:
    """The two linears of what looks like a gated pair, and why they are left."""
    factors = factors_of(root)
    read = [side_of(argument) for argument in factors]
    sides = [side for side in read if side is not None and len(side.ends) == 1]
    if len(sides) == 1:  # what the linear reads may be added to the other factor, as a residual
        inputs = {through(x, RESHAPES | CASTS) for x in sides[0].end.all_input_nodes}
        read = [
            side if side is sides[0] else side_of(x, inputs) for side, x in zip(read, factors, strict=True)
        ]
        sides = [side for side in read if side is not None and len(side.ends) == 1]
    if len(sides) != 2:
        return None
    ends = [side.end for side in sides]
    pair = frozenset(side.part or side.end for side in sides)
    if len(pair) < 2:
        return None
    known = [named(expressions.of(argument), end) for argument, end in zip(factors, ends, strict=True)]
    if terms := [term for end in ends for term in _summed(end)]:
        of_channels = any(term.target in _CONVOLUTION for term in terms)
        return (pair, CONVOLUTION if of_channels else _OF_LINEARS) if share_input(*ends) else None
    if not share_input(*ends):
        shapes = [value(argument).shape for argument in factors]
        plain = not any(side.mixed for side in sides)
        of_another = any(_is_of(one, another) for one, another in (ends, ends[::-1]))
        if (plain or any(side.bends for side in sides)) and same_sizes(*shapes) and of_another:
            return pair, _OF_ANOTHER
        if any(map(_is_attention, ends)):
            return None
        # Linears of different inputs are multiplied for many reasons, unless both pass through a function.
        if all(side.bends for side in sides):
            return pair, _OF_ANOTHER if of_another else _OF_OTHERS
        plain = plain and not any(side.bends for side in sides)
        return (pair, _OF_RANKS) if plain and _is_of_ranks(root, ends) else None
    if all(_of_many(end) for end in ends) and all(map(_is_softmax, factors)):
        return None  # weights of attentions
    functions = [name or ", ".join(sorted(side.names)) for name, side in zip(known, sides, strict=True)]
    return pair, _why(ends, functions, any(side.mixed or side.biased for side in sides))


def _is_of_ranks(root: fx.Node, ends: Sequence[fx.Node]) -> bool:
    """Whether a product of linears is summed over other dims than its columns, or multiplied by a linear."""
    many = all(_of_many(end) is not None for end in ends)
    for user in users_behind(root, _ORDERED):
        if user.target is aten.sum.dim_IntList:
            dims: Any = user.args[1]
            rank = value(user.args[0]).dim()
            if dims and all(dim % rank != rank - 1 for dim in dims):
                return True
        elif user.target is aten.mul.Tensor:
            others = [
                x for x in user.args if isinstance(x, fx.Node) and root not in (x, through(x, RESHAPES))
            ]
            if any(_beside(x) is not None for x in others):
                return True
        elif many and user.target in (aten.bmm.default, aten.mm.default):
            return True
    return False


def of_glu(call: fx.Node) -> Said | None:
    """Why a `glu` is left whose halves are no columns of one linear; None where it reads no convolution."""
    whole: Any = call.args[0]
    return CONVOLUTION if whole.target in _CONVOLUTION else None


def side_of(argument: Any, others: Collection[fx.Node] = ()) -> Side | None:
    """Walk from a factor up to the products that it is computed of; None where that is too far.

    Args:
        others: tensors that take part in it, whatever they are computed of.
    """
    side, waiting, seen = Side(), [argument], set[fx.Node]()
    while waiting and len(side.ends) < 2:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if len(seen) > MOST_STEPS:
            return None
        if node in others:
            side.mixed = True
        elif product(node) is not None or columns(node) is not None or _of_many(node) is not None:
            side.ends.add(node)
        elif node.target in RESHAPES or _is_turned_batch(node):
            waiting.append(node.args[0])
        elif _summed(node):
            side.ends.add(node)
        elif (whole := taken_apart(node)) is not None:
            waiting.append(whole)
        elif is_pointwise(node):
            if node.target not in CASTS:
                side.names.add(str(node.target).split(".")[1])
            side.bends |= node.target in NONLINEAR
            biases = [x for x in node.all_input_nodes if _is_bias(x, node)]
            side.biased |= bool(biases)
            waiting += [x for x in node.all_input_nodes if x not in biases]
        elif is_apart(node) is not None:
            side.ends.add(node)
        elif node.target in _PARTS | {aten.permute.default} and _is_read(node):
            side.part = side.part or node
            waiting.append(node.args[0])
        else:
            side.mixed |= node.target is not _NUMBER
            waiting += node.args[:1] if node.target is aten.slice_scatter.default else []
    return side


def _is_bias(node: fx.Node, added: fx.Node) -> bool:
    """Whether a sum adds an input of the graph to more elements than it has."""
    own, whole = tensor(node), tensor(added)  # a size that is added is no tensor
    if added.target is not aten.add.Tensor or through(node, VIEWS | CASTS).op != "placeholder":
        return False
    return own is not None and whole is not None and bool(hint(own.numel()) < hint(whole.numel()))


def _is_read(part: fx.Node) -> bool:
    """Whether a part, or a permutation, is of a tensor or of what `split` returns; no norm's result is."""
    source: Any = part.args[0]
    return tensor(source) is not None or source.target in SPLITS


def _is_softmax(weights: Any) -> bool:
    """Whether a factor is a softmax: exp(scores) / sum(exp(scores))."""
    quotient = through(weights, RESHAPES | CASTS) if isinstance(weights, fx.Node) else None
    if quotient is None or quotient.target is not aten.div.Tensor:
        return False
    exp, total = quotient.args
    summed = isinstance(total, fx.Node) and total.target is aten.sum.dim_IntList and total.args[0] is exp
    return summed and isinstance(exp, fx.Node) and exp.target is aten.exp.default


def _summed(node: fx.Node) -> list[fx.Node]:
    """The two linears or convolutions whose sum a node is, or has a part of."""
    source: Any = node
    while isinstance(source, fx.Node) and source.target in VIEWS | _PARTS:
        source = source.args[0]
    if not isinstance(source, fx.Node) or source.target is not aten.add.Tensor:
        return []
    terms = [through(x, RESHAPES | CASTS) for x in source.args if isinstance(x, fx.Node)]
    known = [product(term) or columns(term) or term.target in _CONVOLUTION for term in terms]
    return terms if len(terms) == 2 and all(known) else []


def _is_of(node: fx.Node, other: fx.Node) -> bool:
    """Whether an operand of a product or a convolution is computed of a linear of the other one's input."""
    inputs, starts = _inputs(other), [x for base in _bases(node) for x in base.all_input_nodes]
    inside = reached(starts, lambda x: x.all_input_nodes if product(x) is None else (), 2 * MOST_STEPS)
    return any(found is not None and identity(found.a) in inputs for found in map(product, inside))


def _bases(node: fx.Node) -> list[fx.Node]:
    """The product that a node is, or has columns or elements of; or a batch of products."""
    found, whole = columns(node), is_apart(node) or _of_many(node)
    return [found.base.node if found is not None else whole or node]


def may_be_gated(node: fx.Node) -> bool:
    """Whether a node multiplies functions of two linears, parts of something, convolutions or batches of
    products.

    A norm of one is a function. Norms of both are multiplied for other reasons: a cosine, or q and k.
    """
    if node.target not in PRODUCTS:
        return False
    beside = [_beside(x) if isinstance(x, fx.Node) else None for x in factors_of(node)]
    return None not in beside and not all(beside)


def factors_of(node: fx.Node) -> tuple[Any, Any]:
    """The two factors of one of `PRODUCTS`."""
    first, second = node.args[-2:]
    return first, second


def _beside(factor: fx.Node) -> set[fx.Node] | None:
    """The smaller tensors, but biases, of a function of linears and their like: such as the norm of each row.

    None of other nodes.
    """
    found, waiting, seen = set[fx.Node](), [factor], set[fx.Node]()
    while waiting:
        node = through(waiting.pop(), _ORDERED)
        if node in seen or node.target in _SELECTIONS:
            continue
        seen.add(node)
        if product(node) is not None:
            continue
        wholes = [x for x in node.all_input_nodes if has_size_of(x, node) and x.target is not _EXPAND]
        if not wholes or not is_pointwise(node):
            if (columns(node) or _of_many(node)) is None:
                return None
            continue
        if len(seen) > MOST_STEPS:
            return None
        smaller = [x for x in node.all_input_nodes if x not in wholes and x.target is not _NUMBER]
        found.update(x for x in smaller if not _is_bias(x, node))
        waiting += wholes
    return found


def _of_many(node: fx.Node) -> fx.Node | None:
    """The product of many matrices, convolution or attention that a node has all columns of, or some."""
    while node.target in _PARTS or (node.target is aten.add.Tensor and not _is_plain(node)):
        (node, *_) = node.all_input_nodes
    many = (aten.bmm.default, aten.baddbmm.default, *_GROUPED, *_CONVOLUTION)
    return node if node.target in many or kind(node).attention else None


def _is_attention(node: fx.Node) -> bool:
    """Whether a node is the result of an attention, or some of it."""
    whole = _of_many(node)
    return whole is not None and kind(whole).attention


def _is_plain(node: fx.Node) -> bool:
    """Whether what a sum adds to its first operand has the size of that, or is a number."""
    other = tensor(node.args[1])
    return other is None or str(other.numel()) == str(value(node).numel())


def _is_turned(node: fx.Node) -> bool:
    """Whether the last dim of a view of a linear is not that of its columns, which are next to each other."""
    strides = [
        hint(stride)
        for stride, size in zip(value(node).stride(), value(node).shape, strict=True)
        if hint(size) != 1
    ]
    return bool(strides) and strides[-1] != min(strides)


def _is_turned_batch(node: fx.Node) -> bool:
    """Whether a node permutes a batch of products, as an einsum of experts does."""
    return (
        node.target is aten.permute.default and _of_many(through(node, RESHAPES | {node.target})) is not None
    )


def share_input(first: fx.Node, second: fx.Node) -> bool:
    """Whether linears or columns of them read one input, or batches of products one operand."""
    return bool(_inputs(first) & _inputs(second))


def _inputs(side: fx.Node) -> set[Any]:
    """What identifies the input of a linear, or of columns of one; both operands of a batch of products."""
    found, whole, apart = product(side) or columns(side), _of_many(side), is_apart(side)
    if found is None and (terms := _summed(side)):
        return _inputs(terms[0]) | _inputs(terms[1])
    if found is not None:
        return {identity(found.base.a if isinstance(found, Columns) else found.a)}
    source = apart or whole
    assert source is not None
    if kind(source).attention:
        return set()
    if source.target in _CONVOLUTION:
        return {identity(source.all_input_nodes[0])}
    operands = source.args[:2] if source.target in _GROUPED else source.args[-2:]
    return {identity(x) for x in operands if isinstance(x, fx.Node)}


def _why(sides: list[fx.Node], functions: list[str], mixed: bool) -> Said:
    """Why there is no kernel for the product of functions of two linears.

    Args:
        functions: of each linear; "" is none.
        mixed: whether they have other operands: a norm, a vector.
    """
    many = [whole.target for side in sides if (whole := _of_many(side)) is not None]
    if any(target in _CONVOLUTION for target in many):
        return CONVOLUTION
    if len(many) == 2 and _inputs(sides[0]) == _inputs(sides[1]):
        return Reason.LIMIT(
            "gate and up are parts of one batch of products (packed experts, or scores), and the kernel "
            "supports one matrix each"
        )
    if many:
        return Reason.LIMIT(
            "gate and up are batches of products with one operand in common (experts, or an input whose rows "
            "are apart in memory), and the kernel supports one matrix each"
        )
    in_rows = all(product(side) or columns(side) for side in sides)
    if not in_rows and (len({is_apart(side) for side in sides}) == 2 or any(map(_is_turned, sides))):
        return Reason.LAYOUT(
            "the results of gate and up are put into another order, as by an einsum that moves large dims"
        )
    if not in_rows:
        return Reason.LAYOUT(
            "gate and up are parts of one linear, but not all of its rows with evenly spaced columns: some "
            "rows, parts of heads, or heads in a dim of their own"
        )
    if mixed:
        between = ", ".join(sorted({name for each in functions for name in each.split(", ") if name}))
        return Reason.ACTIVATION(
            f"other tensors, or the norm of a row, are between the linears and their product ({between})"
        )
    if all(functions):
        return Reason.ACTIVATION(
            f"both linears pass through a function ({'; '.join(functions)}), and the kernel supports one, on "
            "the gate"
        )
    return Reason.ACTIVATION(
        "the gate, or the linear that it multiplies, passes through an unsupported function: "
        f"{''.join(functions)}"
    )
