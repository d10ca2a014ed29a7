"""The scope of a fusion that reads Dynamo's graph: its facts, and the check of what an operation replaces."""

from __future__ import annotations

import functools
from collections.abc import Collection

from torch import fx

from ..fusion import Scope
from .derivatives import Derivatives, check_operation
from .modes import Modes
from .writes import check_between, check_kept, effects


class DynamoScope(Scope):
    """A graph of Dynamo's with facts that are computed when the first candidate asks for them."""

    @functools.cached_property
    def effects(self) -> list[fx.Node]:
        """The nodes that do more than compute a value."""
        return effects(self.graph)

    @functools.cached_property
    def modes(self) -> Modes:
        """The modes that hold at each node."""
        return Modes(self.graph)

    @functools.cached_property
    def derivatives(self) -> Derivatives:
        """Which derivatives the graph takes."""
        return Derivatives(self.graph, self.modes)

    def check_replaced(
        self, nodes: Collection[fx.Node], last: fx.Node, where: str, saved: Collection[fx.Node]
    ) -> None:
        """Refuse if one operation of this package cannot replace some nodes.

        Args:
            nodes: what it replaces beside `last`.
            last: the last node that it replaces, where it reads its operands.
            where: between what and what the nodes are, for the reason.
            saved: operands that it saves for its backward.

        Raises:
            Rejected: what is read is overwritten in between, or what is saved later; modes differ; or a
                derivative is taken that the operation lacks.
        """
        check_operation([*nodes, last], self.derivatives)  # of tensors with hidden dims writes are unknown
        # A write to any other memory changes nothing of what the nodes, or the operation, read.
        read = {each for node in (*nodes, last) for each in (node, *node.all_input_nodes)}
        check_between(nodes, last, where, self.modes, self.effects, read)
        check_kept(saved, last, self.effects)
