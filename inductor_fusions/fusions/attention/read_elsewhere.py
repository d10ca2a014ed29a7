"""Why weights that several operations read are not those of one attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..._inductor import is_forward_of_function
from ...effects.liveness import readers
from ...fusion import Rejected
from ...graph.dims import selection
from ...graph.torch_ops import CASTS, PRODUCTS, TRANSPOSES, VIEWS, read
from ...reasons import Reason

_ONE_BY_ONE = Reason.NO_PRODUCT(
    "the weights are taken apart, and each part multiplies a value of its own (experts, layers)"
)


def several(users: Sequence[fx.Node]) -> Rejected:
    """The reason for weights that these nodes read, not products alone."""
    if not users:
        return Reason.NO_PRODUCT.rejected("no product reads the weights")
    are_parts = len(users) > 1 and all(selection(each, adds=True) is not None for each in users)
    if are_parts and (found := one_by_one(users)):
        return found
    others = [user for user in users if (op := read(user)) is None or op.name not in PRODUCTS]
    returned = [user for user in others if user.op == "output"]
    other = next(iter([*returned, *(user for user in others if not _is_multiplied(user)), *others]))
    returns = any(map(_is_returned, users))
    hint = "do not request the weights: output_attentions=False, need_weights=False" if returns else ""
    return Reason.WEIGHTS.rejected(f"the attention weights are {read_by_other(other)}", hint)


def one_by_one(parts: Sequence[fx.Node]) -> Rejected | None:
    """The reason for weights that are taken apart into these nodes, if each of them multiplies something."""
    return Rejected(_ONE_BY_ONE) if parts and all(map(_multiplies, parts)) else None


def read_by_other(user: fx.Node) -> str:
    """What reads weights beside the attention, as the end of a sentence."""
    if user.op == "output" and is_forward_of_function(user.graph):
        return "returned by the forward of an autograd.Function, or saved for its backward"
    if user.op == "output":
        return "returned"
    op = read(user)
    return f"also used by {op.said if op is not None and op.name == 'getattr' else user.name}"


def _is_multiplied(user: fx.Node) -> bool:
    """Whether a node is a view of the weights that products alone read, as those with values do."""
    op = read(user)
    if op is None or op.name not in VIEWS | TRANSPOSES:
        return False
    read_by = [read(each) for each in readers(user)]
    return bool(read_by) and all(each is not None and each.name in PRODUCTS for each in read_by)


def _multiplies(part: fx.Node) -> bool:
    """Whether some of the weights multiply others, element by element, and nothing else."""
    for user in readers(part):
        op = read(user)
        if op is None or op.name != "mul":
            passed = op is not None and (op.name in VIEWS | CASTS or selection(user, adds=True) is not None)
            if not passed or not _multiplies(user):
                return False
    return True


def _is_returned(node: fx.Node, steps: int = 8) -> bool:
    """Whether what a node makes of the weights leaves the graph, without a product on the way."""
    if node.op == "output":
        return not is_forward_of_function(node.graph)
    op = read(node)
    if op is None or op.name in PRODUCTS or steps == 0:
        return False
    return any(_is_returned(user, steps - 1) for user in readers(node))
