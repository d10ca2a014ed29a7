"""Plots of docs/performance.md and docs/reliability.md, which `bench.plots` draws from results.

What matplotlib writes depends on its version, so each file names the data that it was drawn from, by a
digest: whether one is stale is told without drawing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.docs_linears import best_time, stock_time
from bench.docs_pieces import Json, get

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


# What was done, and how fast -----------------------------------------------------------------------------


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


def times(row: Json) -> dict[str, float]:
    """Milliseconds by variant, of a row of any tuner; what was wrong has none."""
    if "unfused" in row["times_us"]:
        measured = row.get("device_us") or row["times_us"]
        right = [t for n, t in measured.items() if n != "unfused" and n not in row.get("wrong", ())]
        found = {"stock": measured.get("unfused"), "fused": min(right, default=None)}
    else:
        limit = get(row, "times_us", "frozen") or get(row, "times_us", "limit")
        found = {"stock": stock_time(row), "fused": best_time(row), "limit": limit}
    return {name: time / 1e3 for name, time in found.items() if time}


# What each plot shows, as rows of `bench.plots` ----------------------------------------------------------


def roofline(results: Path, stem: str) -> Json:
    """Linears and attentions without masks, bfloat16 in inference, with the rates of the device.

    Args:
        results: the folder of the results.
        stem: of the device in the names of its files.
    """
    linears, attentions = _read(results, f"projections_{stem}"), _read(results, f"attention_{stem}")
    worked = [
        (row, work_of_linears(row), f"grouped GEMM, {str(row['best']).partition(' ')[0]}")
        for row in linears.get("rows", [])
        if row.get("dtype") == "bfloat16" and row.get("best")
    ]
    worked += [
        (row, work_of_attention(row), "attention")
        for row in attentions.get("rows", [])
        if row.get("dtype") == "bfloat16" and not row["train"] and row["mask"] in ("none", "causal")
    ]
    rows = [
        {"name": f"{kernel}, {row.get('key')}", "dtype": row["dtype"], "kernel": kernel, "flops": work[0],
         "bytes": work[1], "device_ms": {n: t for n, t in times(row).items() if n != "limit"}}
        for row, work, kernel in worked
        if work is not None
    ]  # fmt: skip
    peak = _read(results, f"whole_mlp_{stem}").get("peak") or {}
    return {**_header(linears or attentions), "peak": peak, "rows": rows if peak else []}


@dataclass(frozen=True)
class Curve:
    """Rows that differ in one size.

    Attributes:
        title: what they compute.
        source: of the file, "attention" and so on.
        key: an expression for the names of its rows, whose first group is the size.
    """

    title: str
    source: str
    key: str


CURVES = (
    Curve("causal, 32/8 heads of 128", "attention", r"bfloat16 causal b1 h32/8 q(\d+) k\1 d128 infer"),
    Curve("the same, training", "attention", r"bfloat16 causal b1 h32/8 q(\d+) k\1 d128 train"),
    Curve("QKV, 4096 to 4096+1024+1024", "projections", r"shared_a 4096->4096\+1024\+1024 m(\d+) bfloat16"),
    Curve("gated MLP, 4096 to 14336", "projections", r"gated 4096->14336\+14336 silu m(\d+) bfloat16"),
    Curve("linear and GELU, 768 to 3072", "projections", r"linear 768->3072 gelu m(\d+) bfloat16"),
    Curve("adapter, 4096 to 4096, rank 16", "lora", r"forward 4096->4096 r16 bfloat16 m(\d+)"),
)


def lengths(results: Path, stem: str) -> Json:
    """The rows of each of `CURVES`; arguments as of `roofline`."""
    files = {source: _read(results, f"{source}_{stem}") for source in sorted({c.source for c in CURVES})}
    rows = [
        {"suite": curve.source, "name": row["key"], "line": curve.title, "length": int(match[1]),
         "device_ms": times(row)}
        for curve in CURVES
        for row in files[curve.source].get("rows", [])
        if (match := re.fullmatch(curve.key, str(row["key"])))
    ]  # fmt: skip
    return {**_header(next(filter(None, files.values()), {})), "rows": rows}


def curves(results: Path, stem: str) -> Json:
    """The losses of bench.convergence on a device, or on another one where it was not run on this."""
    found = [path.stem for path in convergence_files(results)]
    name = f"convergence_{stem}"
    data = _read(results, name if name in found or not found else found[0])
    rows = [
        {name: row[name] for name in ("model", "variant", "seed", "loss")} for row in data.get("rows", [])
    ]
    return {**_header(data), "window": data.get("window", 1), "rows": rows}


def convergence_files(results: Path) -> list[Path]:
    """The files of bench.convergence, those of a GPU first."""
    return sorted(results.glob("convergence_*.json"), key=lambda path: ("cpu" in path.stem, path.name))


def _read(results: Path, stem: str) -> Json:
    path = results / f"{stem}.json"
    found: Json = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def _header(data: Json) -> Json:
    return {name: data[name] for name in ("device", "torch", "date") if name in data}


# The files -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plot:
    """A plot of the documentation.

    Attributes:
        kind: its name in `bench.plots`.
        data: from the folder of the results and the stem of a device, what is drawn.
        told: what it shows.
        page: in docs, where it is.
    """

    kind: str
    data: Callable[[Path, str], Json]
    told: str
    page: str = "performance.md"


#: By the name of the file in docs.
PLOTS = {
    "roofline.svg": Plot(
        "roofline",
        roofline,
        "A roofline: TFLOP/s of stock, of the templates of the grouped GEMM, and of fused attentions, over "
        "arithmetic intensity (FLOPs for each byte of compulsory traffic). The roof is the rate of a large "
        "GEMM and of a copy on the same device.",
    ),
    "lengths.svg": Plot(
        "length",
        lengths,
        "Time over sequence length, and over the number of tokens. The limit is one GEMM on concatenated "
        "weights without an activation, or the linear without its adapter.",
    ),
    "convergence.svg": Plot(
        "convergence",
        curves,
        "Loss curves: above, the training loss of stock and fused from the same seed, and of stock with two "
        "other seeds; below, how far each is from stock with the first seed.",
        "reliability.md",
    ),
}


def digest(data: Json) -> str:
    """What a file says that it was drawn from."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def stale(path: Path, data: Json) -> bool:
    """Whether a file shows other data."""
    return not path.exists() or digest(data) not in path.read_text("utf-8")


def wanted(results: Path, stem: str) -> Sequence[tuple[str, Plot, Json]]:
    """The plots that there are results for, with their data."""
    made = [(name, plot, plot.data(results, stem)) for name, plot in PLOTS.items()]
    return [(name, plot, data) for name, plot, data in made if data["rows"]]


def shown(results: Path, stem: str, page: str) -> list[str]:
    """What a page of docs says of its plots, with links to them."""
    return [
        f"{plot.told}\n\n![{plot.told.partition(':')[0].partition('.')[0]}]({name})"
        for name, plot, _ in wanted(results, stem)
        if plot.page == page
    ]


def write(path: Path, plot: Plot, data: Json) -> None:
    """Draw a plot.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    from bench import plots

    try:
        plots.save(plot.kind, data, [path], digest(data))
    except ImportError:
        raise SystemExit(f"{path.name} is drawn by matplotlib: python -m pip install matplotlib") from None
