"""The registry of fusions: the package's own, and those of other packages."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib import metadata
from typing import Any, get_args

from . import config, fusions
from .fusion import Fusion, Stage
from .sites import error_text

log = logging.getLogger(__name__)

#: Entry-point group through which other packages add fusions.
GROUP = "inductor_fusions.fusions"


@dataclass(frozen=True)
class Foreign:
    """An entry point of another package.

    Attributes:
        name: of the entry point.
        package: the distribution that declares it.
        problem: why it gave nothing, or "".
    """

    name: str
    package: str
    fusions: tuple[Fusion, ...] = ()
    problem: str = ""


def foreign() -> tuple[Foreign, ...]:
    """The entry points of other packages, loaded, but for those that `config.skip` names.

    Without `config.plugins` there is none, and nothing of theirs is imported.
    One that cannot be loaded is named in a warning and left out; `config.strict` raises instead.
    """
    return _loaded(config.skipped()) if config.plugins else ()


@functools.lru_cache
def _loaded(skipped: frozenset[str]) -> tuple[Foreign, ...]:
    found: list[Foreign] = []
    taken = {fusion.name for fusion in fusions.ALL}
    entries = sorted(metadata.entry_points(group=GROUP), key=lambda e: (e.name, e.value))
    known = {*taken, *(entry.name for entry in entries)}
    for entry in entries:
        if entry.name in skipped:
            continue
        package = entry.dist.name if entry.dist is not None else "?"
        try:
            given = _checked(entry.load(), taken)
        except Exception as error:
            if config.strict:
                raise
            problem = error_text(error)
            log.warning("the fusion %s of %s was not loaded: %s", entry.name, package, problem)
            log.info("traceback", exc_info=True)
            found.append(Foreign(entry.name, package, problem=problem))
            continue
        taken |= {fusion.name for fusion in given}
        found.append(Foreign(entry.name, package, given))
    for name in sorted(skipped - known - taken):
        near = difflib.get_close_matches(name, known | taken, n=1, cutoff=0.0)
        log.warning("INDUCTOR_FUSIONS_SKIP has %s, which is no fusion; did you mean %s?", name, near[0])
    return tuple(found)


def _checked(loaded: Any, taken: set[str]) -> tuple[Fusion, ...]:
    given = tuple(loaded) if isinstance(loaded, (list, tuple)) else (loaded,)
    for fusion in given:
        if not isinstance(fusion, Fusion):
            raise TypeError(f"it is a {type(fusion).__name__}, not a Fusion")
        if fusion.stage not in get_args(Stage):
            raise ValueError(f"stage {fusion.stage!r} is not one of {', '.join(get_args(Stage))}")
        for where, names in (("before", fusion.before), ("after", fusion.after)):
            if isinstance(names, str):  # whose letters would be taken for names
                raise TypeError(f"{where} must be a tuple of names, not {names!r}")
        if fusion.name in taken or config.toggle_of(fusion.name):
            raise ValueError(f"the name {fusion.name!r} is already that of a fusion or of an entry of config")
    return given


def of(stage: str | None = None) -> tuple[Fusion, ...]:
    """The fusions of a stage, or of all, in the order in which they run."""
    return _of(stage, foreign())


@functools.lru_cache
def _of(stage: str | None, others: tuple[Foreign, ...]) -> tuple[Fusion, ...]:
    known = [*fusions.ALL, *(fusion for entry in others for fusion in entry.fusions)]
    stages = (stage,) if stage is not None else get_args(Stage)
    return tuple(fusion for s in stages for fusion in ordered(f for f in known if f.stage == s))


def ordered(given: Iterable[Fusion]) -> list[Fusion]:
    """Fusions so that each runs before and after those that it names, else as they are given."""
    known = {fusion.name: fusion for fusion in given}
    earlier: dict[str, set[str]] = {name: set() for name in known}
    for fusion in known.values():
        earlier[fusion.name] |= {name for name in fusion.after if name in known}
        for name in fusion.before:
            if name in known:
                earlier[name].add(fusion.name)
    try:
        TopologicalSorter(earlier).prepare()
    except CycleError as error:
        log.warning(
            "these fusions each ask to run before the other, and run in the order listed: %s", error.args[1]
        )
        return list(known.values())
    found: list[Fusion] = []
    while known:
        # The first in the given order that waits for nobody.
        name = next(name for name in known if not earlier[name] & known.keys())
        found.append(known.pop(name))
    return found
