"""The decision for a problem on a device: kernel, expected speedup and source."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch

from .. import config
from ..reasons import Reason
from . import tables
from .asking import Problem
from .devices import Source, carried, sources
from .estimating import Estimate, Nearby, distance, estimate
from .measuring import measurer
from .problems import FEW_ROWS, MARGIN, SECTIONS, Row
from .tables import Measured

Found = TypeVar("Found")

#: If only rows of this machine say something, and the nearest is further away than this, in doublings, the
#: problem is worth measuring.
NEAR_ENOUGH = 1.0

#: A number of tokens between two measured ones counts as measured if their ratio is at most this.
BRACKET = 8
#: A kernel that gains less than this in one of the nearest rows is not chosen.
SLOW = 0.95
#: Tiles are taken from rows that are at most this far from the problem, in doublings of all sizes together.
TILES_REACH = 6.0
#: A symbolic number of tokens is checked at up to so many doublings below and above its hint.
RANGE = 4


@dataclass(frozen=True)
class Span:
    """A symbolic number of tokens: the least, the hint and the most."""

    low: int
    hint: int
    high: int

    def __str__(self) -> str:
        return "?"


@dataclass(frozen=True)
class Query:
    """A problem that is asked for.

    Attributes:
        row: its columns, as a row has them.
        kernels: those that support it; empty: the one that the section is named after.
        text: the problem in words, for reports.
    """

    section: str
    row: Mapping[str, Any]
    kernels: tuple[str, ...] = ()
    text: str = ""

    @property
    def candidates(self) -> tuple[str, ...]:
        """The kernels that support the problem."""
        return self.kernels or (self.section,)

    def at(self, tokens: int) -> Query:
        """The problem with another number of tokens."""
        return replace(self, row={**self.row, SECTIONS[self.section].along: tokens})


@dataclass(frozen=True)
class Decision:
    """Which kernel a problem gets, and why.

    Attributes:
        kernel: the kernel to emit; None: stock's.
        source: where the decision comes from.
        gain, lower: the expected speedup over stock, and the lower end of the estimate.
        rows: the measured rows behind it, the nearest first.
        device: the other device of the nearest row that is of another one.
        elsewhere: how many rows are of other devices.
        reason: why the kernel is stock's.
        near: the distance of the nearest row that says something; infinite if there is none.
    """

    kernel: str | None
    source: Literal["measured", "this machine", "estimated", "another device", "pending", "stock"] = "stock"
    gain: float = 1.0
    lower: float = 1.0
    rows: tuple[Row, ...] = ()
    device: str = ""
    elsewhere: int = 0
    reason: str = ""
    near: float = field(default=math.inf, compare=False)

    @property
    def measured(self) -> bool:
        """Whether there is a row of exactly this problem on this device."""
        return self.source in ("measured", "this machine")

    @property
    def known(self) -> bool:
        """Whether any measurement says something about the problem."""
        return self.source != "stock"

    @property
    def note(self) -> str:
        """The source of the decision, for reports."""
        if self.measured:
            where = " on this machine" if self.source == "this machine" else ""
            return f"{self.gain:.2f}x measured{where}"
        count = f"{len(self.rows)} measurement{'s' * (len(self.rows) != 1)}"
        where = f" on {self.device}" if self.elsewhere else " nearby"
        if 0 < self.elsewhere < len(self.rows):
            where = f" nearby, {self.elsewhere} of them on {self.device}"
        says = f"expected {self.gain:.2f}x, at least {self.lower:.2f}x"
        return f"estimated from {count}{where} ({says})"


_known: ContextVar[dict[Any, Any] | None] = ContextVar("inductor_fusions_decisions", default=None)


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Decide once for each distinct problem inside the outermost block, unless problems are measured."""
    token = _known.set({} if (known := _known.get()) is None else known)
    try:
        yield
    finally:
        _known.reset(token)


def asked(find: Callable[..., Found], *about: Any) -> Found:
    """What `find` gives for some arguments, on which alone it depends: asked once for each inside `once`."""
    known = None if config.measure else _known.get()
    if known is None:
        return find(*about)
    key = (find, repr(about))
    if key not in known:
        known[key] = find(*about)
    found: Found = known[key]
    return found


def decide(query: Query, device: torch.device, may_measure: bool = True) -> Decision:
    """The kernel for a problem on a device.

    If there is a row of the problem, it decides. If the problem lies between two rows that differ only in the
    number of tokens, both must be faster than stock. Otherwise the gain is estimated from rows nearby, of
    this device and of those of its compute capability, then from rows of other devices, and the lower end of
    the estimate must be no slower than stock. A problem far from every row is measured on this machine if
    `config.measure` is set.

    Args:
        may_measure: whether it may be measured.

    Raises:
        Rejected: a size is 0, of which no measurement says anything.
    """
    if not all(SECTIONS[query.section].sizes(query.row)):
        raise Reason.EMPTY.rejected("an operand is empty")
    found = asked(_from_tables, query, device)
    if not may_measure or found.near <= NEAR_ENOUGH or not config.measure:
        return found
    problem = (query.section, query.row, query.candidates)
    if not measurer.may(problem, device):
        return found
    if measurer.collects(problem, device):
        return replace(found, kernel=None, source="pending", reason=found.reason or _unknown(query, device))
    measurer.measure({json.dumps(problem): 1}, device, _is_known)
    return _from_tables(query, device)


class Pending(Exception):
    """A problem is measured before anything else is decided."""


@contextlib.contextmanager
def measured_together() -> Iterator[Collection[object]]:
    """Problems that would be measured inside are measured at the end, those that save most first.

    Gives the collection of these problems, which grows meanwhile.
    """
    with measurer.first_what_saves_most(_is_known) as found:
        yield found


def _is_known(problem: Problem, device: torch.device) -> bool:
    return _from_tables(Query(*problem), device).near <= NEAR_ENOUGH


def _from_tables(query: Query, device: torch.device) -> Decision:
    """The decision from what is known."""
    name, known, near, found_any = tables.device_name(device), False, math.inf, False
    for some in asked(sources, device):
        found_any = found_any or bool(some)
        for source in some:
            found = _measured(query, source) if source.is_own else None
            if found is not None:
                return found
        if not config.estimate:
            break
        decision, seen = _estimated(query, some)
        # A few rows of this machine say little about problems far from them.
        near = min(near, seen)
        if decision is not None:
            return replace(decision, near=near)
        known = seen < math.inf
        # Rows of the device's own compute capability say more than those of others.
        if known:
            break
    if known:
        reason = Reason.NOT_FASTER(f"not expected to be faster than stock on {name} at this shape")
        return Decision(None, "estimated", reason=reason, near=near)
    if not found_any:
        return Decision(None, reason=Reason.NOT_MEASURED(f"no measurements for the device {name}"))
    return Decision(None, reason=_unknown(query, device))


def _unknown(query: Query, device: torch.device) -> str:
    name, text = tables.device_name(device), query.text and f": {query.text}"
    return Reason.NOT_MEASURED(f"not measured on {name}, and no measured shape is close{text}")


def decide_for_all(query: Query, tokens: int | Span | None, device: torch.device) -> Decision:
    """The decision for a number of tokens; for a symbolic one, a kernel that pays at all likely numbers.

    Few tokens are left out: the kernels for these need a static number, and are not emitted.

    Args:
        tokens: None: nothing is known of their number, and no kernel is chosen.
    """
    if tokens is None:
        reason = Reason.SYMBOLIC(
            "the number of rows is symbolic, and no kernel is known to be faster for all its values"
        )
        return Decision(None, reason=reason)
    if isinstance(tokens, int):
        return decide(query.at(tokens), device)
    low, hint, high = max(tokens.low, FEW_ROWS + 1), tokens.hint, tokens.high
    if hint < low:
        return Decision(
            None,
            reason=Reason.SYMBOLIC(
                f"the number of rows is symbolic, and kernels for as few as {hint} need a static size"
            ),
        )
    decision = decide(query.at(hint), device)
    if decision.kernel is None:
        return decision
    steps = [hint << step if step >= 0 else hint >> -step for step in range(-RANGE, RANGE + 1)]
    for some in (max(low, steps[0]), *steps, min(high, steps[-1])):
        if not low <= some <= high or some == hint:
            continue
        other = decide(query.at(some), device, may_measure=False)
        if other.kernel != decision.kernel:
            reason = Reason.SYMBOLIC(
                f"the number of rows is symbolic, and this kernel is not faster for {some} rows"
            )
            return Decision(None, reason=reason)
        if other.lower < decision.lower:
            decision = other
    return decision


def tiles(query: Query, device: torch.device, fits: Callable[[Row], Found | None]) -> Found | None:
    """The tiles of the nearest row whose tiles fit a problem, or None.

    Args:
        fits: maps a row to its configuration for the problem, or to None if it does not fit.
    """
    for row in asked(_rows_with_tiles, query, device):
        found = fits(row)
        if found is not None:
            return found
    return None


def row_with_tiles(query: Query, device: torch.device) -> Row | None:
    """The row of the very problem that has tiles, or None."""
    return tiles(query, device, lambda row: row if SECTIONS[query.section].is_same(row, query.row) else None)


def _rows_with_tiles(query: Query, device: torch.device) -> list[Row]:
    """The rows whose tiles may be those of a problem: source by source, the nearest first."""
    found: list[Row] = []
    place = SECTIONS[query.section].place(query.row)
    for some in asked(sources, device):
        alike = [each for each in some if each.is_alike]
        near = [(distance(place, where), item.row) for _, where, item in _near(query, alike)]
        near.sort(key=lambda entry: entry[0])
        found += [row for apart, row in near if apart <= TILES_REACH and row["config"] is not None]
    return found


# -- rows of the problem itself ------------------------------------------------------------------------------


def bracket(rows: Sequence[Found], tokens: int, of: Callable[[Found], int]) -> list[Found]:
    """The rows next to a number of tokens, below and above; empty if one is missing or far away."""
    below = [row for row in rows if of(row) <= tokens]
    above = [row for row in rows if of(row) >= tokens]
    if not below or not above:
        return []
    low, high = max(below, key=of), min(above, key=of)
    return [low, high] if of(high) <= BRACKET * of(low) else []


def _measured(query: Query, source: Source) -> Decision | None:
    """The decision from rows of the problem itself, or None."""
    section = SECTIONS[query.section]
    key = section.key(query.row)
    rows = [item for item in source.table.rows(query.section) if item.key == key and item.gains]
    if section.along:
        rows = bracket(rows, query.row[section.along], lambda item: int(item.row[section.along]))
    gains: dict[str, float] = {}
    for kernel in query.candidates:
        found = [item.gains[kernel] for item in rows if kernel in item.gains]
        if found:
            gains[kernel] = min(found)
    if not gains:
        return None
    best = max(gains, key=lambda kernel: gains[kernel])
    shown = tuple(item.row for item in rows)
    how: Literal["measured", "this machine"] = "this machine" if source.is_here else "measured"
    if gains[best] < section.margin:
        where = "this machine" if source.is_here else source.name
        reason = Reason.NOT_FASTER(f"measured on {where} to be no faster than stock at this shape")
        return Decision(None, how, gains[best], gains[best], shown, reason=reason, near=0.0)
    return Decision(best, how, gains[best], gains[best], shown, near=0.0)


# -- rows of others ------------------------------------------------------------------------------------------


def _near(query: Query, some: Sequence[Source]) -> Iterator[tuple[Source, tuple[float, ...], Measured]]:
    """The rows that are comparable with the problem, each with its source and its place."""
    section = SECTIONS[query.section]
    same = section.same(query.row)
    for source in some:
        shift = source.shift * section.weights[-1]
        for item in source.table.rows(query.section):
            if item.same == same:
                yield source, (*item.place[:-1], item.place[-1] - shift), item


def _estimated(query: Query, some: Sequence[Source]) -> tuple[Decision | None, float]:
    """The kernel with the best lower end that pays, or None; and the distance of the nearest row.

    Rows of tables count as near (distance 0): only rows of this machine may be too few.
    """
    near, section = list(_near(query, some)), SECTIONS[query.section]
    place = section.place(query.row)
    best: tuple[str, Estimate] | None = None
    seen = math.inf
    items: dict[str, list[tuple[Source, Measured]]] = {}
    for kernel in query.candidates:
        found: list[Nearby] = []
        items[kernel] = []
        for source, where, item in near:
            gain = item.gains.get(kernel)
            rule = None if gain is None else carried(source, query.section, kernel, item.row)
            if gain is None or rule is None:
                continue
            # The gain of a kernel that was wrong at a shape is 0, so that it is not chosen near it either.
            log, differs = math.log(max(gain, 1e-3)), source.fills(section, query.row, item.row, kernel)
            is_slow = log + differs < math.log(SLOW)
            found.append(Nearby(where, rule.of(log) + differs, len(found), rule.doubt, source.name, is_slow))
            items[kernel].append((source, item))
        guess = estimate(place, found, section.process, section.reach, section.doubt(query.row))
        if guess is None:
            continue
        guess = replace(guess, mean=guess.mean - section.untuned(query.row))
        here = all(items[kernel][number][0].is_here for number in guess.rows)
        seen = min(seen, guess.distance if here else 0.0)
        least = math.log(section.margin)
        pays = guess.mean >= least and guess.lower >= least - math.log(MARGIN) and not guess.is_slow
        if pays and (best is None or guess.lower > best[1].lower):
            best = kernel, guess
    if best is None:
        return None, seen
    kernel, guess = best
    chosen = [items[kernel][number] for number in guess.rows]
    others = [source.name for source, _ in chosen if not source.is_own]
    return Decision(
        kernel,
        "another device" if len(others) == len(chosen) else "estimated",
        math.exp(guess.mean),
        math.exp(guess.lower),
        tuple(item.row for _, item in chosen),
        device=others[0] if others else "",
        elsewhere=len(others),
    ), seen
