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

#: A site by what is the same in each attempt: stage, number of the graph in that stage, fusion, node, and
#: which one of those with all of that.
Key = tuple[str, int, str, str, int]


@dataclass(frozen=True)
class Without:
    """What an attempt leaves out.

    Attributes:
        sites: single sites.
        stages: those of whose fusions only such run as keep a graph from a kernel that is wrong.
        bare: not even these.
        reason: why, as reports say it.
    """

    sites: frozenset[Key] = frozenset()
    stages: frozenset[str] = frozenset()
    bare: bool = False
    reason: str = ""

    def digest(self) -> str:
        """Part of every cache key that the attempt asks for; "" where nothing is left out."""
        if not self.sites and not self.stages:
            return ""
        told = repr((sorted(self.sites), sorted(self.stages), self.bare))
        return hashlib.sha256(told.encode()).hexdigest()


@dataclass
class Fused:
    """A site that an attempt fused."""

    key: Key
    site: Site

    @property
    def kind(self) -> tuple[str, str]:
        """What it has in common with others that may fail for the same cause."""
        return self.site.fusion, self.site.kernel


@dataclass
class Attempt:
    """A compile of one graph.

    Attributes:
        model: the graph's module.
        without: what is left out.
        before: what an earlier attempt fused, in the order in which it was met.
        copy: the graph as it was before any pass of Inductor; None while none has run.
        fused: what this attempt has fused so far.
        broken: what the compile of its backward has raised, which AOTAutograd ignores.
        communicates: whether its code may wait for other processes.
        cache_keys, graph_keys: what AOTAutograd's cache and that of graphs know its code by.
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
        """Inductor's first pass over the model's graph is about to run."""
        if self.copy is None:
            self.copy = Copy(self.model.graph)

    def enters(self, stage: str) -> None:
        """A pass of a stage is about to read another graph."""
        self._graphs[stage] += 1

    def key(self, stage: str, fusion: str, anchor: fx.Node) -> Key:
        """The key of the next candidate with this anchor."""
        found = (stage, self._graphs[stage], fusion, anchor.name)
        self._keys[found] += 1
        return (*found, self._keys[found])

    def left_out(self, stage: str) -> list[Site] | None:
        """The sites of the present graph as they are reported where its stage is left out, else None."""
        if stage not in self.without.stages:
            return None
        graph = (stage, self._graphs[stage])
        return [self.failed(each.site) for each in self.before if each.key[:2] == graph]

    def failed(self, site: Site) -> Site:
        """A site that another attempt fused, as this one reports it."""
        found = with_changes(
            site, verdict="failed", reason=self.without.reason, code=Reason.RAISED.code,
            kernel="", backend="", saved={},
        )  # fmt: skip
        self._reported.append(found)
        return found

    def has_left_out(self, site: Site) -> bool:
        """Whether a site failed in another attempt, and was not tried in this one."""
        return any(each is site for each in self._reported)


_current: ContextVar[Attempt | None] = ContextVar("inductor_fusions_attempt", default=None)


def current() -> Attempt | None:
    """The attempt that this thread makes now, if any."""
    return _current.get()


@contextlib.contextmanager
def making(attempt: Attempt) -> Iterator[Attempt]:
    """What is compiled inside belongs to `attempt`."""
    token = _current.set(attempt)
    try:
        yield attempt
    finally:
        _current.reset(token)
