"""Live bytes at each node of a graph, and their peak."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import NamedTuple

from torch import fx


class Interval(NamedTuple):
    """A value in memory: the node that makes it, the node that reads it last, and its size in bytes."""

    birth: fx.Node
    death: fx.Node
    bytes: int


class Profile:
    """The bytes in memory over the nodes of a graph, from gains and losses at births and deaths of values.

    The nodes are in blocks of about the square root of their number: a change visits one block, and a query
    reads one sum of each other block.
    """

    def __init__(self) -> None:
        self._gains: dict[fx.Node, int] = {}
        self._losses: dict[fx.Node, int] = {}
        self._blocks: list[list[fx.Node]] = []
        self._starts: list[fx.Node] = []
        #: Of each block: the sum of its changes and the peak inside it; None if it has changed.
        self._sums: list[tuple[int, int] | None] = []

    def add(self, interval: Interval, sign: int = 1) -> None:
        """Add a value."""
        for changes, node in ((self._gains, interval.birth), (self._losses, interval.death)):
            self._sums[self._block(node)] = None
            changes[node] = changes.get(node, 0) + sign * interval.bytes

    def remove(self, interval: Interval) -> None:
        """Remove a value that was added."""
        self.add(interval, -1)
        for node in {interval.birth, interval.death}:
            if not self._gains.get(node) and not self._losses.get(node):
                self._discard(node)

    def peak(self, without: Iterable[Interval] = (), with_: Iterable[Interval] = ()) -> int:
        """The most bytes at once, if the values `without` were removed and those of `with_` added."""
        gains: dict[fx.Node, int] = {}
        losses: dict[fx.Node, int] = {}
        for sign, intervals in ((-1, without), (1, with_)):
            for interval in intervals:
                gains[interval.birth] = gains.get(interval.birth, 0) + sign * interval.bytes
                losses[interval.death] = losses.get(interval.death, 0) + sign * interval.bytes
        others: dict[int, list[fx.Node]] = {}
        for node in gains.keys() | losses.keys():
            others.setdefault(self._find(node), []).append(node)
        peak = live = 0
        for at, block in enumerate(self._blocks or [[]]):
            if at in others:
                total, most = self._sum(sorted({*others[at], *block}), gains, losses)
            else:
                total, most = self._summed(at)
            peak, live = max(peak, live + most), live + total
        return peak

    def _summed(self, at: int) -> tuple[int, int]:
        found = self._sums[at] if self._blocks else (0, 0)
        if found is None:
            found = self._sums[at] = self._sum(self._blocks[at], {}, {})
        return found

    def _sum(
        self, nodes: Iterable[fx.Node], gains: dict[fx.Node, int], losses: dict[fx.Node, int]
    ) -> tuple[int, int]:
        total = most = 0
        for node in nodes:
            total += self._gains.get(node, 0) + gains.get(node, 0)
            most = max(most, total)
            total -= self._losses.get(node, 0) + losses.get(node, 0)
        return total, most

    def _find(self, node: fx.Node) -> int:
        """The index of the block that a node belongs to."""
        return max(bisect_right(self._starts, node) - 1, 0)

    def _block(self, node: fx.Node) -> int:
        """The index of the block of a node, which is inserted if it is in none."""
        at = self._find(node)
        if node in self._gains or node in self._losses:
            return at
        if not self._blocks:
            self._blocks.append([node])
            self._starts.append(node)
            self._sums.append(None)
            return 0
        block = self._blocks[at]
        insort(block, node)
        self._starts[at], self._sums[at] = block[0], None
        if len(block) > 32 and len(block) ** 2 > 4 * (len(self._gains) + len(self._losses)):
            half = len(block) // 2
            self._blocks[at : at + 1] = [block[:half], block[half:]]
            self._starts.insert(at + 1, block[half])
            self._sums.insert(at + 1, None)
            return at + (node >= block[half])
        return at

    def _discard(self, node: fx.Node) -> None:
        at = self._find(node)
        block = self._blocks[at]
        block.remove(node)
        self._gains.pop(node, None)
        self._losses.pop(node, None)
        if block:
            self._starts[at], self._sums[at] = block[0], None
        else:
            del self._blocks[at], self._starts[at], self._sums[at]
