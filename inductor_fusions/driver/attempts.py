"""One compile of a graph with a subset of its sites, shared by `recovery` and the passes."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from dataclasses import replace as with_changes

from torch import fx

from ..reasons import Reason
from ..sites import Site
from .containment import Copy

#: Identifies a site in every attempt: stage, number of the graph in that stage, fusion, name of the anchor,
#: and a number among the candidates with the same anchor.
Key = tuple[str, int, str, str, int]


@dataclass(frozen=True)
class Without:
    """The sites and stages that an attempt leaves out.

    Attributes:
        stages: in these stages, only fusions run that protect a graph from a wrong kernel.
        bare: in these stages, no fusion runs at all.
    """

    sites: frozenset[Key] = frozenset()
    stages: frozenset[str] = frozenset()
    bare: bool = False
    reason: str = ""

    def digest(self) -> str:
        """A part of the cache keys of the attempt; "" if nothing is left out."""
        if not self.sites and not self.stages:
            return ""
        content = repr((sorted(self.sites), sorted(self.stages), self.bare))
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass
class Fused:
    """A site that an attempt fused."""

    key: Key
    site: Site

    @property
    def kind(self) -> tuple[str, str]:
        """Fusion and kernel: sites that share both may fail for the same cause."""
        return self.site.fusion, self.site.kernel


@dataclass
class Attempt:
    """A compile of one graph.

    Attributes:
        before: the sites that an earlier attempt fused, in order.
        copy: the graph as it was before Inductor's first pass; None before that pass.
        fused: the sites that this attempt has fused so far.
        broken: the exception of the compile of its backward, which AOTAutograd ignores.
        communicates: whether its code may wait for other processes.
        cache_keys, graph_keys: the keys of its code in AOTAutograd's cache and in Inductor's cache of graphs.
    """

    model: fx.GraphModule
    without: Without = Without()
    before: tuple[Fused, ...] = ()
    copy: Copy | None = None
    cache_keys: list[str] = field(default_factory=list)
    fused: list[Fused] = field(default_factory=list)
    broken: Exception | None = None
    communicates: bool = False
    graph_keys: list[str] = field(default_factory=list)
    _reported: list[Site] = field(default_factory=list)
    _graphs: Counter[str] = field(default_factory=Counter)
    _keys: Counter[tuple[str, int, str, str]] = field(default_factory=Counter)

    def starts(self) -> None:
        """Copy the graph: Inductor's first pass over it is about to run."""
        if self.copy is None:
            self.copy = Copy(self.model.graph)

    def enters(self, stage: str) -> None:
        """Count a graph: a pass of this stage is about to read it."""
        self._graphs[stage] += 1

    def key(self, stage: str, fusion: str, anchor: fx.Node) -> Key:
        """The key of the next candidate with this anchor."""
        found = (stage, self._graphs[stage], fusion, anchor.name)
        self._keys[found] += 1
        return (*found, self._keys[found])

    def left_out(self, stage: str) -> list[Site] | None:
        """The sites of the current graph for the report, if its stage is left out; else None."""
        if stage not in self.without.stages:
            return None
        graph = (stage, self._graphs[stage])
        return [self.failed(each.site) for each in self.before if each.key[:2] == graph]

    def failed(self, site: Site) -> Site:
        """The report's entry for a site that another attempt fused and this one leaves out."""
        found = with_changes(
            site, verdict="failed", reason=self.without.reason, code=Reason.RAISED.code,
            kernel="", backend="", saved={},
        )  # fmt: skip
        self._reported.append(found)
        return found

    def say_of_left_out(self, reason: str) -> None:
        """Give the entries of left-out sites another reason."""
        for site in self._reported:
            site.reason = reason

    def has_left_out(self, site: Site) -> bool:
        """Whether a site is such an entry: it failed in another attempt and was not tried in this one."""
        return any(each is site for each in self._reported)


_current: ContextVar[Attempt | None] = ContextVar("inductor_fusions_attempt", default=None)


def current() -> Attempt | None:
    """The current attempt of this thread, or None."""
    return _current.get()


@contextlib.contextmanager
def active(attempt: Attempt) -> Iterator[Attempt]:
    """Make `attempt` the current one inside the block."""
    token = _current.set(attempt)
    try:
        yield attempt
    finally:
        _current.reset(token)
