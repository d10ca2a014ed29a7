"""Records the sites of this process, and reads them back when a cache serves the code."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx

from . import _inductor, config, records, tags
from .sites import Report, Site, Verdict

__all__ = ["Report", "Site", "Verdict", "clear", "isolated", "report"]

log = logging.getLogger(__name__)

#: A counter with this prefix and the key of the records of a graph is stored with the cache entry of the
#: graph. Inductor counts it again when it serves the entry: this is the only sign that it did.
RECORD = "fusions_record_"


@dataclass
class _Entry:
    """A site of this process.

    Attributes:
        attempt: the compile and the attempt of Dynamo.
        batch: the key of the records of which it is the first site; "" for the others.
        thread: the thread that compiled it.
    """

    attempt: tuple[str, int] | None
    site: Site
    batch: str = ""
    thread: int = field(default_factory=threading.get_ident)


_lock = threading.RLock()
_entries: list[_Entry] = []
#: For the key of each record, how often it was counted: up to the last `clear()`, at the last query, and
#: before the counters of torch were cleared.
_seen: Counter[str] = Counter()
_last: Counter[str] = Counter()
_cleared: Counter[str] = Counter()


# -- reading --------------------------------------------------------------------------------------


def report() -> Report:
    """All sites of the compiles of this process since its start or the last `clear()`, in order.

    If Inductor's cache had the compiled code, no pass ran: the sites of the compile that filled the cache are
    read from its records, and are at the end of the list.
    """
    with _lock:
        unknown = _restore()
        return Report([entry.site for entry in _entries], unknown, are_off())


def are_off() -> bool:
    """Whether no fusion runs: by the setting, or because Inductor's hook has no pass of the package."""
    return not config.enabled or (_inductor.inductor_loaded() and not _inductor.passes_installed())


def clear() -> None:
    """Forget the sites recorded so far."""
    with _lock:
        _entries.clear()
        _seen.clear()
        _seen.update(_counted())


@contextlib.contextmanager
def isolated(keep: bool = True) -> Iterator[list[Site]]:
    """Collect the sites of the compiles inside in a list, which is filled at the end.

    Args:
        keep: whether `report()` includes them too.
    """
    collected: list[Site] = []
    with _lock:
        outside = list(_entries)
        _entries.clear()
        _state.quiet += 1
    try:
        yield collected
    finally:
        with _lock:
            _state.quiet -= 1
            collected.extend(entry.site for entry in _entries)
            _entries[:] = [*outside, *(_entries if keep else [])]


# -- recording ------------------------------------------------------------------------------------


def record(site: Site) -> None:
    """Add a site to `report()` and count it; drop the sites of an attempt that Dynamo abandoned."""
    attempt = _inductor.trace_id()
    with _lock:
        while attempt is not None and attempt[1] > 0 and _entries:
            last = _entries[-1].attempt
            if last is None or last[0] != attempt[0] or last[1] >= attempt[1]:
                break
            _entries.pop()
        _entries.append(_Entry(attempt, site))
    verdict = site.verdict.replace(" ", "_")
    _inductor.compile_counters()["inductor_fusions"][f"{site.fusion}_{verdict}"] += 1


class _Pending(threading.local):
    """The sites of the graph that is compiled by this thread, until Inductor compiles what became of it.

    Attributes:
        sites: the sites before autograd, in order.
        counted: how often each record of such sites was counted before this compile; None if the sites are
            counted, or the pass did not run.
        before: the same if the pass has not run in this compile; else None.
    """

    sites: Sequence[Site] = ()
    counted: Counter[str] | None = None
    before: Counter[str] | None = None


@dataclass
class Ledger:
    """The records up to a point in time, or since one.

    Attributes:
        counts: counters of the sites, by name.
        pending: the pending sites of this thread.
    """

    entries: list[_Entry]
    counts: dict[str, Counter[str]]
    pending: tuple[list[Site], Counter[str] | None]

    @property
    def fused(self) -> int:
        """How many fused sites were counted, those of graphs that a cache served as well."""
        return sum(n for name, n in self.counts["inductor"].items() if not name.startswith(RECORD))


def mark() -> Ledger:
    """Everything recorded up to now."""
    with _lock:
        counts = {name: _ours(name) for name in ("inductor", tags.TAG)}
        return Ledger(list(_entries), counts, (list(_pending.sites), _pending.counted))


def since(before: Ledger) -> Ledger:
    """The records of this thread since `before`."""
    now, own = mark(), threading.get_ident()
    known = {id(entry) for entry in before.entries}
    entries = [entry for entry in now.entries if id(entry) not in known and entry.thread == own]
    return Ledger(entries, {name: now.counts[name] - before.counts[name] for name in now.counts}, now.pending)


def take_back(before: Ledger) -> Ledger:
    """Remove and return what was recorded since `before`, as if the compile had not been tried."""
    with _lock:
        found = since(before)
        remove(found)
        _pending.sites, _pending.counted = before.pending
        return found


def remove(ledger: Ledger) -> None:
    """Remove the sites and counts of a ledger from the report and the counters."""
    with _lock:
        gone = {id(entry) for entry in ledger.entries}
        _entries[:] = [entry for entry in _entries if id(entry) not in gone]
        for name, counts in ledger.counts.items():
            counter = _inductor.compile_counters()[name]
            counter.subtract(counts)
            for each in [each for each in counts if counter[each] <= 0]:
                del counter[each]
            # Otherwise `_counted` would take this for cleared counters.
            for key in [each.removeprefix(RECORD) for each in counts if each.startswith(RECORD)]:
                _last[key] = min(_last[key], counter[RECORD + key])


def put_back(ledger: Ledger) -> None:
    """Add the sites and counts of a ledger that `take_back` returned."""
    with _lock:
        _entries.extend(ledger.entries)
        for name, counts in ledger.counts.items():
            _inductor.compile_counters()[name].update(counts)
        _pending.sites, _pending.counted = ledger.pending


def _ours(name: str) -> Counter[str]:
    counter = _inductor.compile_counters()[name]
    ours = name == tags.TAG
    return Counter({each: n for each, n in counter.items() if ours or each.startswith("fusions_")})


class _State:
    """What the warning of this process depends on."""

    quiet = 0
    fused = False
    warned = False


_pending = _Pending()
_state = _State()


def begin(in_pass: bool = True) -> None:
    """Forget the pending sites: a new graph begins, or Dynamo restarts an abandoned attempt.

    Those of the bodies in the graph stay, which Inductor passes before it.

    Args:
        in_pass: whether the pass before autograd runs. It does not if AOTAutograd's cache has the code.
    """
    now = _joint_records()
    _pending.sites = _pending.sites if in_pass and _pending.before is not None else ()
    _pending.counted, _pending.before = (now, None) if in_pass else (None, now)


def pending() -> int:
    """How many sites before autograd are pending."""
    return len(_pending.sites)


def keep_pending(sites: Sequence[Site]) -> None:
    """Keep the sites of a pre-grad graph for `store` or `served`."""
    if sites:
        _pending.sites = [*_pending.sites, *sites]
        if _pending.counted is None:
            _pending.counted = _joint_records()
        _remember_key(sites, records.key(_pending.sites, joint=True))


def store(graph: fx.Graph, own: Sequence[Site]) -> None:
    """Hand the sites to the cache entry of the graph that Inductor compiles now.

    What is counted under `counters["inductor"]` while a graph is compiled is kept with its cache entry and
    counted again when a cache serves it: the number of fused sites, `fusions_<name>`, and a key to the
    records of all sites, which are a file beside the cache.

    Args:
        graph: what became of the pre-grad graph, or of its backward.
        own: the sites of this graph itself.
    """
    tags.name_backends(graph, _pending.sites)
    stored: list[Site] = []
    if _pending.counted is not None and _pending.sites:
        stored += _count(_pending.sites, records.key(_pending.sites, joint=True))
    _pending.counted = None
    if own:
        key = records.key(own)
        _remember_key(own, key)
        stored += _count(own, key)
    if stored:
        _warn_if_nothing(stored)


def served(module: fx.GraphModule | None = None) -> None:
    """If a cache has served the code of a graph whose sites are pending, count these.

    The cache has counted the sites of the graph that filled it. Two graphs of which the same aten graph
    became may have other sites before autograd, such as the same attention in other lines.

    Args:
        module: the graph before autograd, once it is compiled. If no pass ran on it, because AOTAutograd's
            cache had the code, its sites are those that the cache has counted, in the lines of this graph.
    """
    if module is not None and _pending.before is not None:
        _enter(_joint_records() - _pending.before, module)
        _pending.before = None
    if _pending.counted is None:
        return
    others = _joint_records() - _pending.counted
    if not others:
        return
    for name, count in others.items():
        key = name.removeprefix(RECORD)
        known = records.read(key) or []
        for _ in range(count):
            _count(known, key, -1)
        if [_without_place(site) for site in known] == [_without_place(site) for site in _pending.sites]:
            for site, same in zip(_pending.sites, known, strict=True):
                site.backend = site.backend or same.backend
    if _pending.sites:
        _count(_pending.sites, records.key(_pending.sites, joint=True))
    _pending.counted = None


def _enter(served: Counter[str], module: fx.GraphModule) -> None:
    """Enter the sites of records that AOTAutograd's cache has counted, in the lines of this graph."""
    for name, count in served.items():
        key = name.removeprefix(RECORD)
        sites = records.located(records.read(key) or [], module)
        with _lock:
            for _ in range(count):
                for i, site in enumerate(sites):
                    _entries.append(_Entry(_inductor.trace_id(), replace(site), "" if i else key))


def _without_place(site: Site) -> tuple[Any, ...]:
    return site.fusion, site.verdict, site.kernel, site.details


def _count(sites: Sequence[Site], key: str, times: int = 1) -> Sequence[Site]:
    """Count the fused sites and the key of their records, which are saved; returns the sites."""
    counters = _inductor.compile_counters()["inductor"]
    counters[RECORD + key] += times
    for site in sites:
        if site.verdict == "fused":
            counters[f"fusions_{site.fusion}"] += times
    if times > 0:
        records.write(sites, key)
    return sites


def _joint_records() -> Counter[str]:
    """The counters of records of sites before autograd."""
    counters = _inductor.compile_counters()["inductor"]
    return Counter({name: n for name, n in counters.items() if name.startswith(RECORD + records.JOINT)})


def _remember_key(sites: Sequence[Site], key: str) -> None:
    """Note the key of the records of these sites, so that `_restore` does not add them again."""
    with _lock:
        entry = next((e for e in reversed(_entries) if e.site is sites[0]), None)
        if entry is not None:
            entry.batch = key


def _counted() -> Counter[str]:
    """How often each record was counted in this process.

    If the counters were cleared in between, the counts of the last query are added.
    """
    if "torch._dynamo.utils" not in sys.modules:  # then nothing was compiled
        return Counter()
    counters = _inductor.compile_counters().get("inductor", {})
    now = Counter({n.removeprefix(RECORD): c for n, c in counters.items() if n.startswith(RECORD)})
    for key, before in _last.items():
        if now[key] < before:
            _cleared[key] += before
    _last.clear()
    _last.update(now)
    return now + _cleared


def _restore() -> int:
    """Append the sites of graphs that a cache served; returns the number of graphs without records."""
    unknown = 0
    here = Counter(entry.batch for entry in _entries if entry.batch)
    counted = _counted()
    for key, count in counted.items():
        missing = count - _seen[key] - here[key]
        sites = records.read(key) if missing > 0 else None
        for _ in range(missing):
            if sites is None:
                unknown += 1
                continue
            for i, site in enumerate(sites):
                _entries.append(_Entry(None, Site.from_dict(asdict(site)), "" if i else key))
    return unknown


# -- where nothing was fused ----------------------------------------------------------------------


def _warn_if_nothing(sites: Sequence[Site]) -> None:
    """Warn once if there are candidates but none was fused, with the command that shows why.

    A site that is left to stock without a hint does not count: an SDPA call without a mask is optimal.
    """
    if _state.fused or _state.warned or _state.quiet:
        return
    _state.fused = any(site.verdict == "fused" for site in sites)
    missed = [site for site in sites if site.verdict != "left to stock" or site.hint]
    if _state.fused or not missed:
        return
    _state.warned = True
    reasons = Counter(site.reason for site in missed)
    most, count = reasons.most_common(1)[0]
    program = Path((sys.argv or [""])[0])
    command = "print(inductor_fusions.report())"
    if program.suffix == ".py" and program.stem != "__main__" and program.is_file():  # else a package's
        command = f"python -m inductor_fusions run --report {program}"
    what = "a site was not fused"
    if len(sites) > 1:
        what = f"none of {len(sites)} sites was fused; {count} of them"
    log.warning("%s: %s. To see each: %s", what, most, command)
