"""Where one operation can replace several products: after all operands, before all readers.

Views and arithmetic on symbolic sizes cost nothing and are moved with the operation. Other nodes are moved
only if the caller names them. So no cycle can arise, and no other computation changes its place. `memory`
checks what lives longer.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..reasons import Reason
from .facts import move
from .products import VIEWS, Product, operands_of, users_behind
from .search import reached

aten = torch.ops.aten

_SIZES = frozenset(
    {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, torch.sym_max, torch.sym_min}
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where the operation goes.

    Attributes:
        before: the node in front of which it is inserted.
        hoisted: views of operands, and their sizes, that are moved in front of it, in order.
        sunk: views of results that are moved behind it, in order.
    """

    before: fx.Node
    hoisted: tuple[fx.Node, ...]
    sunk: tuple[fx.Node, ...]

    def hoist(self) -> Place:
        """Move the views of operands; returns the place without them."""
        for node in self.hoisted:
            move(node, self.before)
        return replace(self, hoisted=())

    def sink(self) -> None:
        """Move the views of results behind what was inserted. Call it last."""
        for node in self.sunk:
            move(node, self.before)

    def without(self, moved: Container[fx.Node]) -> Place:
        """The place without these views, which another place has moved."""
        return replace(
            self,
            hoisted=tuple(n for n in self.hoisted if n not in moved),
            sunk=tuple(n for n in self.sunk if n not in moved),
        )


def find(
    products: Sequence[Product],
    others: Iterable[fx.Node] = (),
    after: fx.Node | None = None,
    movable: Container[fx.Node] = (),
) -> Place:
    """The place where one operation can replace `products`.

    Args:
        products: the products.
        others: further operands of the operation, also symbolic sizes.
        after: the first node in front of which the operation may be inserted.
        movable: nodes that compute operands and may be moved in addition to views.

    Raises:
        Rejected: there is no such place.
    """
    members = {p.node for p in products}
    free, roots = _free([*operands_of(products), *others], members, movable)
    if members & roots:
        raise Reason.ORDER.rejected("one of the products is an operand of another")
    earliest = _first_behind(roots, after)
    users = [user for p in products for user in users_behind(p.node)]
    if earliest is not None and users and min(users) < earliest:
        raise Reason.ORDER.rejected(
            "the result of one product is used before the operands of another are computed",
            "compute the linears that share an input directly after one another",
        )
    position = min(members) if earliest is None else max(min(members), earliest)
    position = min([position, *users])
    hoisted = sorted(n for n in free if position <= n)
    sunk = sorted({n for p in products for n in _views_of(p.node) if n < position})
    return Place(_behind(position, hoisted), tuple(hoisted), tuple(sunk))


def earliest(operands: Iterable[fx.Node], after: fx.Node | None = None) -> Place:
    """The first place, from the node `after` on, where all operands are computed."""
    free, roots = _free(operands)
    position = _first_behind(roots, after)
    if position is None:
        position = next(iter(next(iter(free)).graph.nodes))
    hoisted = sorted(n for n in free if position <= n)
    return Place(_behind(position, hoisted), tuple(hoisted), ())


def _first_behind(roots: Iterable[fx.Node], after: fx.Node | None) -> fx.Node | None:
    """The first node from `after` on that all of these precede; None: the first node of the graph."""
    last = max(roots, default=None)
    return max((n for n in (after, last and last.next) if n is not None), default=None)


def _behind(position: fx.Node, hoisted: Container[fx.Node]) -> fx.Node:
    """The first node from `position` on that is neither moved nor an input of the graph."""
    while position in hoisted or position.op == "placeholder":
        position = position.next
    return position


def _free(
    operands: Iterable[fx.Node], members: Container[fx.Node] = (), movable: Container[fx.Node] = ()
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that compute operands and may be moved, and the nodes that these are computed from.

    Args:
        operands: tensors or symbolic sizes.
        members: nodes that stay, even if they are views.
        movable: nodes that may be moved, although they are not views.
    """

    def moves(node: fx.Node) -> bool:
        free = node in movable or node.target in VIEWS or _is_size(node)
        return free and node not in members and node.op == "call_function"

    found = set(reached(operands, lambda node: node.all_input_nodes if moves(node) else ()))
    free = set(filter(moves, found))
    return free, found - free


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a size of a tensor, or computed from sizes."""
    if not isinstance(node.meta.get("val"), (int, torch.SymInt)):
        return False
    return node.target in _SIZES or getattr(node.target, "__module__", "") == "_operator"


def _views_of(node: fx.Node) -> list[fx.Node]:
    found = []
    for user in node.users:
        if user.op == "call_function" and user.target in VIEWS:
            found += [user, *_views_of(user)]
    return found
