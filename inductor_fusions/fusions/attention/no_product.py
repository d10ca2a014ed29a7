"""Why scores are not read up to a product of queries and keys: it is behind something else, or not there."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import fx

from ..._inductor import hint, is_body, known_true
from ...fusion import Rejected
from ...graph.regions import computed, graphs
from ...graph.torch_ops import ADDING, CASTS, NUMPY, PRODUCTS, TRANSPOSES, VIEWS, Op, read
from ...operands import tensor
from ...reasons import Reason

NO_PRODUCT = Reason.NO_PRODUCT("no product of queries and keys precedes the softmax")
ELEMENTWISE = Reason.NO_PRODUCT("the scores are sums of elementwise products, not a matrix product")
OUTSIDE = Reason.NO_PRODUCT(
    "the scores are computed outside of the region, such as a checkpoint, of the softmax"
)
GIVEN = Reason.NO_PRODUCT(
    "the scores are an input of the graph: what computes them is in front of a graph break, or outside of "
    "the compiled function"
)
VIEWED = Reason.NO_PRODUCT("the scores are the result of a linear, viewed with other dims")
WITHOUT_NUMPY = "write it with torch"
#: How far a product is looked for, in nodes.
REACH = 64
#: Results of these have other sizes than what they are of.
_TAKEN = frozenset("getitem narrow topk gather max min amax amin sort".split())
#: The search for a product ends at these: their results are weights or tokens, not scores.
_ENDS = frozenset(
    "softmax _softmax softmin scaled_dot_product_attention layer_norm rms_norm group_norm".split()
)


def between(op: Op, scores: torch.Tensor) -> Rejected:
    """Why what holds `scores`, the result of `op`, cannot be read further up."""
    if numpy := by_numpy(op):
        return Reason.IN_BETWEEN.rejected(
            f"the scores are computed by {numpy}, which is not read", WITHOUT_NUMPY
        )
    if _is_viewed_linear(op):
        return Rejected(VIEWED)
    source = read(op.input) if op.name == "sum" else None
    if source is not None and source.name == "mul":
        return Rejected(ELEMENTWISE)
    made = _norms_scores(op) or has_product(op.node, scores)
    return Rejected(stands_between(op) if made else NO_PRODUCT)


def at_the_top(node: object) -> Rejected:
    """Why scores that no operation of the graph computes are not read further up."""
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return Rejected(NO_PRODUCT)
    if is_body(node.graph):
        return Rejected(OUTSIDE)
    if isinstance(tensor(node), torch.nn.Parameter):
        return Rejected(NO_PRODUCT)
    return Rejected(GIVEN, "TORCH_LOGS=graph_breaks names the lines of graph breaks")


def by_numpy(op: Op) -> str:
    """The operation of NumPy that `op` is, or whose result it converts; "" if there is none."""
    near = (op, *map(read, op.node.all_input_nodes[:1]))
    return next((each.name for each in near if each is not None and each.name.startswith(NUMPY)), "")


def _is_viewed_linear(op: Op) -> bool:
    """Whether an operation views the result of a linear."""
    current: Op | None = op if op.name in VIEWS else None
    while current is not None and current.name in VIEWS | TRANSPOSES | CASTS:
        current = read(current.input)
    return current is not None and current.name == "linear"


def _norms_scores(op: Op) -> bool:
    """Whether an operation normalises a product of matrices, none of which holds weights."""
    current: Op | None = op if op.name in _ENDS else None
    for _ in range(3):
        made_of = [] if current is None else current.node.all_input_nodes
        current = read(made_of[0]) if made_of else None
        if current is None or current.name in _ENDS:
            return False
        if current.name in PRODUCTS - {"linear"}:
            sides = map(read, current.node.all_input_nodes)
            return not any(side is not None and side.name in (*_ENDS, "dropout") for side in sides)
        if current.name not in {"mul", "div", "add"} | CASTS | VIEWS:
            return False
    return False


def stands_between(op: Op) -> str:
    """The reason where an operation is behind the product."""
    whole = read(op.input) if op.name == "getitem" else None
    if whole is not None and tensor(op.input) is None:  # one of several results
        op = whole
    if op.name in ("topk", "sort"):
        return Reason.IN_BETWEEN(
            f"{op.said} chooses among the scores, as a router of experts or a sparse attention does"
        )
    computes = ", or computes that product" if graphs(op.node) else ""
    return Reason.IN_BETWEEN(f"{op.said} is between the product of q and k and the softmax{computes}")


def has_product(node: fx.Node, scores: torch.Tensor) -> bool:
    """Whether a product that may be that of queries and keys is near above `scores`.

    It has their dims of queries and keys, or both in one.
    """
    sizes = _sizes(scores)
    frontier, seen = [node], {node}
    while frontier and len(seen) < REACH:
        current = frontier.pop(0)
        op, value = read(current), tensor(current)
        # The matrix of a linear is seldom one of keys.
        if op is not None and value is not None and op.name in (PRODUCTS | ADDING) - {"linear"}:
            if value.dim() < 2 < 1 + sum(hint(size) != 1 for size in scores.shape):
                continue  # a number of each query, or of each key
            if {hint(size) for size in value.shape[-2:]} <= sizes:
                return True
            continue
        if op is not None and op.name in _ENDS:
            continue
        if op is not None and value is not None and _is_of_size(value, scores) and _joins_products(op):
            return True
        taken = op is not None and (op.name in _TAKEN or _merges_rows(op))
        whole = tensor(op.input) if op is not None and taken else None
        sizes |= set() if whole is None else _sizes(whole)
        found = [n for n in (*computed(current), *current.all_input_nodes) if n not in seen]
        seen.update(found)
        frontier += found
    return False


def _is_of_size(value: torch.Tensor, scores: torch.Tensor) -> bool:
    return [*map(hint, value.shape)] == [*map(hint, scores.shape)]


def _joins_products(op: Op) -> bool:
    """Whether an operation joins products of queries and keys, such as those of words and entities (LUKE)."""
    parts = op["tensors"] if op.name == "cat" else ()
    values = {part: tensor(part) for part in parts} if isinstance(parts, (list, tuple)) else {}
    return any(value is not None and has_product(part, value) for part, value in values.items())


def _merges_rows(op: Op) -> bool:
    """Whether an operation views the rows of several matrices as those of one."""
    before, after = tensor(op.input), tensor(op.node)
    if op.name not in VIEWS or before is None or after is None or not 0 < after.dim() < before.dim():
        return False
    return known_true(before.shape[-1] == after.shape[-1])


def _sizes(scores: torch.Tensor) -> set[int]:
    """The sizes of single dims, and of two adjacent dims as one."""
    sizes = [hint(size) for size in scores.shape]
    return {*sizes, *(a * b for a, b in pairwise(sizes))}
