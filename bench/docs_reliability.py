"""The results in docs/reliability.md: random programs, architectures, loss curves, many compiles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import docs_plots, docs_programs
from bench.curves import judge
from bench.docs_pieces import (
    Json,
    Rows,
    folded,
    grouped,
    header,
    listing,
    named,
    number,
    summary,
    table,
    total,
)

#: The report of `python -m tests.fuzz --json`; those of other devices are named likewise.
REPORT = "fuzz_cpu.json"
#: The report of `python -m tests.load --json`.
LOAD = "load_cpu.json"
#: The report of `python -m tests.models.survey --json`.
ARCHITECTURES = "architectures_cpu.json"
#: The report of `python -m tests.models.libraries --json`.
LIBRARIES = "libraries_cpu.json"

#: How many reasons of architectures are listed, those of most models first.
MOST = 10

COMMAND = (
    "Nothing is recorded yet: `python -m tests.fuzz --examples 5000 --json bench/results/fuzz_cpu.json`, and "
    "then `make docs`."
)

#: Kind -> its words in the table.
KINDS = {
    "attentions": "attentions, outputs and gradients",
    "masks": "masks of attentions",
    "projections": "linears, training and inference",
    "chains": "chains of linears, activations and casts",
    "adapters": "linears with adapters, training and inference",
    "situations": "attentions in transforms, contexts, control flow, other layouts",
    "calls": "attentions called with several sizes, by callers that write in place",
}


def measured(results: Path, stem: str) -> str:
    """What the reports say, and where they were made; the plots are those of a device."""
    path = results / REPORT
    parts = ["### Random programs, CPU", _made(path, figures) if path.exists() else COMMAND]
    for other in sorted(set(results.glob("fuzz_*.json")) - {path}):
        seed = json.loads(other.read_text("utf-8")).get("settings", {}).get("seed")
        drawn = "" if seed is None else f", seed {seed}"
        parts += [f"### Random programs, GPU{drawn}", _made(other, figures)]
    for programs in sorted(results.glob("programs_*.json")):
        parts += ["### All tests, GPU", _made(programs, docs_programs.judged)]
    if (results / ARCHITECTURES).exists():
        parts += ["### Architectures of transformers", _made(results / ARCHITECTURES, architectures)]
    if (results / LIBRARIES).exists():
        parts += ["### Models of other libraries", _made(results / LIBRARIES, libraries)]
    for sanitized in sorted(results.glob("sanitizer_*.json")):
        parts += ["### Kernels under compute-sanitizer", _made(sanitized, watched)]
    for trained in docs_plots.convergence_files(results):
        parts += ["### Loss curves", _made(trained, convergence)]
    parts += docs_plots.shown(results, stem, "reliability.md")
    if (results / LOAD).exists():
        parts += ["### A thousand compiles", _made(results / LOAD, growth)]
    return "\n\n".join(parts)


def _made(path: Path, told: Callable[[Json], str]) -> str:
    data = json.loads(path.read_text("utf-8"))
    return "\n\n".join([header(data), told(data)])


def watched(data: Json) -> str:
    """What each tool found."""

    def unclean(rows: Rows) -> str:
        return ", ".join(f"`{row['template']}`" for row in rows if not row["clean"]) or "none"

    columns = {"kernel templates": len, "clean": total("clean"), "not clean": unclean}
    return summary("tool", grouped(data["rows"], lambda row: row["tool"]), columns)


def _survey(title: str, groups: Mapping[str, Rows], left: str) -> str:
    """What became of models that were surveyed, and of the attentions of those that are right."""

    def state(name: str) -> Callable[[Rows], int]:
        return lambda rows: sum(row["state"] == name for row in rows)

    def attentions(value: Callable[[Json], int]) -> Callable[[Rows], int]:
        return lambda rows: sum(value(row) for row in rows if row["state"] == "right")

    columns = {
        "correct": state("right"), "wrong": state("wrong"), "not built": state("not made"),
        "attentions fused": attentions(lambda row: row["fused"].get("attention", 0)),
        "left unfused": attentions(lambda row: sum(row[left].values())),
    }  # fmt: skip
    return summary(title, groups, columns)


def _examples(rows: Rows) -> str:
    return ", ".join(f"`{row['name']}`" for row in rows[:4])


def architectures(data: Json) -> str:
    """How many are right, and what was left of them, with the models that have it."""
    rows: list[Json] = data["rows"]
    kinds = grouped(rows, lambda row: f"{row['attention']}{', training' if row['train'] else ''}")
    having: dict[tuple[str, str], list[Json]] = {}
    for row in rows:
        for reason in row["left"] if row["state"] == "right" else ():
            having.setdefault((row["attention"], reason), []).append(row)
    most = sorted(having.items(), key=lambda item: -len(item[1]))[:MOST]
    why = table(
        ("attention", "reason", "models", "examples"),
        [(*names, len(models), _examples(models)) for names, models in most],
    )
    summary = f"Why: the {len(most)} reasons of most models"
    return "\n\n".join([_survey("attention", kinds, "left"), folded(summary, why)])


def libraries(data: Json) -> str:
    """How many models of each library are right, and the sites that are left by the code of their reason."""

    def kind(row: Json) -> str:
        name = f"{row['library']} {data['libraries'].get(row['library'], '')}".strip()
        return name + (", training" if row["train"] else "")

    kinds, why = grouped(data["rows"], kind), []
    for name, rows in kinds.items():
        left = Counter[str]()
        for row in rows:
            left.update(row.get("codes", {}))
        for code, sites in left.most_common():
            having = [row for row in rows if code in row.get("codes", {})]
            why.append((name, code, sites, _examples(having)))
    codes = table(("library", "reason", "sites", "examples"), why)
    said = "[reasons.md](reasons.md) lists the codes."
    return "\n\n".join([_survey("library", kinds, "codes"), folded("Why", said, codes)])


def convergence(data: Json) -> str:
    """The verdict of the criterion on each model."""
    rows, window = data["rows"], int(data["window"])
    verdicts = {found["model"]: found for found in judge(rows, window)}

    def of_run(variant: str, value: Callable[[Json], Any]) -> Callable[[Rows], Any]:
        """A value of the first run of a variant."""
        return lambda own: next((value(row) for row in own if row["variant"] == variant), None)

    def of_verdict(value: Callable[[Json], Any]) -> Callable[[Rows], Any]:
        return lambda own: value(verdicts[own[0]["model"]]) if own[0]["model"] in verdicts else None

    def last(row: Json) -> str:
        return number(fmean(row["loss"][-window:]), 4)

    def fused(row: Json) -> int:
        return sum(count for what, count in row["sites"]["what"].items() if ": fused: " in what)

    columns = {
        "million parameters": lambda own: f"{own[0]['parameters'] / 1e6:.0f}",
        "fused sites": lambda own: of_run("fused", fused)(own) or 0,
        "last loss, stock": of_run("stock", last), "fused": of_run("fused", last),
        "d(fused, stock)": of_verdict(lambda found: number(found["fused"], 4)),
        "d(stock, stock)": of_verdict(lambda found: number(found["stock"], 4)),
        "passes": of_verdict(lambda found: "yes" if found["within"] else "no"),
        "ms a step, stock": of_run("stock", lambda row: number(row["step_ms"], 1)),
        "ms a step, fused": of_run("fused", lambda row: number(row["step_ms"], 1)),
    }  # fmt: skip
    passed = sum(found["within"] for found in verdicts.values())
    settings = data["settings"]
    said = (
        f"{settings['steps']} steps of {settings['batch']} x {settings['length']} tokens, under the policy "
        f"`{settings['policy']}`. s is the mean of {window} steps. {data['criterion']} {passed} of "
        f"{len(verdicts)} models pass. The last loss is s at the end. The runs shared the device, so their "
        "times are not comparable with those of other pages."
    )
    models = dict(sorted(grouped(rows, lambda row: row["model"]).items()))
    return "\n\n".join([said, summary("model", models, columns)])


#: Backend -> what was compiled, in words.
BACKENDS = {"passes": "the passes alone", "inductor": "Inductor as a whole"}


def growth(data: Json) -> str:
    """What is alive after all compiles and was not after a third of them."""
    count = data["settings"]["compiles"]
    said = (
        f"{count} compiles in one process, stock or with the fusions: the graphs and the memory that the "
        "last two thirds of them leave behind. `tests/torch_features/test_load.py` allows the fusions no "
        "more graphs than stock, 10% more memory, and 4 MB for noise."
    )
    columns = {
        "compiled": lambda row: f"{BACKENDS[row['backend']]}, {row['kind']}",
        **named("graphs", "graphs"),
        "MB": lambda row: f"{row['bytes'] / 2**20:.1f}",
        "seconds": lambda row: f"{row['seconds']:.0f}",
    }
    return "\n\n".join([said, listing(data["rows"], columns)])


def figures(data: Json) -> str:
    """The table of a report, and what it comes to."""
    rows = data["rows"]
    kinds = grouped(rows, lambda row: row["kind"])
    columns = {
        "judged": total("judged"), "invalid": total("rejected"), "with a fused site": total("fused"),
        "compiled": total("code"), "wrong in stock": total("stock_wrong"), "failures": total("failures"),
        "hours": lambda rows: f"{total('seconds')(rows) / 3600:.1f}",
    }  # fmt: skip
    judged, fused, failures = (total(name)(rows) for name in ("judged", "fused", "failures"))
    said = f"{judged} programs were judged: {fused} had at least one fused site, {failures} failed."
    named_kinds = {words: kinds[kind] for kind, words in KINDS.items() if kind in kinds}
    return "\n\n".join([said, summary("programs", named_kinds, columns)])
