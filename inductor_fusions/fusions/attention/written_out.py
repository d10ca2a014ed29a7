"""Matches softmax, also written out as exponentials divided by their sum.

    e = exp(s - s.amax(-1, keepdim=True));  e / e.sum(-1, keepdim=True)
    exp2(s - s.amax(-1, keepdim=True)) in the place of exp, which scales the scores by log(2)
    exp(s - s.logsumexp(-1, keepdim=True)),  exp(log_softmax(s, -1))

All of them are what a softmax computes, in the same range. Exponentials of scores whose largest is not
subtracted overflow where it does not; whatever is done to exponentials or to their sum makes other weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx

from ...fusion import Rejected
from ...graph.torch_ops import CASTS, COPIES, PRODUCTS, VIEWS, Op, appends_dim, read, tensor
from ...liveness import readers
from ...reasons import Reason

if TYPE_CHECKING:
    from ..._inductor import Match

SOFTMAXES = ("softmax", "_softmax")
#: By what the exponent of each is multiplied, to be one of e.
EXPONENTIALS = {"exp": 1.0, "exp2": math.log(2.0)}
#: What people do to exponentials and their sum before they divide.
_STEPS = CASTS | COPIES | VIEWS | PRODUCTS | frozenset(
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
    """

    weights: fx.Node
    scores: Any
    reader: fx.Node
    dim: Any
    inside: tuple[fx.Node, ...] = ()
    maximum: Any = None
    factor: float = 1.0

    def check(self, row_maxima: set[fx.Node]) -> None:
        """Refuse exponentials of scores of which something else than one of these nodes is subtracted."""
        if self.maximum is not None and self.maximum not in row_maxima:
            raise Rejected(_OVERFLOWS, _HINT)


_OVERFLOWS = Reason.RANGE(
    "the row maximum is not subtracted directly before exp: exp may overflow, or underflow for all keys, "
    "where softmax does not"
)
_HINT = "torch.softmax"


def weights_of(match: Match) -> fx.Node | None:
    """What holds weights that are made of exponentials, where they are: a quotient, or the exponential."""
    exp = match.output_node()
    return exp if _of_logarithms(exp) is not None else _quotient(exp)


def softmax_at(weights: fx.Node) -> Softmax:
    """The softmax that a node holds the result of.

    Raises:
        Rejected: the weights are other ones.
    """
    op = read(weights)
    assert op is not None
    if op.name in SOFTMAXES:
        return Softmax(weights, op.input, weights, op["dim"])
    return _of_logarithms(weights) or _divided(op)


def _of_logarithms(weights: fx.Node) -> Softmax | None:
    """exp(log_softmax(s)) or exp(s - logsumexp(s))."""
    op = read(weights)
    source = read(op.input) if op is not None and op.name == "exp" and not op.inplace else None
    if source is None or source.inplace or len(readers(source.node)) != 1:
        return None
    if source.name == "log_softmax":
        return Softmax(weights, source.input, source.node, source["dim"], (source.node,))
    total = read(source["other"]) if source.name == "sub" and source["alpha"] is None else None
    if total is None or total.name != "logsumexp" or total.input is not source.input or not total["keepdim"]:
        return None
    if len(readers(total.node)) != 1:
        return None
    return Softmax(weights, source.input, source.node, _only(total["dim"]), (source.node, total.node))


def _divided(op: Op) -> Softmax:
    """Exponentials divided by their sum."""
    if op.name != "div" or op["rounding_mode"] is not None:
        raise Rejected(
            Reason.IN_BETWEEN(f"the exponentials are normalised by {op.name}, not divided by their sum")
        )
    if op.inplace:
        raise Rejected(Reason.OVERWRITTEN("the division by the sum overwrites the exponentials"))
    exp, total = read(op.input), read(op["other"])
    inside, keeps = [op.input, op["other"]], True
    if exp is not None and exp.name in PRODUCTS:
        raise Rejected(Reason.IN_BETWEEN("the division by the sum follows the product with v"))
    if exp is None or exp.name not in EXPONENTIALS or exp.inplace:
        name = "nothing" if exp is None else exp.name
        raise Rejected(Reason.IN_BETWEEN(f"{name} is between the exponentials and the division by their sum"))
    if total is not None and appends_dim(total):
        total, keeps = read(total.input), False
        inside += [] if total is None else [total.node]
    if total is None or total.name != "sum" or total.input is not exp.node or total["dtype"] is not None:
        name = "nothing" if total is None else total.name
        raise Rejected(Reason.IN_BETWEEN(f"the exponentials are divided by {name}, not by their plain sum"))
    dim, whole = _only(total["dim"]), tensor(exp.node)
    last = whole is not None and isinstance(dim, int) and dim % whole.dim() == whole.dim() - 1
    if bool(total["keepdim"]) is not keeps or not (keeps or last):
        raise Rejected(Reason.SHAPES("the exponentials are divided by sums over another dim"))
    outside = {exp.node: {op.node, total.node}}
    for node in inside:
        other = set(readers(node)) - outside.get(node, {op.node, op["other"]})
        if other:
            raise Rejected(Reason.WEIGHTS(f"the exponentials are also used by {min(other).name}"))
    shifted = read(exp.input)
    if shifted is None or shifted.name != "sub" or shifted["alpha"] is not None:
        raise Rejected(_OVERFLOWS, _HINT)
    factor = EXPONENTIALS[exp.name]
    return Softmax(op.node, exp.input, exp.node, dim, tuple(inside), shifted["other"], factor)


def _only(dim: Any) -> Any:
    """The dim of a list of one."""
    return dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim


def _quotient(exp: fx.Node, limit: int = 32) -> fx.Node | None:
    """What divides something made of exponentials by something made of their sum."""
    frontier, seen, summed = [exp], {exp}, set[fx.Node]()
    while frontier and len(seen) < limit:
        node = frontier.pop(0)
        for user in readers(node):
            op = read(user)
            if op is None or op.name not in _STEPS | {"div", "normalize"}:
                continue
            if op.name == "normalize":
                return user
            if op.name == "div":
                if op["other"] in summed and op.input in seen - summed:
                    return user
                continue
            if op.name == "sum" or node in summed:
                summed.add(user)
            if user not in seen:
                seen.add(user)
                frontier.append(user)
    return None
