"""Sections of docs/performance.md about linears: projections, adapters, interactions of features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from bench import interactions
from bench.docs_pieces import (
    NONE,
    Columns,
    Json,
    Rows,
    fixed,
    get,
    grouped,
    listing,
    named,
    number,
    of,
    out_of_budget,
    quotient,
    section,
    summary,
    table,
)
from bench.tuning_linears import gain
from inductor_fusions.decisions.problems import MARGIN


def projections_section(data: Json) -> str:
    """Summary of a file of bench.tune_projections."""
    rows: list[Json] = data["rows"]
    text = (
        f"{len(rows)} problems. A gain is the time of stock, the faster one of the default and max-autotune, "
        "over that of the best configuration of the grouped GEMM. `pays` counts gains of "
        f"{MARGIN:.2f} or more; the others are left to stock. `of the limit` is the time of the grouped GEMM "
        "over that of one product on weights that were concatenated beforehand (median)."
    )

    def kind(row: Json) -> str:
        return f"{row['kind']}, {'up to 128 rows' if row['tokens'] <= 128 else 'more than 128 rows'}"

    columns = {
        "problems": len, "least gain": of(min, gain), "median gain": of(median, gain),
        "largest gain": of(max, gain), "pays": pays, "of the limit": of(median, over("limit")),
    }  # fmt: skip
    kinds = dict(sorted(grouped(rows, kind).items()))
    bare = (
        "Linears on one input, gated pairs and linears with an activation, in microseconds. `bare` is the "
        "library's products alone, one for each weight and without the activation; `limit` one product on "
        "concatenated weights."
    )
    forward = sorted((row for row in rows if row["kind"] in ("shared_a", "gated", "linear")), key=_order)
    return section(
        "Linears",
        data,
        text,
        summary("kind", kinds, columns),
        bare,
        details(forward, "limit", also=("bare",)),
    )


def _order(row: Json) -> tuple[Any, ...]:
    return row["kind"], row.get("inner", []), row.get("outer", []), row["tokens"]


def stock_time(row: Json) -> float | None:
    """The faster one of stock's two, in microseconds."""
    found = [get(row, "times_us", name) for name in ("stock", "max_autotune")]
    return min((time for time in found if time is not None), default=None)


def best_time(row: Json) -> float | None:
    """The time of the fastest configuration of ours, in microseconds."""
    return get(row, "times_us", str(row.get("best")))


def pays(rows: Rows) -> int:
    """How many rows are fused under the default policy."""
    return sum(gain(row) >= MARGIN for row in rows)


def over(limit: str) -> Callable[[Json], float | None]:
    """The time of ours over that of a limit, of a row."""
    return lambda row: quotient(row, str(row["best"]), limit) if row.get("best") else None


def lora_section(data: Json) -> str:
    """Summary of a file of bench.tune_lora."""
    rows: list[Json] = data["rows"]
    text = (
        f"{len(rows)} problems: `forward` is the linear with its adapter, `backward` the gradient of its "
        "input, `step` both with the gradients of the adapter, and `gradient` one skinny GEMM over all "
        "tokens. Times are microseconds, `ours` of the fastest configuration; stock is the default of "
        "`torch.compile`, and max-autotune where it was measured. `frozen` is the linear without an adapter, "
        "on the library."
    )

    def place(row: Json) -> tuple[Any, ...]:
        return row["kind"], row["dropout"] > 0, row["tokens"] <= 64, row["rank"], row["adapters"]

    def kind(row: Json) -> str:
        name, dropped, few, rank, adapters = place(row)
        tokens = "up to 64 rows" if few else "more rows"
        return f"{name}{' behind a dropout' * dropped}, {tokens}, r = {rank}, {adapters} adapters"

    groups = grouped(sorted(rows, key=place), kind)
    told = against_limit("kind", "problems", groups, "frozen")
    return section("Linears with adapters", data, text, told, details(rows, "frozen"))


def against_limit(what: str, count: str, groups: Mapping[str, Rows], limit: str) -> str:
    """A row for each group of rows: how many, what they gain, and their time over that of a limit.

    Args:
        what, count: heads of the first two columns.
        limit: the variant that is one.
    """
    columns = {
        count: len, "stock / ours, geometric mean": of(geometric_mean, gain), "least": of(min, gain),
        f"ours / {limit}, geometric mean": of(geometric_mean, over(limit)),
    }  # fmt: skip
    return summary(what, groups, columns)


def details(rows: Iterable[Json], limit: str, also: Sequence[str] = ()) -> str:
    """Each row: times of stock, of a limit and of ours in microseconds, and their quotients.

    Args:
        limit: the variant that is one.
        also: further variants, whose times are shown.
    """
    columns = {
        **named("problem"),
        "stock": lambda row: number(stock_time(row), 1),
        **fixed("times_us", 1, {name: name for name in (*also, limit)}),
        "ours": lambda row: number(best_time(row), 1),
        "stock / ours": lambda row: number(gain(row) or None, 2),
        f"ours / {limit}": lambda row: number(over(limit)(row), 2),
    }
    return listing(rows, columns)


def lora_models_section(data: Json) -> str:
    """Every case of bench.models_lora."""
    rows: list[Json] = [row for row in data["rows"] if row.get("median_ms")]
    text = (
        "PEFT's adapters of rank 16 on every linear, unless the case names another rank. `frozen` is the "
        "fused model without adapters, the limit at which they cost nothing. For inference, `no guards` is "
        "the time without Dynamo's guards, and `device` the time on the device alone."
    )
    names = ("stock", "fused", "frozen")

    def frozen(title: str, clock: str) -> Columns:
        return {f"fused / frozen{title}": lambda row: number(quotient(row, "fused", "frozen", clock), 2)}

    every = {
        **named("case", "name"),
        **fixed("median_ms", 3, {name: f"{name} ms" for name in names}),
        **fixed("ratio", 2, {"stock/fused": "stock / fused", "fused/frozen": "fused / frozen"}),
        **frozen(", no guards", "unguarded_ms"),
        **frozen(", device", "device_ms"),
        **fixed("peak_gib", 2, {name: f"GiB {name}" for name in names}),
    }
    return section("Models with adapters", data, text, listing(rows, every), out_of_budget(rows, "name"))


def lora_summary(data: Json) -> str:
    """What bench.models_lora measured with PEFT's own settings, in a sentence or two; "" where it did not."""
    told = []
    for row in data["rows"]:
        what = {
            "train b2 s2048": "a training step of 2 x 2048 tokens",
            "decode b1 s1 reduce-overhead": "decoding a token",
        }.get(str(row["name"]))
        stock, fused, frozen = (get(row, "median_ms", name) for name in ("stock", "fused", "frozen"))
        if what and row.get("correct") and stock and fused and frozen:
            told.append(
                f"{what} takes {fused:.3g} ms in place of {stock:.3g} (without adapters {frozen:.3g})"
            )
    if not told:
        return ""
    return (
        "Llama-1B with PEFT's adapters on every linear, as `LoraConfig` makes them: " + "; ".join(told) + "."
    )


def interactions_section(title: str, data: Json) -> str:
    """Every row of bench.lora_merged, bench.outer_product or bench.dot_interaction."""
    text = (
        "Microseconds, by the wall clock and, in brackets, on the device alone; MiB is the peak beyond "
        "weights and inputs. The gain is that over the better stock, by the worse one of both clocks: it "
        "decides whether the fusion is used."
    )

    def time(name: str) -> Columns:
        def cell(row: Json) -> str:
            wall, device = get(row, "times_us", name), get(row, "device_us", name)
            return NONE if wall is None else f"{wall:.0f}" + ("" if device is None else f" ({device:.0f})")

        return {name: cell}

    every = {
        **named("case"), **time("stock"), **time("max_autotune"), **time("fused"),
        "gain": lambda row: number(interactions.gain(row), 2),
        **fixed("peak_bytes", 0, {"stock": "MiB stock", "fused": "MiB fused"}, 2**20),
    }  # fmt: skip
    rows = data["rows"]
    return section(title, data, text, listing(rows, every), out_of_budget(rows))


#: The ways to choose of bench.tile_model that docs/measuring.md has, in its words.
WAYS = {
    "nearest": "the nearest problem's",
    "shipped": "the one that is chosen",
    "held out": "the same, if the model is fitted without the width",
    "other GPUs": "the same, if the model is fitted to the other GPU's times",
}
#: Those of bench.lora_tiles.
ADAPTER_WAYS = {
    "chosen": WAYS["shipped"],
    "without tables": "the one that a GPU without tables gets",
    "measured": "the fastest of the four that are measured on a GPU without tables",
}


#: The kernels of bench.lora_tiles, in the words of docs/measuring.md.
ADAPTERS = {"block": "linears with adapters", "narrow": "skinny GEMMs", "added": "updates that are added"}


def tiles_table(linears: Json, adapters: Json) -> str:
    """What bench.tile_model and bench.lora_tiles say of the configurations that are chosen."""
    rows = []

    def add(device: str, what: str, found: Json, ways: Mapping[str, str]) -> None:
        gpu = f"{device.split('_')[1].upper()}, {found['problems']} {what}"
        seen: list[Json] = []
        for way, words in ways.items():
            values = found["ways"][way]
            if values in seen:  # the same configurations
                continue
            seen.append(values)
            longer = [f"{values[column]:.0%}" for column in ("mean", "nine_tenths_below", "most", "kept")]
            rows.append([gpu, words, *longer, f"{values['below_0.98']} of {values['kernel']}"])

    for name, found in linears["judgement"].items():
        add(name, "linears", found, WAYS)
    for kernel, words in ADAPTERS.items():
        for device, kernels in adapters["devices"].items():
            if kernel in kernels:
                add(device, words, kernels[kernel], ADAPTER_WAYS)
    columns = (
        "", "configuration", "longer than the fastest, mean", "nine tenths are below", "most",
        "log speedup kept", "below 0.98 of stock",
    )  # fmt: skip
    return table(columns, rows)
