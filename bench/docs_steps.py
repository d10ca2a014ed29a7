"""Sections of docs/performance.md about whole training steps and about `generate` of transformers."""

from __future__ import annotations

from collections.abc import Iterable

from bench.docs_models import gain_text
from bench.docs_pieces import NONE, Json, get, number, opening, table

VARIANTS = ("stock", "autotuned", "fused", "detached")


def steps_section(data: Json) -> str:
    """Every case of bench.steps."""
    parts = opening("Training steps", data)
    parts.append(
        "As transformers' Trainer takes them: bfloat16 autocast, the loss head with labels, clipped "
        "gradients, AdamW. `full` trains all weights, `lora` PEFT's adapters of rank 16 on every linear. "
        "The compiled model returns its logits beside the loss, except with `loss alone`; `detached` is "
        "the package with `returned_logits=detached` ([loss.md](loss.md#returned-logits)). Memory is the "
        "peak of a step, with weights and optimizer. The share is that of the device's dense bfloat16 "
        "peak, by the FLOPs of products (six for each weight and token, four for a frozen weight) and of "
        "attention. All variants take four steps from the same weights first, and their losses are "
        "compared with stock's."
    )
    rows: list[Json] = data["rows"]
    columns = (
        "step", *(f"{n} ms" for n in VARIANTS), "stock / fused", "fused sites", "GiB stock", "GiB fused",
        "GiB detached", "a second, stock", "a second, fused", "share stock", "share fused",
    )  # fmt: skip
    body = [
        (
            str(row["key"]),
            *(number(get(row, "median_ms", name), 1) for name in VARIANTS),
            gain_text(row),
            str((row.get("sites") or {}).get("fused", {}).get("fused", 0)),
            *(number(get(row, "peak_gib", name), 2) for name in ("stock", "fused", "detached")),
            *(_rate(row, name) for name in ("stock", "fused")),
            *(_percent(get(row, "peak_share", name)) for name in ("stock", "fused")),
        )
        for row in rows
    ]
    failed = [f"{row['key']}, {n}: {why}" for row in rows for n, why in row["failed_variants"].items()]
    return "\n\n".join(
        [*parts, table(columns, body), *_wrong(rows), *(["; ".join(failed)] if failed else [])]
    )


def generate_section(data: Json) -> str:
    """Every case of bench.generate."""
    parts = opening("`generate` with a static cache", data)
    parts.append(
        "`model.generate(..., cache_implementation='static', do_sample=False)` of transformers, which "
        "compiles one step by itself, but not the prompt; p and b are tokens of each prompt and prompts. "
        "New tokens a second are those of the whole call; ms a token are medians between two tokens. "
        "Greedy tokens are compared with stock's: how many sequences are equal, or differ first at a tie, "
        "which rounding decides."
    )
    rows: list[Json] = data["rows"]
    body = [
        (
            str(row["key"]),
            *(number(get(row, "tokens_s", name), 0) for name in ("stock", "fused")),
            f"{row['gain']:.2f}",
            *(number(get(row, "token_ms", name), 3) for name in ("stock", "fused")),
            str(sum(row["sites"].values())),
            f"{len(row['equal']) - row['differ']} and {row['ties']} of {len(row['equal'])}",
        )
        for row in rows
    ]
    columns = (
        "model and prompts", "stock tokens/s", "fused tokens/s", "fused / stock", "stock ms a token",
        "fused ms a token", "fused sites", "equal, ties",
    )  # fmt: skip
    return "\n\n".join([*parts, table(columns, body), *_wrong(rows)])


def _rate(row: Json, name: str) -> str:
    rate = get(row, "rate", name)
    return NONE if rate is None else f"{rate:.0f} {row['unit']}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"


def _wrong(rows: Iterable[Json]) -> list[str]:
    found = [str(row["key"]) for row in rows if row["correct"] is False]
    return [f"Not as stock: {'; '.join(found)}."] if found else []
