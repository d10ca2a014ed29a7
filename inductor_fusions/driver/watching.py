"""Observers of the passes, which `explain()` and `run --issue` install."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx


class Watcher:
    """Observes the passes; a subclass overrides the events that it wants."""

    def begins(self, stage: str, graph: fx.Graph) -> None:
        """Called before a pass reads `graph`."""

    def fused(self, site: Any, removed: Sequence[fx.Node], added: Sequence[fx.Node]) -> None:
        """Called after a site was fused, with the nodes that were removed and added."""

    def ends(self, stage: str, graph: fx.Graph, sites: Sequence[Any]) -> None:
        """Called after a pass, with the sites of `graph`."""

    def mark(self) -> int:
        """The number of events so far."""
        return 0

    def take_back(self, mark: int) -> list[Any]:
        """Remove and return the events since a mark: the compile is repeated with other sites."""
        return []

    def put_back(self, told: list[Any]) -> None:
        """Add events that `take_back` returned: that compile is kept."""


# Shared by all threads: a backward may be compiled in a thread of the autograd engine.
_watchers: list[Watcher] = []


def current() -> Watcher | None:
    """The current watcher, or None."""
    return _watchers[-1] if _watchers else None


@contextlib.contextmanager
def observing(watcher: Watcher) -> Iterator[None]:
    """Let `watcher` observe the passes that run inside."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
