"""Whether longer lifetimes of a graph's values raise its peak memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from ..reasons import Reason
from .lifetimes import Lifetimes, bytes_of
from .products import Product, operands_of
from .profile import Interval
from .sharing import owner, readers

#: What the peak may grow by: relative to it, and in bytes, to which CUDA's allocator rounds large blocks up.
SLACK, ROUNDING = 1 / 1024, 2 * 2**20


class Memory(Lifetimes):
    """The lifetimes of the values that a graph keeps in memory, as Inductor will compile it."""

    def check(
        self, products: Sequence[Product], position: fx.Node, outputs: Sequence[fx.Node] | None = None
    ) -> None:
        """Check that one operation in place of several products does not raise peak memory.

        Args:
            products: the products.
            position: the node in front of which the operation is inserted.
            outputs: the nodes whose values it computes; by default the products. Other products are not
                stored.

        Raises:
            Rejected: the peak over the graph would grow.
        """
        self.settle()
        members = [p.node for p in products]
        made = list(members if outputs is None else outputs)
        # A product whose rows are padded is a view of what is stored.
        inner = {*members, *(owner(node) for node in members)}
        reads = {owner(x) for x in operands_of(products)}
        # Another form of an operand is in memory for these products alone.
        forms = {owner(x) for node in inner for x in node.all_input_nodes}
        gone = {
            node
            for node in (forms | set(made)) - reads
            if (node in self._values or node in made) and set() < set(readers(node)) <= inner
        }
        births = {node: self._values[node].birth for node in reads if node in self._values}
        births |= dict.fromkeys(made, position)
        deaths = {node: self._read_last(node, members) for node in made}
        # A call of several results is no more where all of them are made here.
        calls = {node.all_input_nodes[0] for node in members if node.target is operator.getitem}
        removed = {*members, *(call for call in calls if set(call.users) <= set(members))}
        for node in reads & self._values.keys():
            deaths[node] = max([position, *(user for user in readers(node) if user not in removed)])
        without = (inner - set(made)) | gone
        before = [self._interval(node) for node in {*inner, *made, *gone, *reads} if node in self._values]
        after = [
            Interval(birth, max(deaths[node], birth), bytes_of(node))
            for node, birth in births.items()
            if node not in without
        ]
        peak = self._profile.peak()
        if self._profile.peak(before, after) > peak + min(peak * SLACK, ROUNDING):
            raise Reason.MEMORY.rejected("computing all results at once would raise peak memory")

    def intervals(self) -> dict[fx.Node, Interval]:
        """The interval of each value that is in memory."""
        self.settle()
        return {node: self._interval(node) for node in self._values}

    def peak(self) -> int:
        """The most bytes in memory at once, without the inputs of the graph."""
        self.settle()
        return self._profile.peak()

    def _read_last(self, node: fx.Node, members: Sequence[fx.Node]) -> fx.Node:
        """The last node that reads one of the values made here."""
        if node in self._values:
            return self._interval(node).death
        death = self._death(node)
        # The terms of a sum that is not in memory are read as long as the sum is.
        terms = self._sources(node) & self._values.keys() & set(members)
        return min([death, *([max(self._interval(term).death for term in terms)] if terms else [])])
