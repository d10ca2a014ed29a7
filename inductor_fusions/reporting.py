"""What was fused, and why not: one `Site` for each candidate that a pass met."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Literal

from torch import fx

from . import _inductor

Verdict = Literal["fused", "rejected", "left to stock", "failed"]


@dataclass
class Site:
    """One candidate and what became of it.

    Attributes:
        fusion: name of the fusion.
        verdict: "fused"; "rejected" (a predicate failed); "left to stock" (it would not pay);
            "failed" (the fusion raised, the graph was left as it was).
        reason: why it was not fused, in words; "" where it was.
        hint: what to change, or "".
        kernel: what a fused site became.
        source: the user's line, as "file:line in function: text".
        node: name of the node in Dynamo's graph.
        details: shapes and dtypes, name -> text.
    """

    fusion: str
    verdict: Verdict
    node: str
    reason: str = ""
    hint: str = ""
    kernel: str = ""
    source: str = ""
    details: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        what = self.kernel if self.verdict == "fused" else self.reason
        return f"{self.fusion}: {self.verdict} ({what}) at {self.source or self.node}"


@dataclass
class Report:
    """The sites of every compile since the start of the process or the last `clear()`."""

    sites: list[Site] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def count(self, verdict: Verdict = "fused", fusion: str | None = None) -> int:
        """Number of sites with this verdict, of one fusion or of all."""
        return sum(s.verdict == verdict and fusion in (None, s.fusion) for s in self.sites)

    def to_dict(self) -> dict[str, object]:
        """Plain data: {"schema": 1, "sites": [...]}."""
        return {"schema": 1, "sites": [asdict(site) for site in self.sites]}

    def to_json(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        if not self.sites:
            return "inductor_fusions: no candidate was seen"
        rows = Counter(
            (s.fusion, s.verdict, s.kernel if s.verdict == "fused" else s.reason, s.source)
            for s in self.sites
        )
        lines = []
        for (fusion, verdict, what, source), count in rows.items():
            lines.append(f"{count:4d} x {fusion}: {verdict}: {what}\n         {source}")
        return "\n".join(lines)


_lock = threading.Lock()
_sites: list[tuple[tuple[str, int] | None, Site]] = []


def record(site: Site) -> None:
    """Keep a site for `report()`; those of an attempt that Dynamo has abandoned go."""
    attempt = _inductor.trace_id()
    with _lock:
        while attempt is not None and attempt[1] > 0 and _sites:
            last = _sites[-1][0]
            if last is None or last[0] != attempt[0] or last[1] >= attempt[1]:
                break
            _sites.pop()
        _sites.append((attempt, site))


def report() -> Report:
    """Every site seen by the compiles of this process, in order."""
    with _lock:
        return Report([site for _, site in _sites])


@contextlib.contextmanager
def isolated() -> Iterator[list[Site]]:
    """Collect the sites of the compiles inside in a list of their own, which is filled at the end."""
    collected: list[Site] = []
    with _lock:
        outside = list(_sites)
        _sites.clear()
    try:
        yield collected
    finally:
        with _lock:
            collected.extend(site for _, site in _sites)
            _sites[:] = [*outside, *_sites]


def clear() -> None:
    """Forget the sites recorded so far."""
    with _lock:
        _sites.clear()


_pending = threading.local()


def count(fusion: str, verdict: Verdict) -> None:
    """Count a site in `torch._dynamo.utils.counters["inductor_fusions"]`, and see `flush_counts`."""
    _inductor.compile_counters()["inductor_fusions"][f"{fusion}_{verdict.replace(' ', '_')}"] += 1
    if verdict == "fused":
        waiting = getattr(_pending, "counts", None) or Counter()
        waiting[fusion] += 1
        _pending.counts = waiting


def forget_counts() -> None:
    """Drop what was counted since the last flush: a new graph begins, or an attempt was abandoned."""
    _pending.counts = Counter()


def flush_counts() -> None:
    """Count fused sites as `counters["inductor"]["fusions_<name>"]`.

    Called while Inductor compiles a graph: what it counts then is kept with the cache entry and
    counted again when a warm cache serves it, where no pass runs.
    """
    counters = _inductor.compile_counters()
    for fusion, number in (getattr(_pending, "counts", None) or {}).items():
        counters["inductor"][f"fusions_{fusion}"] += number
    forget_counts()


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<text>.*)')


def source_line(node: fx.Node) -> str:
    """The innermost user line that made `node`, as "file:line in function: text"."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    if not frames:
        return ""
    last = frames[-1]
    return f"{last['file']}:{last['line']} in {last['function']}: {last['text'].strip()}"
