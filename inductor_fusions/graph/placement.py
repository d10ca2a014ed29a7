"""Where one operation can stand for several products: after all operands, before all readers.

Views, and what is computed of symbolic sizes, cost nothing and move with it; nothing else moves but what is
named. So no cycle is ever made, and no computation changes its place but the products themselves. What lives
longer for it is counted in `memory`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..reasons import Reason
from .facts import move
from .products import VIEWS, Product, readers

aten = torch.ops.aten

_SIZES = frozenset(
    {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, torch.sym_max, torch.sym_min}
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where the operation goes.

    Attributes:
        before: the node in front of which it is inserted.
        hoisted: views of operands, and their sizes, that come to stand in front of it, in order.
        sunk: views of results that come to stand behind it, in order.
    """

    before: fx.Node
    hoisted: tuple[fx.Node, ...]
    sunk: tuple[fx.Node, ...]

    def hoist(self) -> Place:
        """Move the views of operands; the place where they are there."""
        for node in self.hoisted:
            move(node, self.before)
        return replace(self, hoisted=())

    def sink(self) -> None:
        """Move the views of results behind what was inserted: to be called last."""
        for node in self.sunk:
            move(node, self.before)

    def without(self, moved: Container[fx.Node]) -> Place:
        """The same place for one who moves neither of these views: another place has moved them."""
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
        others: operands that it has beside those of the products; also symbolic sizes.
        after: the first node in front of which it may go.
        movable: what operands are made of that may move with it as well.

    Raises:
        Rejected: nowhere.
    """
    members = {p.node for p in products}
    operands = [x for p in products for x in (p.a, p.b, p.bias) if x is not None] + list(others)
    free, roots = _free(operands, members, movable)
    if members & roots:
        raise Reason.ORDER.rejected("one of the products is an operand of another")
    earliest = _first_behind(roots, after)
    users = [user for p in products for user in readers(p.node)]
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
    """The first place where all operands are there, from the node `after` on."""
    free, roots = _free(operands)
    position = _first_behind(roots, after)
    if position is None:
        position = next(iter(next(iter(free)).graph.nodes))
    hoisted = sorted(n for n in free if position <= n)
    return Place(_behind(position, hoisted), tuple(hoisted), ())


def _first_behind(roots: Iterable[fx.Node], after: fx.Node | None) -> fx.Node | None:
    """The first node from `after` on behind which all of these are; None: the first of the graph."""
    last = max(roots, default=None)
    return max((n for n in (after, last and last.next) if n is not None), default=None)


def _behind(position: fx.Node, hoisted: Container[fx.Node]) -> fx.Node:
    """The first node from `position` on that stays, and is no input."""
    while position in hoisted or position.op == "placeholder":
        position = position.next
    return position


def _free(
    operands: Iterable[fx.Node], members: Container[fx.Node] = (), movable: Container[fx.Node] = ()
) -> tuple[set[fx.Node], set[fx.Node]]:
    """What operands are made by that may move, and what that is made of.

    Args:
        operands: tensors or symbolic sizes.
        members: nodes that stay where they are, though they may be views.
        movable: nodes that may move, though they are none.
    """
    free: set[fx.Node] = set()
    roots: set[fx.Node] = set()
    waiting = list(operands)
    while waiting:
        node = waiting.pop()
        if node in free:
            continue
        moves = node in movable or node.target in VIEWS or _is_size(node)
        if node not in members and node.op == "call_function" and moves:
            free.add(node)
            waiting += node.all_input_nodes
        else:
            roots.add(node)
    return free, roots


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
