"""The sections of docs/measurements.html about decoding attention, guards, and the loss head."""

from __future__ import annotations

from statistics import geometric_mean

from bench.docs_pieces import Json, opening, table

GIB = 1 << 30


def decoding_section(data: Json) -> str:
    """Every row of bench.decode_attention: attentions to a cache, and whole steps."""
    rows = [row for row in data["rows"] if row["kind"] != "step"]
    parts = opening("Attention of one token to a cache", data)
    gains = [_best(row["device_us"]) / row["device_us"]["decode"] for row in rows]
    full = [_best(row["full"]["device_us"]) / row["full"]["device_us"]["decode"] for row in rows]
    parts.append(
        "Microseconds on the device, bfloat16. Names are those of heads, batch, length of the cache, and "
        "how many of its keys are seen. SDPA is the fastest of its forms. `tiles` finds what the mask "
        "shows, once for all layers. The limit is the time in which the keys and values that are seen "
        f"come from memory. SDPA over ours, geometric mean of {len(rows)}: {geometric_mean(gains):.2f} "
        f"(least {min(gains):.2f}) for the cache as it is, {geometric_mean(full):.2f} (least "
        f"{min(full):.2f}) for one that is full."
    )
    body = [
        (
            row["key"], f"{_best(row['device_us']):.1f}", f"{row['device_us']['decode']:.1f}",
            f"{row['device_us']['tiles']:.1f}", f"{row['limit_us']:.1f}", f"{gain:.2f}",
            f"{_best(row['full']['device_us']):.1f}", f"{row['full']['device_us']['decode']:.1f}",
            f"{least:.2f}",
        )
        for row, gain, least in zip(rows, gains, full, strict=True)
    ]  # fmt: skip
    columns = ("attention", "SDPA", "ours", "tiles", "limit", "SDPA / ours")
    parts.append(table((*columns, "SDPA, full", "ours, full", "SDPA / ours, full"), body))
    steps = [
        (row["key"], *(f"{row['times_us'][name] / 1e3:.2f}" for name in ("stock", "sdpa", "decode")))
        for row in data["rows"]
        if row["kind"] == "step"
    ]
    if steps:
        parts.append(
            "A whole step of a Llama of 8 layers with the widths of Llama-8B, a static cache and reduce- "
            "overhead, in ms: stock, the package with SDPA, and with this kernel."
        )
        parts.append(table(("step", "stock", "SDPA", "ours"), steps))
    return "\n\n".join(parts)


def _best(times: dict[str, float]) -> float:
    return min(time for name, time in times.items() if name not in ("decode", "tiles"))


def guards_section(data: Json) -> str:
    """Every row of bench.guards."""
    parts = opening("Guards of a call", data)
    counts = [(row["model"], row["count"]) for row in data["rows"] if "count" in row]
    parts.append(
        "Microseconds of a call whose graph does nothing, by the wall clock: with the guards that a function "
        "of `torch.compiler` keeps, and under `skip_guard_eval_unsafe`. Guards of a model of two layers, "
        "without the package and with it: "
        + "; ".join(f"{name} {count['stock']} and {count['fused']}" for name, count in counts)
        + "."
    )
    body = [
        (
            row["model"], row["filter"] or "none", str(row["kept"]), f"{row['guarded_us']:.0f}",
            f"{row['unguarded_us']:.0f}",
        )
        for row in data["rows"]
    ]  # fmt: skip
    return "\n\n".join([*parts, table(("model", "filter", "guards", "with", "without"), body)])


def loss_section(data: Json) -> str:
    """Every row of bench.loss_head."""
    parts = opening("The loss head", data)
    parts.append(
        "A linear and the loss of its logits, bfloat16: milliseconds on the device, the memory that one "
        "call needs at its peak in GiB, and the relative error against float64. `train` has the gradients "
        "of hidden states and weight, `frozen` those of hidden states alone, `rows` gives a log- "
        "probability for each token."
    )
    body = [
        (
            row["key"],
            *(f"{row['device_us'][name] / 1e3:.1f}" for name in ("stock", "fused")),
            *(f"{row['peak_bytes'][name] / GIB:.2f}" for name in ("stock", "fused")),
            *(f"{row['error'][name]:.1e}" for name in ("stock", "fused")),
        )
        for row in data["rows"]
    ]
    columns = ("head", "stock ms", "fused ms", "stock GiB", "fused GiB", "stock error", "fused error")
    return "\n\n".join([*parts, table(columns, body)])
