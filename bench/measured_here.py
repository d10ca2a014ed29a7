"""What measuring on this machine brings where there is no table at all, beside what the tables bring.

Three processes, one after the other, each with stock and fused side by side, from empty caches:

    table    the package as it is, without measuring
    first    a copy of the package without its tables, which measures: INDUCTOR_FUSIONS_MEASURE=1
    second   the same again: it finds what the first one has measured

The budget of measuring is that of a process with one model. Of each model: device time and compile time of
both, and how much of the logarithm of the gain with the tables is kept. Models have two layers of their real
widths; those of the adapters are in no table.

    python -m bench.measured_here --out /tmp/measured_here.json --budget 60
    python -m bench.measured_here --device cpu --quick --out /tmp/try.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from bench import model_cases, models_lora
from bench.common import Json, free, interleave
from bench.models.variants import Variant, make_variant
from bench.provenance import environment

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("table", "first", "second")
#: Layers of each model: problems are those of all of them.
LAYERS = {"num_hidden_layers": 2, "n_layer": 2}
#: What has no shape of its own in a table, by its name.
MODELS = (
    model_cases.named("bert eager b32 s512", model="bert-base"),
    model_cases.named("gpt2 eager b8 s1024 train"),
    models_lora.named("qwen2.5-1.5b r8 train b2 s2048", model="qwen2.5-1.5b-2l"),
    models_lora.named("qwen2.5-1.5b bf16 r8 train b2 s2048", model="qwen2.5-1.5b-2l"),
)


def variants_of(case: model_cases.Case, device: str, quick: bool) -> dict[str, Variant]:
    """Stock and fused, on the same weights."""
    usual = model_cases.model_config

    def shorter(case: model_cases.Case, quick: bool) -> tuple[str, Json]:
        architecture, values = usual(case, quick)
        return architecture, values | {name: n for name, n in LAYERS.items() if name in values}

    with mock.patch.object(model_cases, "model_config", shorter):
        model = model_cases.build(case, case.attn, device, quick)
        inputs = model_cases.make_inputs(case, shorter(case, quick)[1], device)
        return {name: make_variant(name, model, case, inputs) for name in ("stock", "fused")}


def measure(case: model_cases.Case, device: str, quick: bool) -> Json:
    """Compile both and time them."""
    from inductor_fusions import decisions

    row: Json = {"name": case.name, "compile_s": {}}
    variants, spent = variants_of(case, device, quick), decisions.measurer.spent
    decisions.measurer.spent = 0.0
    for name, variant in variants.items():
        first = variant.first_step(device)
        start = time.perf_counter()
        variant.step()
        row["compile_s"][name] = round(first - (time.perf_counter() - start), 2)
    row["measuring_s"] = round(decisions.measurer.spent, 2)
    decisions.measurer.spent += spent
    sites = variants["fused"].sites
    row["fused"] = sum(site.verdict == "fused" for site in sites)
    row["sites"] = len(sites)
    row["decided"] = sorted({f"{site.fusion}: {site.kernel or site.reason}" for site in sites})
    calls = {name: variant.step for name, variant in variants.items()}
    gpu = device == "cuda"
    times = interleave(calls, device, 8, 0.1 if gpu else 0.3, max_calls=10, run_ahead=gpu)
    row["ms"] = {name: round(1e3 * each.median, 4) for name, each in times.items()}
    row["gain"] = round(row["ms"]["stock"] / row["ms"]["fused"], 4)
    return row


def phase(options: argparse.Namespace) -> None:
    """In a process of its own: measure every model."""
    import inductor_fusions
    from inductor_fusions import decisions
    from inductor_fusions.decisions import machine, tables
    from inductor_fusions.decisions.problems import SECTIONS

    if options.device == "cpu":
        torch.set_num_threads(1)
    square = torch.randn(64, 64, device=options.device, requires_grad=True)
    torch.compile(lambda x: (x @ x).softmax(-1).sum())(square).backward()  # what a process does once
    rows = []
    for case in selected(options):
        rows.append(measure(case, options.device, options.quick))
        print(f"{options.phase}: {rows[-1]['name']}: {rows[-1]['gain']}x", file=sys.stderr, flush=True)
        free(options.device)
    known = machine.load(square.device) or {}
    found = {
        "rows": rows, "package": str(Path(inductor_fusions.__file__).parent), "tables": tables.names(),
        "measured": len(decisions.measurer.measured), "not_reached": decisions.measurer.left,
        "measuring_s": round(decisions.measurer.spent, 1),
        "known": {name: known[name] for name in SECTIONS if known.get(name)},
    }  # fmt: skip
    options.out.write_text(json.dumps(found))


def selected(options: argparse.Namespace) -> list[model_cases.Case]:
    """The models that are meant."""
    found = [case for case in MODELS if not options.only or re.search(options.only, case.name)]
    if not options.quick:
        return found
    return [replace(case, batch=min(case.batch, 2), seq=min(case.seq, 64)) for case in found]


def run(name: str, options: argparse.Namespace, folder: Path) -> Json:
    """One of the processes."""
    bare = folder / "bare"
    out = folder / f"{name}.json"
    own = {"INDUCTOR_FUSIONS_MEASURE": "0", "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(folder / "data")}
    own |= {"XDG_CONFIG_HOME": str(folder / "config")}
    if name != "table":
        own |= {
            "INDUCTOR_FUSIONS_MEASURE": "1", "INDUCTOR_FUSIONS_MEASURE_BUDGET": str(options.budget),
            "PYTHONPATH": os.pathsep.join([str(bare), str(ROOT)]),
        }  # fmt: skip
    command = [sys.executable, "-m", "bench.measured_here", "--phase", name, "--out", str(out)]
    command += ["--device", options.device, "--only", options.only] + ["--quick"] * options.quick
    start = time.monotonic()
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, **own})
    found: Json = json.loads(out.read_text())
    return {**found, "seconds": round(time.monotonic() - start, 1)}


def summary(found: Json) -> list[Json]:
    """Of each model: the gains, what is kept of the one with the tables, and how long compiles take."""
    rows = []
    for table, first, second in zip(*(found[name]["rows"] for name in PHASES), strict=True):
        row: Json = {"key": table["name"]}
        for name, each in zip(PHASES, (table, first, second), strict=True):
            took = each["compile_s"]
            row[name] = {
                "ms": each["ms"], "gain": each["gain"], "fused": each["fused"], "sites": each["sites"],
                "measuring_s": each["measuring_s"], "compile": round(took["fused"] / took["stock"], 3),
                "compile_without_measuring": round((took["fused"] - each["measuring_s"]) / took["stock"], 3),
            }  # fmt: skip
        if table["gain"] > 1.01:
            for name, each in (("first", first), ("second", second)):
                row[name]["kept"] = round(math.log(each["gain"]) / math.log(table["gain"]), 3)
        rows.append(row)
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--budget", type=int, default=60, help="seconds of measuring for each model")
    parser.add_argument("--only", default="", help="only models whose name matches this expression")
    parser.add_argument("--quick", action="store_true", help="small models, to try it")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        phase(options)
        return
    found: Json = environment(options.device, "bench.measured_here")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(
            ROOT / "inductor_fusions", folder / "bare" / "inductor_fusions",
            ignore=shutil.ignore_patterns("__pycache__", "configs"),
        )  # fmt: skip
        for each in PHASES:
            found[each] = run(each, options, folder)
            options.out.write_text(json.dumps(found, indent=1) + "\n")  # what there is, if it is stopped
    found["rows"] = summary(found)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    for row in found["rows"]:
        print(json.dumps(row))
    for each in PHASES:
        print(each, found[each]["seconds"], "s,", found[each]["measured"], "measured,",
              found[each]["not_reached"], "not reached")  # fmt: skip


if __name__ == "__main__":
    main()
