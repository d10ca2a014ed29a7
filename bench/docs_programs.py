"""The results in docs/reliability.md of all tests on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from bench.docs_pieces import Json, Rows, folded, grouped, summary, table, total

DTYPES = ("bfloat16", "float16", "float32")
#: Folder or file of tests -> what its programs are, the first that fits.
SOURCES = {
    "tests/counterexamples/test_mutants": "mutants",
    "tests/counterexamples/test_product_mutants": "mutants",
    "tests/counterexamples": "upstream bugs and regressions",
    "tests/fuzz": "random programs",
    "tests/attention": "attention: forms and near misses",
    "tests/lora": "adapters: forms and near misses",
    "tests/block_mm": "linears and gated MLPs",
    "tests/dot_interaction": "interactions",
    "tests/outer_product_linear": "interactions",
    "tests/models": "models of transformers",
    "tests/seed_systems": "other systems' examples",
    "tests": "others",
}


def source(file: str) -> str:
    """What the programs of a file are."""
    return next(words for start, words in SOURCES.items() if file.startswith(start))


def judged(data: Json) -> str:
    """How many were judged, by source and dtype, and each that failed."""
    rows: list[Json] = data["rows"]
    order = list(dict.fromkeys(SOURCES.values()))
    kinds = grouped(rows, lambda row: source(row["file"]))

    def how(name: str) -> Callable[[Rows], int]:
        """Those of a dtype or a mode: what was judged is counted by both, as "bfloat16 training"."""
        return lambda rows: sum(
            count for row in rows for what, count in row.get("judged", {}).items() if name in what.split()
        )

    def listed(column: str) -> Callable[[Rows], int]:
        return lambda rows: sum(len(row.get(column, ())) for row in rows)

    columns = {
        **{name: how(name) for name in DTYPES}, "as in the test": how("own"),
        "training": how("training"), "inference": how("inference"),
        "not judged": lambda rows: sum(sum(row.get("left", {}).values()) for row in rows),
        "wrong in stock": listed("stock_wrong"), "failed": listed("failures"),
    }  # fmt: skip
    known = {kind: kinds[kind] for kind in order if any(row.get("judged") for row in kinds.get(kind, ()))}
    count = how("training")(rows) + how("inference")(rows)
    seeds, hours = len({row["seed"] for row in rows}), total("seconds")(rows) / 3600
    said = (
        f"{count} programs were judged in {seeds} {'orders' if seeds > 1 else 'order'} and {hours:.1f} "
        f"process hours: {total('fused')(rows)} had at least one fused site, {listed('failures')(rows)} "
        f"failed. {total('draws')(rows)} draw random numbers: only their shapes, strides and whether values "
        "are finite were compared."
    )
    parts = [said, summary("programs", known, columns), _failures(rows)]
    why = Counter[str]()
    for row in rows:
        why.update({_short(reason): count for reason, count in row.get("left", {}).items()})
    if why:
        parts.append(folded("Not judged", table(("reason", "programs"), why.most_common(12))))
    return "\n\n".join(filter(None, parts))


def _failures(rows: Rows) -> str:
    body = [
        (f"`{failure['name']}`", f"{failure['dtype']} {failure['mode']}", row["seed"])
        + (_short(failure["what"]), failure.get("alone", "not run"))
        for row in rows
        for failure in row.get("failures", ())
    ]
    return table(("failed", "dtype, mode", "seed", "error", "alone"), body) if body else ""


def _short(text: str) -> str:
    """One line without what a table's cell cannot hold."""
    return " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")")[:160]
