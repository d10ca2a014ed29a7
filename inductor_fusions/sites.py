"""The outcome of one candidate (`Site`), and of all of them (`Report`)."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from rich.table import Table

Verdict = Literal["fused", "rejected", "left to stock", "failed"]

#: Version of the JSON form. Within a version, fields may be added; none is removed or changes its meaning.
SCHEMA = 1

_COLORS = {"fused": "green", "left to stock": "cyan", "rejected": "yellow", "failed": "red"}


@dataclass
class Site:
    """One candidate and what became of it.

    Attributes:
        verdict: "fused"; "rejected" (not proved to be correct); "left to stock" (not expected to be faster);
            "failed" (the fusion raised an exception, and the site runs unfused).
        reason: why it was not fused, in words; "" if it was.
        hint: what to change, or "".
        kernel: the kernel of a fused site.
        source: the user's line, as "file:line in function: text".
        node: name of the node in Dynamo's graph.
        details: shapes and dtypes, name -> text.
        module: path of its module, such as "encoder.layer.3.attention"; "" outside a module.
        backend: the operation that Inductor got for it, such as "flash" or "cudnn"; "" if that is unknown
            or nothing was fused.
        saved: for a fused site, estimates for one forward: saved "bytes" of memory traffic, and "flops".
        code: of the reason, from the closed list in docs/reasons.md; "" if it was fused.
    """

    fusion: str
    verdict: Verdict
    node: str
    reason: str = ""
    hint: str = ""
    kernel: str = ""
    source: str = ""
    details: dict[str, str] = field(default_factory=dict)
    module: str = ""
    backend: str = ""
    saved: dict[str, int] = field(default_factory=dict)
    code: str = ""

    def __str__(self) -> str:
        return f"{self.fusion}: {self.verdict} ({self.what}) at {self.source or self.node}"

    @property
    def what(self) -> str:
        """The kernel of a fused site with its backend, else the reason."""
        if self.verdict != "fused":
            return self.reason
        return f"{self.kernel} -> {self.backend}" if self.backend else self.kernel

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Site:
        """The inverse of `asdict`. Fields of later versions are ignored.

        Raises:
            ValueError: the verdict is invalid.
        """
        if values.get("verdict") not in get_args(Verdict):
            raise ValueError(f"{values.get('verdict')!r} is not a verdict")
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass
class Report:
    """The sites of every compile since the start of the process or the last `clear()`.

    Attributes:
        sites: the candidates, in the order in which they were met.
        unknown: number of graphs whose code came from a cache that has no records of their sites.
        off: whether the fusions were off when the report was made.
    """

    sites: list[Site] = field(default_factory=list)
    unknown: int = 0
    off: bool = False

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def count(self, verdict: Verdict = "fused", fusion: str | None = None) -> int:
        """The number of sites with this verdict, of one fusion or of all.

        Raises:
            ValueError: the verdict is invalid.
        """
        if verdict not in get_args(Verdict):
            raise ValueError(f"verdict must be {' or '.join(get_args(Verdict))}, not {verdict!r}")
        return sum(s.verdict == verdict and fusion in (None, s.fusion) for s in self.sites)

    def to_dict(self) -> dict[str, object]:
        """Plain data: {"schema": 1, "sites": [...]}."""
        return {"schema": SCHEMA, "sites": [asdict(site) for site in self.sites]}

    def to_json(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def summary(self) -> str:
        """One line: "12 fused, 3 rejected"."""
        verdicts = Counter(site.verdict for site in self.sites)
        said = [f"{count} {verdict}" for verdict, count in verdicts.items()]
        if self.unknown:
            said.append(f"{self.unknown} graphs from a cache without records")
        return ", ".join(said) or "no candidate was found" + ": the fusions are off" * self.off

    def __rich__(self) -> Table:
        return table(self.sites)

    def __str__(self) -> str:
        if not self.sites:
            return f"inductor_fusions: {self.summary()}"
        return f"{text(table(self.sites))}{self.summary()}"


def groups(sites: Iterable[Site]) -> list[tuple[int, list[Site]]]:
    """Sites that say the same, with their number, in the order in which the first of each was met."""
    found: dict[tuple[str, ...], list[Site]] = {}
    for site in sites:
        key = (site.fusion, site.verdict, site.what, site.hint, site.source, *site.details.values())
        found.setdefault(key, []).append(site)
    return [(len(same), same) for same in found.values()]


def table(sites: Iterable[Site]) -> Table:
    """A table for `rich`: one row for sites that say the same."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    found = Table(box=SIMPLE_HEAD, pad_edge=False)
    found.add_column("sites", justify="right", no_wrap=True)
    found.add_column("fusion", no_wrap=True)
    found.add_column("verdict", no_wrap=True)
    found.add_column("kernel, or reason and hint", overflow="fold", ratio=3)
    found.add_column("where", overflow="fold", ratio=2)
    for count, same in groups(sites):
        site = same[0]
        what = Text(site.what)
        for line in (f"hint: {site.hint}" if site.hint else "", saved(site)):
            what.append(f"\n{line}" if line else "", style="italic")
        where = Text(place(site.source) or site.node)
        for line in (modules(same), ", ".join(f"{name} {value}" for name, value in site.details.items())):
            where.append(f"\n{line}" if line else "", style="dim")
        found.add_row(str(count), site.fusion, Text(site.verdict, _COLORS[site.verdict]), what, where)
    return found


def text(table: Table, width: int = 120) -> str:
    """A table as plain text."""
    from rich.console import Console

    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip()) + "\n"


def place(source: str) -> str:
    """A source line without its code, and without the current folder or the one of installed packages."""
    where = source.partition(": ")[0]
    return where.removeprefix(os.getcwd() + os.sep).rpartition("site-packages" + os.sep)[2]


def modules(same: list[Site]) -> str:
    """The module of one site, or the first and the last of several."""
    paths = [site.module for site in same if site.module]
    return " … ".join(dict.fromkeys([paths[0], paths[-1]])) if paths else ""


def saved(site: Site) -> str:
    """The estimated savings of a fused site in one forward, in words, or ""."""
    parts = []
    if site.saved.get("bytes"):
        parts.append(f"{scaled(site.saved['bytes'], 1024, ('B', 'KiB', 'MiB', 'GiB', 'TiB'))} of traffic")
    if site.saved.get("flops"):
        units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP")
        parts.append(scaled(site.saved["flops"], 1000, units))
    return f"saves about {' and '.join(parts)} in a forward" if parts and site.verdict == "fused" else ""


def error_text(error: BaseException) -> str:
    """Type and message of an exception in one line, cut off after 300 characters."""
    found = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return found if len(found) <= 300 else f"{found[:300]} ..."


def scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in units[:-1]:
        if value < base:
            return f"{value:.3g} {unit}"
        value /= base
    return f"{value:.3g} {units[-1]}"
