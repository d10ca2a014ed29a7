"""The results in docs/reliability.md: random programs, architectures, loss curves, many compiles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from bench import docs_plots, docs_programs
from bench.curves import judge
from bench.docs_pieces import NONE, Json, header, number, table

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
    body = []
    for tool in dict.fromkeys(row["tool"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["tool"] == tool]
        found = [f"`{row['template']}`" for row in rows if not row["clean"]]
        body.append((tool, str(len(rows)), str(len(rows) - len(found)), ", ".join(found) or "none"))
    return table(("tool", "kernel templates", "clean", "not clean"), body)


def architectures(data: Json) -> str:
    """How many are right, and what was left of them, with the models that have it."""
    body, reasons = [], dict[tuple[str, str], list[str]]()
    for attention, train in dict.fromkeys((row["attention"], row["train"]) for row in data["rows"]):
        rows = [r for r in data["rows"] if (r["attention"], r["train"]) == (attention, train)]
        states = Counter(row["state"] for row in rows)
        made = [row for row in rows if row["state"] == "right"]
        fused = sum(row["fused"].get("attention", 0) for row in made)
        left = sum(sum(row["left"].values()) for row in made)
        counts = [states["right"], states["wrong"], states["not made"], fused, left]
        body.append((f"{attention}{', training' if train else ''}", *map(str, counts)))
        for row in made:
            for reason in row["left"]:
                reasons.setdefault((attention, reason), []).append(row["name"])
    names = ("attention", "correct", "wrong", "not built", "attentions fused", "left unfused")
    told = [
        (attention, reason, str(len(models)), ", ".join(f"`{m}`" for m in models[:4]))
        for (attention, reason), models in sorted(reasons.items(), key=lambda item: -len(item[1]))[:MOST]
    ]
    why = table(("attention", "reason", "models", "examples"), told)
    summary = f"Why: the {len(told)} reasons of most models"
    folded = f"<details><summary>{summary}</summary>\n\n{why}\n\n</details>"
    return "\n\n".join([table(names, body), folded])


def libraries(data: Json) -> str:
    """How many models of each library are right, and the sites that are left by the code of their reason."""
    body, told = [], []
    for library, train in dict.fromkeys((row["library"], row["train"]) for row in data["rows"]):
        rows = [row for row in data["rows"] if (row["library"], row["train"]) == (library, train)]
        states = Counter(row["state"] for row in rows)
        fused, left, such = Counter[str](), Counter[str](), dict[str, list[str]]()
        for row in rows:
            fused.update(row.get("fused", {}))
            left.update(row.get("codes", {}))
            for code in row.get("codes", {}):
                such.setdefault(code, []).append(f"`{row['name']}`")
        name = f"{library} {data['libraries'].get(library, '')}".strip() + (", training" if train else "")
        counts = [states["right"], states["wrong"], states["not made"], fused["attention"], left.total()]
        body.append((name, *map(str, counts)))
        told += [(name, code, str(n), ", ".join(such[code][:4])) for code, n in left.most_common()]
    names = ("library", "correct", "wrong", "not built", "attentions fused", "left unfused")
    codes = table(("library", "reason", "sites", "examples"), told)
    said = "[reasons.md](reasons.md) lists the codes."
    folded = f"<details><summary>Why</summary>\n\n{said}\n\n{codes}\n\n</details>"
    return "\n\n".join([table(names, body), folded])


def convergence(data: Json) -> str:
    """The verdict of the criterion on each model."""
    rows, window = data["rows"], int(data["window"])
    verdicts = {found["model"]: found for found in judge(rows, window)}
    body = []
    for model in sorted({str(row["model"]) for row in rows}):
        own = [row for row in rows if row["model"] == model]
        pair = [next((row for row in own if row["variant"] == v), None) for v in ("stock", "fused")]
        found = verdicts.get(model, {})
        losses = [number(fmean(row["loss"][-window:]) if row else None, 4) for row in pair]
        apart = [number(found.get(name), 4) for name in ("fused", "stock")]
        passes = {True: "yes", False: "no"}.get(found.get("within"), NONE)
        times = [number(row["step_ms"] if row else None, 1) for row in pair]
        told = (pair[1]["sites"]["what"] if pair[1] else {}).items()
        fused = sum(count for what, count in told if ": fused: " in what)
        body.append((model, f"{own[0]['parameters'] / 1e6:.0f}", str(fused), *losses, *apart, passes, *times))
    passed = sum(found["within"] for found in verdicts.values())
    settings = data["settings"]
    said = (
        f"{settings['steps']} steps of {settings['batch']} x {settings['length']} tokens, under the policy "
        f"`{settings['policy']}`. s is the mean of {window} steps. {data['criterion']} {passed} of "
        f"{len(verdicts)} models pass. The last loss is s at the end. The runs shared the device, so their "
        "times are not comparable with those of other pages."
    )
    columns = ("model", "million parameters", "fused sites", "last loss, stock", "fused", "d(fused, stock)")
    columns += ("d(stock, stock)", "passes", "ms a step, stock", "fused")
    return "\n\n".join([said, table(columns, body)])


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
    rows = [
        (
            f"{BACKENDS[row['backend']]}, {row['kind']}", str(row["graphs"]), f"{row['bytes'] / 2**20:.1f}",
            f"{row['seconds']:.0f}",
        )
        for row in data["rows"]
    ]  # fmt: skip
    return "\n\n".join([said, table(("compiled", "graphs", "MB", "seconds"), rows)])


def figures(data: Json) -> str:
    """The table of a report, and what it comes to."""
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
    columns = ("programs", "judged", "invalid", "with a fused site", "compiled")
    columns += ("wrong in stock", "failures", "hours")
    judged, fused, failures = (sum(r[n] for r in data["rows"]) for n in ("judged", "fused", "failures"))
    said = f"{judged} programs were judged: {fused} had at least one fused site, {failures} failed."
    return "\n\n".join([said, table(columns, body)])
