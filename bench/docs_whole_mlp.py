"""docs/whole_mlp.md: when fusing parts of an MLP pays, from the results of bench.whole_mlp."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.docs_linears import against_limit, pays
from bench.docs_pieces import Json, filled, fixed, get, grouped, listing, number, section
from bench.tuning_linears import gain
from inductor_fusions.decisions.problems import MARGIN

COMMAND = """## Measurements

No measurements yet. `python -m bench.whole_mlp --out bench/results/whole_mlp_DEVICE.json` takes them, and
`make docs` writes them here.
"""

#: Variants in the order of the columns; what is compared with them is in the first group.
NAMES = {"up": ("stock", "epilogue", "triton", "bare"), "mlp": ("stock", "epilogue", "max_autotune", "whole")}
TITLES = {"up": "The first half: product, bias and activation", "mlp": "The whole MLP"}


def page(results: Path) -> str:
    """The text of docs/whole_mlp.md."""
    parts = []
    for path in sorted(results.glob("whole_mlp_*.json")):
        parts.append(measurements(json.loads(path.read_text("utf-8"))))
    if not parts:
        parts.append(COMMAND.strip())
    for path in sorted(results.glob("projections_*.json")):
        parts += epilogues(json.loads(path.read_text("utf-8")))
    for path in sorted(results.glob("mlp_training_*.json")):
        parts += training(json.loads(path.read_text("utf-8")))
    return filled("whole_mlp.md", measurements="\n\n".join(parts))


def epilogues(data: Json) -> list[str]:
    """What a file of bench.tune_projections says of linears with their activation."""
    rows = sorted(
        (row for row in data["rows"] if row["kind"] == "linear" and row["activation"] and gain(row)),
        key=lambda row: (row["inner"], str(row["activation"]), row["tokens"], str(row["key"])),
    )
    if not rows:
        return []
    text = (
        "A linear with bias and activation in the grouped GEMM, as `linear_epilogue` emits it, is at least "
        f"{MARGIN - 1:.0%} faster than stock in {pays(rows)} of {len(rows)} cases. Times are microseconds, "
        "measured with CUDA graphs on operands that are not in the L2 cache. Stock is the faster of default "
        "and max-autotune, if both were measured. **bare** is the library's GEMM without bias and "
        "activation, the limit at which the epilogue costs nothing."
    )

    def kind(row: Json) -> str:
        return f"{row['activation']}, {'up to 128 tokens' if row['tokens'] <= 128 else 'more tokens'}"

    kinds = dict(sorted(grouped(rows, kind).items()))
    where = "; [measurements.html](measurements.html) has the commands and each row."
    return [
        *_opening("The first half alone", data, where), text,
        against_limit("activation", "cases", kinds, "bare"),
    ]  # fmt: skip


def _opening(title: str, data: Json, where: str) -> list[str]:
    """A heading, and one line that says when its rows were measured, and where they are."""
    when = f"torch {data.get('torch', '?')}, {str(data.get('date', '?'))[:10]}"
    return [f"## {title}, {data.get('device', '?')}", when + where]


def training(data: Json) -> list[str]:
    """What a file of bench.mlp_training says of forward and backward."""
    text = (
        "Microseconds on the device alone, for a forward and a backward. **gemms** are the library's GEMMs "
        "of the step alone, the limit at which the activation and its gradient cost nothing. **up** and "
        "**hidden** are the two GEMMs that an epilogue could be fused into: the one before the activation, "
        "and the one that computes the gradient of the hidden layer. **triton** next to each is the fastest "
        "of Inductor's Triton templates for the same GEMM, without an epilogue. The last two columns are "
        "upper bounds for the speedup over the faster stock: with epilogues in GEMMs as fast as the "
        "library's, and with Triton's GEMMs."
    )
    rows = [{**row, "us": row.get("device_us") or row["times_us"]} for row in data["rows"]]
    names = {"stock": "stock", "max_autotune": "max-autotune", "gemms": "gemms", "up": "up"}
    names |= {"up_triton": "up, triton", "hidden": "hidden", "hidden_triton": "hidden, triton"}
    columns = {
        # Rows from before the script tried all templates say so.
        "case": lambda row: row["key"] + ("" if row.get("persistent") else ", without persistent templates"),
        **fixed("us", 0, names),
        **fixed("limits", 2, {"free": "bound", "triton": "bound, Triton"}),
    }
    command = f", by `{data.get('command', '?')}`"
    return [*_opening("Training", data, command), text, listing(rows, columns)]


def measurements(data: Json) -> str:
    """Every row of a file of bench.whole_mlp."""
    peak = data.get("peak") or {}
    parts = [
        f"Peak rates measured here: {number(rate, 1)} TFLOP/s in {dtype}, "
        f"{number(peak.get('gb_per_s'), 0)} GB/s. `roofline` is the lower bound that they give for the time."
        for dtype, rate in (peak.get("tflops") or {}).items()
    ]
    parts.append(
        "Times are microseconds, on the device alone where that was measured. **stock** is `torch.compile`: "
        "the library's GEMM and a pointwise kernel. **epilogue** is the library's GEMM with bias and gelu "
        "as its epilogue. **triton** is a Triton GEMM with the same epilogue. **bare** is the library's "
        "GEMM alone. **whole** is one kernel."
    )
    for part, names in NAMES.items():
        rows = sorted(
            (row for row in data["rows"] if row["part"] == part), key=lambda r: (r["width"], r["tokens"])
        )
        if rows:
            parts += [f"### {TITLES[part]}", answer(part, rows), _rows(rows, names)]
    return section("Measurements", data, *parts)


def measured(row: Json, name: str) -> float | None:
    """Microseconds of a variant: on the device alone where that was measured."""
    return get(row, "device_us" if row.get("device_us") else "times_us", name)


def usable(row: Json) -> dict[str, float]:
    """Times of the variants that do all of the work and are in the error budget."""
    left_out = {"bare", *row.get("wrong", ())}
    names = [name for name in NAMES[row["part"]] if name not in left_out]
    return {name: time for name in names if (time := measured(row, name)) is not None}


def answer(part: str, rows: Sequence[Json]) -> str:
    """What the rows say to the question."""
    fused = ("whole",) if part == "mlp" else ("epilogue", "triton")
    wins, compared = [], 0
    for row in rows:
        times = usable(row)
        ours = [times[name] for name in fused if name in times]
        others = [value for name, value in times.items() if name not in fused]
        if ours and others:
            compared += 1
            if min(others) / min(ours) >= MARGIN:
                wins.append((row, min(others) / min(ours)))
    what = "One kernel" if part == "mlp" else "A GEMM with bias and activation as its epilogue"
    against = "every other form" if part == "mlp" else "a GEMM and a pointwise kernel"
    text = f"{what} is at least {MARGIN - 1:.0%} faster than {against} in {len(wins)} of {compared} cases"
    if not wins:
        return text + "."
    widths = Counter(row["width"] for row, _ in wins)
    of = Counter(row["width"] for row in rows)
    where = ", ".join(f"{count} of {of[width]} at width {width}" for width, count in sorted(widths.items()))
    row, most = max(wins, key=lambda win: win[1])
    shape = f"{row['tokens']} tokens and width {row['width']}"
    return f"{text}: {where}. The largest speedup is {most:.2f}, at {shape}."


def _rows(rows: Sequence[Json], names: Sequence[str]) -> str:
    def time(name: str) -> Callable[[Json], str]:
        return lambda row: "wrong" if name in row.get("wrong", ()) else number(measured(row, name), 1)

    fused = "whole" if rows[0]["part"] == "mlp" else "epilogue"
    columns = {
        "case": lambda row: f"width {row['width']}, {row['tokens']} tokens",
        **{name: time(name) for name in names},
        **fixed("roofline_us", 1, {"unfused": "roofline, unfused", fused: "roofline, fused"}),
        "fastest": lambda row: min(times, key=times.__getitem__) if (times := usable(row)) else None,
    }
    return listing(rows, columns)
