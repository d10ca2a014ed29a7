"""The section of docs/performance.md about several processes, from the results of bench.distributed."""

from __future__ import annotations

from bench.docs_pieces import Json, opening, table

NAMES = {
    "ddp": "DDP, compiled inside it",
    "ddp_outside": "DDP, compiled outside of it",
    "fsdp": "FSDP2",
    "tp": "tensor parallel",
    "tp_inference": "tensor parallel, a prompt",
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
    model = data.get("model", "a Llama with four blocks and width 2048")
    parts.append(
        f"Milliseconds for a training step, or for a prompt, of {model} in bfloat16, with 4 x 2048 tokens "
        "for each process: the best of six blocks of steps on the slower process. The spread is between "
        "blocks. "
        "Memory is the peak of the process with more."
    )
    columns = ("engine", "stock ms", "fused ms", "stock / fused", "spread", "GiB stock", "GiB fused")
    body = [
        (
            NAMES.get(str(row["key"]), str(row["key"])),
            f"{row['stock_ms']:.1f}",
            f"{row['fused_ms']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['spread']:.0%}",
            *(f"{row[key]:.2f}" if key in row else "-" for key in ("stock_gib", "fused_gib")),
        )
        for row in sorted(data["rows"], key=_place)
    ]
    return "\n\n".join([*parts, table(columns, body)])
