"""The suites of `python -m inductor_fusions bench`: each case stock and fused, side by side in one process.

    from bench import suites
    rows = suites.run(suites.select(["attention"], None, False, "cpu"), suites.Settings("cpu"), ...)

A row has the columns of `bench.models` (`median_ms`, `spread`, `error`, `sites` and so on, by variant), and

    suite, name     the case
    ratio           "stock/fused", and fused over each other variant; where a call is so short that its launch
                    counts, the worse one of wall time and time on the device
    noise           of "stock/fused": half the range of its repeated runs, or the spread of the one run
    flops, bytes    of one step, for the roofline: operations and blocks only
    line, length    the curve that it belongs to

Correct before fast: outputs and gradients of the code that is timed are compared with float64, and the ratios
of a result out of the error budget are left out.
"""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

import inductor_fusions
from bench import cases, compare, model_cases, models_lora, modules, recommendation, tuning
from bench.common import (
    DTYPES,
    Json,
    Timing,
    apart,
    error_limit,
    free,
    fresh_cache,
    in_turn,
    interleave,
    is_fatal,
    one_line,
    peak_bytes,
    switched,
    synchronize,
)
from bench.models import measure as whole_models
from bench.models.variants import AUTOTUNED, BASIC, MARKERS
from bench.provenance import environment
from inductor_fusions import reporting

SUITES = ("attention", "projections", "lora", "blocks", "modules", "models")
GROUPS = {"ops": ("attention", "projections", "lora"), "all": SUITES}
#: A call shorter than this is timed on the device alone as well.
SHORT_CALL = 5e-3
#: The quick selection of whole models.
QUICK_MODELS = ("llama-1b sdpa b4 s2048", "bert-base eager padded b32 s512", "bert-base eager b32 s512 train")
#: Of whole models, these are enough to say what is faster here.
QUICK_VARIANTS = ("stock", "fused", "frozen")
#: Where the seconds that a whole model took are recorded, and what is put in front of the names there.
RECORDED = {"models_h200.json": "", "lora_models_h200.json": "llama-1b lora "}
#: The most tokens of a whole model on a CPU.
CPU_TOKENS = 256


@dataclass(frozen=True)
class Settings:
    """How cases are measured.

    Attributes:
        device: "cpu" or "cuda".
        quick: fewer rounds.
        repeats: runs of the timing; the noise band comes from them.
        autotune: measure stock with max-autotune too; whole models also fused.
    """

    device: str
    quick: bool = False
    repeats: int = 1
    autotune: bool = False


@dataclass(frozen=True)
class Entry:
    """A case of any suite; `measure` gives its row."""

    suite: str
    name: str
    train: bool
    quick: bool
    dtype: str
    measure: Callable[[Settings, Callable[[str], None]], Json]
    seconds: float


def entries(device: str) -> list[Entry]:
    """Every case for a device."""
    found = [
        Entry(case.suite, case.name, case.train, case.quick, case.dtype, partial(measure, case), 20.0)
        for case in (*cases.cases(device), *modules.cases(device), *recommendation.cases(device))
    ]
    seconds = recorded_seconds()
    adapted = [replace(case, name=f"llama-1b lora {case.name}") for case in models_lora.CASES]
    for case in (*(adapted if importlib.util.find_spec("peft") else ()), *model_cases.CASES):
        chosen = case if device == "cuda" else _for_cpu(case)
        usual = 180.0 if case.adapters else 80.0 if case.train else 50.0
        expected = 20.0 if device == "cpu" else seconds.get(case.name, usual)
        whole = partial(measure_model, chosen)
        quick = case.name in QUICK_MODELS
        found.append(Entry("models", chosen.name, chosen.train, quick, chosen.dtype, whole, expected))
    return list({entry.name: entry for entry in found}.values())


def recorded_seconds() -> dict[str, float]:
    """What each whole model took where it was measured last, by name, without compiles under max-autotune."""
    found: dict[str, float] = {}
    for file, prefix in RECORDED.items():
        path = Path(__file__).parent / "results" / file
        rows = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
        for row in rows:
            if "seconds" in row:
                compiles = row.get("compile_s_of") or row["compile_s"]
                tuned = sum(s for name, s in compiles.items() if name in AUTOTUNED)
                found[f"{prefix}{row['name']}"] = row["seconds"] - tuned
    return found


def _for_cpu(case: model_cases.Case) -> model_cases.Case:
    """A whole model in sizes that a CPU runs in seconds; its layers are cut to two as well."""
    batch, seq = min(case.batch, 2), min(case.seq, CPU_TOKENS)
    name = re.sub(r"\bb\d+", f"b{batch}", case.name)
    return replace(case, name=re.sub(r"\bs\d+", f"s{seq}", name), batch=batch, seq=seq)


def select(suites: Sequence[str], only: re.Pattern[str] | None, quick: bool, device: str) -> list[Entry]:
    """The cases of some suites (or groups of them) whose name matches."""
    wanted = {name for suite in suites for name in GROUPS.get(suite, (suite,))}
    return [
        entry
        for entry in entries(device)
        if entry.suite in wanted and (entry.quick or not quick) and (only is None or only.search(entry.name))
    ]


# The machine -------------------------------------------------------------------------------------------


def header(device: str, repeats: int, dtypes: Sequence[str]) -> Json:
    """Device, versions, clocks, commit, date; peak rates that were measured here."""
    found = environment(device, "inductor_fusions")
    found["inductor_fusions"] = inductor_fusions.__version__
    found["repeats"] = repeats
    found["peak"] = peak_rates(device, dtypes)
    return found


def peak_rates(device: str, dtypes: Sequence[str]) -> Json:
    """What the roofline is made of: TFLOP/s of a large product in each dtype, and GB/s of a copy."""
    if not dtypes:
        return {}
    size, count = (8192, 2**28) if device == "cuda" else (1024, 2**24)
    found: Json = {"tflops": {}}
    for name in dtypes:
        a = torch.randn(size, size, device=device).to(DTYPES[name])
        seconds = interleave({"mm": lambda a=a: a @ a}, device, 5, 1e-2)["mm"].median
        found["tflops"][name] = round(2 * size**3 / seconds / 1e12, 3)
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    seconds = interleave({"copy": lambda: target.copy_(source)}, device, 5, 1e-2)["copy"].median
    found["gb_per_s"] = round(2 * source.nbytes / seconds / 1e9, 1)
    return found


# Operations and blocks ---------------------------------------------------------------------------------


def _compile(function: Callable[..., Any], variant: str) -> Callable[..., Any]:
    from torch._inductor import config, list_mode_options

    marker = None if variant == "autotuned" else MARKERS.get(variant)
    # Equal options would share compiled code; those of max-autotune are others anyway.
    options = {marker: getattr(config, marker)} if marker else list_mode_options("max-autotune-no-cudagraphs")
    compiled: Callable[..., Any] = torch.compile(apart(function, variant), dynamic=False, options=options)
    return compiled


def compiled_variants(
    work: cases.Work, variants: Sequence[str], device: str, say: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, Callable[[], Any]], Json]:
    """Compile and run each variant of a case, and compare it with float64.

    Returns:
        A call of each that takes the sets of inputs in turn; and what is known of them: first seconds, sites,
        errors and failures, by variant.
    """
    calls: dict[str, Callable[[], Any]] = {}
    facts: Json = {"first_s": {}, "sites": {}, "error": {}, "failed": {}}
    torch._dynamo.reset()
    for variant in variants:
        say(f"compiling {variant}")
        compiled = _compile(work.function(variant), variant)
        quiet = torch._inductor.config.patch(force_disable_caches=True)
        try:
            with fresh_cache(), quiet, switched(variant == "fused"):
                with reporting.isolated(False) as sites:
                    start = time.monotonic()
                    work.step(variant, compiled, 0)
                    synchronize(device)
                    facts["first_s"][variant] = time.monotonic() - start
                if variant in ("stock", "fused"):
                    step = partial(work.step, variant, compiled, 0)
                    facts["error"][variant] = work.errors(step)
            if variant == "fused":
                facts["sites"] = whole_models.site_counts(list(sites))
        except Exception as error:
            if is_fatal(error):
                raise
            facts["failed"][variant] = one_line(error, 300)
            continue
        calls[variant] = in_turn(partial(work.step, variant, compiled), range(work.sets))
    return calls, facts


def within_budget(errors: Json, dtype: str) -> bool | None:
    """Whether the fused errors are within those of stock; None if there is nothing to compare."""
    if "fused" not in errors or "stock" not in errors:
        return None
    stock = errors["stock"]
    return all(value <= error_limit(stock[name], DTYPES[dtype]) for name, value in errors["fused"].items())


def measure(case: cases.Case, settings: Settings, say: Callable[[str], None]) -> Json:
    """Compile, check and time every variant of an operation, a block or a small model."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.tf32 else before)
    try:
        return _measured(case, settings, say)
    finally:
        torch.set_float32_matmul_precision(before)


def _measured(case: cases.Case, settings: Settings, say: Callable[[str], None]) -> Json:
    device = settings.device
    say("building")
    work = case.make(device)
    variants = ["stock", "fused", *(("autotuned",) if settings.autotune else ()), *work.hands]
    calls, facts = compiled_variants(work, variants, device, say)
    row: Json = {
        "dtype": case.dtype,
        "failed": facts["failed"],
        "sites": facts["sites"],
        "error": facts["error"],
    }
    row["correct"] = within_budget(facts["error"], case.dtype)
    row |= {"line": case.line, "length": case.length, "flops": work.flops, "bytes": work.nbytes}
    say("timing")
    graphs = counters["stats"]["unique_graphs"]
    row["peak_gib"] = {n: round(b / 2**30, 4) for n, c in calls.items() if (b := peak_bytes(c, device))}
    rounds, block = (6, 2e-3) if settings.quick else (15, 5e-3)
    runs = []
    for _ in range(settings.repeats):
        run = {"wall": interleave(calls, device, rounds, block)} if calls else {}
        if run and device == "cuda" and min(t.median for t in run["wall"].values()) < SHORT_CALL:
            run["device"] = interleave(
                calls, device, min(rounds, 10), 1e-3, max_calls=8, run_ahead=True, cold=True
            )
        runs.append(run)
    row["recompiled"] = counters["stats"]["unique_graphs"] != graphs
    row |= summary(runs, row["correct"])
    row["compile_s"] = {
        n: round(s - row["median_ms"][n] / 1e3, 2) for n, s in facts["first_s"].items() if n in calls
    }
    return row


def summary(runs: Sequence[dict[str, dict[str, Timing]]], correct: bool | None) -> Json:
    """Times of repeated runs ("wall", and for short calls "device": variant -> time) as columns of a row."""
    found: Json = {"median_ms": {}, "spread": {}, "device_ms": {}, "ratio": {}, "noise": None}
    for clock, column in (("wall", "median_ms"), ("device", "device_ms")):
        for name in runs[0].get(clock, {}):
            found[column][name] = round(statistics.median(run[clock][name].median for run in runs) * 1e3, 5)
    walls = [run["wall"] for run in runs if "wall" in run]
    for name in found["median_ms"]:
        found["spread"][name] = round(statistics.median(wall[name].spread for wall in walls), 4)
    if correct is False:
        return found
    ratios = [value for run in runs if (value := _ratio(run, "stock", "fused")) is not None]
    if ratios:
        middle = statistics.median(ratios)
        found["ratio"]["stock/fused"] = round(middle, 4)
        found["noise"] = round(noise(ratios, found["spread"]), 4)
        found["runs"] = [round(value, 4) for value in ratios]
    for name in found["median_ms"]:
        others = [value for run in runs if (value := _ratio(run, "fused", name)) is not None]
        if name not in ("stock", "fused") and others:
            found["ratio"][f"fused/{name}"] = round(statistics.median(others), 4)
    return found


def noise(ratios: Sequence[float], spread: Json) -> float:
    """How far a ratio may be off, relatively: half the range of repeated runs, or half of both spreads."""
    if len(ratios) > 1:
        return (max(ratios) - min(ratios)) / 2 / statistics.median(ratios)
    return compare.noise({"spread": spread})


def _ratio(run: dict[str, dict[str, Timing]], above: str, below: str) -> float | None:
    """The least quotient of both clocks."""
    found = [t[above].median / t[below].median for t in run.values() if above in t and below in t]
    return min(found, default=None)


# Whole models ------------------------------------------------------------------------------------------


def measure_model(case: model_cases.Case, settings: Settings, say: Callable[[str], None]) -> Json:
    """A row of `bench.models`, in which a frozen model is the limit; each repeated run compiles anew."""
    small = settings.device == "cpu"
    rounds = 8 if settings.quick else 24
    basic = QUICK_VARIANTS if settings.quick else BASIC
    wanted = (*basic, *(AUTOTUNED if settings.autotune else ()))
    how = whole_models.Settings(settings.device, small, wanted, rounds)
    rows = []
    with switched(inductor_fusions.enabled()):  # bench.models leaves the fusions off
        for i in range(settings.repeats):
            rows.append(whole_models.measure(case, how, i % 2 == 1, say))
            free(settings.device)
    row = _last(rows)
    if case.adapters is not None:  # the frozen model is their limit
        for column in ("median_ms", "spread", "device_ms", "unguarded_ms", "peak_gib", "compile_s", "ratio"):
            held = row.get(column, {})
            row[column] = {name.replace("frozen", "limit"): value for name, value in held.items()}
    return {"dtype": case.dtype, **row}


def _last(rows: Sequence[Json]) -> Json:
    """The last one of repeated rows of a whole model, with the median of their ratios and their noise."""
    row, ratios = rows[-1], [r["ratio"]["stock/fused"] for r in rows if "stock/fused" in r["ratio"]]
    if ratios:
        row["ratio"]["stock/fused"] = round(statistics.median(ratios), 4)
        row["runs"] = ratios
        row["noise"] = round(noise(ratios, row["spread"]), 4)
    return row


# Running -----------------------------------------------------------------------------------------------


def prepare(todo: Sequence[Entry], device: str) -> None:
    """What a process needs once: for whole models on a GPU, what else the first of them would pay for."""
    whole_models.set_up()
    if device == "cuda" and any(entry.suite == "models" for entry in todo):
        with switched(inductor_fusions.enabled()):
            whole_models.warm_up(device)


def run(
    todo: Sequence[Entry], settings: Settings, left: Callable[[], float], say: Callable[[str], None]
) -> Iterator[tuple[Entry, Json]]:
    """Measure cases one by one, and yield each with its row; one that failed has the reason as "failed".

    Args:
        left: seconds left; a case that would not end in time is left out. Operations and blocks are taken to
            last as long as the longest of their suite so far, whole models as long as they did elsewhere.
        say: told what is going on.
    """
    longest: dict[str, float] = {}

    def may_start(entry: Entry) -> bool:
        expected = longest.get(entry.suite, entry.seconds)
        if entry.suite == "models":
            expected = entry.seconds * settings.repeats
        if left() >= expected:
            return True
        say(f"{entry.name}: left out, {left():.0f} s are too few")
        return False

    def work(entry: Entry, _: Path) -> tuple[Json, bool]:
        start = time.monotonic()
        row, usable = tuning.tried(lambda: entry.measure(settings, lambda text: say(f"{entry.name}: {text}")))
        row["seconds"] = round(time.monotonic() - start, 1)
        longest[entry.suite] = max(row["seconds"], longest.get(entry.suite, 0.0))
        if usable:
            free(settings.device)
        return {"suite": entry.suite, "name": entry.name, "train": entry.train, **row}, usable

    return tuning.here(work, todo, may_start)
