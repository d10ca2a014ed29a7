"""Sections about operations alone, and guards: rows as a table, and what they come to."""

from __future__ import annotations

from collections import Counter
from statistics import geometric_mean, median

from bench.compare import means, noise
from bench.device_table import gains
from bench.docs_pieces import (
    NONE,
    Json,
    Rows,
    fixed,
    get,
    grouped,
    listing,
    named,
    number,
    of,
    quotient,
    section,
    summary,
    table,
)
from inductor_fusions.decisions.problems import MARGIN

GIB = 1 << 30


def bench_section(data: Json) -> str:
    """Every case of a results file of `inductor_fusions bench`."""
    rows = [row for row in data["rows"] if row.get("median_ms")]
    columns = ("suite", "cases", "geometric mean", "below 1.0", "by more than noise")
    body = [(mean.kind, mean.cases, number(mean.mean, 3), mean.below, mean.clearly) for mean in means(rows)]
    said = "Stock over fused; of short calls the worse one of wall time and time on the device."

    def sites(row: Json) -> str:
        found = row.get("sites") or {}
        return f"{found.get('fused', 0)} of {found.get('total', 0)}"

    def ratio(row: Json) -> str:
        value = get(row, "ratio", "stock/fused")
        return NONE if value is None else f"{value:.2f} ± {value * noise(row):.2f}"

    times = {"stock": "stock ms", "fused": "fused ms", "limit": "by hand ms"}
    every = {
        **named("case", "name"), "sites fused": sites, **fixed("median_ms", 3, times),
        **fixed("device_ms", 3, {"stock": "stock ms, device", "fused": "fused ms, device"}),
        "stock / fused": ratio,
    }  # fmt: skip
    return section("Operations and blocks", data, said, table(columns, body), listing(rows, every))


# Attention -----------------------------------------------------------------------------------------------

#: In words; in the order of the table, which has others behind these.
MASKS = {
    "none": "no mask",
    "causal": "causal",
    "pad": "padding, `[B, 1, 1, K]`",
    "bias_batch": "additive, `[B, 1, Q, K]`",
    "bool4d": "boolean, `[B, 1, Q, K]`",
    "bias": "bias, `[1, H, Q, K]`",
    "bias_grad": "bias with a gradient, `[1, H, Q, K]`",
    "bias_full": "bias, `[B, H, Q, K]`",
    "full_grad": "bias with a gradient, `[B, H, Q, K]`",
    "alibi": "ALiBi and padding (BLOOM)",
    "window": "bias and window mask (Swin)",
}


def attention_section(data: Json) -> str:
    """Summary of a file of bench.tune_attention."""
    rows: list[Json] = data["rows"]
    wrong = sorted(str(row["key"]) for row in rows if row.get("wrong"))
    text = (
        f"{len(rows)} shapes. Each is timed hand-written (stock) and as each kernel that takes it. A gain "
        "is the time of stock over that of the kernel, the worse one of the wall time and the time on the "
        "device. `none pays` counts shapes where no kernel that the package can emit reaches "
        f"{MARGIN:.2f}, or where all are out of the error budget; the package also weighs the nearest "
        "shapes. `memory` is what SDPA takes over what stock takes, beyond the inputs (median). `shapes by "
        "backend` names what SDPA chose in the forward."
    )
    said = "No kernel was out of the error budget."
    if wrong:
        said = f"Out of the error budget, and so never chosen near these shapes ({len(wrong)}): "
        said += "; ".join(wrong) + "."
    times = {n: n for n in ("sdpa", "cudnn", "flash", "efficient", "short")}
    every = {
        **named("shape"), **fixed("times_us", 1, {"unfused": "stock", **times}),
        "best gain": lambda row: number(max(gains(row).values(), default=None), 2),
    }  # fmt: skip
    return section("Attention alone", data, text, _kernels(rows), said, listing(rows, every))


def _kernels(rows: Rows) -> str:
    order = list(MASKS)

    def place(row: Json) -> tuple[bool, str, int, str, bool]:
        dtype, mask = row["dtype"], row["mask"]
        known = order.index(mask) if mask in MASKS else len(order)
        return dtype != "bfloat16", dtype, known, mask, row["train"]

    def kind(row: Json) -> str:
        mask = MASKS.get(row["mask"], row["mask"])
        return f"{mask}, {'training' if row['train'] else 'inference'}, {row['dtype']}"

    def best(row: Json) -> float:
        return max(gains(row).values(), default=0.0)

    def backends(group: Rows) -> str:
        chosen = Counter(
            name.removeprefix("_scaled_dot_product_").replace("_attention", "").replace("_for_cpu", "")
            for row in group
            for name in (row.get("kernels") or {}).get("sdpa", ())[:1]
        )
        return ", ".join(f"{name} {count}" for name, count in chosen.most_common()) or NONE

    columns = {
        "shapes": len, "least gain": of(min, best), "median gain": of(median, best),
        "largest gain": of(max, best), "none pays": lambda group: sum(best(row) < MARGIN for row in group),
        "memory": of(median, lambda row: quotient(row, "sdpa", "unfused", "peak_mib")),
        "shapes by backend": backends,
    }  # fmt: skip
    return summary("mask", grouped(sorted(rows, key=place), kind), columns)


def flex_section(data: Json) -> str:
    """Every shape of a file of bench.tune_flex."""
    rows: list[Json] = data["rows"]
    text = (
        f"{len(rows)} attentions whose masks are predicates, or whose scores are changed, as models write "
        "them: stock, SDPA with the mask as a dense tensor, and flex attention with its block mask computed "
        "in each call. Times are microseconds; memory is beyond the inputs."
    )
    every = {
        **named("case"),
        **fixed("times_us", 0, {"unfused": "stock", "sdpa": "sdpa", "flex": "flex"}),
        "stock / flex": lambda row: number(quotient(row, "unfused", "flex"), 2),
        "sdpa / flex": lambda row: number(quotient(row, "sdpa", "flex"), 2),
        **fixed("peak_mib", 0, {"unfused": "MiB stock", "flex": "MiB flex"}),
    }
    left = [f"{row['key']}: {n} ({why})" for row in rows for n, why in (row.get("wrong") or {}).items()]
    said = f"Out of the error budget: {'; '.join(left) or 'none'}."
    return section("Flex attention", data, text, listing(rows, every), said)


def decoding_section(data: Json) -> str:
    """Every row of bench.decode_attention: attentions to a cache, and whole steps."""
    rows = [row for row in data["rows"] if not row["kind"].startswith("step")]
    # What is fastest of SDPA beside ours, for the cache as it is and for one that is full.
    rows = [
        {**row, "now": _with_best(row["device_us"]), "then": _with_best(row["full"]["device_us"])}
        for row in rows
    ]
    gains, full = ([row[when]["gain"] for row in rows] for when in ("now", "then"))
    text = (
        "Microseconds on the device, bfloat16. Names are those of heads, batch, length of the cache, and "
        "how many of its keys are seen. SDPA is the fastest of its forms. `tiles` finds what the mask "
        "shows, once for all layers. The limit is the time in which the keys and values that are seen "
        f"come from memory. SDPA over ours, geometric mean of {len(rows)}: {geometric_mean(gains):.2f} "
        f"(least {min(gains):.2f}) for the cache as it is, {geometric_mean(full):.2f} (least "
        f"{min(full):.2f}) for one that is full."
    )
    every = {
        **named("attention"), **fixed("now", 1, {"best": "SDPA", "decode": "ours", "tiles": "tiles"}),
        "limit": lambda row: f"{row['limit_us']:.1f}", **fixed("now", 2, {"gain": "SDPA / ours"}),
        **fixed("then", 1, {"best": "SDPA, full", "decode": "ours, full"}),
        **fixed("then", 2, {"gain": "SDPA / ours, full"}),
    }  # fmt: skip
    parts = [text, listing(rows, every)]
    if steps := [row for row in data["rows"] if row["kind"].startswith("step")]:
        names = {
            "stock": "stock", "sdpa": "SDPA", "decode": "ours", "norms apart": "without norm_linear",
            "stock combo": "stock, combo_kernels", "combo": "ours, combo_kernels",
        }  # fmt: skip
        parts += [
            "A whole step with a static cache and reduce-overhead, in ms on the device, of a Llama of 8 "
            "layers with the widths of Llama-8B or of the model that is named: stock, the package with SDPA, "
            "with this kernel, without `norm_linear`, and both with Inductor's `combo_kernels`.",
            listing(steps, {**named("step"), **fixed("device_us", 3, names, 1e3)}),
        ]
    return section("Attention of one token to a cache", data, *parts)


def _with_best(times: dict[str, float]) -> dict[str, float]:
    best = min(time for name, time in times.items() if name not in ("decode", "tiles"))
    return {**times, "best": best, "gain": best / times["decode"]}


# Others --------------------------------------------------------------------------------------------------


def guards_section(data: Json) -> str:
    """Every row of bench.guards."""
    counts = [(row["model"], row["count"]) for row in data["rows"] if "count" in row]
    text = (
        "Microseconds of a call whose graph does nothing, by the wall clock: with the guards that a function "
        "of `torch.compiler` keeps, and under `skip_guard_eval_unsafe`. Guards of a model of two layers, "
        "without the package and with it: "
        + "; ".join(f"{name} {count['stock']} and {count['fused']}" for name, count in counts)
        + "."
    )
    every = {
        **named("model", "model"),
        "filter": lambda row: row["filter"] or "none",
        **named("guards", "kept"),
        "with": lambda row: f"{row['guarded_us']:.0f}",
        "without": lambda row: f"{row['unguarded_us']:.0f}",
    }
    return section("Guards of a call", data, text, listing(data["rows"], every))


def norm_section(data: Json) -> str:
    """Every row of bench.norm_linear."""
    text = (
        "Blocks of layers of one row, bfloat16, under CUDA graphs: microseconds on the device with an "
        "RMSNorm in a kernel of its own, and in the kernels of the linears behind it, with the tile that the "
        "package took then and with others (columns x elements of K, warps). The package keeps the norm "
        "apart where the linears read as much as a head does."
    )
    names = dict.fromkeys(name for row in data["rows"] for name in row["times_us"])
    every = {**named("block"), **fixed("device_us", 1, {name: name for name in names})}
    return section("A norm in front of linears", data, text, listing(data["rows"], every))


def loss_section(data: Json) -> str:
    """Every row of bench.loss_head."""
    text = (
        "A linear and the loss of its logits, bfloat16: milliseconds on the device, the memory that one "
        "call needs at its peak in GiB, and the relative error against float64. `train` has the gradients "
        "of hidden states and weight, `frozen` those of hidden states alone, `rows` gives a log-"
        "probability for each token, `policy` an entropy as well."
    )
    every = {
        **named("head"),
        **fixed("device_us", 1, {"stock": "stock ms", "fused": "fused ms"}, 1e3),
        **fixed("peak_bytes", 2, {"stock": "stock GiB", "fused": "fused GiB"}, GIB),
        "stock error": lambda row: f"{row['error']['stock']:.1e}",
        "fused error": lambda row: f"{row['error']['fused']:.1e}",
    }
    return section("The loss head", data, text, listing(data["rows"], every))
