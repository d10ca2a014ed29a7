"""Plots of results of `python -m inductor_fusions bench`, each as PNG and SVG, to be read in print.

speedup.{png,svg}    stock over fused of every case, with its noise
roofline.{png,svg}   operations and blocks: FLOP/s over FLOPs a byte, under the rates measured there
length.{png,svg}     time against sequence length, or number of tokens, where cases differ in that alone
convergence.{png,svg}  loss curves of bench.convergence, and how far apart they are
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.compare import noise, ratio
from bench.curves import smooth

Json = dict[str, Any]
Row = Mapping[str, Any]

#: Told apart in grey and by colour-blind readers: a shape and a line style go with each colour.
STYLES = {
    "stock": {"color": "#555555", "marker": "s", "linestyle": "--"},
    "fused": {"color": "#0072b2", "marker": "o", "linestyle": "-"},
    "limit": {"color": "#d55e00", "marker": "^", "linestyle": ":"},
    "autotuned": {"color": "#009e73", "marker": "D", "linestyle": "-."},
    "sdpa": {"color": "#cc79a7", "marker": "v", "linestyle": ":"},
}
#: Of what is fused, where rows name their kernel.
KERNELS = (("#0072b2", "o"), ("#009e73", "D"), ("#d55e00", "^"), ("#cc79a7", "v"), ("#e69f00", "P"))
FONT = {"font.size": 9, "axes.titlesize": 10, "svg.fonttype": "path",
        "svg.hashsalt": "inductor_fusions", "axes.spines.top": False,
        "axes.spines.right": False, "figure.dpi": 100, "savefig.dpi": 200}  # fmt: skip


def draw(data: Json, folder: Path) -> list[Path]:
    """Draw what the rows have; a plot without data is left out.

    Args:
        data: header and "rows" of a results file.
        folder: where the files go; it is made.

    Returns:
        The files written.

    Raises:
        ImportError: matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name in PLOTS:
        written += save(name, data, [folder / f"{name}.{suffix}" for suffix in ("png", "svg")])
    return written


def save(name: str, data: Json, paths: Sequence[Path], source: str = "") -> list[Path]:
    """Draw one plot into files.

    Args:
        paths: the files, whose endings say what they are.
        source: what SVG files say that they were drawn from.

    Returns:
        The files written: none without data.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(FONT):
        figure = PLOTS[name](data, pyplot)
        if figure is None:
            return []
        for path in paths:
            told = {"Date": None, "Source": source or None} if path.suffix == ".svg" else None
            figure.savefig(path, bbox_inches="tight", metadata=told)
        pyplot.close(figure)
    return list(paths)


def where(data: Json) -> str:
    """Device and versions, for titles."""
    return f"{data.get('device', '?')}, torch {data.get('torch', '?')}, {str(data.get('date', '?'))[:10]}"


def speedup(data: Json, pyplot: Any) -> Any:
    """Horizontal bars from 1: stock over fused of each case, the largest on top."""
    rows = sorted((r for r in data["rows"] if ratio(r) is not None), key=lambda r: ratio(r) or 0.0)
    if not rows:
        return None
    figure, axes = pyplot.subplots(figsize=(7.5, 1.2 + 0.19 * len(rows)))
    values = [ratio(row) or 1.0 for row in rows]
    colors = ["#0072b2" if value >= 1 else "#d55e00" for value in values]
    errors = [value * min(noise(row), 1.0) for value, row in zip(values, rows, strict=True)]
    places = range(len(rows))
    axes.barh(places, [v - 1 for v in values], left=1, xerr=errors, color=colors, height=0.65,
              error_kw={"elinewidth": 0.8, "capsize": 1.5})  # fmt: skip
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(places, [str(row["name"]) for row in rows], fontsize=7)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    if max(values) > 3:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("time of stock over time fused")
    axes.set_title(where(data))
    return figure


def roofline(data: Json, pyplot: Any) -> Any:
    """Achieved FLOP/s over arithmetic intensity; the roofs are the rates that were measured on the device."""
    peak = data.get("peak") or {}
    rows = [r for r in data["rows"] if r.get("flops") and r.get("bytes") and _ms(r, "fused")]
    if not rows or not peak:
        return None
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5))
    intensities = [row["flops"] / row["bytes"] for row in rows]
    low, high = min(intensities) / 2, max(intensities) * 2
    for dtype in sorted({str(row["dtype"]) for row in rows} & set(peak["tflops"])):
        top, slope = peak["tflops"][dtype] * 1e12, peak["gb_per_s"] * 1e9
        xs = [low * (high / low) ** (i / 200) for i in range(201)]
        axes.plot(xs, [min(top, slope * x) / 1e12 for x in xs], color="black", linewidth=1)
        axes.annotate(f"{dtype}: {peak['tflops'][dtype]:g} TFLOP/s, {peak['gb_per_s']:g} GB/s",
                      (high, top / 1e12), ha="right", va="bottom", fontsize=8)  # fmt: skip
    for variant, label, color, marker in _groups(rows):
        points = [
            (r["flops"] / r["bytes"], r["flops"] / (ms * 1e-3) / 1e12)
            for r in rows
            if (ms := _ms(r, variant)) and label in (variant, r.get("kernel"))
        ]
        if points:
            size = 9 if variant == "stock" else 18
            axes.scatter(*zip(*points, strict=True), label=label, s=size, color=color, marker=marker)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs a byte that has to be moved")
    axes.set_ylabel("TFLOP/s")
    axes.legend(frameon=False, loc="lower right")
    axes.set_title(f"Linears, attentions and blocks: {where(data)}")
    return figure


def _groups(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """Variant, label, colour and marker of what a roofline shows: of what is fused, each kernel by itself."""
    kernels = sorted({str(row["kernel"]) for row in rows if row.get("kernel")})
    found = [(v, v, STYLES[v]["color"], STYLES[v]["marker"]) for v in ("stock", "fused", "limit")]
    if not kernels:
        return found
    return [found[0], *(("fused", k, *style) for k, style in zip(kernels, KERNELS, strict=False)), found[2]]


def _ms(row: Row, variant: str) -> float | None:
    """Time on the device where that was measured, else the wall time."""
    for column in ("device_ms", "median_ms"):
        value = (row.get(column) or {}).get(variant)
        if value:
            return float(value)
    return None


def lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows that differ in their length alone, by the name of the curve; two at least."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("line") and row.get("length") and _ms(row, "fused"):
            found.setdefault(str(row["line"]), []).append(row)
    return {
        name: sorted(group, key=lambda r: int(r["length"])) for name, group in found.items() if len(group) > 1
    }


def _apart(sizes: Sequence[int]) -> list[int]:
    """Those of some sizes, in order, whose labels do not run into each other."""
    least = (sizes[-1] / sizes[0]) ** (1 / 6)
    found: list[int] = []
    for size in sizes:
        if not found or size >= found[-1] * least:
            found.append(size)
    return found


def length(data: Json, pyplot: Any) -> Any:
    """A panel for each curve: time over length, of each variant."""
    from matplotlib.ticker import NullFormatter

    curves = lines(data["rows"])
    if not curves:
        return None
    columns = min(3, len(curves))
    height = math.ceil(len(curves) / columns)
    figure, grid = pyplot.subplots(height, columns, figsize=(3.2 * columns, 2.8 * height), squeeze=False)
    panels = [axes for line in grid for axes in line]
    for axes, (name, rows) in zip(panels, curves.items(), strict=False):
        for variant, style in STYLES.items():
            points = [(int(row["length"]), ms) for row in rows if (ms := _ms(row, variant)) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=variant, markersize=3.5, linewidth=1.2, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = _apart([int(row["length"]) for row in rows])
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        if min(axes.get_ylim()) * 10 < max(axes.get_ylim()):
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("sequence length" if rows[0].get("suite") == "attention" else "tokens", fontsize=8)
        axes.set_ylabel("ms", fontsize=8)
        axes.tick_params(labelsize=7)
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    max(panels, key=lambda axes: len(axes.lines)).legend(frameon=False, fontsize=7)
    figure.suptitle(where(data), fontsize=9)
    figure.tight_layout()
    return figure


def convergence(data: Json, pyplot: Any) -> Any:
    """Two panels for each model: smoothed losses, and their distances from stock with the first seed."""
    rows, window = [row for row in data["rows"] if row.get("loss")], int(data.get("window", 1))
    models = sorted({str(row["model"]) for row in rows})
    if not models:
        return None
    figure, grid = pyplot.subplots(2, len(models), figsize=(3.2 * len(models), 5), squeeze=False)
    for column, model in enumerate(models):
        curves = [(r["variant"], r["seed"], smooth(r["loss"], window)) for r in rows if r["model"] == model]
        first = next((curve for variant, _, curve in curves if variant == "stock"), None)
        # The fused curve on top, where it hides none.
        for variant, seed, curve in sorted(curves, key=lambda item: item[0] != "stock"):
            above = variant == "stock" and curve is first
            style = {name: STYLES[variant][name] for name in ("color", "linestyle")}
            if variant == "stock" and not above:
                style = {"color": "#aaaaaa", "linestyle": ":"}
            label = variant if variant != "stock" or above else f"stock, seed {seed}"
            some = range(0, len(curve), max(1, len(curve) // 200))  # points of a picture of this width
            steps = [window + i for i in some]
            grid[0][column].plot(steps, [curve[i] for i in some], label=label, linewidth=1.2, **style)
            if first is not None and not above:
                apart = [abs(curve[i] - first[i]) for i in some]
                grid[1][column].plot(steps, apart, label=label, linewidth=1.2, **style)
        grid[0][column].set_title(model, fontsize=8)
        for axes in (grid[0][column], grid[1][column]):
            axes.set_xlabel("step", fontsize=8)
            axes.tick_params(labelsize=7)
    grid[0][0].set_ylabel(f"loss, mean of {window} steps", fontsize=8)
    grid[1][0].set_ylabel("distance from stock", fontsize=8)
    grid[0][-1].legend(frameon=False, fontsize=7)
    figure.suptitle(where(data), fontsize=9)
    figure.tight_layout()
    return figure


#: By name: from results, and matplotlib's pyplot, a figure; None without data.
PLOTS: dict[str, Callable[[Json, Any], Any]] = {
    "speedup": speedup,
    "roofline": roofline,
    "length": length,
    "convergence": convergence,
}
