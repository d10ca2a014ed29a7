"""Write what the results say into the documentation: the README's table and picture, and pages of docs.

    python -m bench.docs            # render all
    python -m bench.docs --check    # exit 1 where one of them is stale

Every figure comes from bench/results/*.json, and a file or a column that is not there is left out.
`models_*.json` are files of bench.models, `lora_models_*.json` of bench.models_lora, `bench_*.json` of
`inductor_fusions bench`; `attention_*.json`, `flex_*.json`, `projections_*.json` and `lora_*.json` of the
scripts bench.tune_*; `outer_product_*.json`, `dot_interaction_*.json`, `whole_mlp_*.json` and
`distributed_*.json` of scripts of these names; `fuzz_cpu.json` of tests.fuzz.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from bench import docs_reliability, docs_whole_mlp, picture
from bench.compare import geometric_mean, means, noise
from bench.device_table import gains
from bench.docs_distributed import distributed_section
from bench.docs_linears import (
    interactions_section,
    lora_models_section,
    lora_section,
    lora_summary,
    projections_section,
)
from bench.docs_pieces import NONE, NOTICE, Json, get, number, opening, quotient, table
from inductor_fusions.tables import MARGIN

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- measured: begin (python -m bench.docs) -->"
END = "<!-- measured: end -->"
#: The device of the README's table, and of what it says of adapters.
README_RESULTS = "models_h200.json"
README_ADAPTERS = "lora_models_h200.json"
#: Cases of the README's table, in this order; all cases are in docs/performance.md.
README_CASES = (
    "llama-1b sdpa b1 s8192",
    "llama-1b sdpa b1 s8192 train",
    "llama-1b sdpa padded b4 s2048",
    "gpt-oss-8l eager b2 s4096",
    "gpt2 eager b16 s1024",
    "bert-base eager padded b32 s512",
    "t5-base encoder padded b16 s512",
    "swin-tiny b64",
)
#: Ratios this close to 1 count as level.
LEVEL = 0.02
#: More memory or compile time than this, relative to stock, is told.
MORE = 1.05
#: An error may be this many times that of stock, plus eps of the dtype.
ERROR_FACTOR = 1.5
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
MASKS = (
    ("none", "no mask"),
    ("causal", "causal"),
    ("pad", "padding, `[B, 1, 1, K]`"),
    ("bias_batch", "additive, `[B, 1, Q, K]`"),
    ("bool4d", "boolean, `[B, 1, Q, K]`"),
    ("bias", "bias, `[1, H, Q, K]`"),
    ("bias_grad", "bias with a gradient, `[1, H, Q, K]`"),
    ("bias_full", "bias, `[B, H, Q, K]`"),
    ("full_grad", "bias with a gradient, `[B, H, Q, K]`"),
    ("alibi", "ALiBi and padding (BLOOM)"),
    ("window", "bias and window mask (Swin)"),
)


def ratio(row: Json, above: str, below: str) -> float | None:
    """Quotient of the median times of two variants."""
    first, second = get(row, "median_ms", above), get(row, "median_ms", below)
    return first / second if first is not None and second else None


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
    what: dict[str, int] | None = (row.get("sites") or {}).get("what")
    if what is None:
        return NONE
    attention = {text: count for text, count in what.items() if text.startswith("attention: ")}
    fused = sum(count for text, count in attention.items() if ": fused: " in text)
    return f"{fused} of {sum(attention.values())}"


def not_fused(row: Json) -> dict[str, int]:
    """Verdict and reason of the sites that were not fused, with their number."""
    what: dict[str, int] = (row.get("sites") or {}).get("what") or {}
    return {text: count for text, count in what.items() if ": fused: " not in text}


def verdict(row: Json) -> str:
    """ "faster", "level" or "slower" than stock."""
    value = ratio(row, "stock", "fused")
    if value is None:
        return "not compared"
    if abs(value - 1) <= LEVEL:
        return "level"
    return "faster" if value > 1 else "slower"


def tally(rows: Sequence[Json]) -> str:
    """One sentence: how many cases are faster, level and slower."""
    counts = Counter(verdict(row) for row in rows)
    text = f"{len(rows)} cases were measured: {counts['faster']} are faster than stock, "
    text += f"{counts['level']} are level (within {LEVEL:.0%}), {counts['slower']} are slower"
    text += f", {counts['not compared']} could not be compared." if counts["not compared"] else "."
    told = []
    for train, name in ((False, "inference"), (True, "training")):
        found = [r for row in rows if bool(row.get("train")) is train and (r := ratio(row, "stock", "fused"))]
        if found:
            told.append(f"{geometric_mean(found):.2f} over the {len(found)} {name} cases")
    return text + (f" The geometric mean of stock / fused is {' and '.join(told)}." if told else "")


# Whole models --------------------------------------------------------------------------------------------


def readme_table(data: Json) -> str:
    """The README's table of measured gains."""
    rows: list[Json] = data["rows"]
    by_name = {row["name"]: row for row in rows}
    chosen = [by_name[name] for name in README_CASES if name in by_name] or rows
    body = [
        (
            str(row["name"]),
            sites(row),
            time_text(row, "stock"),
            time_text(row, "fused"),
            ratio_text(row, "stock", "fused"),
        )
        for row in chosen
    ]
    dtypes = ", ".join(sorted({str(row["dtype"]) for row in rows if row.get("dtype")}))
    text = f"{data.get('device', '?')}, torch {data.get('torch', '?')}, "
    text += f"transformers {data.get('transformers', '?')}, {dtypes}, {str(data.get('date', '?'))[:10]}. "
    text += "Whole Hugging Face models with random weights, stock `torch.compile` beside the same with the "
    text += "import, in one process. `eager` and `sdpa` are the model's `attn_implementation`; `padded` "
    text += "means that the batch has a padding mask; `train` is a forward and a backward.\n\n"
    columns = ("case", "attentions fused", "stock ms", "fused ms", "stock / fused")
    left = (
        f"{tally(rows)} The table holds {len(chosen)} of them. " if len(chosen) < len(rows) else tally(rows)
    )
    return f"{text}{table(columns, body)}\n\n{left.strip()}"


def models_section(data: Json) -> str:
    """Every case of a file of bench.models."""
    rows: list[Json] = data["rows"]
    what = (
        "Whole models with adapters"
        if any("frozen" in (row.get("median_ms") or {}) for row in rows)
        else "Whole models"
    )
    parts = [*opening(what, data), tally(rows)]
    single = [len(compiles) < 2 for compiles in _compiles(rows)]
    if any(single):
        who = "Each case was" if all(single) else "Some cases were"
        parts.append(f"{who} compiled once: such a compile time is a single measurement.")
    parts += ["### Time", _times(rows), "### Memory and compile time", _resources(rows)]
    parts += ["### Error against float64", _errors(rows), "### Where it loses or ties", _losses(rows)]
    parts += ["### Sites left to stock, and rejected", _left(rows), "### What was emitted", _emitted(rows)]
    return "\n\n".join(parts)


def _compiles(rows: Sequence[Json]) -> list[list[float]]:
    return [times for row in rows for times in [(row.get("compiles_s") or {}).get("fused")] if times]


def _times(rows: Sequence[Json]) -> str:
    columns = [
        "case",
        "attentions fused",
        "stock ms",
        "fused ms",
        "stock / fused",
        "by hand ms",
        "fused / by hand",
    ]
    columns += ["sdpa path ms", "fused / sdpa path", "frozen ms", "fused / frozen"]
    return table(
        columns,
        [
            (
                str(row["name"]),
                sites(row),
                time_text(row, "stock"),
                time_text(row, "fused"),
                ratio_text(row, "stock", "fused"),
                time_text(row, "limit"),
                ratio_text(row, "fused", "limit"),
                time_text(row, "sdpa"),
                ratio_text(row, "fused", "sdpa"),
                time_text(row, "frozen"),
                ratio_text(row, "fused", "frozen"),
            )
            for row in rows
        ],
    )


def _resources(rows: Sequence[Json]) -> str:
    names = ("stock", "fused", "limit", "sdpa")
    columns = ["case", *(f"GiB {n}" for n in ("stock", "fused", "by hand", "sdpa path"))]
    columns += ["compile s stock", "compile s fused"]
    return table(
        columns,
        [
            (
                str(row["name"]),
                *(number(get(row, "peak_gib", name), 2) for name in names),
                number(get(row, "compile_s", "stock"), 1),
                number(get(row, "compile_s", "fused"), 1),
            )
            for row in rows
        ],
    )


def _errors(rows: Sequence[Json]) -> str:
    def text(row: Json, variant: str, which: str) -> str:
        value = error(row, variant, which)
        return NONE if value is None else f"{value:.4f}"

    kinds = {"out": "output", "grad": "gradients", "worst_grad": "worst gradient", "tables_grad": "tables"}
    columns = ["case", *(f"{kind}, {name}" for kind in kinds.values() for name in ("stock", "fused"))]
    columns.append("within budget")
    words = {True: "yes", False: "no", None: "not compared"}
    body = [
        (
            str(row["name"]),
            *(text(row, variant, which) for which in kinds for variant in ("stock", "fused")),
            words[row.get("correct")],
        )
        for row in rows
    ]
    note = (
        "Relative errors: the norm of the difference over the norm of the float64 result. `gradients` takes "
    )
    note += (
        "all parameters together, `worst gradient` the one parameter with the largest error, `tables` the "
    )
    note += "position tables, learned scales and sinks together. The budget "
    note += (
        f"allows {ERROR_FACTOR} times the error of stock plus eps of the dtype, for output and gradients. "
    )
    note += "Where stock ran out of memory, the model without `torch.compile` takes its place. "
    note += "A case with dropout draws other random numbers than stock, so that it is not compared."
    return note + "\n\n" + table(columns, body)


def _losses(rows: Sequence[Json]) -> str:
    lines: list[str] = []
    tests: list[tuple[str, Callable[[Json], str | None]]] = [
        ("Slower than stock", lambda r: ratio_text(r, "stock", "fused") if verdict(r) == "slower" else None),
        ("Level with stock", lambda r: ratio_text(r, "stock", "fused") if verdict(r) == "level" else None),
        ("Slower than the same written by hand (fused / by hand)", lambda r: _behind(r, "limit")),
        ("Slower than the model's own sdpa path (fused / sdpa path)", lambda r: _behind(r, "sdpa")),
        ("Takes more memory than stock (GiB)", lambda r: _more(r, "peak_gib", 2)),
        ("Takes longer to compile than stock (s)", lambda r: _more(r, "compile_s", 1)),
        ("Error out of budget", lambda r: "output or gradients" if r.get("correct") is False else None),
        ("Worst single gradient over the same budget (relative error)", _worst_gradient),
        ("Recompiled while it was timed", lambda r: "timed all the same" if r.get("recompiled") else None),
        ("A variant failed", _failed),
    ]
    for title, test in tests:
        found = [(str(row["name"]), text) for row in rows if (text := test(row)) is not None]
        said = "; ".join(f"{name} ({text})" for name, text in found) or "none"
        lines.append(f"- {title}: {said}.")
    note = f"Ratios within {LEVEL:.0%} of 1 count as level. More memory or compile time than stock is told "
    return note + f"from {MORE - 1:.0%} on.\n\n" + "\n".join(lines)


def _failed(row: Json) -> str | None:
    found: Mapping[str, str] = row.get("failed") or {}
    short = {n: "out of memory" if "out of memory" in text else text for n, text in found.items()}
    return ", ".join(f"{name}: {text}" for name, text in short.items()) or None


def _behind(row: Json, other: str) -> str | None:
    value = ratio(row, "fused", other)
    return ratio_text(row, "fused", other) if value is not None and value > 1 + LEVEL else None


def _more(row: Json, name: str, digits: int) -> str | None:
    stock, fused = get(row, name, "stock"), get(row, name, "fused")
    if stock is None or fused is None or fused <= MORE * stock:
        return None
    return f"{number(fused, digits)} against {number(stock, digits)}"


def _worst_gradient(row: Json) -> str | None:
    stock, fused = error(row, "stock", "worst_grad"), error(row, "fused", "worst_grad")
    eps = EPS.get(str(row.get("dtype")), 0.0)
    if stock is None or fused is None or fused <= ERROR_FACTOR * stock + eps:
        return None
    where = row["error"]["fused"].get("worst_grad_of", "?")
    return f"{fused:.4f} in `{where}`, against {stock:.4f} for stock's worst"


def _left(rows: Sequence[Json]) -> str:
    body = []
    for row in rows:
        for text, count in not_fused(row).items():
            _, what, reason = (*text.split(": ", 2), "", "")[:3]
            body.append((f"{row['name']}: {reason}", what, str(count)))
    return table(("case and reason", "verdict", "sites"), body) if body else "None: every site was fused."


def _emitted(rows: Sequence[Json]) -> str:
    body = []
    for row in rows:
        what: Mapping[str, int] = (row.get("sites") or {}).get("what") or {}
        for text, count in what.items():
            if ": fused: " in text:
                body.append((f"{row['name']}: {text.split(': fused: ', 1)[1]}", str(count)))
    note = (
        "A gain that is named here is the one that the table of the device predicts for the attention alone."
    )
    return note + "\n\n" + table(("case and kernel", "sites"), body) if body else "Nothing."


# Attention alone -----------------------------------------------------------------------------------------


def attention_section(data: Json) -> str:
    """Summary of a file of bench.tune_attention."""
    rows: list[Json] = data["rows"]
    parts = opening("Attention alone", data)
    wrong = sorted(str(row["key"]) for row in rows if row.get("wrong"))
    text = (
        f"{len(rows)} shapes. Each is timed as written out (stock) and as each kernel that takes it. A gain "
    )
    text += (
        "is the time of stock over that of the kernel, the worse one of the wall time and the time on the "
    )
    text += "device. `none pays` counts shapes where no kernel that the package can emit reaches "
    text += f"{MARGIN:.2f}, or where all are out of the error budget; the package also weighs the nearest "
    text += (
        "shapes. `memory` is what SDPA takes over what stock takes, beyond the inputs (median). `shapes by "
    )
    text += "backend` names what SDPA chose in the forward."
    parts += [text, _kernels(rows)]
    if wrong:
        parts.append(
            f"Out of the error budget, and so never chosen near these shapes ({len(wrong)}): "
            + "; ".join(f"{key}" for key in wrong)
            + "."
        )
    else:
        parts.append("No kernel was out of the error budget.")
    return "\n\n".join(parts)


def _kernels(rows: Sequence[Json]) -> str:
    body = []
    dtypes = sorted({str(row["dtype"]) for row in rows}, key=lambda d: (d != "bfloat16", d))
    known = [name for name, _ in MASKS]
    others = sorted({str(row["mask"]) for row in rows} - set(known))
    titles = dict(MASKS)
    for dtype in dtypes:
        for mask in (*known, *others):
            for train in (False, True):
                group = [r for r in rows if (r["dtype"], r["mask"], r["train"]) == (dtype, mask, train)]
                if group:
                    kind = f"{titles.get(mask, mask)}, {'training' if train else 'inference'}, {dtype}"
                    body.append((kind, *_kernel_row(group)))
    columns = ["mask", "shapes", "least gain", "median gain", "largest gain", "none pays", "memory"]
    return table([*columns, "shapes by backend"], body)


def _kernel_row(group: Sequence[Json]) -> tuple[str, ...]:
    best = [max(gains(row).values(), default=0.0) for row in group]
    known = [gain for gain in best if gain > 0]
    memory = [
        get(row, "peak_mib", "sdpa") / unfused  # type: ignore[operator]
        for row in group
        if get(row, "peak_mib", "sdpa") is not None and (unfused := get(row, "peak_mib", "unfused"))
    ]
    backends = Counter(
        name.removeprefix("_scaled_dot_product_").replace("_attention", "").replace("_for_cpu", "")
        for row in group
        for name in (row.get("kernels") or {}).get("sdpa", ())[:1]
    )
    return (
        str(len(group)),
        number(min(known, default=None), 2),
        number(statistics.median(known) if known else None, 2),
        number(max(known, default=None), 2),
        str(sum(gain < MARGIN for gain in best)),
        number(statistics.median(memory) if memory else None, 2),
        ", ".join(f"{name} {count}" for name, count in backends.most_common()) or NONE,
    )


# Flex attention, linears, operations and blocks ----------------------------------------------------------


def flex_section(data: Json) -> str:
    """Every shape of a file of bench.tune_flex."""
    rows: list[Json] = data["rows"]
    parts = opening("Flex attention", data)
    parts.append(
        f"{len(rows)} attentions whose masks are predicates, or whose scores are changed, as models write "
        "them: stock, SDPA with the mask as a dense tensor, and flex attention with its block mask computed "
        "in each call. Times are microseconds; memory is beyond the inputs."
    )
    columns = ("case", "stock", "sdpa", "flex", "stock / flex", "sdpa / flex", "MiB stock", "MiB flex")
    body = [
        (
            str(row["key"]),
            *(number(get(row, "times_us", name), 0) for name in ("unfused", "sdpa", "flex")),
            *(number(quotient(row, name, "flex"), 2) for name in ("unfused", "sdpa")),
            *(number(get(row, "peak_mib", name), 0) for name in ("unfused", "flex")),
        )
        for row in rows
    ]
    parts.append(table(columns, body))
    left = [f"{row['key']}: {n} ({why})" for row in rows for n, why in (row.get("wrong") or {}).items()]
    parts.append(f"Out of the error budget: {'; '.join(left) or 'none'}.")
    return "\n\n".join(parts)


def bench_section(data: Json) -> str:
    """Every case of a results file of `inductor_fusions bench`."""
    rows = [row for row in data["rows"] if row.get("median_ms")]
    parts = opening("Operations and blocks", data)
    columns = ("suite", "cases", "geometric mean", "below 1.0", "by more than noise")
    body = [
        (mean.kind, str(mean.cases), number(mean.mean, 3), str(mean.below), str(mean.clearly))
        for mean in means(rows)
    ]
    parts += [
        "Stock over fused; of short calls the worse one of wall time and time on the device.",
        table(columns, body),
    ]
    names = ("stock", "fused", "limit")
    columns = (
        "case",
        "sites fused",
        *(f"{'by hand' if n == 'limit' else n} ms" for n in names),
        "stock / fused",
    )
    body = [
        (
            str(row["name"]),
            f"{(row.get('sites') or {}).get('fused', 0)} of {(row.get('sites') or {}).get('total', 0)}",
            *(number(get(row, "median_ms", name), 3) for name in names),
            NONE if (r := get(row, "ratio", "stock/fused")) is None else f"{r:.2f} ± {r * noise(row):.2f}",
        )
        for row in rows
    ]
    return "\n\n".join([*parts, table(columns, body)])


# Files ---------------------------------------------------------------------------------------------------


PREFACE = """# Performance

What was measured, with the cases that lose. [measuring.md](measuring.md) says how to repeat it.

- **stock**: `torch.compile` without the package. **fused**: the same with it, under the default policy.
- **by hand**: for Llama, an attention function that calls `scaled_dot_product_attention(is_causal=True,
  enable_gqa=True)` and no mask built. In `padded` cases that leaves the padding out: it is the time that a
  batch without padding takes, a bound. For windows, documents, softcap and sinks it is stock on the same
  model with `attn_implementation="flex_attention"`.
- **frozen**: for models with adapters, the model without them: what adapters would cost nothing beside.
- **sdpa path**: stock on the same model with `attn_implementation="sdpa"`, for cases with eager attention.
- All variants of a case run in one process, in interleaved blocks whose order rotates. Times are medians.
  A spread after ± is half of both interquartile ranges, added in quadrature.
- Models have real configurations and random weights. A training case is a forward and a backward, without
  the optimizer. Memory is the peak of a step beyond weights and inputs.
"""


#: What is written of which results, in this order.
SECTIONS: dict[str, Callable[[Json], str]] = {
    "models_*.json": models_section,
    "bench_*.json": bench_section,
    "attention_*.json": attention_section,
    "flex_*.json": flex_section,
    "projections_*.json": projections_section,
    "lora_models_*.json": lora_models_section,
    "lora_[!m]*.json": lora_section,
    "outer_product_*.json": partial(interactions_section, "A linear on an outer product"),
    "dot_interaction_*.json": partial(interactions_section, "Pairwise dot products"),
    "distributed_*.json": distributed_section,
}


def performance(results: Path) -> str:
    """The text of docs/performance.md."""
    parts = [NOTICE, PREFACE.strip()]
    for pattern, section in SECTIONS.items():
        # A GPU first: its figures are what the package is for.
        for path in sorted(results.glob(pattern), key=lambda p: ("cpu" in p.stem, p.name)):
            parts.append(section(json.loads(path.read_text("utf-8"))))
    return "\n\n".join(parts) + "\n"


def between(text: str, made: str, name: str) -> str:
    """A page with what is between its markers made anew.

    Raises:
        SystemExit: it has no markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{name} has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def readme(text: str, results: Path) -> str:
    """The README with its table made anew."""
    path = results / README_RESULTS
    made = readme_table(json.loads(path.read_text("utf-8"))) if path.exists() else "Nothing is measured yet."
    adapters = results / README_ADAPTERS
    if adapters.exists() and (told := lora_summary(json.loads(adapters.read_text("utf-8")))):
        made += f"\n\n{told}"
    return between(text, made, "README.md")


def render(root: Path = ROOT) -> dict[Path, str]:
    """Each file that this script writes, with what it should hold."""
    results, page = root / "bench" / "results", root / "README.md"
    tested = root / "docs" / "reliability.md"
    measured = results / README_RESULTS
    return {
        page: readme(page.read_text("utf-8"), results),
        root / "docs" / "performance.md": performance(results),
        root / "docs" / "whole_mlp.md": docs_whole_mlp.page(results),
        tested: between(tested.read_text("utf-8"), docs_reliability.fuzzing(results), tested.name),
        root / "docs" / "speedups.svg": picture.draw(
            json.loads(measured.read_text("utf-8")) if measured.exists() else {"rows": []}
        ),
    }


def stale(root: Path = ROOT) -> list[Path]:
    """The files that do not hold what the results say."""
    return [
        path for path, text in render(root).items() if not path.exists() or path.read_text("utf-8") != text
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.docs", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is stale")
    options = parser.parse_args()
    if options.check:
        found = stale()
        for path in found:
            print(f"{path.relative_to(ROOT)} is stale: run python -m bench.docs", file=sys.stderr)
        sys.exit(1 if found else 0)
    for path, text in render().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
