"""Folds the lines of a graph into a tree of layers that shows equal layers once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .graphs import Line


@dataclass
class Group:
    """Lines of one layer, or of the inputs.

    Attributes:
        path: of the layer, such as "encoder.layer.3"; "" for inputs.
        items: lines and groups, in order.
        paths: every layer that looks like this one, itself first.
    """

    path: str
    items: list[Line | Group] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """ "encoder.layer.0 … encoder.layer.23, 24 times the same" """
        if not self.path:
            return f"{len(list(lines(self)))} inputs"
        if len(self.paths) < 2:
            return self.path
        return f"{self.paths[0]} … {self.paths[-1]}, {len(self.paths)} times the same"


@dataclass
class Row:
    """Two items that are shown side by side."""

    before: Line | Group | None
    after: Line | Group | None


def lines(item: Line | Group) -> Iterator[Line]:
    """Every line of an item."""
    if isinstance(item, Line):
        yield item
    else:
        for inner in item.items:
            yield from lines(inner)


def rows(before: Sequence[Line], after: Sequence[Line], mark: Callable[[Line], object]) -> list[Row]:
    """The lines before and after side by side, layer by layer; layers that are alike are one row.

    Args:
        mark: what must be equal, beside the operations, for two lines to look alike: what their site says.
    """
    left, right = tree(before), tree(after)
    paired: list[Row] = []
    matcher = difflib.SequenceMatcher(None, [_key(i) for i in left], [_key(i) for i in right], autojunk=False)
    for _, a, b, c, d in matcher.get_opcodes():
        for i in range(max(b - a, d - c)):
            paired.append(Row(left[a + i] if a + i < b else None, right[c + i] if c + i < d else None))
    found: list[Row] = []
    seen: list[tuple[object, ...]] = []
    for row in paired:
        looks = tuple(_looks(item, mark) for item in (row.before, row.after))
        groups = [item for item in (row.before, row.after) if isinstance(item, Group) and item.path]
        if groups and found and seen[-1] == looks and len(groups) == 2:
            for item, kept in zip((row.before, row.after), (found[-1].before, found[-1].after), strict=True):
                assert isinstance(item, Group) and isinstance(kept, Group)
                kept.paths.append(item.path)
            continue
        for item in groups:
            _fold(item, mark)
        found.append(row)
        seen.append(looks)
    return found


def tree(lines: Sequence[Line], level: int = 1) -> list[Line | Group]:
    """Lines grouped by the layer that they belong to, and by the layers within it."""
    found: list[Line | Group] = []
    for line in lines:
        path = "" if line.operation == "input" and line.depth == 0 else _layer(line.module, level)
        if path is None:
            found.append(line)
            continue
        last = found[-1] if found else None
        if not isinstance(last, Group) or last.path != path:
            last = Group(path, paths=[path])
            found.append(last)
        last.items.append(line)
    for group in found:
        if isinstance(group, Group) and group.path:
            group.items = tree([item for item in group.items if isinstance(item, Line)], level + 1)
    return found


def _layer(path: str, level: int) -> str | None:
    """The path up to its `level`-th index: "encoder.layer.3" of "encoder.layer.3.attention", or None."""
    parts = path.split(".")
    indices = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: indices[level - 1] + 1]) if len(indices) >= level else None


def _key(item: Line | Group) -> str:
    return f"layer {item.path}" if isinstance(item, Group) else item.name


def _fold(group: Group, mark: Callable[[Line], object]) -> None:
    """Show layers inside `group` that are alike once."""
    kept: list[Line | Group] = []
    seen: object = None
    for item in group.items:
        looks = _looks(item, mark)
        last = kept[-1] if kept else None
        if isinstance(item, Group) and isinstance(last, Group) and looks == seen:
            last.paths.append(item.path)
            continue
        if isinstance(item, Group):
            _fold(item, mark)
        kept.append(item)
        seen = looks
    group.items = kept


def _looks(item: Line | Group | None, mark: Callable[[Line], object]) -> object:
    """Equal for two items that are shown as one: everything but names from outside."""
    if item is None:
        return None
    own: dict[str, int] = {}
    found = []
    for line in lines(item):
        uses = [own.get(name, -1) for name in line.uses]
        own[line.name] = len(own)
        arguments = re.sub(r"[A-Za-z_][\w.]*", "", line.arguments)  # what is left are numbers
        found.append((line.operation, line.shape, tuple(uses), arguments, line.source, line.dead, mark(line)))
    return tuple(found)
