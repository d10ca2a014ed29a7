"""Whole models, from results of bench.models: the README's table, and a section of docs/performance.md."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from bench.common import DTYPES
from bench.compare import geometric_mean
from bench.docs_pieces import (
    NONE,
    Columns,
    Json,
    baseline,
    fixed,
    get,
    listing,
    named,
    number,
    quotient,
    section,
    table,
)
from bench.models.report import attentions
from inductor_fusions.checking import budget

#: Cases of the README's table, in this order; all cases are in docs/performance.md.
README_CASES = (
    "llama-1b sdpa b1 s8192",
    "llama-1b sdpa b1 s8192 train",
    "llama-1b sdpa padded b4 s2048",
    "gpt-oss-8l eager b2 s4096",
    "gpt2 eager b16 s1024 train",
    "bert-base eager padded b32 s512",
    "t5-base encoder padded b16 s512",
    "swin-tiny b64",
)
#: Ratios this close to 1 count as level.
LEVEL = 0.02
#: What a gain is stated against, where there is a choice.
BETTER = "`autotuned` is stock under max-autotune; where it was measured, the faster of the two counts."
#: More memory or compile time than this, relative to stock, is told.
MORE = 1.05
#: Titles of variants that are compiled from the same model, and of others.
TITLES = {
    "stock": "stock", "autotuned": "stock autotuned", "fused": "fused", "fused_autotuned": "fused autotuned",
}  # fmt: skip
OTHERS = {"limit": "by hand", "sdpa": "sdpa path"}


def ratio(row: Json, above: str, below: str) -> float | None:
    """Quotient of the median times of two variants."""
    return quotient(row, above, below, "median_ms")


def gain(row: Json) -> float | None:
    """The time of the better stock over that of fused."""
    return ratio(row, baseline(row), "fused")


def gain_text(row: Json, fused: str = "fused") -> str:
    """The time of the better stock over that of fused, or of another variant, with its spread."""
    return ratio_text(row, baseline(row), fused)


def ratio_text(row: Json, above: str, below: str) -> str:
    """The quotient with its spread: half of both interquartile ranges, added in quadrature."""
    value = ratio(row, above, below)
    if value is None:
        return NONE
    parts = [get(row, "spread", name) for name in (above, below)]
    if any(part is None for part in parts):
        return f"{value:.2f}"
    return f"{value:.2f} ± {value * math.hypot(*(part or 0.0 for part in parts)) / 2:.2f}"


def time_text(row: Json, variant: str) -> str:
    """The median time of a variant in ms, or that it ran out of memory."""
    reason = str((row.get("failed") or {}).get(variant, ""))
    return "out of memory" if "out of memory" in reason else number(get(row, "median_ms", variant), 2)


def error(row: Json, variant: str, which: str) -> float | None:
    """Relative error of a variant against float64: of its output, its gradients or its worst gradient."""
    return get(row.get("error") or {}, variant, which)


def sites(row: Json) -> str:
    """How many attentions were fused, of how many."""
    return attentions(row) if (row.get("sites") or {}).get("what") is not None else NONE


def not_fused(row: Json) -> dict[str, int]:
    """Verdict and reason of the sites that were not fused, with their number."""
    what: dict[str, int] = (row.get("sites") or {}).get("what") or {}
    return {text: count for text, count in what.items() if ": fused: " not in text}


def verdict(row: Json) -> str:
    """ "faster", "level" or "slower" than the better stock."""
    value = gain(row)
    if value is None:
        return "not compared"
    if abs(value - 1) <= LEVEL:
        return "level"
    return "faster" if value > 1 else "slower"


def tally(rows: Sequence[Json]) -> str:
    """One sentence: how many cases are faster, level and slower."""
    counts = Counter(verdict(row) for row in rows)

    def of(name: str) -> str:
        return f"{counts[name]} {'is' if counts[name] == 1 else 'are'} {name}"

    text = f"{len(rows)} cases were measured: {of('faster')} than stock, "
    text += f"{of('level')} (within {LEVEL:.0%}), {of('slower')}"
    text += f", {counts['not compared']} could not be compared." if counts["not compared"] else "."
    told = [f"{mean:.2f} over the {count} {name} cases" for name, count, mean in means(rows)]
    return text + (f" The geometric mean of stock / fused is {' and '.join(told)}." if told else "")


def means(rows: Sequence[Json]) -> list[tuple[str, int, float]]:
    """Of inference and of training: how many cases have a gain, and the geometric mean of it."""
    told = []
    for train, name in ((False, "inference"), (True, "training")):
        found = [r for row in rows if bool(row.get("train")) is train and (r := gain(row))]
        if found:
            told.append((name, len(found), geometric_mean(found) or 1.0))
    return told


def best_setting(row: Json) -> float | None:
    """The shortest median time in ms that a setting of stock was measured with; None if the row has no other
    setting than the one it was measured with."""
    others = [time for name in ("sdpa", "autotuned") if (time := get(row, "median_ms", name))]
    stock = get(row, "median_ms", "stock")
    if stock is None or not (others or " sdpa " in str(row["name"])):
        return None
    return min(stock, *others) if others else stock


def over_best(row: Json) -> float | None:
    """The time of the best setting of stock over that of fused."""
    best, fused = best_setting(row), get(row, "median_ms", "fused")
    return best / fused if best and fused else None


def readme_table(data: Json) -> str:
    """The README's table of measured gains."""
    rows: list[Json] = data["rows"]
    by_name = {row["name"]: row for row in rows}
    chosen = [by_name[name] for name in README_CASES if name in by_name] or rows
    columns: Columns = {
        **named("case", "name"),
        "stock ms": partial(time_text, variant="stock"),
        "best stock setting ms": lambda row: number(best_setting(row), 2),
        "fused ms": partial(time_text, variant="fused"),
        "best setting / fused": lambda row: number(over_best(row), 2),
        "stock / fused": gain_text,
    }
    body = [[cell(row) for cell in columns.values()] for row in chosen]
    for name, count, mean in means(rows):
        train = name == "training"
        both = [gained for row in rows if bool(row.get("train")) is train and (gained := over_best(row))]
        best = f"{geometric_mean(both):.2f} ({len(both)} cases)" if both else None
        title = f"**all {count} {name} cases**, geometric mean"
        body.append([title, None, None, None, best, f"**{mean:.2f}**"])
    dtypes = ", ".join(sorted({str(row["dtype"]) for row in rows if row.get("dtype")}))
    text = f"{data.get('device', '?')}, torch {data.get('torch', '?')}, "
    text += f"transformers {data.get('transformers', '?')}, {dtypes}, "
    text += f"last run {str(data.get('date', '?'))[:10]}. "
    text += "Whole Hugging Face models with random weights: stock `torch.compile`, and the same with the "
    text += "import. `eager` and `sdpa` are the model's `attn_implementation`; `padded`: the batch has a "
    text += "padding mask; `train`: a forward and a backward. The best stock setting is the fastest measured "
    text += "one of the case's own, `sdpa` and max-autotune; `-`: only its own was measured."
    if any(get(row, "median_ms", "autotuned") for row in chosen):
        text = f"{text} {BETTER}"
    return "\n\n".join([text, table(tuple(columns), body), tally(rows).partition(" The geometric")[0]])


def summary(data: Json) -> str:
    """Two sentences on the cases of another device, for the README."""
    return f"{data.get('device', '?')}, last run {str(data.get('date', '?'))[:10]}: {tally(data['rows'])}"


def models_section(data: Json, title: str = "Whole models") -> str:
    """Every case of a file of bench.models."""
    rows: list[Json] = data["rows"]
    adapters = any("frozen" in (row.get("median_ms") or {}) for row in rows)
    parts = [tally(rows)]
    compiles = [times for row in rows if (times := (row.get("compiles_s") or {}).get("fused"))]
    single = [len(times) < 2 for times in compiles]
    if any(single):
        who = "Each case was" if all(single) else "Some cases were"
        parts[-1] += f" {who} compiled once, so its compile time is a single measurement."
    told = {
        "Time": _times, "Memory and compile time": _resources, "Error against float64": _errors,
        "Where it loses or ties": _losses, "Sites left to stock, and rejected": _left,
        "What was emitted": _emitted,
    }  # fmt: skip
    for part, tell in told.items():
        parts += [f"### {part}", tell(rows)]
    return section("Whole models with adapters" if adapters else title, data, *parts)


def _times(rows: Sequence[Json]) -> str:
    columns: dict[str, Callable[[Json], str]] = {**named("case", "name"), "attentions fused": sites}
    for name, title in TITLES.items():
        columns[f"{title} ms"] = partial(time_text, variant=name)
    columns |= {
        "stock / fused": gain_text,
        "stock / fused autotuned": partial(gain_text, fused="fused_autotuned"),
    }
    columns |= fixed("device_ms", 2, {"stock": "stock ms, device", "fused": "fused ms, device"})
    columns["stock / fused, device"] = lambda row: number(
        quotient(row, baseline(row, "device_ms"), "fused", "device_ms"), 2
    )
    for name, title in {**OTHERS, "frozen": "frozen"}.items():
        columns[f"{title} ms"] = partial(time_text, variant=name)
        columns[f"fused / {title}"] = partial(ratio_text, above="fused", below=name)
    columns["without ms"] = partial(time_text, variant="without")
    columns["stock / without"] = partial(ratio_text, above="stock", below="without")
    return listing(rows, columns)


def _resources(rows: Sequence[Json]) -> str:
    memory = {name: f"GiB {title}" for name, title in (TITLES | OTHERS).items()}
    seconds = {name: f"compile s {title}" for name, title in TITLES.items()}
    return listing(
        rows, {**named("case", "name"), **fixed("peak_gib", 2, memory), **fixed("compile_s", 1, seconds)}
    )


def _errors(rows: Sequence[Json]) -> str:
    kinds = {"out": "output", "grad": "gradients", "worst_grad": "worst gradient", "tables_grad": "tables"}
    words = {True: "yes", False: "no", None: "not compared"}

    def column(which: str, kind: str, name: str) -> Columns:
        def cell(row: Json) -> str | None:
            value = error(row, name, which)
            return None if value is None else f"{value:.4f}"  # NaN is no dash

        return {f"{kind}, {name.replace('_', ' ')}": cell}

    columns: Columns = named("case", "name")
    for (which, kind), name in itertools.product(kinds.items(), TITLES):
        columns = {**columns, **column(which, kind, name)}
    columns = {**columns, "within budget": lambda row: words[row.get("correct")]}
    note = f"""
        An error is the norm of the difference from the float64 result, divided by the norm of that result.
        `gradients` is the error of the gradients of all parameters as one vector. `worst gradient` is the
        error of the parameter that has the largest one. `tables` is the error of the gradients of position
        tables, learned scales and sinks as one vector. The budget is {budget.FACTOR} times the error of stock
        plus eps of the dtype; the output and `gradients` must stay within it. If stock ran out of memory, the
        model without `torch.compile` takes its place. A case with dropout is not compared: it draws other
        random numbers than stock.
    """
    return " ".join(note.split()) + "\n\n" + listing(rows, columns)


def _losses(rows: Sequence[Json]) -> str:
    def behind(ours: str, other: str) -> Callable[[Json], str | None]:
        """The quotient of two variants where the first one is slower."""
        return lambda row: (
            ratio_text(row, ours, other) if (ratio(row, ours, other) or 0) > 1 + LEVEL else None
        )

    lines: list[str] = []
    none: list[str] = []
    tests: list[tuple[str, Callable[[Json], str | None]]] = [
        ("Slower than stock", lambda r: gain_text(r) if verdict(r) == "slower" else None),
        ("Level with stock", lambda r: gain_text(r) if verdict(r) == "level" else None),
        ("Slower than attention written by hand (fused / by hand)", behind("fused", "limit")),
        ("Slower than the model's own sdpa path (fused / sdpa path)", behind("fused", "sdpa")),
        ("Takes more memory than stock (GiB)", lambda r: _more(r, "peak_gib", 2)),
        ("Takes longer to compile than stock (s)", lambda r: _more(r, "compile_s", 1)),
        ("Error out of budget", lambda r: "output or gradients" if r.get("correct") is False else None),
        ("Worst single gradient over the same budget (relative error)", _worst_gradient),
        ("Recompiled while it was timed", lambda r: "timed anyway" if r.get("recompiled") else None),
        ("A variant failed", _failed),
    ]
    if any(ratio(row, "fused_autotuned", "autotuned") for row in rows):
        both = "Slower than stock where both are autotuned (fused / stock)"
        tests.insert(2, (both, behind("fused_autotuned", "autotuned")))
    for title, test in tests:
        found = [(str(row["name"]), text) for row in rows if (text := test(row)) is not None]
        if found:
            lines.append(f"- {title}: {'; '.join(f'{name} ({text})' for name, text in found)}.")
        else:
            none.append(title[0].lower() + title[1:])
    return "\n".join([*lines, f"- No case: {'; '.join(none)}."] if none else lines)


def _failed(row: Json) -> str | None:
    found: Mapping[str, str] = row.get("failed") or {}
    short = {n: "out of memory" if "out of memory" in text else text for n, text in found.items()}
    return ", ".join(f"{name}: {text}" for name, text in short.items()) or None


def _more(row: Json, name: str, digits: int) -> str | None:
    stock, fused = get(row, name, "stock"), get(row, name, "fused")
    if stock is None or fused is None or fused <= MORE * stock:
        return None
    return f"{number(fused, digits)} against {number(stock, digits)}"


def _worst_gradient(row: Json) -> str | None:
    stock, fused = error(row, "stock", "worst_grad"), error(row, "fused", "worst_grad")
    if stock is None or fused is None or fused <= budget.limit(stock, DTYPES[row["dtype"]]):
        return None
    where = row["error"]["fused"].get("worst_grad_of", "?")
    return f"{fused:.4f} in `{where}`, against {stock:.4f} for stock's worst"


def _left(rows: Sequence[Json]) -> str:
    body = []
    for row in rows:
        for text, count in not_fused(row).items():
            _, what, reason = (*text.split(": ", 2), "", "")[:3]
            body.append((f"{row['name']}: {reason}", what, count))
    return table(("case and reason", "verdict", "sites"), body) if body else "None: every site was fused."


def _emitted(rows: Sequence[Json]) -> str:
    body = [
        (f"{row['name']}: {text.split(': fused: ', 1)[1]}", count)
        for row in rows
        for text, count in ((row.get("sites") or {}).get("what") or {}).items()
        if ": fused: " in text
    ]
    note = "A speedup in this table is the prediction of the device's table for the attention alone."
    return note + "\n\n" + table(("case and kernel", "sites"), body) if body else "Nothing."
