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
    """The order of engines: that of `NAMES`, then all others."""
    names = list(NAMES)
    return names.index(row["key"]) if row["key"] in names else len(names)


def distributed_section(data: Json) -> str:
    """Every row of bench.distributed."""
    parts = opening("Two processes", data)
    parts.append(
        "Milliseconds for a training step of a Llama with four blocks, width 2048, bfloat16, and 4 x 2048 "
        "tokens for each process: the best of six blocks of steps on the slower process. The spread is "
        "between blocks."
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
