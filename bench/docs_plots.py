"""Plots of docs/performance.md from the results of the tuners: a roofline of the templates, time over size.

Written without a plotting library, as `bench.picture`: their bytes depend on the results alone.
`python -m inductor_fusions bench --plot` draws the same of a run of one's own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from bench.docs_linears import best_time, stock_time
from bench.docs_pieces import Json, get

#: Colour, shape and dashes of what is drawn: told apart in grey as well.
STYLES = {
    "stock": ("#777777", "cross", "4 3"),
    "ours": ("#0072b2", "circle", ""),
    "limit": ("#d55e00", "triangle", "1 3"),
    "row": ("#d55e00", "triangle", ""),
    "tiled": ("#009e73", "square", ""),
    "persistent": ("#0072b2", "circle", ""),
    "attention": ("#cc79a7", "diamond", ""),
}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Axes:
    """A rectangle in pixels, with a logarithmic scale along each side."""

    left: float
    top: float
    width: float
    height: float
    xs: tuple[float, float]
    ys: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is, in pixels."""

        def part(value: float, ends: tuple[float, float]) -> float:
            return math.log(value / ends[0]) / math.log(ends[1] / ends[0])

        return self.left + self.width * part(x, self.xs), self.top + self.height * (1 - part(y, self.ys))


def text(x: float, y: float, what: str, anchor: str = "start", size: int = 11, color: str = "black") -> str:
    """A label."""
    style = f'text-anchor="{anchor}" fill="{color}" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(what)}</text>'


def marker(shape: str, x: float, y: float, color: str, size: float = 3.0) -> str:
    """A point."""
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}" fill="{color}"/>'
    s = size
    corners = {
        "square": [(-s, -s), (s, -s), (s, s), (-s, s)],
        "triangle": [(-s, s), (s, s), (0, -s)],
        "diamond": [(-s, 0), (0, -s), (s, 0), (0, s)],
    }
    if shape == "cross":
        ends = (-s, -s, s, s), (-s, s, s, -s)
        d = "".join(f"M{x + a:.1f} {y + b:.1f}L{x + c:.1f} {y + e:.1f}" for a, b, c, e in ends)
        return f'<path d="{d}" stroke="{color}" fill="none"/>'
    d = "M" + "L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in corners[shape]) + "Z"
    return f'<path d="{d}" fill="{color}"/>'


def line(points: Sequence[tuple[float, float]], color: str, dashes: str = "") -> str:
    """A line through points in pixels."""
    d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="{d}" stroke="{color}" fill="none"{dashed}/>'


def frame(
    axes: Axes, x_label: str, y_label: str, x_ticks: Sequence[float], y_ticks: Sequence[float]
) -> list[str]:
    """The sides, with their ticks and labels."""
    bottom = axes.top + axes.height
    lines = []
    for tick in x_ticks:
        x, _ = axes.at(tick, axes.ys[0])
        lines.append(line([(x, axes.top), (x, bottom)], "#dddddd"))
        lines.append(text(x, bottom + 14, f"{tick:g}", "middle", 10))
    for tick in y_ticks:
        _, y = axes.at(axes.xs[0], tick)
        lines.append(line([(axes.left, y), (axes.left + axes.width, y)], "#dddddd"))
        lines.append(text(axes.left - 5, y + 3, f"{tick:g}", "end", 10))
    lines.append(
        line([(axes.left, axes.top), (axes.left, bottom), (axes.left + axes.width, bottom)], "black")
    )
    lines.append(text(axes.left + axes.width / 2, bottom + 29, x_label, "middle"))
    lines.append(text(axes.left, axes.top - 6, y_label, size=10, color="#555555"))
    return lines


def svg(width: int, height: int, title: str, lines: Iterable[str]) -> str:
    """A file, on white."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="11">'
    )
    white = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", white, *lines, "</svg>", ""])


def powers(low: float, high: float, base: int = 10) -> list[float]:
    """The powers of a base from `low` to `high`."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    return [float(base) ** n for n in range(first, last + 1)]


# Roofline ----------------------------------------------------------------------------------------------


def work_of_linears(row: Json) -> tuple[float, float] | None:
    """FLOPs of a row of bench.tune_projections, and the bytes that it moves at least.

    None for gradients of weights, whose sizes mean something else.
    """
    m, inner, outer, size = row["tokens"], row["inner"], row["outer"], BYTES[row["dtype"]]
    if row["kind"] == "sum":
        products = [(k, outer[0]) for k in inner]
        moved = sum(m * k for k in inner) + m * outer[0]
    elif row["kind"] in ("shared_a", "gated", "linear"):
        products = [(inner[0], n) for n in outer]
        moved = m * inner[0] + m * (outer[0] if row["kind"] == "gated" else sum(outer))
    else:
        return None
    return 2.0 * m * sum(k * n for k, n in products), float(size * (moved + sum(k * n for k, n in products)))


def work_of_attention(row: Json) -> tuple[float, float]:
    """FLOPs of a forward of bench.tune_attention without a tensor as mask, and the bytes that it moves."""
    heads, shared, dim = row["heads"], row["kv_heads"], row["head_dim"]
    flops = 4.0 * row["batch"] * heads * row["q_len"] * row["kv_len"] * dim
    moved = 2.0 * row["batch"] * dim * (heads * row["q_len"] + shared * row["kv_len"]) * BYTES[row["dtype"]]
    return flops * (0.5 if row["mask"] == "causal" else 1.0), moved


def points(projections: Sequence[Json], attentions: Sequence[Json]) -> dict[str, list[tuple[float, float]]]:
    """By name of a style: FLOPs a byte, and TFLOP/s, of bfloat16 in inference."""
    found: dict[str, list[tuple[float, float]]] = {}

    def add(name: str, work: tuple[float, float], microseconds: float | None) -> None:
        if microseconds:
            found.setdefault(name, []).append((work[0] / work[1], work[0] / microseconds / 1e6))

    for row in projections:
        work = work_of_linears(row) if row.get("dtype") == "bfloat16" and row.get("best") else None
        template = str(row.get("best")).partition(" ")[0]
        if work is not None and template in STYLES:
            add("stock", work, stock_time(row))
            add(template, work, best_time(row))
    for row in attentions:
        if row.get("dtype") == "bfloat16" and not row["train"] and row["mask"] in ("none", "causal"):
            times = row.get("device_us") or row["times_us"]
            fused = [
                time for name, time in times.items() if name != "unfused" and name not in row.get("wrong", ())
            ]
            add("stock", work_of_attention(row), times.get("unfused"))
            add("attention", work_of_attention(row), min(fused, default=None))
    return found


def roofline(results: Path, stem: str) -> str:
    """FLOP/s over FLOPs a byte, below the rates of a large product and of a copy on the same device.

    Args:
        results: the folder of the results.
        stem: of the device in the names of its files.

    Returns:
        An SVG file; "" where the rates or the times were not measured.
    """
    peak = _read(results, f"whole_mlp_{stem}").get("peak") or {}
    linears, attentions = _read(results, f"projections_{stem}"), _read(results, f"attention_{stem}")
    found = points(linears.get("rows", []), attentions.get("rows", []))
    rate = (peak.get("tflops") or {}).get("bfloat16")
    if not found or not rate or not peak.get("gb_per_s"):
        return ""
    slope = peak["gb_per_s"] / 1e3  # TFLOP/s for each FLOP a byte
    every = [point for group in found.values() for point in group]
    xs = min(x for x, _ in every) / 1.3, max(x for x, _ in every) * 1.3
    ys = min(y for _, y in every) / 1.3, rate * 1.5
    axes = Axes(60, 56, 620, 330, xs, ys)
    ridge = rate / slope
    roof = [(xs[0], slope * xs[0]), (ridge, rate), (xs[1], rate)]
    title = f"{linears.get('device', '?')}, torch {linears.get('torch', '?')}, bfloat16, inference"
    lines = [
        text(60, 16, "linears and attentions below what the device allows", size=13),
        text(60, 32, title, color="#555555"),
        *frame(axes, "FLOPs a byte that has to be moved", "TFLOP/s", powers(*xs), powers(*ys)),
        line([axes.at(x, max(y, ys[0])) for x, y in roof], "black"),
        text(676, axes.at(xs[1], rate)[1] - 5, f"{rate:.0f} TFLOP/s, {peak['gb_per_s']:.0f} GB/s", "end", 10),
    ]
    for name, group in found.items():
        color, shape, _ = STYLES[name]
        size = 2.0 if name == "stock" else 3.0
        lines += [marker(shape, *axes.at(x, y), color, size) for x, y in sorted(group)]
    named = {"stock": "stock", **{n: f"block GEMM, {n}" for n in ("row", "tiled", "persistent")}}
    lines += legend(560, 290, {**named, "attention": "fused attention"}, found)
    return svg(720, 430, f"Roofline: {title}", lines)


def legend(x: float, y: float, names: dict[str, str], there: Iterable[str]) -> list[str]:
    """What the markers mean, one below the other."""
    lines = []
    for i, name in enumerate(name for name in names if name in set(there)):
        color, shape, _ = STYLES[name]
        lines.append(marker(shape, x, y + 15 * i, color))
        lines.append(text(x + 9, y + 15 * i + 4, names[name], size=10))
    return lines


# Time over size ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """A curve: rows that differ in one size.

    Attributes:
        title: what they compute.
        source: of the file, "attention" and so on.
        key: an expression for the names of its rows, whose first group is the size.
        label: of that size.
    """

    title: str
    source: str
    key: str
    label: str = "tokens"


PANELS = (
    Panel(
        "causal, 32/8 heads of 128", "attention", r"bfloat16 causal b1 h32/8 q(\d+) k\1 d128 infer", "length"
    ),
    Panel("the same, training", "attention", r"bfloat16 causal b1 h32/8 q(\d+) k\1 d128 train", "length"),
    Panel("QKV, 4096 to 4096+1024+1024", "projections", r"shared_a 4096->4096\+1024\+1024 m(\d+) bfloat16"),
    Panel("gated MLP, 4096 to 14336", "projections", r"gated 4096->14336\+14336 silu m(\d+) bfloat16"),
    Panel("linear and GELU, 768 to 3072", "projections", r"linear 768->3072 gelu m(\d+) bfloat16"),
    Panel("adapter, 4096 to 4096, rank 16", "lora", r"forward 4096->4096 r16 bfloat16 m(\d+)"),
)


def times(row: Json) -> dict[str, float | None]:
    """Microseconds of stock, of ours and of the limit, of a row of any tuner."""
    if "unfused" in row["times_us"]:
        fused = [t for n, t in row["times_us"].items() if n != "unfused" and n not in row.get("wrong", ())]
        return {"stock": get(row, "times_us", "unfused"), "ours": min(fused, default=None)}
    limit = get(row, "times_us", "frozen") or get(row, "times_us", "limit")
    return {"stock": stock_time(row), "ours": best_time(row), "limit": limit}


def curve(rows: Sequence[Json], panel: Panel) -> list[tuple[int, dict[str, float | None]]]:
    """Size and times of the rows of a panel, in order."""
    found = [
        (int(match[1]), times(row)) for row in rows if (match := re.fullmatch(panel.key, str(row["key"])))
    ]
    return sorted(found, key=lambda item: item[0])


def lengths(results: Path, stem: str) -> str:
    """A panel for each of `PANELS` that was measured: time over sequence length, or number of tokens.

    Args:
        results, stem: as in `roofline`.

    Returns:
        An SVG file; "" without results.
    """
    files = {source: _read(results, f"{source}_{stem}") for source in {panel.source for panel in PANELS}}
    curves = [(panel, curve(files[panel.source].get("rows", []), panel)) for panel in PANELS]
    curves = [(panel, found) for panel, found in curves if len(found) > 1]
    if not curves:
        return ""
    device = files[curves[0][0].source].get("device", "?")
    width, height = 300, 240
    lines = [text(54, 16, f"microseconds over size, {device}, bfloat16", size=13)]
    for i, (panel, found) in enumerate(curves):
        every = [t for _, group in found for t in group.values() if t]
        sizes = [size for size, _ in found]
        axes = Axes(
            54 + width * (i % 3), 60 + height * (i // 3), width - 74, height - 84,
            (sizes[0] / 1.15, sizes[-1] * 1.15), (min(every) / 1.4, max(every) * 1.4),
        )  # fmt: skip
        ticks = [size for j, size in enumerate(sizes) if len(sizes) <= 4 or j % 3 == 0]
        lines += frame(axes, panel.label, "us", [float(tick) for tick in ticks], powers(*axes.ys))
        lines.append(text(axes.left, axes.top - 20, panel.title))
        for name in ("limit", "stock", "ours"):
            color, shape, dashes = STYLES[name]
            drawn = [axes.at(size, t) for size, group in found if (t := group.get(name))]
            if drawn:
                lines += [line(drawn, color, dashes), *(marker(shape, x, y, color, 2.5) for x, y in drawn)]
    total = 36 + height * -(-len(curves) // 3)
    names = {"stock": "stock", "ours": "fused", "limit": "limit"}
    for i, (name, what) in enumerate(names.items()):
        color, shape, _ = STYLES[name]
        lines += [marker(shape, 60 + 90 * i, total, color), text(68 + 90 * i, total + 4, what, size=10)]
    return svg(54 + width * min(3, len(curves)), total + 16, f"Time over size: {device}", lines)


def _read(results: Path, stem: str) -> Json:
    path = results / f"{stem}.json"
    found: Json = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


@dataclass(frozen=True)
class Plot:
    """A plot of the documentation.

    Attributes:
        draw: from the folder of the results and the stem of a device, the SVG file; "" without results.
        told: what it shows.
    """

    draw: Callable[[Path, str], str]
    told: str


#: By the name of the file in docs.
PLOTS = {
    "roofline.svg": Plot(
        roofline,
        "A roofline: TFLOP/s of stock, of the templates of the block GEMM, and of what attentions became, "
        "over the FLOPs for each byte that has to be moved. The roof is what a large product and a copy "
        "reach on the same device.",
    ),
    "lengths.svg": Plot(
        lengths,
        "Time over sequence length, and over the number of tokens. The limit is one product on weights that "
        "were joined beforehand, without an activation, or the linear without its adapter.",
    ),
}
