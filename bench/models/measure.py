"""A row: every variant of a case compiled, compared and timed."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.common import (
    Json,
    Timing,
    collect,
    device_milliseconds,
    free,
    interleave,
    peak_bytes,
)
from bench.model_cases import (
    Case,
    build,
    compared_inputs,
    first_tokens,
    make_inputs,
    model_config,
    register_attentions,
)
from bench.models.correctness import check, is_compared, is_correct, make_reference
from bench.models.variants import (
    Variant,
    attempt,
    compile_variants,
    make_variants,
    uncompiled,
    wanted_variants,
)
from bench.pool import FileLock
from bench.tuning import tried

#: Seconds of a block of training steps with adapters, whose many short kernels the host must launch ahead of
#: the device: they follow each other, as in a loop that does not wait for each.
TRAINING_BLOCK = 0.2


def site_counts(sites: list[Any]) -> Json:
    """Verdicts, and what each fused site became or why another was not fused, with counts."""
    verdicts = Counter(str(getattr(site, "verdict", "?")) for site in sites)
    what = Counter(
        f"{getattr(s, 'fusion', '?')}: {getattr(s, 'verdict', '?')}: {getattr(s, 'what', '')}" for s in sites
    )
    return {**verdicts, "total": len(sites), "what": dict(what)}


def static_bytes(model: torch.nn.Module, inputs: dict[str, Any]) -> int:
    """Bytes of parameters, buffers and inputs."""
    tensors = [
        *model.parameters(),
        *model.buffers(),
        *(x for x in inputs.values() if isinstance(x, torch.Tensor)),
    ]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def ratio(times: dict[str, Timing], above: str, below: str) -> float | None:
    """Quotient of two medians."""
    if above not in times or below not in times:
        return None
    return round(times[above].median / times[below].median, 4)


@dataclass(frozen=True)
class Settings:
    """How every case is measured.

    Attributes:
        device: "cpu" or "cuda".
        quick: two layers, tiny inputs.
        variants: which to measure; none: those that a case has of itself.
        rounds: interleaved blocks of each variant.
        compiles: how often stock and fused are compiled.
    """

    device: str
    quick: bool = False
    variants: tuple[str, ...] = ()
    rounds: int = 24
    compiles: int = 1


def measure(
    case: Case,
    settings: Settings,
    fused_first: bool,
    say: Callable[[str], None],
    lock: FileLock | None = None,
) -> Json:
    """Compile, then check and time, every variant of a case.

    Args:
        fused_first: whether fused is compiled before stock.
        say: told what is going on.
        lock: shared while this compiles and takes first steps, and held alone from then on: while one process
            times, the others neither use the device nor keep the host busy.
    """
    device, quick = settings.device, settings.quick
    with lock.shared() if lock else contextlib.nullcontext():
        say("building")
        model = build(case, case.attn, device, quick)
        values = model_config(case, quick)[1]
        inputs = make_inputs(case, values, device)
        wanted = wanted_variants(case, settings.variants)
        variants = make_variants(case, model, inputs, wanted, device, quick)
        failed, firsts = compile_variants(variants, settings.compiles, fused_first, device, say)
    row: Json = {"failed": failed}
    fusing = [variants[name] for name in ("fused", "fused_autotuned") if name in variants]
    row["sites"] = site_counts(fusing[0].sites) if fusing else {}
    with lock or contextlib.nullcontext():
        _check_and_time(case, settings, model, values, inputs, variants, firsts, row, say)
    return row


def _check_and_time(
    case: Case,
    settings: Settings,
    model: torch.nn.Module,
    values: Json,
    inputs: dict[str, Any],
    variants: dict[str, Variant],
    firsts: dict[str, list[float]],
    row: Json,
    say: Callable[[str], None],
) -> None:
    from torch._dynamo.utils import counters

    device, failed = settings.device, row["failed"]
    graphs = counters["stats"]["unique_graphs"]
    row["error"] = {}
    if not case.draws:
        say("checking")
        row["error"] = _errors(case, settings, model, values, inputs, variants, failed)
    row["correct"] = is_correct(case, row["error"])
    collect(device)
    say("timing")
    row["peak_gib"] = _peaks(variants, failed, device)
    times, clocks = _times(case, settings, variants)
    row |= clocks
    row["recompiled"] = counters["stats"]["unique_graphs"] != graphs
    row["median_ms"] = {name: round(t.median * 1e3, 4) for name, t in times.items()}
    row["spread"] = {name: round(t.spread, 4) for name, t in times.items()}
    row["compiles_s"] = {n: [round(x - times[n].median, 2) for x in firsts[n]] for n in times}
    row["compile_s"] = {n: statistics.median(x[1:] or x) for n, x in row["compiles_s"].items()}
    pairs = [("stock", "fused"), ("fused", "limit"), ("fused", "sdpa"), ("stock", "limit")]
    pairs += [("stock", "without"), ("fused", "without"), ("fused", "frozen"), ("stock", "frozen")]
    pairs += [("autotuned", "fused"), ("autotuned", "fused_autotuned"), ("stock", "autotuned")]
    ratios = {f"{a}/{b}": ratio(times, a, b) for a, b in pairs if row["correct"] is not False}
    row["ratio"] = {name: value for name, value in ratios.items() if value is not None}


def _errors(
    case: Case,
    settings: Settings,
    model: torch.nn.Module,
    values: Json,
    inputs: dict[str, Any],
    variants: dict[str, Variant],
    failed: Json,
) -> Json:
    """Errors of the variants against float64; where stock has none, those of the model as it is too."""
    device = settings.device
    compared = compared_inputs(case, values, inputs)
    checked = [variant for name, variant in variants.items() if is_compared(case, name)]
    for variant in checked:
        variant.inputs = compared
    reference = make_reference(case, model, compared, device, settings.quick)
    collect(device)
    errors = check(case, variants, reference, failed, device)
    if "stock" not in errors and {"fused", "fused_autotuned"} & errors.keys():
        plain = uncompiled(case, model, first_tokens(compared, reference.output.shape[1]))
        errors["uncompiled"] = reference.compare(plain, plain.output())
    for variant in checked:
        variant.inputs = inputs
    return errors


def _peaks(variants: dict[str, Variant], failed: Json, device: str) -> Json:
    """Most memory of a step of each variant, in GiB; those that fail are taken out."""
    found: Json = {}

    def find_peak(name: str, variant: Variant) -> None:
        with variant.switched():
            for _ in range(3):
                variant.step()
        variant.forget()
        peak = peak_bytes(variant.step, device)
        variant.forget()
        if peak is not None:
            fixed = static_bytes(variant.model, variant.inputs)
            found[name] = round((peak + fixed) / 2**30, 4)

    for name, variant in list(variants.items()):
        attempt(name, partial(find_peak, name, variant), variants, failed, device)
    return found


def _times(case: Case, settings: Settings, variants: dict[str, Variant]) -> tuple[dict[str, Timing], Json]:
    """Times by the wall clock; columns of a row with those by others."""
    device, found = settings.device, dict[str, Any]()
    calls = {name: variant.step for name, variant in variants.items()}
    if not calls:
        return {}, found
    block = TRAINING_BLOCK if case.adapters and case.train and device == "cuda" else 1e-2
    times = interleave(calls, device, settings.rounds, block, max_calls=20)
    if device == "cuda":
        found["device_ms"] = device_milliseconds(calls, device, settings.rounds // 3)
    if case.adapters and not case.train:
        # PEFT's modules have many guards, and a decoder that waits for the host waits for them.
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
            unguarded = interleave(calls, device, settings.rounds, block, max_calls=20)
        found["unguarded_ms"] = {n: round(t.median * 1e3, 4) for n, t in unguarded.items()}
    return times, found


def set_up() -> None:
    """Settings of a process that measures."""
    warnings.filterwarnings("ignore", message=".*force_disable_caches")
    register_attentions()
    torch._dynamo.config.recompile_limit = 64


def work(task: tuple[Case, Settings, bool], path: Path) -> tuple[Json, bool]:
    """A worker: measure one case. Others compile beside it, and wait while one is timed."""
    case, settings, fused_first = task
    set_up()
    lock, start = FileLock(path), time.monotonic()

    def measured() -> Json:
        with lock.shared():
            warm_up(settings.device)
        return measure(case, settings, fused_first, lambda text: None, lock)

    row, usable = tried(measured)
    if usable:
        free(settings.device)
    return {**row, "seconds": round(time.monotonic() - start, 1)}, usable


@functools.cache
def warm_up(device: str) -> None:
    """Compile a tiny inference and a tiny training step, once in a process, so that no variant pays for what
    a process does once."""
    for train, names in ((False, ["stock", "fused"]), (True, ["fused"])):
        case = Case("warm-up", "bert-base", "eager", 2, 64, train=train)
        model = build(case, case.attn, device, quick=True)
        inputs = make_inputs(case, model_config(case, quick=True)[1], device)
        for variant in make_variants(case, model, inputs, names, device, quick=True).values():
            variant.first_step(device)
        free(device)
