"""Rows as a line each, and as a table."""

from __future__ import annotations

import sys

from bench.common import Json

#: The ratios of the table.
SHOWN = ("stock/fused", "autotuned/fused", "autotuned/fused_autotuned", "fused/limit", "fused/sdpa")


def attentions(row: Json) -> str:
    """How many attentions were fused, of how many."""
    found = [(text, n) for text, n in row["sites"].get("what", {}).items() if text.startswith("attention: ")]
    return f"{sum(n for text, n in found if ': fused: ' in text)}/{sum(n for _, n in found)}"


def kernels(row: Json) -> dict[str, int]:
    """What each fused site became, with its number."""
    what = row["sites"].get("what", {})
    return {text.split(": fused: ", 1)[1]: n for text, n in what.items() if ": fused: " in text}


def describe(row: Json) -> str:
    """A case's outcome in one line."""
    if "median_ms" not in row:
        return f"failed: {row['failed']}"
    text = " ".join(f"{name} {ms:.2f} ms" for name, ms in row["median_ms"].items())
    text += "".join(f", {name} {value:.3f}" for name, value in row["ratio"].items())
    text += f", attention {attentions(row)}"
    text += "".join(f", {n} x {kernel}" for kernel, n in kernels(row).items())
    if row["correct"] is False:
        text += ", WRONG"
    if row["recompiled"]:
        text += ", RECOMPILED while it was timed"
    if row["failed"]:
        text += "".join(f", {name} failed: {reason}" for name, reason in row["failed"].items())
    return text + f" ({row['seconds']:.0f} s)"


def print_table(rows: list[Json]) -> None:
    """The final table."""
    from rich.console import Console
    from rich.table import Table

    def number(values: Json, name: str, digits: int) -> str:
        return f"{values[name]:.{digits}f}" if name in values else "-"

    def pair(values: Json, digits: int) -> str:
        return f"{number(values, 'stock', digits)} {number(values, 'fused', digits)}"

    def error(row: Json) -> str:
        parts = [
            max(e["out"], e.get("grad", 0.0)) for e in (row["error"].get(n) for n in ("stock", "fused")) if e
        ]
        return " ".join(f"{x:.1e}" for x in parts) or "-"

    times = list(dict.fromkeys(("stock", "fused", *(n for row in rows for n in row["median_ms"]))))
    ratios = list(dict.fromkeys(n for row in rows for n in row["ratio"] if n in SHOWN))
    columns = ["case", "attentions fused", *(f"{name} ms" for name in times), *ratios]
    columns += ["GiB stock fused", "compile s stock fused", "error stock fused", ""]
    table = Table(title="stock and fused torch.compile, medians")
    for i, column in enumerate(columns):
        table.add_column(
            column.replace("_", " ").replace("/", " / "), justify="right" if i else "left", no_wrap=i == 0
        )
    for row in rows:
        verdict = {True: "ok", False: "WRONG", None: ""}[row["correct"]]
        table.add_row(
            row["name"],
            attentions(row),
            *(
                "no memory"
                if "out of memory" in row["failed"].get(name, "")
                else number(row["median_ms"], name, 2)
                for name in times
            ),
            *(number(row["ratio"], name, 3) for name in ratios),
            pair(row["peak_gib"], 2),
            pair(row["compile_s"], 1),
            error(row),
            verdict,
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)
