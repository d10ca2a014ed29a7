"""The results in docs/reliability.md of all tests on a device."""

from __future__ import annotations

from collections import Counter

from bench.docs_pieces import Json, table

DTYPES = ("bfloat16", "float16", "float32", "own")
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
    rows = data["rows"]
    counts, wrong, failed, left = Counter[tuple[str, str]](), Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        kind = source(row["file"])
        for how, count in row.get("judged", {}).items():
            counts[kind, how.partition(" ")[0]] += count
            counts[kind, how.partition(" ")[2]] += count
        wrong[kind] += len(row.get("stock_wrong", ()))
        failed[kind] += len(row.get("failures", ()))
        left[kind] += sum(row.get("left", {}).values())
    kinds = [kind for kind in dict.fromkeys(SOURCES.values()) if any(k == kind for k, _ in counts)]
    body = []
    for kind in kinds:
        numbers = [counts[kind, name] for name in (*DTYPES, "training", "inference")]
        body.append((kind, *map(str, [*numbers, left[kind], wrong[kind], failed[kind]])))
    names = (
        *DTYPES[:-1],
        "as in the test",
        "training",
        "inference",
        "not judged",
        "wrong in stock",
        "failed",
    )
    total = sum(counts[kind, mode] for kind in kinds for mode in ("training", "inference"))
    fused, draws = (sum(row.get(name, 0) for row in rows) for name in ("fused", "draws"))
    seeds, hours = len({row["seed"] for row in rows}), sum(row["seconds"] for row in rows) / 3600
    said = (
        f"{total} programs were judged in {seeds} {'orders' if seeds > 1 else 'order'} and {hours:.1f} "
        f"process hours: {fused} had at least one fused site, {sum(failed.values())} failed. {draws} draw "
        "random numbers: only their shapes, strides and whether values are finite were compared."
    )
    parts = [said, table(("programs", *names), body), _failures(rows)]
    why = Counter[str]()
    for row in rows:
        why.update({_short(reason): count for reason, count in row.get("left", {}).items()})
    if why:
        told = table(("reason", "programs"), [(w, str(c)) for w, c in why.most_common(12)])
        parts.append(f"<details><summary>Not judged</summary>\n\n{told}\n\n</details>")
    return "\n\n".join(part for part in parts if part)


def _failures(rows: list[Json]) -> str:
    body = [
        (f"`{failure['name']}`", f"{failure['dtype']} {failure['mode']}", str(row["seed"]))
        + (_short(failure["what"]), failure.get("alone", "not run"))
        for row in rows
        for failure in row.get("failures", ())
    ]
    return table(("failed", "dtype, mode", "seed", "error", "alone"), body) if body else ""


def _short(text: str) -> str:
    """One line without what a table's cell cannot hold."""
    return " ".join(text.split()).replace("|", "/").replace("<", "(").replace(">", ")")[:160]
