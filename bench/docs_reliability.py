"""The section of docs/reliability.md about random programs, from the report of tests.fuzz."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from bench.docs_pieces import Json, header, table

#: The report of `python -m tests.fuzz --json`.
REPORT = "fuzz_cpu.json"

COMMAND = (
    "Nothing is recorded yet: `python -m tests.fuzz --examples 5000 --json bench/results/fuzz_cpu.json`, and "
    "then `make docs`."
)

#: Kind -> its words in the table.
KINDS = {
    "attentions": "attentions, outputs and gradients",
    "masks": "masks of attentions",
    "projections": "linears, training and inference",
    "chains": "linears with activations in a chain, and casts in between",
    "adapters": "linears with adapters, training and inference",
}


def fuzzing(results: Path) -> str:
    """What the report says, and where it was made."""
    path = results / REPORT
    if not path.exists():
        return COMMAND
    data = json.loads(path.read_text("utf-8"))
    return "\n\n".join([header(data), figures(data)])


def figures(data: Json) -> str:
    """The tables of a report, and what they come to."""
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in data["rows"])]
    body = []
    for kind in kinds:
        rows = [row for row in data["rows"] if row["kind"] == kind]
        numbers = [
            sum(row[name] for row in rows)
            for name in ("judged", "rejected", "fused", "code", "stock_wrong", "failures")
        ]
        hours = sum(row["seconds"] for row in rows) / 3600
        body.append((KINDS[kind], *map(str, numbers), f"{hours:.1f}"))
    columns = ("programs", "judged", "rejected", "with a fused site", "by code")
    columns += ("wrong in stock", "failures", "hours")
    sites: Counter[str] = Counter()
    for row in data["rows"]:
        sites.update(row["sites"])
    counted = table(("fusion", "fused sites"), [(f"`{n}`", str(c)) for n, c in sites.most_common()])
    judged, fused, failures = (sum(r[n] for r in data["rows"]) for n in ("judged", "fused", "failures"))
    said = f"{judged} programs were judged, {fused} of them with a fused site at least; {failures} failed."
    return "\n\n".join([said, table(columns, body), counted])
