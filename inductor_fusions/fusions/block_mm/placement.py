"""Where one operation can stand for several products: after all operands, before all readers.

Views, and what is computed of symbolic sizes, cost nothing and move with it; nothing else moves but what is
named. So no cycle is ever made, and no computation changes its place but the products themselves. What lives
longer for it is counted.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..._inductor import hint
from ...fusion import Rejected
from .normal_form import VIEWS, Product, is_pointwise, readers, tensor, through, value

aten = torch.ops.aten

#: Operations that read and write memory themselves; loops of Inductor's own are fused away around them.
_KERNELS = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
        aten.convolution.default,
    }
)  # fmt: skip

_SIZES = frozenset(
    {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, torch.sym_max, torch.sym_min}
)  # fmt: skip

#: What the peak may grow by: relative to it, and in bytes, to which CUDA's allocator rounds large blocks up.
SLACK, ROUNDING = 1 / 1024, 2 * 2**20


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
            self.before.prepend(node)
        return replace(self, hoisted=())

    def sink(self) -> None:
        """Move the views of results behind what was inserted: to be called last."""
        for node in self.sunk:
            self.before.prepend(node)

    def without(self, moved: Container[fx.Node]) -> Place:
        """The same place for one who moves neither of these views: another place has moved them."""
        return replace(
            self,
            hoisted=tuple(n for n in self.hoisted if n not in moved),
            sunk=tuple(n for n in self.sunk if n not in moved),
        )


class Order:
    """The order of a graph's nodes, as it is now."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.index = {node: i for i, node in enumerate(self.nodes)}

    def find(
        self,
        products: Sequence[Product],
        others: Iterable[fx.Node] = (),
        after: int = 0,
        movable: Container[fx.Node] = (),
    ) -> Place:
        """Where one operation can stand for `products`.

        Args:
            products: what it computes.
            others: operands that it has beside those of the products; also symbolic sizes.
            after: the first index that it may have.
            movable: what operands are made of that may move with it as well.

        Raises:
            Rejected: nowhere.
        """
        at = self.index
        members = {p.node for p in products}
        operands = [x for p in products for x in (p.a, p.b, p.bias) if x is not None] + list(others)
        free, roots = _free(operands, members, movable)
        if members & roots:
            raise Rejected("one of the products is an operand of another")
        earliest = max([after, *(at[root] + 1 for root in roots)])
        latest = min((at[user] for p in products for user in readers(p.node)), default=len(self.nodes) - 1)
        if earliest > latest:
            raise Rejected(
                "the result of one product is used before the operands of another are there",
                "compute the linears on one input next to each other",
            )
        first = min(at[node] for node in members)
        position = min(max(first, earliest), latest)
        hoisted = {n for n in free if at[n] >= position}
        while self.nodes[position] in hoisted:
            position += 1
        before = self.nodes[position]
        sunk = {n for p in products for n in _views_of(p.node) if at[n] < position}
        by_order = at.__getitem__
        return Place(before, tuple(sorted(hoisted, key=by_order)), tuple(sorted(sunk, key=by_order)))

    def earliest(self, operands: Iterable[fx.Node], after: int = 0) -> Place:
        """The first place where all operands are there, from the index `after` on."""
        free, roots = _free(operands)
        position = max([after, *(self.index[root] + 1 for root in roots)])
        hoisted = {n for n in free if self.index[n] >= position}
        while self.nodes[position] in hoisted or self.nodes[position].op == "placeholder":
            position += 1
        return Place(self.nodes[position], tuple(sorted(hoisted, key=self.index.__getitem__)), ())

    def check_memory(
        self, products: Sequence[Product], place: Place, outputs: Sequence[fx.Node] | None = None
    ) -> None:
        """Refuse where values would live longer at a time of peak memory.

        Args:
            products: as in `find`.
            place: what it returned.
            outputs: the nodes whose values are made there: the products themselves by default. Products
                that are not among them are never stored.

        Raises:
            Rejected: the peak over the graph would grow.
        """
        at, position = self.index, self.index[place.before]
        members = [p.node for p in products]
        made = list(members if outputs is None else outputs)
        births = self._births()
        # A product whose rows are padded is a view of what is stored.
        inner = {*members, *(through(node, VIEWS) for node in members)}
        after = {node: birth for node, birth in births.items() if node not in inner - set(made)}
        after.update(dict.fromkeys(made, position))
        reads = {through(x, VIEWS) for p in products for x in (p.a, p.b, p.bias) if x is not None}
        for node in [n for n in after if n not in reads and set(readers(n)) and set(readers(n)) <= inner]:
            del after[node]  # another spelling of an operand
        deaths = {node: self._death(node, births) for node in {*births, *after, *reads}}
        for node in [n for n in made if n not in births]:
            # The terms of a sum that is not in memory are read as long as the sum is.
            terms = _sources(node) & births.keys() & set(members)
            deaths[node] = min([deaths[node], max((deaths[term] for term in terms), default=deaths[node])])
        later = dict(deaths)
        # A call of several results is no more where all of them are made here.
        calls = {node.all_input_nodes[0] for node in members if node.target is operator.getitem}
        gone = {*members, *(call for call in calls if set(call.users) <= set(members))}
        for node in reads & births.keys():
            others = [at[user] for user in readers(node) if user not in gone]
            later[node] = max([position, *others])
        peak = self._peak(births, deaths)
        if self._peak(after, later) > peak + min(peak * SLACK, ROUNDING):
            raise Rejected("all results at once would need more memory than one after the other")

    def _births(self) -> dict[fx.Node, int]:
        """When each stored value is made, in the unfused graph.

        Inductor computes pointwise values of one size in one loop where they read the same, so these
        are there as soon as the first of them is.
        """
        births: dict[fx.Node, int] = {}
        loops: list[tuple[int, str, set[fx.Node]]] = []
        for node in self.nodes:
            if not _is_stored(node):
                continue
            birth = self.index[node]
            if is_pointwise(node):
                sources = _sources(node)
                ready = max((births.get(s, self.index[s]) for s in sources), default=0)
                size = str(value(node).numel())
                joined = [at for at, other, read in loops if other == size and read & sources and at >= ready]
                birth = min([birth, *joined])
                loops.append((birth, size, sources))
            births[node] = birth
        return births

    def _death(self, node: fx.Node, births: dict[fx.Node, int], depth: int = 16) -> int:
        """When a value is read last: by what is computed in a loop, when that loop runs."""
        last = self.index[node]
        for user in readers(node):
            if user in births:
                last = max(last, births[user])
            elif depth and is_pointwise(user):
                last = max(last, self._death(user, births, depth - 1))
            else:
                last = max(last, self.index[user])
        return last

    def _peak(self, births: dict[fx.Node, int], deaths: dict[fx.Node, int]) -> int:
        change = [0] * (len(self.nodes) + 2)
        for node, birth in births.items():
            size = _bytes(node)
            change[birth] += size
            change[max(deaths[node], birth) + 1] -= size
        peak = live = 0
        for step in change:
            live += step
            peak = max(peak, live)
        return peak


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


def _is_stored(node: fx.Node) -> bool:
    """Whether the value of a node is surely in memory: kernels make it, read it, or it is returned."""
    if node.op != "call_function" or tensor(node) is None or node.target in VIEWS:
        return False
    return _is_kernel(node) or any(_is_kernel(user) or user.op == "output" for user in readers(node))


def _sources(node: fx.Node) -> set[fx.Node]:
    """What a pointwise value is computed from, in one loop."""
    found: set[fx.Node] = set()
    waiting, seen = [through(x, VIEWS) for x in node.all_input_nodes], set()
    while waiting:
        source = waiting.pop()
        if source in seen:
            continue
        seen.add(source)
        if is_pointwise(source) and not _is_stored(source):
            waiting += [through(x, VIEWS) for x in source.all_input_nodes]
        else:
            found.add(source)
    return found


def _is_kernel(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    target: Any = node.target
    name = getattr(target, "namespace", "")
    return target in _KERNELS or name not in ("aten", "prims", "_operator") or "scaled_dot" in str(target)


def _bytes(node: fx.Node) -> int:
    found = value(node)
    count = 1
    for size in found.shape:
        count *= hint(size)
    return count * found.dtype.itemsize
