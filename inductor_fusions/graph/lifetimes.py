"""Lifetimes of the values that a graph keeps in memory.

They are computed once and then updated: a node that is added, erased, moved, or gets other inputs changes
only those of the values around it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from .._inductor import hint, was_erased
from ..operands import tensor, value
from .products import kind
from .profile import Interval, Profile
from .sharing import is_view, owner, readers

#: How many values in a row that are not in memory are looked through, for their sources and their readers.
_DEPTH = 16


@dataclass
class _Stored:
    """A value that is in memory.

    Attributes:
        birth: the node at which it is computed: itself, or the first value of its loop.
        size: its number of elements as text, because a comparison of symbols would add a guard.
        sources: of a pointwise value: the values that its loop reads.
        ready: the node at which the last source is computed; None if there is no source.
        interval: its interval in the profile; None if that is not known yet.
    """

    birth: fx.Node
    size: str
    sources: frozenset[fx.Node]
    ready: fx.Node | None
    interval: Interval | None = None


class Lifetimes:
    """The lifetimes of the values that a graph keeps in memory, as Inductor will compile it.

    Args:
        graph: a functional graph of aten operations.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._values: dict[fx.Node, _Stored] = {}
        self._is_stored: dict[fx.Node, bool] = {}
        #: What is computed where it is read: pointwise, and not in memory.
        self._inlined: set[fx.Node] = set()
        self._read_by: dict[fx.Node, frozenset[fx.Node]] = {}
        #: The loops that read a value, by number of elements: in the order in which they run.
        self._loops: dict[tuple[fx.Node, str], list[tuple[fx.Node, fx.Node]]] = {}
        self._consumers: dict[fx.Node, dict[fx.Node, None]] = {}
        self._born: dict[fx.Node, dict[fx.Node, None]] = {}
        self._dead: dict[fx.Node, dict[fx.Node, None]] = {}
        self._returned: frozenset[fx.Node] = frozenset()
        self._profile = Profile()
        self._touched: dict[fx.Node, None] = dict.fromkeys(graph.nodes)
        #: What nodes read, seen through views, until these nodes or the views are touched.
        self._seen: dict[fx.Node, tuple[fx.Node, ...]] = {}
        #: How many nodes were looked at: what a test of the cost counts.
        self.visits = 0

    # -- what is told of changes ---------------------------------------------------------------------------

    def touch(self, *nodes: fx.Node) -> None:
        """Note nodes that are new, or whose inputs or users changed."""
        for node in nodes:
            self._touched[node] = None
            self._touched[owner(node)] = None

    def forget(self, node: fx.Node) -> None:
        """Forget a node that is about to be erased or moved; `touch` a moved one afterwards."""
        for x in node.all_input_nodes:
            self._touched[x] = self._touched[owner(x)] = None
            self._read_by.pop(owner(x), None)
        self._touched.update(self._consumers.get(node, {}))
        for other in [node, *self._born.get(node, ())]:
            self._touched[other] = None
            self._touched.update(self._drop(other))
        self._is_stored.pop(node, None)
        self._inlined.discard(node)
        for other in list(self._dead.get(node, ())):
            self._touched[other] = None
            self._unsettle(other)

    # -- bringing it up to date -----------------------------------------------------------------------------

    def _interval(self, node: fx.Node) -> Interval:
        found = self._values[node].interval
        assert found is not None, node
        return found

    def settle(self) -> None:
        """Bring all lifetimes up to date."""
        if not self._touched:
            return
        for node in self._touched:
            for reader in (node, *readers(node)) if is_view(node) else (node,):
                self._seen.pop(reader, None)
        touched = [node for node in self._touched if not was_erased(node)]
        self._touched.clear()
        around = dict.fromkeys(touched)
        for node in touched:
            if node.op == "output":  # it has many, of which few change
                before, self._returned = self._returned, frozenset(node.all_input_nodes)
                others = before ^ self._returned
                around.update((owner(x), None) for x in others if not was_erased(x))
            else:
                around.update(dict.fromkeys(self._inputs(node)))
        siblings: dict[fx.Node, None] = {}
        read_by = {node: frozenset(readers(node)) for node in around}
        changed = [node for node, users in read_by.items() if self._store(node, users, siblings)]
        born = self._settle_births([*self._below([*touched, *changed]), *siblings])
        read = [node for node, users in read_by.items() if self._is_read_anew(node, users)]
        self._settle_deaths(self._above([*read, *changed, *born]))

    def _store(self, node: fx.Node, users: Iterable[fx.Node], siblings: dict[fx.Node, None]) -> bool:
        """Find out whether a value is in memory; whether that is new. `siblings` gets the loops around it."""
        self.visits += 1
        now = _is_stored(node, users)
        before, self._is_stored[node] = self._is_stored.get(node), now
        if not now:
            siblings.update(self._drop(node))
        (self._inlined.add if kind(node).pointwise and not now else self._inlined.discard)(node)
        return now is not before

    def _is_read_anew(self, node: fx.Node, now: frozenset[fx.Node]) -> bool:
        """Whether others read a value than when it was asked before, or when it is read last is not known."""
        before, self._read_by[node] = self._read_by.get(node), now
        return now != before or (node in self._values and self._values[node].interval is None)

    def _stores(self, node: fx.Node) -> bool:
        found = self._is_stored.get(node)
        return self._is_stored.setdefault(node, _is_stored(node, readers(node))) if found is None else found

    def _below(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The values in memory that loops compute of nodes, with those among the nodes themselves."""

        def users(node: fx.Node, depth: int) -> Iterator[tuple[fx.Node, int]]:
            left = depth if is_view(node) else depth - 1 if kind(node).pointwise else 0
            if left and not self._stores(node):
                yield from ((user, left) for user in node.users)

        return self._reached(nodes, users)

    def _above(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """The values in memory that loops compute nodes of, with those among the nodes themselves."""

        def sources(node: fx.Node, depth: int) -> Iterator[tuple[fx.Node, int]]:
            for source in self._inputs(node) if node.op != "output" else ():
                if self._stores(source):
                    yield source, 0
                elif depth > 1 and source in self._inlined:
                    yield source, depth - 1

        return self._reached(nodes, sources)

    def _reached(
        self, nodes: Iterable[fx.Node], onwards: Callable[[fx.Node, int], Iterable[tuple[fx.Node, int]]]
    ) -> list[fx.Node]:
        """The values in memory among nodes and what is reached from them.

        Args:
            onwards: where to go from a node, and how many steps may follow there.
        """
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        # Each node with all of the steps that may follow: what takes no step comes right behind it.
        waiting = deque((node, _DEPTH + 2) for node in nodes)
        while waiting:
            node, depth = waiting.popleft()
            if node in seen:
                continue
            seen.add(node)
            self.visits += 1
            if self._stores(node):
                found[node] = None
            for other, left in onwards(node, depth) if depth else ():
                (waiting.appendleft if left == depth else waiting.append)((other, left))
        return list(found)

    def _inputs(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """What a node reads, seen through views."""
        found = self._seen.get(node)
        if found is None:
            found = self._seen[node] = tuple(owner(x) for x in node.all_input_nodes)
        return found

    def _settle_births(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Find out when values are made; those of which that is new.

        Inductor computes pointwise values of one size in one loop where they read the same, so these are
        there as soon as the first of them is.
        """
        found = []
        queue = sorted({node for node in nodes if self._stores(node)})
        queued = set(queue)
        while queue:
            node = heapq.heappop(queue)
            queued.discard(node)
            self.visits += 1
            before = self._values.get(node)
            now = self._looped(node) if kind(node).pointwise else _Stored(node, "", frozenset(), None)
            later: dict[fx.Node, None] = {}
            if before is not None and before.birth is now.birth:
                later.update(self._leave(node, before.sources - now.sources))
                fresh = now.sources - before.sources
                before.sources, before.ready = now.sources, now.ready
                later.update(self._join(node, fresh))
            else:
                later.update(self._consumers.get(node, {}))
                later.update(self._drop(node))
                self._values[node] = now
                self._born.setdefault(now.birth, {})[node] = None
                later.update(self._join(node, now.sources))
                found.append(node)
            for other in later.keys() - queued:
                if other in self._values:
                    queued.add(other)
                    heapq.heappush(queue, other)
        return found

    def _join(self, node: fx.Node, sources: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, None]]:
        """A loop reads these from now on; what may be computed in it as well, and stands behind it."""
        stored = self._values[node]
        for source in sources:
            self._consumers.setdefault(source, {})[node] = None
            loops = self._loops.setdefault((source, stored.size), [])
            at = bisect_left(loops, (stored.birth, node))
            loops.insert(at, (stored.birth, node))
            for birth, other in loops[at + 1 :]:
                self.visits += 1
                ready = self._values[other].ready
                if stored.birth < birth and node < other and (ready is None or not stored.birth < ready):
                    yield other, None

    def _leave(self, node: fx.Node, sources: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, None]]:
        """A loop reads these no more; what may have been computed in it, and stands behind it."""
        stored = self._values[node]
        for source in sources:
            self._consumers[source].pop(node, None)
            loops = self._loops[source, stored.size]
            at = bisect_left(loops, (stored.birth, node))
            del loops[at]
            for birth, other in loops[at:]:
                if birth is not stored.birth:
                    break
                self.visits += 1
                yield other, None

    def _looped(self, node: fx.Node) -> _Stored:
        """A pointwise value as the first loop that computes it stores it."""
        size, sources = str(value(node).numel()), frozenset(self._sources(node))
        births = [self._values[s].birth if s in self._values else s for s in sources]
        ready = max(births, default=None)
        first = node
        for source in sources:
            loops = self._loops.get((source, size), [])
            for birth, other in loops[0 if ready is None else bisect_left(loops, (ready,)) :]:
                self.visits += 1
                if not birth < first:
                    break
                if other < node:
                    first = birth
                    break
        return _Stored(first, size, sources, ready)

    def _settle_deaths(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            stored = self._values.get(node)
            if stored is None:
                continue
            death = max(self._death(node), stored.birth)
            if stored.interval is not None and stored.interval.death is death:
                continue
            self._unsettle(node)
            stored.interval = Interval(stored.birth, death, bytes_of(node))
            self._dead.setdefault(death, {})[node] = None
            self._profile.add(stored.interval)

    def _death(self, node: fx.Node) -> fx.Node:
        """The last node that reads a value; a pointwise reader reads it when its loop runs."""
        last, seen = node, set[fx.Node]()
        users = self._read_by[node]
        for depth in reversed(range(_DEPTH + 1)):
            level = users - seen
            if not level:
                break
            seen |= level
            self.visits += len(level)
            last = max(last, *(self._values[user].birth if user in self._values else user for user in level))
            inlined = level & self._inlined if depth else ()
            users = frozenset().union(*(self._read_by[user] for user in inlined))
        return last

    def _sources(self, node: fx.Node) -> set[fx.Node]:
        """What a pointwise value is computed from, in one loop."""
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        level = [node]
        for depth in reversed(range(_DEPTH)):
            inputs = [source for each in level for source in self._inputs(each)]
            if not inputs:
                break
            level = []
            for source in inputs:
                if source in seen:
                    continue
                self.visits += 1
                seen.add(source)
                if depth and source in self._inlined:
                    level.append(source)
                else:
                    found.add(source)
        return found

    def _drop(self, node: fx.Node) -> dict[fx.Node, None]:
        """Forget a value; what may have been computed in its loop, and stands behind it."""
        stored = self._values.get(node)
        if stored is None:
            return {}
        found = dict(self._leave(node, stored.sources))
        self._unsettle(node)
        del self._values[node], self._born[stored.birth][node]
        return found

    def _unsettle(self, node: fx.Node) -> None:
        stored = self._values.get(node)
        if stored is not None and stored.interval is not None:
            self._profile.remove(stored.interval)
            del self._dead[stored.interval.death][node]
            stored.interval = None


def _is_stored(node: fx.Node, users: Iterable[fx.Node]) -> bool:
    """Whether the value of a node is surely in memory: kernels make it, read it, or it is returned."""
    if node.op != "call_function" or is_view(node) or tensor(node) is None:
        return False
    return kind(node).kernel or any(user.op == "output" or kind(user).kernel for user in users)


def bytes_of(node: fx.Node) -> int:
    found = value(node)
    count = 1
    for size in found.shape:
        count *= hint(size)
    return count * found.dtype.itemsize
