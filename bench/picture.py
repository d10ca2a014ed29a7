"""The README's picture: stock over fused of every whole model that was measured, as an SVG file.

Written without a plotting library: its bytes depend on the results alone, so that a test can tell whether
it is stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from bench.docs_pieces import Json, baseline, quotient

#: Pixels; a column is one of bars with their labels.
WIDTH, LABELS, RIGHT, LINE, TOP, BOTTOM = 720, 250, 40, 15, 44, 34
COLUMN = 530
#: More cases than this stand in two columns, so that the picture fits on a screen.
LONG = 24
#: Told apart in grey as well: those that are not faster have no filling.
FASTER, OTHER = "#0072b2", "#d55e00"


def draw(data: Json) -> str:
    """Horizontal bars from 1, the largest gain on top; a white background, for dark pages and print.

    Args:
        data: header and "rows" of a file of bench.models.
    """
    rows = sorted(
        ((str(row["name"]), value) for row in data["rows"] if (value := _ratio(row)) is not None),
        key=lambda item: (-item[1], item[0]),
    )
    title = f"{data.get('device', '?')}, torch {data.get('torch', '?')}, {str(data.get('date', '?'))[:10]}"
    low, high = _ends([value for _, value in rows])
    length = len(rows) if len(rows) <= LONG else -(-len(rows) // 2)
    columns = [rows[i : i + length] for i in range(0, len(rows), length)] if rows else [[]]
    width = WIDTH if len(columns) == 1 else COLUMN * len(columns)
    bottom = TOP + LINE * length
    height = bottom + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f"<title>Time of stock torch.compile over time with inductor_fusions: {escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(LABELS, 16, "time of stock torch.compile / time with inductor_fusions", size=13),
        _text(LABELS, 32, title, color="#555555"),
    ]
    each = width / len(columns)
    for i, column in enumerate(columns):
        lines += _bars(column, i * each, each, bottom, low, high)
    return "\n".join([*lines, "</svg>", ""])


def _bars(
    rows: Sequence[tuple[str, float]], start: float, width: float, bottom: int, low: float, high: float
) -> list[str]:
    """One column: the axis from `low` to `high`, and a bar for each case."""

    def at(value: float) -> float:
        return start + LABELS + (width - LABELS - RIGHT) * (value - low) / (high - low)

    lines = []
    for tick in _ticks(low, high):
        x = at(tick)
        color = "black" if tick == 1 else "#dddddd"
        lines.append(f'<path d="M{x:.1f} {TOP - 4}V{bottom + 4}" stroke="{color}"/>')
        lines.append(_text(x, bottom + 18, f"{tick:g}", anchor="middle"))
    for i, (name, value) in enumerate(rows):
        y, left, right = TOP + LINE * i, at(min(value, 1.0)), at(max(value, 1.0))
        color, filling = (FASTER, FASTER) if value > 1 else (OTHER, "white")
        lines.append(_text(start + LABELS - 8, y + 11, name, anchor="end"))
        lines.append(
            f'<rect x="{left:.1f}" y="{y + 2}" width="{right - left:.1f}" height="{LINE - 5}" '
            f'fill="{filling}" stroke="{color}"/>'
        )
        lines.append(_text(max(right, at(1.0)) + 5, y + 11, f"{value:.2f}"))
    return lines


def _ratio(row: Json) -> float | None:
    return quotient(row, baseline(row), "fused", "median_ms")


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Multiples of a half around the values and 1."""
    return min(0.5 * int(2 * min([*values, 1.0])), 1.0), 0.5 * int(2 * max([*values, 1.0]) + 1)


def _ticks(low: float, high: float) -> list[float]:
    return [low + 0.5 * i for i in range(round(2 * (high - low)) + 1)]


def _text(x: float, y: float, text: str, anchor: str = "start", color: str = "black", size: int = 11) -> str:
    style = f'text-anchor="{anchor}" fill="{color}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y}" {style}>{escape(text)}</text>'
