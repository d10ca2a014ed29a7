"""What the terms of a sum lead to, and why an adapter is part of no sum of products."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ..._inductor import is_backward, known_true, remembered
from ...block_mm import guards
from ...graph.additions import added_matrix, additions_behind, has_size_of, is_sum, summands
from ...graph.products import CASTS, DIV, MUL, RESHAPES, is_floating, kind, product, scaled, users_behind
from ...graph.search import reached
from ...operands import tensor, value
from ...reasons import Reason, Said
from .adapters import adapter_of, step, times_tensor, weighted
from .columns import parts_of
from .masks import mask_in

aten = torch.ops.aten

#: Of a sum without a base: it may be added to what is in memory (`sums`).
NO_PRODUCT = Reason.NO_BASE("the adapter is not added to a product that only this sum reads")
#: Also of one whose base has no gradient of the input.
GRADIENT = Reason.NO_BASE("the two products are those of a gradient, and no base is added to it")


#: How many nodes behind an adapter with several readers may lead to a sum.
_MOST_BEHIND = 32


@remembered(spreads=lambda node: True)
def leads_to_products(node: fx.Node) -> bool:
    """Whether a node is a product or a sum, or has one behind casts, reshapes and factors."""
    if product(node) is not None:
        return True
    if node.op != "call_function" or not is_floating(node):
        return False
    if summands(node) or parts_of(node):
        return True
    below = step(node)
    if below is None or below.kept is not None:
        return weighted(node) is not None
    return len(below.inner.users) == 1 and leads_to_products(below.inner)


def leads_to_adapter(node: Any, in_sums: bool = True) -> bool:
    """Whether a node is an adapter, or has one behind casts, reshapes, factors and masks, or in a sum.

    Args:
        in_sums: whether it may be in a sum.
    """
    while isinstance(node, fx.Node) and node.op == "call_function" and len(node.users) == 1:
        found = product(node)
        if found is not None:
            return (in_sums or added_matrix(found) is None) and adapter_of(node) is not None
        if is_sum(node):
            return in_sums and any(has_size_of(x, node) and leads_to_adapter(x) for x, _ in summands(node))
        below = step(node)
        if below is None:
            return False
        node, in_sums = below.inner, in_sums and below.is_number
    return False


def alone(up: fx.Node) -> Said:
    """Why the result of an adapter is not part of a sum of products."""
    # Several may read it behind a view: the gradient of a factor does as well.
    if is_backward(up.graph) and not additions_behind([up, *users_behind(up, RESHAPES | CASTS)]):
        return GRADIENT
    node, saved = up, False
    for _ in range(8):
        if not node.users:
            return Reason.NO_BASE("nothing reads the result of the two products")
        # The graph returns it for the backward as well, or to its caller.
        readers = [user for user in node.users if user.op != "output"]
        if not readers:
            return Reason.NO_BASE("this graph returns the result of the two products as it is")
        if len(readers) != 1 or (len(node.users) != 1 and is_added_to_product(readers[0])):
            return _read_elsewhere(node)
        (user,) = readers
        saved |= len(node.users) != 1
        by = _other_factor(user, node)
        # `weighted` reads no product that is saved.
        is_smaller = by is not None and known_true(value(by).numel() < value(user).numel())
        if (
            by is not None
            and times_tensor(user) is None
            and weighted(user) is None
            and not (saved and is_smaller)
        ):
            how = "divided" if user.target in DIV else "multiplied"
            if not additions_behind([user]):
                return Reason.NO_BASE(
                    f"the result of the two products is {how} by a tensor, and no base is added"
                )
            if mask_in(by) is not None:
                return Reason.BEHIND_ADAPTER(
                    "a mask is applied to the result of the adapter, or to its gradient"
                )
            if not isinstance(value(user).shape[-1], int):
                return Reason.SYMBOLIC("the number of columns that the adapter adds to is symbolic")
            return Reason.BEHIND_ADAPTER(
                f"the result of the two products is {how} by a tensor before the addition, in a form that is "
                "not supported"
            )
        if user.target is aten.where.self and additions_behind([user]):
            return Reason.BEHIND_ADAPTER(
                "the result of the adapter passes through torch.where, which can remove NaN"
            )
        if adds_pairs(user):
            return Reason.NO_BASE(
                "the sum that reads the result of the two products broadcasts all its terms"
            )
        if summands(user) or added_matrix(product(user)) is node:
            return NO_PRODUCT
        if by is None and user.target not in RESHAPES and user.target not in CASTS and scaled(user) is None:
            reader = guards.called(user)
            return Reason.NO_BASE(
                f"{reader} reads the result of the two products, and no base is added before that"
            )
        node = user
    return Reason.NO_BASE("the result of the two products is not added to anything")


def _read_elsewhere(node: fx.Node) -> Said:
    """The readers of the result of an adapter, if a product is added to it, or to a function of it."""
    if not any(is_added_to_product(user) for user in node.users) and not _is_added_later(node):
        # Who reads it is not said: a function such as softplus may be several operations here.
        return Reason.NO_BASE("no product of a base is added to the result of the two products")
    scaled_by = any(_other_factor(user, node) is not None for user in node.users)
    reason = "the gradient of a factor" if scaled_by else "the backward"
    return guards.read_elsewhere("the result of the adapter", node.users, reason)


def _is_added_later(node: fx.Node) -> bool:
    """Whether a product is added to what is computed of a node, without another product of that."""

    def behind(each: fx.Node) -> Iterable[fx.Node]:
        return () if each is not node and kind(each).kernel else each.users

    inside = set(reached([node], behind, _MOST_BEHIND))
    terms = (x for each in inside for x, _ in summands(each) if isinstance(x, fx.Node) and x not in inside)
    return any(map(leads_to_products, terms))


def adds_pairs(top: fx.Node) -> bool:
    """Whether an addition broadcasts all its terms, to add each element of one to each of another."""
    terms = summands(top)
    return bool(terms) and not any(has_size_of(x, top) for x, _ in terms)


def sums_behind(ups: Iterable[fx.Node]) -> list[fx.Node]:
    """The additions behind products, but those of all pairs."""
    return [top for top in additions_behind(ups) if not adds_pairs(top)]


def is_added_to_product(node: fx.Node) -> bool:
    """Whether a sum behind a node has a product among its other terms."""
    for before, top in enumerate(sums_behind([node])):
        terms = [x for x, _ in summands(top) if isinstance(x, fx.Node)]
        # A sum before this one, which is a term of it, counts as a product.
        if sum(map(leads_to_products, terms)) > min(before, 1):
            return True
    return False


def _other_factor(user: fx.Node, node: fx.Node) -> fx.Node | None:
    """The tensor that a value is multiplied with, or divided by."""
    if user.target not in (*MUL, *DIV) or len(user.args) != 2 or user.args[0] is user.args[1]:
        return None
    first, second = user.args
    by = second if first is node else first if user.target in MUL else None
    return by if isinstance(by, fx.Node) and tensor(by) is not None else None
