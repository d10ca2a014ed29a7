"""The HTML page of an explanation: self-contained, without external scripts or styles."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from ..sites import Site, groups, modules, place, saved
from . import folding
from .graphs import Line, Pair, short

if TYPE_CHECKING:
    from . import Explanation


def render(explanation: Explanation) -> str:
    """The page of an explanation."""
    import jinja2

    source = resources.files(__package__).joinpath("page.html.jinja").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["short"] = short
    environment.tests["line"] = lambda item: isinstance(item, Line)
    grouped = groups(explanation.sites)
    number = {id(site): i for i, (_, same) in enumerate(grouped) for site in same}
    return environment.from_string(source).render(
        explanation=explanation,
        groups=[_group(i, count, same) for i, (count, same) in enumerate(grouped)],
        graphs=[_graph(pair, number) for pair in explanation.graphs],
    )


def _group(index: int, count: int, same: list[Site]) -> dict[str, Any]:
    site = same[0]
    return {
        "index": index,
        "count": count,
        "site": site,
        "where": place(site.source) or site.node,
        "code": site.source.partition(": ")[2],
        "modules": modules(same),
        "saved": saved(site),
        "hue": (150 + 137 * index) % 360,  # far apart for neighbours
    }


def _graph(pair: Pair, number: dict[int, int]) -> dict[str, Any]:
    def mark(line: Line) -> int | None:
        return None if line.site is None else number.get(id(pair.sites[line.site]))

    def style(line: Line) -> str:
        """Class and colour of a line."""
        parts = ["dead"] if line.dead else []
        group = mark(line)
        if line.site is not None and group is not None:
            parts.append("fused" if pair.sites[line.site].verdict == "fused" else "missed")
            parts.append(f"g{group}")
        return " ".join(parts)

    def touched(item: Any) -> bool:
        return any(line.site is not None for line in folding.lines(item))

    return {
        "title": pair.title,
        "counts": (len(pair.before), len([line for line in pair.after if not line.dead])),
        "rows": folding.rows(pair.before, pair.after, mark),
        "style": style,
        "mark": mark,
        "touched": touched,
    }
