"""Reports attention whose weights are no softmax of a matrix of scores.

They are a sigmoid of the scores, a square of relu, decays; or a softmax over the edges at a node of a graph.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import fx

from ..._inductor import known_true
from ...effects.writes import storage, written
from ...fusion import Candidate, Rejected, Reported
from ...graph.dims import is_transposed
from ...graph.einsum import equation_of, operands
from ...graph.search import named_behind
from ...graph.torch_ops import ADDING, CASTS, COPIES, PRODUCTS, TRANSPOSES, VIEWS, Op, read, scaled_by
from ...operands import tensor, text
from ...reasons import Reason
from .operands import product
from .written_out import EXPONENTIALS, SOFTMAXES, weights_of

#: Functions of scores.
_FUNCTIONS = frozenset(
    "sigmoid hardsigmoid log_sigmoid relu relu6 leaky_relu pow square silu gelu tanh elu erf clamp abs "
    "softplus exp exp2 normalize gumbel_softmax".split()
)
_MASKS = frozenset("tril triu masked_fill where mul".split())
#: What is said where numbers alone multiply the products.
_SCALE = "a scale"
_PASSED = (
    _FUNCTIONS
    | _MASKS
    | CASTS
    | VIEWS
    | COPIES
    | TRANSPOSES
    | frozenset("div add sub neg dropout getattr".split())
)
_READ = _PASSED | PRODUCTS | ADDING | frozenset(SOFTMAXES)
#: What sums elements of the same index.
_SCATTERS = frozenset("scatter_add scatter_reduce index_add index_reduce index_put".split())
#: What may be between exponentials and such a sum, and between it and a division.
_TO_SUMS = VIEWS | CASTS | COPIES | frozenset("expand expand_as mul add clamp clamp_min getitem".split())
_OF_SUMS = _TO_SUMS | frozenset("index_select gather reciprocal".split())
#: What may be between one state and the next, and between a state and the product that reads it.
_TO_STEPS = VIEWS | CASTS | COPIES | frozenset({"mul", "getitem"})
_LINEAR = Reason.NO_PRODUCT(
    "keys are multiplied by values first, and queries by that (linear attention): there are no scores"
)
_RECURRENT = Reason.NO_PRODUCT(
    "each step adds an outer product to a state, which a product reads (a recurrence, as of the delta rule): "
    "there is no matrix of scores"
)
_CONCATENATED = Reason.NO_PRODUCT(
    "the weights are made of the concatenated features of each pair, not of a product of queries and keys"
)
_AT_ONCE = Reason.NO_PRODUCT(
    "one einsum multiplies queries, keys and values, and no softmax is in between (a state space model as "
    "attention, linear attention)"
)
_DRAWN = Reason.IN_BETWEEN("gumbel_softmax draws numbers that are added to the scores")
#: How far the product of pairs is looked for, in nodes.
_REACH = 32


def without_softmax(node: fx.Node) -> Candidate | None:
    """A product of values with weights that are made of scores without a softmax."""
    op = read(node)
    if op is None or op.name not in PRODUCTS - {"linear"}:
        return None
    sides = operands(op) if op.name == "einsum" else [op.input, op["other"]]
    turned = [is_transposed(side) for side in sides]
    if op.name == "einsum":
        found, turned = equation_of(op), []  # none of what is no product of two tensors
        if found is not None:
            turned = [not keeps for keeps in found.keeps_last]
        elif _has_scores_and_values(op):
            return Reported(node, Rejected(_AT_ONCE), {"product": text(tensor(node))})
    for weights, values, values_turned in zip(sides, sides[::-1], turned[::-1], strict=False):
        name, channels_first = _function(weights) if isinstance(weights, fx.Node) else ("", False)
        held, made = tensor(values), tensor(weights)
        # A matrix that mixes heads, or keys, is not one of values for each sample.
        many = name == _SCALE or (made is not None and made.dim() > 2)
        mixes = many and (held is None or held.dim() < 3)
        plain = name and not mixes and (channels_first or not values_turned)
        if plain and not _gets_softmax(weights):
            why = Reason.IN_BETWEEN.rejected(
                f"{name}, and no softmax, is between the product of q and k and the product with v",
                "nothing: fused kernels compute the softmax of the scores",
            )
            if name == "gumbel_softmax":
                why = Rejected(_DRAWN, "write it as (scores + numbers).softmax(dim)")
            return Reported(node, why, {"weights": text(tensor(weights))})
    for side, other in zip(sides, sides[::-1], strict=True):
        said = _LINEAR if _sums_tokens(side, other) else _CONCATENATED if _is_of_concatenated(side) else ""
        if said:
            return Reported(node, Rejected(said), {"weights": text(tensor(side))})
    return None


def recurrent(added: fx.Node) -> Candidate | None:
    """The first of the sums of a state and an outer product, whose result a product and the next sum read."""
    state = _state_before(added)
    if state is None or _state_before(_through_factors(state)) is not None:
        return None
    steps = named_behind(added, _TO_STEPS, {"add"}, _REACH)
    is_returned = added.graph.output_node() in added.users
    goes_on = is_returned or any(_state_before(step) is not None for step in steps)
    if not goes_on or not named_behind(added, _TO_STEPS | {"add"}, PRODUCTS | {"sum"}, _REACH):
        return None
    return Reported(added, Rejected(_RECURRENT), {"state": text(tensor(added))})


def _state_before(added: Any) -> fx.Node | None:
    """What an outer product is added to."""
    op = read(added)
    if op is None or op.name != "add":
        return None
    sides = [op.input, op["other"]]
    return next((one for one, other in (sides, sides[::-1]) if _is_outer(other)), None)


def _through_factors(node: Any) -> Any:
    while (op := read(node)) is not None and op.name in ("mul", "sub"):
        node = op.input
    return node


def _is_outer(node: Any) -> bool:
    """Whether a node is the product of all elements of one vector with all of another, for each sample."""
    op, made = read(node), tensor(node)
    if op is None or made is None or made.dim() < 3:
        return False
    if op.name == "einsum":
        found = equation_of(op)
        if found is None:
            return False
        one, other, result = set(found.first), set(found.second), set(found.result)
        return one | other == result and one != result and other != result
    sides = [tensor(side) for side in (op.input, op["other"])]
    ones = [[known_true(size == 1) for size in side.shape[-2:]] for side in sides if side is not None]
    return op.name in ("mul", "matmul", "bmm") and sorted(ones) == [[False, True], [True, False]]


def _sums_tokens(node: Any, other: Any) -> bool:
    """Whether a node is a product of keys and values, which sums over their tokens: `k.mT @ v`.

    Or `v @ k`, times queries, where v and they have their features in front of as many tokens (Sana), and
    perhaps the keys as well: `v @ k.mT` (EfficientViT).
    Functions of queries and keys tell it from `x @ a @ b` of a low rank.
    """
    op = _made_by(node)
    found = None if op is None or op.name not in PRODUCTS - {"linear"} else equation_of(op)
    if op is None or found is None or found.keeps_last == [True, False] or len(found.summed) != 1:
        return False
    if min(len(found.first), len(found.second)) < 3 or any(map(_is_softmax, (found.left, found.right))):
        return False
    one, made, queries = (tensor(each) for each in (found.left, op.node, other))
    assert one is not None and made is not None
    tokens = one.shape[found.first.index(found.summed)]
    if found.keeps_last[0]:
        return all(known_true(tokens >= columns) for columns in made.shape[-2:])
    # What is scaled may be scores of a few tokens.
    if op.node is not node or queries is None or queries.dim() < 3:
        return False
    same = known_true(queries.shape[-1] == tokens)
    narrow = all(known_true(tokens > columns) for columns in made.shape[-2:])
    return same and narrow and _is_mapped(found.right) and _is_mapped(other)


def _is_mapped(node: Any) -> bool:
    """Whether a node is a function of features, such as `relu(k)` or `elu(k) + 1`."""
    while (op := read(node)) is not None and op.name in {"add"} | VIEWS | CASTS | COPIES | TRANSPOSES:
        if tensor(op["other"]) is not None:
            return False
        node = op.input
    return op is not None and op.name in _FUNCTIONS


def _is_of_concatenated(node: Any) -> bool:
    """Whether a node is a linear, or a convolution, of one output for the features of each pair."""
    op, weights = _made_by(node), tensor(node)
    if op is None or weights is None or op.name not in ("linear", "conv1d", "conv2d"):
        return False
    matrix, made = tensor(op["weight"] if op.name == "linear" else op.rest[1]), tensor(op.node)
    source = read(op.input if op.name == "linear" else op.rest[0])
    whole = made is not None and known_true(product(made.shape) == product(weights.shape))
    single = matrix is not None and known_true(matrix.shape[0] == 1)
    return whole and single and source is not None and source.name == "cat"


def _gets_softmax(scores: fx.Node) -> bool:
    """Whether a softmax is written into the memory of scores, and has a site of its own."""
    own = storage(scores)
    writers = [each for each in scores.graph.nodes if own in map(storage, written(each))]
    return own is not None and any(_is_softmax(each) for by in writers for each in by.all_input_nodes)


def _is_softmax(node: Any) -> bool:
    made = _made_by(node)
    return made is not None and made.name in SOFTMAXES


def _made_by(node: Any) -> Op | None:
    """The operation of which numbers, views and functions of its elements make a node."""
    for _ in range(8):
        op = read(node)
        if op is None or (op.name not in _PASSED and scaled_by(op) is None):
            return op
        node = op.input
    return None


def over_edges(exp: fx.Node) -> Candidate | None:
    """Exponentials that are divided by sums of those with the same index."""
    if weights_of(exp) is not None:
        return None
    for total in named_behind(exp, _TO_SUMS, _SCATTERS, _REACH):
        if named_behind(total, _OF_SUMS, {"div", "reciprocal"}, _REACH):
            summing = read(total)
            assert summing is not None
            why = Reason.NO_PRODUCT.rejected(
                f"{summing.name} sums the exponentials of a softmax, as over the edges of a graph: the "
                "scores are not a matrix product"
            )
            return Reported(exp, why, {"scores": text(tensor(exp))})
    return None


def _function(weights: fx.Node) -> tuple[str, bool]:
    """The last function that makes weights of the products of queries and keys; "" of other tensors.

    And whether the channels of both are in front of the tokens.
    """
    waiting, seen, found = [(weights, "")], {weights}, ("", False)
    while waiting and len(seen) < _REACH:
        node, name = waiting.pop(0)
        op = read(node)
        if op is None or op.name not in _READ:
            continue
        if op.name in SOFTMAXES or (op.name in EXPONENTIALS and weights_of(node) is not None):
            return "", False
        if op.name in PRODUCTS | ADDING:
            pairs, scores = _pairs(op), tensor(node)
            # The product of keys and values of a linear attention sums over all keys.
            wide = pairs is not None and scores is not None and known_true(pairs[0] <= scores.shape[-1])
            if pairs is not None and not found[0] and (name != _SCALE or wide):
                found = name, pairs[1]
            continue
        if scaled_by(op) is not None:
            name = name or _SCALE
        elif name not in _FUNCTIONS and (
            op.name in _FUNCTIONS or (name in ("", _SCALE) and op.name in _MASKS)
        ):
            name = op.name
        before = tensor(node)
        for each in node.all_input_nodes:
            held = tensor(each)
            if held is None or before is None or each in seen or not held.is_floating_point():
                continue
            if known_true(product(held.shape) == product(before.shape)):
                seen.add(each)
                waiting.append((each, name))
    return found


def _has_scores_and_values(op: Op) -> bool:
    """Whether an einsum of three tensors or more sums over features of q and k, and over the keys of v."""
    equation = op["equation"]
    if not isinstance(equation, str) or "." in equation:
        return False
    given, _, result = equation.replace(" ", "").partition("->")
    kept, sides = set(result), [set(side) for side in given.split(",")]
    for q, k, v in itertools.permutations(sides, 3):
        others = set[str]().union(*(side for side in sides if side is not q and side is not k))
        features, keys = (q & k) - kept - others, (k & v) - kept - q
        if features and keys and q & k & v & kept and (q & kept) - k and (v & kept) - k:
            return True
    return False


def _pairs(op: Op) -> tuple[Any, bool] | None:
    """Of the product of two lists of vectors: their size, and whether that is not the last dim of the first.

    None of a linear of each.
    """
    found = None if op.name == "linear" else equation_of(op)
    if found is None or min(len(found.first), len(found.second)) < 3 or len(found.summed) != 1:
        return None
    value, (turned, other) = tensor(found.left), found.keeps_last
    if value is None or turned != other:
        return None
    return value.shape[found.first.index(found.summed)], turned
