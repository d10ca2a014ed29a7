"""A row of `bench.models` as a line."""

from __future__ import annotations

from bench.common import Json


def attentions(row: Json) -> str:
    """How many attentions were fused, of how many."""
    found = [(text, n) for text, n in row["sites"].get("what", {}).items() if text.startswith("attention: ")]
    return f"{sum(n for text, n in found if ': fused: ' in text)} of {sum(n for _, n in found)}"


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
