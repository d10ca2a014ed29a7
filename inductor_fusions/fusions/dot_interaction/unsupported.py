"""Reports pairwise products of features that are computed or read in a way for which there is no kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...effects.liveness import readers
from ...graph.dims import WHOLE, appends_dim, is_over_last, permuted_by, selection
from ...graph.einsum import equation_of
from ...graph.search import named_behind
from ...graph.torch_ops import CASTS, PRODUCTS, VIEWS, Op, read, readers_named
from ...operands import tensor
from .between import POINTWISE, are_of_samples, is_of_one, operands_of, product_behind
from .recognise import FLATTENS, features_of, gathered, is_index, is_row, squared

BY_MATRICES = "features are multiplied through matrices"
CORRELATED = "all correlations of features over the samples are read"
OF_FIELDS = "each field has features of its own for each other field (field-aware), which are multiplied"
OF_SETS = "the vectors of two sets are multiplied one by one"
WEIGHTED = "pairs are multiplied by weights of each element before the sum (a kernel of a product network)"
UNSUMMED = "pairs are multiplied without a sum"
VECTORS = "all products are read, each times a vector"
LARGEST = "the largest product of each vector is read (late interaction)"
ONE_BY_ONE = "pairs are multiplied one by one"
ALL = "all products are read, those of both triangles"
OF_TWO = "pairs are selected from the products of two sets of vectors, and only those of one set are fused"
ONE_SCALED = "an operand of the products is scaled: scale the products, so that both are the same vectors"
#: Of these no other form is supported.
WITHOUT_HINT = frozenset(
    {BY_MATRICES, CORRELATED, OF_FIELDS, OF_SETS, OF_TWO, ONE_SCALED, WEIGHTED, UNSUMMED, VECTORS, LARGEST}
)
_RETURNED = "the graph returns all products, as where a boolean mask, which ends it, selects"
#: The most products of fields that are looked for.
_MOST_PAIRS = 64
#: What may be between features and their product with a matrix.
_TO_MATRICES = frozenset("matmul bmm einsum linear sum squeeze unsqueeze transpose permute".split())


def how(node: fx.Node) -> str:
    """Return in which unsupported way a node reads pairwise products of features; "" if it reads none."""
    op = read(node)
    if op is None:
        return ""
    source, index = op.input, op["index"]
    if op.name in PRODUCTS:
        if not _squared_at(node):
            return CORRELATED if _is_correlation(op) else ""
        returned = any(user.op == "output" for user in node.users)
        return _RETURNED if returned else VECTORS if _multiply_vectors(node) else ""
    if op.name == "sum":
        t = _through_matrices(op.input)
        if t is not None and not any(map(_begins_products, readers(t))):
            return BY_MATRICES
        by = read(op.input)
        if by is not None and by.name == "mul" and any(map(_squared_at, (by.input, by["other"]))):
            return "all products are read, each times a factor"
        if is_over_last(op) and _is_weighted(op.input):
            return WEIGHTED
        if fields := _fields_from(node):
            return _of_tensors(fields)
        return ONE_BY_ONE if _begins_loop(node) else ""
    if op.name in ("max", "amax"):
        return _of_largest(op)
    if op.name in ("tril", "triu"):
        rows = all((by := read(user)) is not None and by.name in FLATTENS for user in readers(node))
        return f"all products are read, through {op.name}" if rows and _squared_at(source) else ""
    if op.name in ("stack", "cat"):
        parts = op["tensors"]
        several = isinstance(parts, (list, tuple)) and len(parts) >= 3
        if several and (how := _of_loop(parts)):
            return how
        if _begins_unsummed(node):
            return UNSUMMED
        return _of_tensors(parts) if several and all(map(_of_fields, parts)) else ""
    if op.name in ("getitem", "index_select") and _begins_products(node):
        return BY_MATRICES
    if op.name in ("getitem", "index_select") and _begins_unsummed(node):
        return UNSUMMED
    if op.name == "masked_select":
        return "pairs are selected by a mask" if _squared_at(source) else ""
    if not isinstance(index, tuple) or len(index) not in (2, 3) or index[0] != WHOLE:
        return ""
    if len(index) == 3:
        return _of_indices(source) if all(map(is_index, index[1:])) else ""
    mask = tensor(index[1])
    if mask is not None and mask.dtype == torch.bool and mask.dim() == 2 and _squared_at(source):
        return "pairs are selected by a mask"
    return ""


def of_two_sets(row: fx.Node) -> str:
    """How products of vectors are read, where a node has those of two sets as one row of each sample."""
    view, flat = read(row), tensor(row)
    op = None if view is None else product_behind(view.input)[0]
    made = None if op is None else tensor(op.node)
    if op is None or made is None or flat is None:
        return ""
    if named_behind(row, VIEWS | POINTWISE, ("softmax",), 8):
        return ""  # weights over all pairs, or the scores of an attention
    sides, kept = operands_of(op)
    if (made.dim(), flat.dim()) != (3, 2) or not known_true(flat.shape[0] == made.shape[0]) or not sides:
        return ""
    if kept == [False, False]:
        if not are_of_samples(op):
            return ""
        return ALL if is_of_one(op) else "the vectors of two sets are multiplied, and all products are read"
    first, inner = sides[0], read(sides[1])  # (x @ x.mT) @ w or x @ (x.mT @ w), as in Wukong
    begins = inner is not None and inner.name in PRODUCTS and permuted_by(inner.input, [0, 2, 1]) is first
    return BY_MATRICES if begins or _squared_at(first) else ""


def _of_largest(op: Op) -> str:
    """How products of vectors are read, where an operation takes the largest of each, and they are summed."""
    z, _ = product_behind(op.input)
    if z is None or not is_over_last(op) or operands_of(z)[1] != [False, False]:
        return ""
    waiting = list(readers(op.node))
    for by in filter(None, map(read, waiting)):
        if by.name in ("sum", "mean"):
            return LARGEST
        if by.name in {"getitem", "getattr", "mul", "masked_fill"} | VIEWS | CASTS and len(waiting) < 8:
            waiting += readers(by.node)
    return ""


def _of_indices(z: Any) -> str:
    """How pairs are read that indices take of functions of products, or of those of two sets."""
    (op, function), made = product_behind(z), tensor(z)
    if op is None or made is None or made.dim() != 3 or operands_of(op)[1] != [False, False]:
        return ""
    if not are_of_samples(op):
        return ""
    if not is_of_one(op):
        return OF_TWO
    return f"all products are read, by {function}" if function else ONE_SCALED


def _is_correlation(op: Op) -> bool:
    """Whether a product sums over the rows of two matrices, and its diagonal is read (Barlow Twins)."""
    sides, kept = operands_of(op)
    values = [tensor(side) for side in sides]
    if kept != [True, True] or any(value is None or value.dim() != 2 for value in values):
        return False
    passed = ("mul", "div", "sub", "add", "pow", "square")
    return bool(named_behind(op.node, passed, ("diagonal", "diag"), 8))


def _multiply_vectors(z: fx.Node) -> bool:
    """Whether products of features are read as `z.unsqueeze(-1) * vectors` (SAM)."""
    appended = [user for user in readers(z) if (by := read(user)) is not None and appends_dim(by)]
    made = [tensor(by) for view in appended for by in readers_named(view, {"mul"})]
    return any(each is not None and not known_true(each.shape[-1] == 1) for each in made)


def _through_matrices(product: Any) -> fx.Node | None:
    """t, where a node is `(t[:, i] @ m) * t[:, j]`: with one matrix, or one for each feature or pair."""
    op = read(product)
    if op is None or op.name != "mul":
        return None
    for side, other in ((op.input, op["other"]), (op["other"], op.input)):
        t: fx.Node | None = _source(other)
        products = 0
        known = t is not None or bool(features_of(other))
        while known and isinstance(side, fx.Node) and (by := read(side)) is not None:
            if by.name not in _TO_MATRICES and _source(side) is None:
                break
            if by.name == "sum" and (summed := read(by.input)) is not None and summed.name == "mul":
                by = summed  # a product with a matrix, element by element
            products += by.name in PRODUCTS | {"mul"}
            if by.name == "einsum":
                found = equation_of(by)
                if found is None:
                    break
                side = found.left
            else:
                side = by.input if _source(side) is None else _source(side)
            if products and (t in (side, _source(side)) if t is not None else _of_one_set(side, other)):
                return t or other
    return None


def _of_one_set(node: Any, other: Any) -> bool:
    """Whether two nodes have features of one tensor, or different ones of the same tensors of one feature."""
    first, second = gathered(node), gathered(other)
    if first is not None and second is not None:
        return first[0] is second[0]
    op, others = read(node), features_of(other)
    own = op["tensors"] if op is not None and op.name in ("cat", "stack") else ()
    if not isinstance(own, (list, tuple)):  # also of a tensor that has one more dim later, by `unsqueeze_`
        return False
    return tuple(own) != others and len(own) == len(others) and not set(own).isdisjoint(others)


def _source(node: Any) -> fx.Node | None:
    """The features of which a node is one, or has some."""
    found = gathered(node)
    return _feature(node) if found is None else found[0]


def _begins_products(node: fx.Node) -> bool:
    """Whether a node takes the first features that are multiplied by others through matrices (FiBiNET)."""
    t = _source(node)
    if t is None:
        return False
    takers = [each for each in readers(t) if _source(each) is t]
    for parts in [each for each in readers(t) if _source(each) is None]:
        takers += [each for each in readers(parts) if _source(each) is t]

    def products(taker: fx.Node) -> set[fx.Node]:
        return {user for user in readers(taker) if _through_matrices(user) is t}

    first = next((each for each in sorted(takers) if products(each)), None)
    if first is not node:
        return False
    return gathered(node) is not None or len(set[fx.Node]().union(*map(products, takers))) >= 3


def _begins_unsummed(node: fx.Node) -> bool:
    """Whether a node takes the features that others multiply one by one, and no sum follows (AFM)."""
    t = gathered(node)
    for product in readers(node) if t is not None or features_of(node) else ():
        op = read(product)
        if op is None or op.name != "mul" or op.input is not node:
            continue
        other = gathered(op["other"])
        if t is not None and other is not None and other[0] is t[0] and other[1] is not t[1]:
            return not _is_summed(product)
        if t is None and _of_one_set(node, op["other"]):
            return not _is_summed(product)
    return False


def _is_summed(product: fx.Node, weighted: bool = False) -> bool:
    """Whether a product of features is summed; times weights, over its width."""
    for by in map(read, readers(product)):
        if by is not None and by.name == "sum" and (not weighted or is_over_last(by)):
            return True
        if by is not None and by.name == "mul" and _is_summed(by.node, True):
            return True
    return False


def _begins_loop(node: fx.Node) -> bool:
    """Whether a sum is the first of three products of two features, or more, such as a loop computes."""
    op = read(node)
    pair = None if op is None else read(op.input)
    found = None if pair is None or pair.name != "mul" else _feature(pair.input)
    if found is None:
        return False
    loop: list[fx.Node] = []
    features = list(filter(_feature, readers(found)))
    features += [each for feature in features for each in readers_named(feature, {"squeeze"})]
    for feature in features:
        for product in readers(feature):
            op = read(product)
            sides = [] if op is None or op.name != "mul" else [op.input, op["other"]]
            two = sides and sides[0] is not sides[1] and all(_feature(side) is found for side in sides)
            loop += readers_named(product, {"sum"}) if two else []
            if loop and loop[0] is not node:
                return False
            if len(set(loop)) >= 3:
                return True
    return False


def _of_loop(parts: Any) -> str:
    """How pairs are read, where nodes are products of two tensors of one feature each, of which several read
    one: dot products, or elements behind one linear.
    """
    features, hows = set[Any](), set[str]()
    for op in map(read, parts):
        summed = op is not None and op.name == "sum" and is_over_last(op)
        by = read(op.input) if op is not None and summed else op
        sides = [] if by is None or by.name != "mul" else [by.input, by["other"]]
        held = [tensor(side) for side in sides]
        if not held or None in held or len({str(each.shape) for each in held if each is not None}) != 1:
            return ""
        linears = [made for side in sides if (made := read(side)) is not None and made.name in PRODUCTS]
        own = {linears[0].input if linears and side is linears[0].node else side for side in sides}
        if len(own) != 2 or any(_feature(side) is not None for side in own):
            return ""
        features |= own
        hows.add(BY_MATRICES if linears else ONE_BY_ONE if summed else "")
    return hows.pop() if len(hows) == 1 and len(features) < 2 * len(parts) else ""


def _is_weighted(product: Any) -> bool:
    """Whether a node is `t[:, i] * t[:, j] * weights`, in any order."""
    waiting, found = [product], list[fx.Node]()
    for each in waiting:
        op = read(each)
        if gathered(each) is not None or features_of(each):
            found.append(each)
        elif op is not None and op.name == "mul" and len(waiting) < 5:
            waiting += [op.input, op["other"]]
    return len(waiting) == 5 and len(found) == 2 and _of_one_set(*found)


def _fields_from(node: fx.Node) -> set[fx.Node]:
    """The products of fields of whose sums a node is the first: three or more, or many at once; else none."""
    product = read(node)
    if product is None or not _of_fields(product.input) or not is_over_last(product):
        return set()
    waiting, seen, sums = [product.input], set[fx.Node](), set[fx.Node]()
    while waiting and len(seen) < _MOST_PAIRS:
        each = waiting.pop()
        if each in seen or not (sources := _of_fields(each)):
            continue
        seen.add(each)
        sums.update(readers_named(each, {"sum"}))
        waiting += [other for source in sources for taken in readers(source) for other in readers(taken)]
    made = tensor(product.input)
    at_once = made is not None and made.dim() == 3
    return seen if at_once or (len(sums) >= 3 and min(sums) is node) else set()


def _of_tensors(products: Iterable[fx.Node]) -> str:
    """How products of `_of_fields` are read: if one tensor is in all of them, and others too, of two sets."""
    tensors = list(map(_of_fields, products))
    if len(set().union(*tensors)) == 1 or not set.intersection(*tensors):
        return OF_FIELDS
    # Products through matrices have a report of their own.
    return "" if any(map(_through_matrices, products)) else OF_SETS


def _of_fields(product: Any) -> set[fx.Node]:
    """The tensors of `e[i][:, j] * e[j][:, i]` or `e[:, i, j] * e[:, j, i]`; none of another product."""
    op = read(product)
    if op is None or op.name != "mul":
        return set()
    fields = [_field(side) for side in (op.input, op["other"])]
    (one, i), (other, j) = (each or (None, ()) for each in fields)
    if one is None or other is None or i == j:
        return set()
    same = one is other and len(i) == 2 and i == j[::-1]
    return {one, other} if same or (one is not other and len(i) == 1 == len(j)) else set()


def _field(node: Any) -> tuple[fx.Node, tuple[Any, ...]] | None:
    """The tensor that a node has the features of one field of, and the numbers of the field in it."""
    taken, op = selection(node), read(node)
    if op is None:
        return None
    if taken is not None and taken.part is None and len(taken.index) > 2:
        numbers = tuple(taken.index[dim] for dim in taken.dims)
        plain = taken.dims == list(range(1, len(taken.index) - 1)) and all(type(n) is int for n in numbers)
        return (taken.source, numbers) if plain else None
    index = op["index"] if op.name == "getitem" else None
    if (
        not isinstance(index, tuple)
        or len(index) != 3
        or index[0] != WHOLE
        or not isinstance(op.input, fx.Node)
    ):
        return None
    return (op.input, index[1:]) if all(map(is_index, index[1:])) else None


def _feature(node: Any) -> fx.Node | None:
    """The features of which a node is one: `t[:, 2]`, `t[:, 2:3]`, also squeezed, or `t.unbind(1)[2]`."""
    op = read(node)
    taken = selection(op.input if op is not None and op.name == "squeeze" else node)
    if taken is None:
        return None
    if taken.part is not None:
        return taken.nodes[1]
    return taken.source if any(is_row(taken, keeps_dim) for keeps_dim in (False, True)) else None


def _squared_at(z: Any) -> bool:
    """Whether a node is computed of the products of features with themselves, element by element."""
    op, _ = product_behind(z)
    return op is not None and squared(op.node) is not None
