"""Observers of the passes, which only `explain()` installs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx


class Watcher:
    """Is told what a pass does; a subclass overrides what it wants to know."""

    def begins(self, stage: str, graph: fx.Graph) -> None:
        """A pass is about to read `graph`."""

    def fused(self, site: Any, removed: Sequence[fx.Node], added: Sequence[fx.Node]) -> None:
        """A site was fused: these nodes went, these came."""

    def ends(self, stage: str, graph: fx.Graph, sites: Sequence[Any]) -> None:
        """The pass is done with `graph` and has met these sites."""

    def mark(self) -> int:
        """How much was told so far."""
        return 0

    def take_back(self, mark: int) -> list[Any]:
        """Forget what was told since: the compile is tried in another way. What that was."""
        return []

    def put_back(self, told: list[Any]) -> None:
        """That was the way after all."""


# Not one a thread: a backward may be compiled in the thread of the autograd engine.
_watchers: list[Watcher] = []


def current() -> Watcher | None:
    """The watcher of now, if there is one."""
    return _watchers[-1] if _watchers else None


@contextlib.contextmanager
def by(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of the passes that run inside."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
