"""Trials of kernel configurations in the measuring process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from .problems import Row

#: A configuration: a dataclass.
C = TypeVar("C", bound=Any)


class Trial:
    """One configuration of a kernel.

    Attributes:
        section: of the kernel; kernels of other sections get their usual configuration.
        number: of the configuration; 0 is the usual one.
        rows: by section, the configurations that kernels got.
        exhausted: whether there are fewer configurations than `number`.
    """

    def __init__(self, section: str, number: int) -> None:
        self.section, self.number = section, number
        self.rows: dict[str, list[Row]] = {}
        self.exhausted = False


_now: Trial | None = None


@contextlib.contextmanager
def trial(section: str, number: int) -> Iterator[Trial]:
    """Give kernels of a section the configuration of this number inside the block."""
    global _now
    before, made = _now, Trial(section, number)
    _now = made
    try:
        yield made
    finally:
        _now = before


def configured(section: str, row: Mapping[str, Any], usual: C, candidates: Callable[[], Sequence[C]]) -> C:
    """The configuration of a kernel: the usual one, except inside of `trial`.

    Args:
        candidates: returns the configurations that are worth measuring, the most promising first.
    """
    if _now is None:
        return usual
    chosen = usual
    if _now.section == section and _now.number > 0:
        others = [each for each in candidates() if each != usual]
        _now.exhausted |= _now.number > len(others)
        chosen = usual if _now.exhausted else others[_now.number - 1]
    made = {**row, "config": asdict(chosen)}
    known = _now.rows.setdefault(section, [])
    if made not in known:
        known.append(made)
    return chosen
