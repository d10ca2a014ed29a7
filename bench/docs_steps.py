"""Sections about training steps, `generate` of transformers, several processes, and compiles."""

from __future__ import annotations

from bench.docs_models import gain_text
from bench.docs_pieces import NONE, Columns, Json, Rows, fixed, get, listing, named, number, section

VARIANTS = ("stock", "autotuned", "fused", "detached")
#: The processes of bench.measured_here.
TITLES = {"table": "tables", "first": "first", "second": "second"}


def steps_section(data: Json) -> str:
    """Every case of bench.steps."""
    text = (
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

    def rate(name: str) -> Columns:
        def cell(row: Json) -> str | None:
            rate = get(row, "rate", name)
            return None if rate is None else f"{rate:.0f} {row['unit']}"

        return {f"a second, {name}": cell}

    def share(name: str) -> Columns:
        def cell(row: Json) -> str | None:
            share = get(row, "peak_share", name)
            return None if share is None else f"{share:.0%}"

        return {f"share {name}": cell}

    columns = {
        **named("step"), **fixed("median_ms", 1, {name: f"{name} ms" for name in VARIANTS}),
        "stock / fused": gain_text,
        "fused sites": lambda row: (row.get("sites") or {}).get("fused", {}).get("fused", 0),
        **fixed("peak_gib", 2, {name: f"GiB {name}" for name in ("stock", "fused", "detached")}),
        **rate("stock"), **rate("fused"), **share("stock"), **share("fused"),
    }  # fmt: skip
    failed = [f"{row['key']}, {n}: {why}" for row in rows for n, why in row["failed_variants"].items()]
    return section("Training steps", data, text, listing(rows, columns), _wrong(rows), "; ".join(failed))


def generate_section(data: Json) -> str:
    """Every case of bench.generate."""
    text = (
        "`model.generate(..., cache_implementation='static', do_sample=False)` of transformers, which "
        "compiles one step by itself, but not the prompt; p: tokens of a prompt, b: prompts. "
        "New tokens a second are those of the whole call; ms a token are medians between two tokens. "
        "Greedy tokens are compared with stock's: how many sequences are equal, or differ first at a tie, "
        "which rounding decides."
    )
    rows: list[Json] = data["rows"]
    columns = {
        **named("model and prompts"),
        **fixed("tokens_s", 0, {"stock": "stock tokens/s", "fused": "fused tokens/s"}),
        "fused / stock": lambda row: f"{row['gain']:.2f}",
        **fixed("token_ms", 3, {"stock": "stock ms a token", "fused": "fused ms a token"}),
        "fused sites": lambda row: sum(row["sites"].values()),
        "equal, ties": lambda row: (
            f"{len(row['equal']) - row['differ']} and {row['ties']} of {len(row['equal'])}"
        ),
    }
    return section("`generate` with a static cache", data, text, listing(rows, columns), _wrong(rows))


def _wrong(rows: Rows) -> str:
    found = [str(row["key"]) for row in rows if row["correct"] is False]
    return f"Not as stock: {'; '.join(found)}." if found else ""


#: Engines of bench.distributed in words, in the order of the table.
ENGINES = {
    "ddp": "DDP, compiled inside it",
    "ddp_outside": "DDP, compiled outside of it",
    "fsdp": "FSDP2",
    "tp": "tensor parallel",
    "tp_inference": "tensor parallel, a prompt",
    "ddp_lora": "DDP, PEFT's adapters",
    "fsdp_lora": "FSDP2, PEFT's adapters",
    "tp_lora": "tensor parallel, PEFT's adapters",
}


def distributed_section(data: Json) -> str:
    """Every row of bench.distributed."""
    model = data.get("model", "a Llama with four blocks and width 2048")
    text = (
        f"Milliseconds for a training step, or for a prompt, of {model} in bfloat16, with 4 x 2048 tokens "
        "for each process: the best of six blocks of steps on the slower process. The spread is between "
        "blocks. Memory is the peak of the process with more."
    )

    def gib(name: str) -> Columns:
        return {f"GiB {name}": lambda row: f"{row[f'{name}_gib']:.2f}" if f"{name}_gib" in row else NONE}

    columns = {
        "engine": lambda row: ENGINES[row["key"]],
        "stock ms": lambda row: f"{row['stock_ms']:.1f}",
        "fused ms": lambda row: f"{row['fused_ms']:.1f}",
        "stock / fused": lambda row: f"{row['ratio']:.2f}",
        "spread": lambda row: f"{row['spread']:.0%}",
        **gib("stock"), **gib("fused"),
    }  # fmt: skip
    rows = sorted(data["rows"], key=lambda row: list(ENGINES).index(row["key"]))
    return section("Two processes", data, text, listing(rows, columns))


def compile_section(data: Json) -> str:
    """Every case of bench.compile_cost."""
    text = (
        "Python and C functions that are called, and CPU seconds, while a model of few layers is compiled "
        "for an H200 that need not be there. Every candidate is fused. Triton's compiler is not included. "
        "Launches are those of the code that is written."
    )
    variants = ("stock", "fused")
    columns = {
        **named("model"),
        **fixed("calls", 1, {name: f"{name} calls, millions" for name in variants}, 1e6),
        "fused / stock": lambda row: f"{row['ratio']:.3f}",
        **fixed("cpu_s", 1, {name: f"{name} s" for name in variants}),
        **fixed("launches", 0, {name: f"{name} launches" for name in variants}),
    }
    return section("Compiles", data, text, listing(data["rows"], columns))


def measured_here_section(data: Json) -> str:
    """Every model of bench.measured_here."""
    text = (
        "Two layers of each model. `tables` is the package as it is; `first` and `second` are processes of a "
        "copy without any table that measures (`INDUCTOR_FUSIONS_MEASURE=1`), the second with what the first "
        "has found. Gains are stock / fused of the same process; kept is the logarithm of a gain over that "
        "with the tables. Compile times are over stock's."
    )

    def of(phase: str, name: str, digits: int, title: str = "") -> Columns:
        return {f"{TITLES[phase]}, {title or name}": lambda row: number(row[phase].get(name), digits)}

    columns = {**named("model")}
    for phase in TITLES:
        columns |= of(phase, "gain", 2)
        if phase != "table":
            columns |= of(phase, "kept", 2) | of(phase, "measuring_s", 0, "seconds of measuring")
        columns |= of(phase, "compile", 2)
    return section("Measuring on this machine", data, text, listing(data["rows"], columns))
