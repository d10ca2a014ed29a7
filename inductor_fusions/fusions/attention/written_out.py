"""Matches softmax, also as exponentials divided by their sum.

    e = exp(s - s.amax(-1, keepdim=True));  e / e.sum(-1, keepdim=True)
    exp2(s - s.amax(-1, keepdim=True)) in the place of exp, which scales the scores by log(2)
    (e @ v) / e.sum(-1, keepdim=True)
    exp(s - s.logsumexp(-1, keepdim=True)),  exp(log_softmax(s, -1))
    e / (e.sum(-1, keepdim=True) + exp(-m)) with the m that is subtracted: a sink of 0 ("softmax one")

All of them are equal to a softmax, in the same range. There is one exception: in a row that is filled with a
large number, the logsumexp is that number, and each weight is 1. Other forms are not matched. Exponentials of
scores whose maximum is not subtracted overflow where a softmax does not, and any other operation on
exponentials or on their sum gives other weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph.dims import permutation, picked, reduced, reduction_at
from ...graph.torch_ops import CASTS, COPIES, PRODUCTS, TRANSPOSES, VIEWS, Op, read, reads_metadata
from ...operands import same_shape, tensor
from ...reasons import Reason
from .arrangement import Arrangement
from .normal_form import Attention

SOFTMAXES = ("softmax", "_softmax", "softmin")
#: Functions base ** x, and ln(base): base ** x = exp(x * ln(base)).
EXPONENTIALS = {"exp": 1.0, "exp2": math.log(2.0)}
#: Operations that may be on exponentials and their sum before the division.
_STEPS = CASTS | COPIES | VIEWS | TRANSPOSES | PRODUCTS | frozenset(
    "mul add where masked_fill clamp clamp_min clamp_max maximum max sum getitem dropout nan_to_num".split()
)  # fmt: skip


@dataclass(frozen=True)
class Softmax:
    """A softmax, by whatever operations.

    Attributes:
        weights: the node that holds its result.
        scores: what it is taken of.
        reader: the node that reads the scores on the way to the weights.
        dim: over which dim.
        inside: nodes between the scores and the weights.
        maximum: what the scores have had subtracted, which has to be the largest of each row; or None.
        factor: what the scores are multiplied by.
        sink: a score that takes weight and has no value; or None.
        by_logsumexp: whether the logsumexp is subtracted from the scores, each of them rounded.
        division: what divides the product with the values by the sum of the exponentials; the weights are
            these then.
    """

    weights: fx.Node
    scores: Any
    reader: fx.Node
    dim: Any
    inside: tuple[fx.Node, ...] = ()
    maximum: Any = None
    factor: float = 1.0
    division: fx.Node | None = None
    sink: float | None = None
    by_logsumexp: bool = False

    def check(self, row_maxima: set[fx.Node]) -> None:
        """Refuse exponentials of scores of which something else than one of these nodes is subtracted."""
        if self.maximum is not None and self.maximum not in row_maxima:
            raise Rejected(_OVERFLOWS, _HINT)


_OVERFLOWS = Reason.RANGE(
    "the row maximum is not subtracted directly before exp: exp may overflow, or underflow for all keys, "
    "where softmax does not"
)
_HINT = "torch.softmax"


def weights_of(exp: fx.Node) -> fx.Node | None:
    """The node with the weights of a softmax written as exponentials: a quotient, or the exponential."""
    try:
        return exp if _of_logarithms(exp) is not None else _quotient(exp)
    except Rejected:
        return exp


def softmax_at(weights: fx.Node) -> Softmax:
    """The softmax that a node holds the result of.

    Raises:
        Rejected: the weights are other ones.
    """
    op = read(weights)
    assert op is not None
    if op["out"] is not None:
        raise Reason.OVERWRITTEN.rejected(
            "the softmax writes to a given tensor (out=)", "torch.softmax without out="
        )
    if op.name in SOFTMAXES:
        dims = reduced(op)[0] or (None,)
        return Softmax(weights, op.input, weights, dims[0], factor=-1.0 if op.name == "softmin" else 1.0)
    return _of_logarithms(weights) or _divided(op)


def _of_logarithms(weights: fx.Node) -> Softmax | None:
    """exp(log_softmax(s)) or exp(s - logsumexp(s)).

    Raises:
        Rejected: the logarithm is used elsewhere.
    """
    op = read(weights)
    source = read(op.input) if op is not None and op.name == "exp" and not op.inplace else None
    if source is None or source.inplace:
        return None
    if source.name == "log_softmax":
        _check_only_reader(source.node, weights)
        return Softmax(weights, source.input, source.node, source["dim"], (source.node,))
    by = source["other"] if source.name == "sub" and source["alpha"] is None else None
    total = reduction_at(by, ("logsumexp",), lambda op, appended: None)
    if total is None or total.op.input is not source.input or not (total.keeps and total.op["keepdim"]):
        return None
    _check_only_reader(source.node, weights)
    _check_only_reader(total.op.node, source.node)
    nodes = source.node, total.op.node
    return Softmax(weights, source.input, source.node, total.dim, nodes, by_logsumexp=True)


def _check_only_reader(node: fx.Node, reader: fx.Node) -> None:
    other = set(readers(node)) - {reader}
    if other:
        user = min(other)
        raise Reason.USED_ELSEWHERE.rejected(
            f"the logarithm of the weights or their sum is also used by {user.name}"
            if user.op != "output"
            else "the logarithm of the weights or their sum is returned"
        )


def _divided(op: Op) -> Softmax:
    """Exponentials divided by their sum, before or behind a product with values."""
    divides = _divides(op)
    if divides is None:
        raise Reason.IN_BETWEEN.rejected(
            f"the exponentials are normalised by {op.name}, not divided by their sum"
        )
    of, sums = divides
    if op.inplace:
        raise Reason.OVERWRITTEN.rejected("the division by the sum overwrites the exponentials")
    exp = read(of)
    product = exp if exp is not None and exp.name in PRODUCTS else None
    if product is not None:
        exp = None if sums is None else read(sums.of)
    if exp is not None and exp.name in EXPONENTIALS and exp.inplace:
        raise Reason.OVERWRITTEN.rejected("the exponentials overwrite the scores", _HINT)
    if exp is None or exp.name not in EXPONENTIALS:
        name = "nothing" if exp is None else exp.name
        raise Reason.IN_BETWEEN.rejected(f"{name} is between the exponentials and the division by their sum")
    if sums is None or sums.of not in twins(exp):
        total = read(op["other"])
        name = "nothing" if total is None else total.name
        raise Reason.IN_BETWEEN.rejected(f"the exponentials are divided by {name}, not by their plain sum")
    weights = tensor(exp.node)
    if sums.tensors:
        raise Reason.IN_BETWEEN.rejected(
            "a tensor is added to the sum of the exponentials, such as the exponential of a sink",
            "concatenate the sink to the scores, and drop its column of the weights",
        )
    # The largest exponential of a row is 1, and so is the sum at least.
    if weights is None or sums.least > 1 or not 0 <= 8 * sums.more <= torch.finfo(weights.dtype).eps:
        raise Reason.IN_BETWEEN.rejected("a number is added to the sum of the exponentials, or bounds it")
    if not sums.keeps or (sums.order and product is None):
        raise Reason.SHAPES.rejected(
            "the exponentials are divided by sums over another dim, or with dims in another order"
        )
    shifted, exps = read(exp.input), twins(exp)
    if shifted is None or shifted.name != "sub" or shifted["alpha"] is not None:
        raise Rejected(_OVERFLOWS, _HINT)
    scores, reader, maximum, sink = exp.input, exp.node, shifted["other"], None
    inside = [*sums.nodes, *(exps if product is None else ())]
    if sums.zero is not None:
        highest = _row_maximum(maximum, shifted.input, sums.dim)
        if not highest or sums.zero.maximum is not maximum or sums.zero.function != exp.name:
            raise Rejected(_OVERFLOWS, _HINT)
        inside += [shifted.node, *highest, *sums.zero.nodes]
        scores, reader, maximum, sink = shifted.input, shifted.node, None, math.log(sums.zero.count)
    other = {reader for node in inside for reader in readers(node)} - {*inside, *exps, op.node}
    if other:
        raise Reason.WEIGHTS.rejected(
            f"the exponentials, their sum or their maximum are also used by {min(other).name}"
        )
    held = op.node if product is None else exp.node
    return Softmax(
        held, scores, reader, sums.dim, tuple(inside), maximum, EXPONENTIALS[exp.name],
        None if product is None else op.node, sink,
    )  # fmt: skip


@dataclass(frozen=True)
class Zero:
    """Exponentials of scores of 0, which are added to a sum: `count * exp(-maximum)`.

    Attributes:
        count: how many.
        function: the exponential.
        maximum: what is subtracted of them.
        nodes: that compute it.
    """

    count: float
    function: str
    maximum: Any
    nodes: tuple[fx.Node, ...]


def _zero_at(node: Any, count: float = 1.0) -> Zero | None:
    """The exponentials of zeros that a node holds."""
    op = read(node)
    if op is None or op.inplace:
        return None
    other = op["other"]
    if op.name == "mul" and isinstance(other, (int, float)) and other > 0 and count == 1.0:
        found = _zero_at(op.input, float(other))
        return None if found is None else replace(found, nodes=(*found.nodes, op.node))
    negative = read(op.input) if op.name in EXPONENTIALS else None
    minus = negative is not None and (
        negative.name == "neg" or (negative.name == "mul" and negative["other"] in (-1, -1.0))
    )
    if negative is None or negative.inplace or not minus:
        return None
    return Zero(count, op.name, negative.input, (negative.node, op.node))


def _row_maximum(node: Any, scores: Any, dim: Any) -> tuple[fx.Node, ...]:
    """The nodes that compute the largest score of each row, or 0 if that is larger; () for anything else."""

    def step(op: Op, appended: bool) -> Any:
        raised = op.name in ("clamp", "clamp_min") and op["max"] is None and op["min"] in (0, 0.0)
        return op.input if raised else picked(op)

    found, whole = reduction_at(node, ("amax", "max"), step), tensor(scores)
    if found is None or found.overwrites or not (found.keeps and reduced(found.op)[1]):
        return ()
    same = whole is not None and isinstance(dim, int) and found.dims == (dim % whole.dim(),)
    return found.of(scores) if same else ()


@dataclass(frozen=True)
class Sums:
    """Sums of a tensor along one dim, by which it is divided.

    Attributes:
        of: the tensor.
        dim: along which it is summed.
        keeps: whether they have a dim of size 1 there.
        more: a number that is added to them.
        least: a number that they are raised to, after or before that.
        nodes: that compute them.
        zero: exponentials of zeros that are added to them.
        inverse: whether they are the reciprocals of the sums.
        order: how their dims are permuted; () if they are not.
        tensors: whether tensors are added to them.
    """

    of: Any
    dim: Any
    keeps: bool
    more: float
    least: float
    nodes: tuple[fx.Node, ...]
    zero: Zero | None = None
    inverse: bool = False
    order: tuple[int, ...] = ()
    tensors: bool = False


def _divides(op: Op) -> tuple[Any, Sums | None] | None:
    """What an operation divides, also by a factor of 1 / sums, and the sums; None if it does not divide."""
    if op.name == "div" and op["rounding_mode"] is None:
        sums = sums_at(op["other"])
        return op.input, None if sums is None or sums.inverse else sums
    for of, by in ((op.input, op["other"]), (op["other"], op.input)) if op.name == "mul" else ():
        sums = sums_at(by)
        if sums is not None and sums.inverse:
            return of, sums
    return None


def _inverts(op: Op) -> Any:
    """What an operation takes the reciprocal of; None if it does something else."""
    if op.name == "div" and op.input in (1, 1.0) and op["rounding_mode"] is None:
        return op["other"]
    return op.input if op.name == "reciprocal" else None


def sums_at(node: Any) -> Sums | None:
    """The sums that a node holds, perhaps raised by a small number that avoids a division by zero."""
    more, least, zero, inverse, tensors = 0.0, 0.0, None, False, False
    order: tuple[int, ...] = ()

    def step(op: Op, appended: bool) -> Any:
        nonlocal more, least, zero, inverse, tensors, order
        if (inverted := _inverts(op)) is not None:
            first = not (inverse or more or least or zero)
            inverse = True
            return inverted if first else None
        if not order and (dims := permutation(op)) is not None:
            order = (*dims, len(dims)) if appended else tuple(dims)
            return op.input if order[-1] == len(order) - 1 else None
        number, source = op["other"], op.input
        if op.name == "add" and op["alpha"] is None:
            if not isinstance(source, fx.Node) or _zero_at(source) is not None:
                number, source = source, number
            if zero is None and not appended and (zero := _zero_at(number)) is not None:
                return source
            more += number if isinstance(number, float) else math.inf
            tensors |= tensor(number) is not None
            return source
        if op.name not in ("clamp", "clamp_min") or op["max"] is not None:
            return None
        least = max(least, op["min"]) if isinstance(op["min"], float) else math.inf
        return source

    found = reduction_at(node, ("sum",), step)
    if found is None or found.overwrites or found.op["dtype"] is not None:
        return None
    if zero is not None and (order or found.keeps is not reduced(found.op)[1]):
        return None
    return Sums(
        found.op.input, found.dim, found.keeps, more, least, found.nodes, zero, inverse, order, tensors
    )  # fmt: skip


def twins(exp: Op) -> list[fx.Node]:
    """All nodes that compute the same exponentials, in order."""
    found = ((node, read(node)) for node in readers(exp.input))
    return [n for n, op in found if op is not None and op.name == exp.name and not op.inplace]


def _quotient(exp: fx.Node) -> fx.Node | None:
    """The division of a value computed from exponentials by one computed from their sum, or None."""
    op = read(exp)
    frontier = [exp] if op is None or op.inplace else twins(op)
    seen, summed, inverse = set(frontier), set[fx.Node](), set[fx.Node]()
    if exp not in frontier[:1]:  # another one is the first, or nobody uses it
        return None
    while frontier and len(seen) < 32:
        node = frontier.pop(0)
        for user in readers(node):
            op = read(user)
            if op is None or op.name not in _STEPS | {"div", "reciprocal", "normalize"}:
                continue
            if op.name == "normalize":
                return user
            sides = (op.input, op["other"])
            if op.name == "div" and sides[1] in summed and sides[0] in seen - summed:
                return user
            if op.name == "mul" and {*sides} & inverse and {*sides} & (seen - summed):
                return user
            if node in inverse or (node in summed and _inverts(op) is node):
                inverse.add(user)
            elif op.name in ("div", "reciprocal"):
                continue
            if op.name == "sum" or node in summed:
                summed.add(user)
            if user not in seen:
                seen.add(user)
                frontier.append(user)
    return None


def divided(site: Attention, division: fx.Node, sums: Collection[fx.Node], at: Arrangement) -> None:
    """Read the division of the product by the sums of the weights into `site`, which ends behind it then.

    Args:
        site: read down to the product; its weights are exponentials.
        sums: what computes the sums, the last one first.
        at: what the dims of the weights are.
    """
    op, product_, by = read(division), tensor(site.output), tensor(next(iter(sums)))
    assert op is not None and product_ is not None and by is not None
    used = [user for user in readers(site.output) if not reads_metadata(user, site.output)]
    rows = (*product_.shape[:-1], 1)
    divides, rank = _divides(op), len(at.order)
    assert divides is not None and divides[1] is not None
    order = divides[1].order or range(rank)
    # The dims of the sums are those of the weights: sizes alone do not tell two of them apart.
    placed = tuple(at.order.index(dim) for dim in order) if len(order) == rank else ()
    natural = site.results[0].dims == placed and len(site.results) == 1
    fits = natural and same_shape(by.shape, rows) and not site.drops_nan
    if divides[0] is not site.output or used != [division] or not fits:
        raise Reason.IN_BETWEEN.rejected("the product with v is not divided by the sum of its exponentials")
    site.chain += [site.output, *sums]
    site.ends_behind(division)
