"""Generate the measured documentation: table and picture of the README, pages and plots of docs.

    python -m bench.docs            # write all
    python -m bench.docs --check    # exit status 1 if one of them is stale

Every figure comes from bench/results/*.json. Missing files and columns are left out.
`models_*.json` and `widths_*.json` are files of bench.models, `lora_models_*.json` of bench.models_lora,
`bench_*.json` of `inductor_fusions bench`; `attention_*.json`, `flex_*.json`, `projections_*.json` and
`lora_*.json` of the scripts bench.tune_*; `lora_merged_*.json`, `outer_product_*.json`,
`dot_interaction_*.json`, `decode_attention_*.json`, `loss_head_*.json`, `norm_linear_*.json`,
`tile_model*.json`, `guards_*.json`, `compile_cost_*.json`, `steps_*.json`, `generate_*.json`,
`whole_mlp_*.json`, `mlp_training_*.json`, `convergence_*.json` and `distributed_*.json` of scripts of these
names; `fuzz_*.json` of tests.fuzz, `load_cpu.json` of tests.load, `sanitizer_*.json` of tests.gpu.sanitize.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench import docs_plots, docs_reliability, docs_tables, docs_whole_mlp, picture
from bench.docs_linears import (
    interactions_section,
    lora_models_section,
    lora_section,
    lora_summary,
    projections_section,
    tiles_table,
)
from bench.docs_models import LEVEL, MORE, models_section, readme_table, summary
from bench.docs_operations import (
    attention_section,
    bench_section,
    decoding_section,
    flex_section,
    guards_section,
    loss_section,
    norm_section,
)
from bench.docs_pieces import Json, anchor, filled, table
from bench.docs_steps import (
    compile_section,
    distributed_section,
    generate_section,
    measured_here_section,
    steps_section,
)

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- measured: begin (python -m bench.docs) -->"
END = "<!-- measured: end -->"
#: The device of the README's table, and of what it says of adapters.
README_RESULTS = "models_h200.json"
README_ADAPTERS = "lora_models_h200.json"
#: What docs/measuring.md says of the chosen configurations: of linears, and of those with adapters.
TILES = "tile_model.json", "tile_model_lora.json"
#: The device of the plots, as files name it.
PLOTTED = "h200"


#: What is written of which results, in this order.
SECTIONS: dict[str, Callable[[Json], str]] = {
    "models_*.json": models_section,
    "widths_*.json": partial(models_section, title="Two layers of models whose widths few tables have"),
    "steps_*.json": steps_section,
    "generate_*.json": generate_section,
    "measured_here_*.json": measured_here_section,
    "bench_*.json": bench_section,
    "attention_*.json": attention_section,
    "flex_*.json": flex_section,
    "projections_*.json": projections_section,
    "lora_models_*.json": lora_models_section,
    "lora_[!m]*.json": lora_section,
    "lora_merged_*.json": partial(interactions_section, "Adapters merged in each step"),
    "outer_product_*.json": partial(interactions_section, "A linear on an outer product"),
    "dot_interaction_*.json": partial(interactions_section, "Pairwise dot products"),
    "decode_attention_*.json": decoding_section,
    "loss_head_*.json": loss_section,
    "norm_linear_*.json": norm_section,
    "guards_*.json": guards_section,
    "compile_cost_*.json": compile_section,
    "distributed_*.json": distributed_section,
}


#: Sections that are in docs/performance.md, with their parts; the rest is in docs/measurements.html alone.
SHOWN = {
    "models_*.json": ("Time", "Where it loses or ties"),
    "widths_*.json": ("Where it loses or ties",),
    "steps_*.json": (),
    "generate_*.json": (),
    "lora_models_*.json": (),
    "distributed_*.json": (),
}
#: Of these, docs/performance.md has the last file by name; docs/measurements.html has the other devices.
ONE_DEVICE = ("distributed_*.json",)


def sections(results: Path) -> list[tuple[str, Path, str]]:
    """Every section: the pattern of its file, the file, and its text."""
    found = []
    for pattern, section in SECTIONS.items():
        # A GPU first: its figures are what the package is for.
        for path in sorted(results.glob(pattern), key=lambda p: ("cpu" in p.stem, p.name)):
            found.append((pattern, path, section(json.loads(path.read_text("utf-8")))))
    return found


def performance(results: Path, written: list[tuple[str, Path, str]]) -> str:
    """The text of docs/performance.md."""
    parts: list[str] = []
    others: dict[str, list[str]] = {}
    last = {pattern: path for pattern, path, _ in written}
    for pattern, path, text in written:
        if pattern in ONE_DEVICE and path != last[pattern]:
            continue
        if pattern in SHOWN:
            parts.append(docs_tables.short(text, SHOWN[pattern]))
        else:
            rows = max((len(table.rows) for table in docs_tables.tables(text)), default=0)
            file = f"[{path.stem}.csv](../bench/results/{path.stem}.csv) ({rows})"
            others.setdefault(_title(text).partition(", ")[0], []).append(file)
    titles = [*map(_title, parts), "Rows of operations"]
    plots = docs_plots.shown(results, PLOTTED, "performance.md")
    shown = [_contents(titles), *plots, *_explained_once(parts)]
    return filled(
        "performance.md", level=f"{LEVEL:.0%}", more=f"{MORE - 1:.0%}", sections="\n\n".join(shown),
        operations=table(("what", "files and their rows"), [(k, ", ".join(f)) for k, f in others.items()]),
    )  # fmt: skip


def _title(section: str) -> str:
    """Of a section: its kind, and after a comma the device."""
    return section.partition("\n")[0].removeprefix("## ")


def _explained_once(parts: list[str]) -> list[str]:
    """The sections, without what an earlier one says in the same words in front of its first table."""
    said: set[str] = set()
    found = []
    for part in parts:
        paragraphs = part.split("\n\n")
        first = next((i for i, each in enumerate(paragraphs) if each.startswith("|")), 0)
        found.append("\n\n".join(each for i, each in enumerate(paragraphs) if i >= first or each not in said))
        said.update(each for each in paragraphs[:first] if not each.startswith("#"))
    return found


def _contents(titles: list[str]) -> str:
    """Links to sections: those of one kind together, by device."""
    kinds: dict[str, list[str]] = {}
    for title in titles:
        kind, _, device = title.partition(", ")
        kinds.setdefault(kind, []).append(f"[{device or kind}](#{anchor(title)})")
    of_one = {kind: links[0] for kind, links in kinds.items() if links[0].startswith(f"[{kind}]")}
    found = [of_one.get(kind, f"{kind} ({', '.join(links)})") for kind, links in kinds.items()]
    return f"Sections: {'; '.join(found)}."


def between(text: str, made: str, name: str) -> str:
    """A page with what is between its markers made anew.

    Raises:
        SystemExit: it has no markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{name} has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def readme(text: str, results: Path) -> str:
    """The README with its table made anew."""
    path = results / README_RESULTS
    made = readme_table(json.loads(path.read_text("utf-8"))) if path.exists() else "Nothing is measured yet."
    for other in sorted(results.glob("models_*.json")):
        if other != path:
            made += f" {summary(json.loads(other.read_text('utf-8')))}"
    adapters = results / README_ADAPTERS
    if adapters.exists() and (told := lora_summary(json.loads(adapters.read_text("utf-8")))):
        made += f"\n\n{told}"
    return between(text, made, "README.md")


def render(root: Path = ROOT) -> dict[Path, str]:
    """Each text that this script writes, with what it should hold."""
    results, page = root / "bench" / "results", root / "README.md"
    tested, judged = root / "docs" / "reliability.md", root / "docs" / "measuring.md"
    tiles = [json.loads((results / name).read_text("utf-8")) for name in TILES]
    measured = results / README_RESULTS
    written = sections(results)
    return {
        page: readme(page.read_text("utf-8"), results),
        root / "docs" / "performance.md": performance(results, written),
        root / "docs" / "measurements.html": docs_tables.page([text for _, _, text in written]),
        **{
            path.with_suffix(".csv"): docs_tables.rows_of(text)
            for pattern, path, text in written
            if pattern not in SHOWN
        },
        root / "docs" / "whole_mlp.md": docs_whole_mlp.page(results),
        tested: between(tested.read_text("utf-8"), docs_reliability.measured(results, PLOTTED), tested.name),
        judged: between(judged.read_text("utf-8"), tiles_table(*tiles), judged.name),
        root / "docs" / "speedups.svg": picture.draw(
            json.loads(measured.read_text("utf-8")) if measured.exists() else {"rows": []}
        ),
    }


def plotted(root: Path = ROOT) -> dict[Path, tuple[docs_plots.Plot, Json]]:
    """Each plot that this script draws, with its data."""
    made = docs_plots.wanted(root / "bench" / "results", PLOTTED)
    return {root / "docs" / name: (plot, data) for name, plot, data in made}


def stale(root: Path = ROOT) -> list[Path]:
    """The files that do not hold what the results say."""
    texts = [
        path for path, text in render(root).items() if not path.exists() or path.read_text("utf-8") != text
    ]
    return [*texts, *(path for path, (_, data) in plotted(root).items() if docs_plots.stale(path, data))]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.docs", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with status 1 if a file is stale"
    )
    options = parser.parse_args()
    if options.check:
        found = stale()
        for path in found:
            print(f"{path.relative_to(ROOT)} is stale: run python -m bench.docs", file=sys.stderr)
        sys.exit(1 if found else 0)
    for path, text in render().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        print(path.relative_to(ROOT))
    for path, (plot, data) in plotted().items():
        if docs_plots.stale(path, data):
            docs_plots.write(path, plot, data)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
