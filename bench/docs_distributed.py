"""The section of docs/performance.md about several processes, from the results of bench.distributed."""

from __future__ import annotations

from bench.docs_pieces import Json, opening, table

NAMES = {
    "ddp": "DDP, compiled inside it",
    "ddp_outside": "DDP, compiled outside of it",
    "fsdp": "FSDP2",
    "tp": "tensor parallel",
    "ddp_lora": "DDP, PEFT's adapters",
    "fsdp_lora": "FSDP2, PEFT's adapters",
    "tp_lora": "tensor parallel, PEFT's adapters",
}


def _place(row: Json) -> int:
    """Engines in the order of `NAMES`, those without a name behind them."""
    names = list(NAMES)
    return names.index(row["key"]) if row["key"] in names else len(names)


def distributed_section(data: Json) -> str:
    """Every row of bench.distributed."""
    parts = opening("Two processes", data)
    parts.append(
        "A training step of a Llama of four blocks, width 2048, bfloat16, 4 x 2048 tokens a process, in ms: "
        "the best of six blocks of steps, on the slower process. The spread is that of the blocks."
    )
    columns = ("engine", "stock ms", "fused ms", "stock / fused", "spread")
    body = [
        (
            NAMES.get(str(row["key"]), str(row["key"])),
            f"{row['stock_ms']:.1f}",
            f"{row['fused_ms']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['spread']:.0%}",
        )
        for row in sorted(data["rows"], key=_place)
    ]
    return "\n\n".join([*parts, table(columns, body)])
