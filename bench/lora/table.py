"""What was measured of linears with adapters, as the table of a device has it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench import device_table
from bench.common import Json
from bench.lora.rows import ALONE
from bench.lora.spellings import ADDED
from bench.tuning_linears import plain_gain
from inductor_fusions.decisions import problems


def sections(rows: Sequence[Json]) -> dict[str, list[Json]]:
    """What the package looks up: `profit` says how it is read."""
    names = ("lora", "block_mm", "narrow_mm", "lora_decode", "lora_sums", "lora_accumulate", "lora_dropout")
    found: dict[str, list[Json]] = {name: [] for name in names}
    for row in rows:
        if not row.get("best"):
            continue
        ratio, tokens = round(plain_gain(row), 3), row["tokens"]
        if row["dropout"] and row["kind"] != "gradient":
            if row["kind"] == "step":
                (outer,) = row["outer"]
                found["lora_dropout"].append(
                    {
                        "inner": row["inner"], "outer": outer, "rank": row["rank"], "dtype": "bfloat16",
                        "adapters": row["adapters"], "masks": row.get("masks", 0), "tokens": tokens,
                        "gain": ratio,
                    }
                )  # fmt: skip
            # Rows from before products read masks are of what a dropout has left.
            for thin in row.get("narrow", ()):
                if thin.get("masks"):
                    found["narrow_mm"].append({**thin, "tokens": tokens})
            continue
        if row["kind"] == "step":
            continue
        if row["kind"] in ALONE:
            found["narrow_mm"] += [{**thin, "tokens": tokens, "gain": ratio} for thin in row["narrow"]]
            continue
        if row["kind"] in ADDED:
            there = row["kind"] == "accumulate"
            inner, count = [row["inner"]] if there else list(row["outer"]), len(row["outer"])
            found["lora_sums"].append(
                {
                    "inner": inner, "columns": row["outer"][0] if there else row["inner"],
                    "ranks": [row["rank"]] * count, "masks": 0 if there else count, "dtype": "bfloat16",
                    "adapters": row["adapters"], "tokens": tokens, "gain": ratio,
                }
            )  # fmt: skip
            if "added" in row:
                found["lora_accumulate"].append({**row["added"], "tokens": tokens, "gain": ratio})
            continue
        if "block" not in row and "decode" not in row:
            continue  # only its skinny GEMM was fused
        forward_row = row["kind"] == "forward"
        inner = [row["inner"]] if forward_row else list(row["outer"])
        outer = list(row["outer"]) if forward_row else [row["inner"]]
        ranks = [[row["rank"]] for _ in outer] if forward_row else [[row["rank"]] * len(inner)]
        found["lora"].append(
            {
                "inner": inner, "outer": outer, "ranks": ranks, "dtype": "bfloat16",
                "adapters": row["adapters"], "layout": "t" if forward_row else "n",
                "tokens": tokens, "gain": ratio,
            }
        )  # fmt: skip
        if "decode" in row:
            found["lora_decode"].append({**row["decode"], "tokens": tokens})
        # What the whole linear gains is not what its skinny GEMM gains alone.
        found["narrow_mm"] += [{**thin, "tokens": tokens} for thin in row.get("narrow", ())]
        if "block" in row:
            block = dict(row["block"])
            chosen = block.pop("config")
            block |= {"tokens": tokens, "gain": ratio, "capability": row["capability"]}
            found["block_mm"].append({**block, "config": chosen if ratio >= problems.MARGIN else None})
    return found


def write_table(path: Path, rows: Sequence[Json]) -> None:
    """Put the rows into a device's table, in place of those of the same problems that it has."""
    device_table.merge(path, sections(rows))
