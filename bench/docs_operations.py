"""The section of docs/performance.md about the results of `inductor_fusions bench`."""

from __future__ import annotations

from bench.compare import means, noise
from bench.docs_pieces import NONE, Json, get, number, opening, table


def bench_section(data: Json) -> str:
    """Every case of a results file of `inductor_fusions bench`."""
    rows = [row for row in data["rows"] if row.get("median_ms")]
    parts = opening("Operations and blocks", data)
    columns = ("suite", "cases", "geometric mean", "below 1.0", "by more than noise")
    body = [
        (mean.kind, str(mean.cases), number(mean.mean, 3), str(mean.below), str(mean.clearly))
        for mean in means(rows)
    ]
    parts += [
        "Stock over fused; of short calls the worse one of wall time and time on the device.",
        table(columns, body),
    ]
    names = ("stock", "fused", "limit")
    columns = (
        "case",
        "sites fused",
        *(f"{'by hand' if n == 'limit' else n} ms" for n in names),
        "stock / fused",
    )
    body = [
        (
            str(row["name"]),
            f"{(row.get('sites') or {}).get('fused', 0)} of {(row.get('sites') or {}).get('total', 0)}",
            *(number(get(row, "median_ms", name), 3) for name in names),
            NONE if (r := get(row, "ratio", "stock/fused")) is None else f"{r:.2f} ± {r * noise(row):.2f}",
        )
        for row in rows
    ]
    return "\n\n".join([*parts, table(columns, body)])
