"""Whole Hugging Face models: stock `torch.compile` and the same with inductor_fusions, side by side.

The cases are in `bench/model_cases.py`. Each is measured in one process, in interleaved steps whose order
rotates:

    stock   inductor_fusions switched off
    fused   inductor_fusions switched on, under its policy in force
    limit   where someone can write it by hand: for Llama, an attention function that calls
            F.scaled_dot_product_attention(is_causal=True, enable_gqa=True), and no mask built; with padding
            that is another function, the time of the unpadded one; for windows, documents, softcap and
            sinks, Hugging Face's attn_implementation="flex_attention"
    sdpa    stock, on the same model with attn_implementation="sdpa", for cases with eager attention

Correct before fast: each variant's output, and in training each parameter's gradient under a random
cotangent, is compared with a float64 copy of the model, eager and uncompiled, on the first sample (for
causal models on its first 1024 tokens or two windows, which do not depend on the rest; with padding among
them where the case has any). The check runs the very code that is timed. A fused result is correct if its
error is at most 1.5 times that of stock, plus eps; the ratios of a wrong one are left out. Where stock is
not there, because it ran out of memory or was not asked for, the uncompiled model takes its place.

Compile times are those of the first step less one step, from empty caches; stock and fused take turns at
going first. With `--compiles 3` both are compiled three times, and the median of the last two counts.

    python -m bench.models --out bench/results/models_h200.json --budget 580
    python -m bench.models --out bench/results/models_h200.json --only 'llama.*train'
    python -m bench.models --out /tmp/flex.json --only gemma2 --set attention_kernel=flex
    python -m bench.models --quick --device cpu --out /tmp/try.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import re
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import inductor_fusions
from bench.common import (
    Budget,
    Json,
    Progress,
    Results,
    Timing,
    environment,
    error_limit,
    fresh_cache,
    interleave,
    is_fatal,
    one_line,
    peak_bytes,
    relative_error,
    synchronize,
)
from bench.model_cases import (
    BY_HAND,
    CASES,
    Case,
    build,
    compared_inputs,
    first_tokens,
    make_inputs,
    model_config,
    quick_case,
    reference_tokens,
    register_by_hand,
    share_weights,
    supports_sdpa,
)
from bench.pool import FileLock, run_tasks

MODES = ("default", "reduce-overhead", "max-autotune")

MARKERS = {"stock": "verbose_progress", "fused": "comment_origin", "limit": "debug_fusion", "sdpa": "debug"}
"""Dynamo shares compiled code between equal backends, and backends are equal if their options are. So each
variant names one Inductor option of its own, at the value that it has anyway."""

#: Parameters of biases, position tables and sinks, whose gradient is small beside that of the weights.
TABLES = re.compile(r"sinks|relative|rel_embeddings|logit_scale|continuous_position_bias")


# Variants ----------------------------------------------------------------------------------------------


@dataclass
class Variant:
    """One way to compile the model of a case."""

    name: str
    model: torch.nn.Module
    compiled: Callable[..., Any]
    case: Case
    inputs: dict[str, Any]
    sites: list[Any] = field(default_factory=list)

    def output(self) -> torch.Tensor:
        """The last hidden state, with a graph in training."""
        if self.case.mode != "default":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(self.case.train):
            hidden: torch.Tensor = self.compiled(**self.inputs).last_hidden_state
        return hidden

    def step(self) -> None:
        """One inference, or one training step without the optimizer."""
        if not self.case.train:
            self.output()
            return
        self.model.zero_grad(set_to_none=True)
        self.output().float().pow(2).mean().backward()

    @contextlib.contextmanager
    def switched(self) -> Iterator[None]:
        """inductor_fusions on or off, as the name says; off afterwards."""
        switch = inductor_fusions.enable if self.name == "fused" else inductor_fusions.disable
        switch()
        try:
            with fresh_cache(), torch._inductor.config.patch(force_disable_caches=True):
                yield
        finally:
            inductor_fusions.disable()

    def first_step(self, device: str) -> float:
        """Compile, from empty caches; the seconds."""
        forget = getattr(inductor_fusions, "clear", None)
        with self.switched():
            if callable(forget):
                forget()
            start = time.perf_counter()
            self.step()
            synchronize(device)
            seconds = time.perf_counter() - start
            report = getattr(inductor_fusions, "report", None)
            if self.name == "fused" and callable(report):
                self.sites = list(report())
        return seconds


def make_variant(name: str, model: torch.nn.Module, case: Case, inputs: dict[str, Any]) -> Variant:
    """A variant that is not compiled yet."""
    from torch._inductor import config, list_mode_options

    marker = MARKERS[name]
    options = {**list_mode_options(case.mode), marker: getattr(config, marker)}
    compiled: Any = torch.compile(model, options=options, dynamic=False)
    return Variant(name, model, compiled, case, inputs)


def make_variants(
    case: Case,
    model: torch.nn.Module,
    inputs: dict[str, Any],
    wanted: Sequence[str],
    device: str,
    quick: bool,
) -> dict[str, Variant]:
    """Every variant that the case has; all of them share one set of weights."""
    implementations = {"stock": case.attn, "fused": case.attn}
    if case.by_hand:
        implementations["limit"] = BY_HAND if case.by_hand == "causal" else case.by_hand
    # The sdpa path of a model with softcap leaves it out.
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    if case.attn == "eager" and supports_sdpa(model) and softcap is None:
        implementations["sdpa"] = "sdpa"
    variants: dict[str, Variant] = {}
    for name, attn in implementations.items():
        if name not in wanted:
            continue
        own = model
        if attn != case.attn:
            own = build(case, attn, device, quick)
            share_weights(model, own)
        variants[name] = make_variant(name, own, case, inputs)
    return variants


# Correctness -------------------------------------------------------------------------------------------


def total(parts: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The norms of several tensors together, from pairs of norms."""
    difference, norm = (math.hypot(*values) for values in zip(*parts, strict=True))
    return difference, norm


@dataclass
class Reference:
    """Output and gradients of the first tokens of the first sample, in float64."""

    output: torch.Tensor
    cotangent: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def compare(self, variant: Variant, full: torch.Tensor) -> Json:
        """Relative errors of a variant's output and gradients; `full` is its whole output."""
        samples, tokens = self.output.shape[:2]
        errors: Json = {"out": relative_error(full[:samples, :tokens], self.output)}
        if not self.gradients:
            return errors
        variant.model.zero_grad(set_to_none=True)
        gradient = torch.zeros_like(full)
        gradient[:samples, :tokens] = self.cotangent.to(full.dtype)
        full.backward(gradient)
        parameters = dict(variant.model.named_parameters())
        parts: dict[str, tuple[float, float]] = {}
        for name, expected in self.gradients.items():
            found = parameters[name].grad
            found = torch.zeros_like(expected) if found is None else found.double()
            parts[name] = float((found - expected).norm()), float(expected.norm())
        difference, norm = total(parts.values())
        # A key's bias has no gradient in exact arithmetic: leave out what is only rounding.
        large = {
            name: d / size for name, (d, size) in parts.items() if size > 1e-3 * norm / len(parts) ** 0.5
        }
        worst = max(large, key=large.__getitem__)
        errors |= {"grad": difference / norm, "worst_grad": large[worst], "worst_grad_of": worst}
        tables = [part for name, part in parts.items() if TABLES.search(name)]
        if tables:
            difference, norm = total(tables)
            errors["tables_grad"] = difference / norm
        variant.model.zero_grad(set_to_none=True)
        return errors


def make_reference(
    case: Case, model: torch.nn.Module, inputs: dict[str, Any], device: str, quick: bool
) -> Reference:
    """Run the float64 copy, eager and uncompiled."""
    copy = build(case, "eager", device, quick, experts="eager")
    copy.load_state_dict(model.state_dict())
    copy = copy.double()
    inputs = first_tokens(inputs, reference_tokens(case, model_config(case, quick)[1]))
    inputs = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    with torch.set_grad_enabled(case.train):
        output = copy(**inputs).last_hidden_state
    dtype = getattr(torch, case.dtype)
    cotangent = torch.randn(output.shape, device=device).to(dtype).double()
    gradients: dict[str, torch.Tensor] = {}
    if case.train:
        output.backward(cotangent)
        gradients = {n: p.grad for n, p in copy.named_parameters() if p.grad is not None}
    return Reference(output.detach(), cotangent, gradients)


def uncompiled(case: Case, model: torch.nn.Module, inputs: dict[str, Any], tokens: int) -> Variant:
    """The model without torch.compile, on what is compared."""
    return Variant("uncompiled", model, model, case, first_tokens(inputs, tokens))


def check(
    case: Case, variants: dict[str, Variant], reference: Reference, failed: Json, device: str
) -> tuple[Json, Json]:
    """Errors of each variant, and the difference of each variant's whole output from that of stock.

    A variant that runs out of memory is taken out, and named in `failed`.
    """
    errors: Json = {}
    differences: Json = {}
    stock: list[torch.Tensor] = []

    def compare(name: str, variant: Variant) -> None:
        with variant.switched():
            full = variant.output()
            kept = full.detach().clone()
            errors[name] = reference.compare(variant, full)
        if name == "stock":
            stock.append(kept)
        elif stock:
            differences[name] = relative_error(kept, stock[0])

    for name, variant in list(variants.items()):
        if name == "limit" and case.padded:
            continue  # it leaves the padding out
        attempt(name, partial(compare, name, variant), variants, failed, device)
    return errors, differences


def attempt(
    name: str, action: Callable[[], None], variants: dict[str, Variant], failed: Json, device: str
) -> None:
    """Run a variant; one that raises is taken out, with the reason in `failed`.

    Raises:
        Exception: the device is unusable after it.
    """
    try:
        return action()
    except Exception as error:
        if "CUDA error" in str(error) and "ALLOC_FAILED" not in str(error):
            raise
        failed[name] = one_line(error, 300)
    # Here the exception is gone, and with it the tensors that its frames hold.
    variants.pop(name).model.zero_grad(set_to_none=True)
    collect(device)


def collect(device: str) -> None:
    """Give unused memory back."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def is_correct(case: Case, errors: Json) -> bool | None:
    """Whether the fused errors are within budget; None if there is nothing to compare."""
    if "fused" not in errors:
        return None
    dtype = getattr(torch, case.dtype)
    unfused = errors.get("stock") or errors.get("uncompiled") or {}
    return all(
        errors["fused"][n] <= error_limit(unfused.get(n), dtype)
        for n in ("out", "grad", "tables_grad")
        if n in errors["fused"]
    )


# Measuring ---------------------------------------------------------------------------------------------


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


def compile_variants(
    variants: dict[str, Variant], repeats: int, fused_first: bool, device: str, say: Callable[[str], None]
) -> tuple[Json, dict[str, list[float]]]:
    """First steps of each; those that fail are taken out.

    Stock and fused are compiled `repeats` times, in turns; the last compile is the one that is timed.

    Returns:
        The reason of each that failed, and the seconds of every first step.
    """
    failed: Json = {}
    seconds: dict[str, list[float]] = {}
    for i in range(repeats):
        # Hugging Face's flex attention may reset Dynamo when it is first used, which drops what is compiled.
        order = sorted(variants, key=["limit", "sdpa", "stock", "fused"].index)
        if fused_first != (i % 2 == 1):
            order = sorted(variants, key=["limit", "sdpa", "fused", "stock"].index)
        torch._dynamo.reset()
        for name in order:
            if name in ("limit", "sdpa") and i + 1 < repeats:
                continue
            if name not in variants:
                continue
            say(f"compiling {name}")

            def compile_once(name: str = name) -> None:
                seconds.setdefault(name, []).append(variants[name].first_step(device))

            attempt(name, compile_once, variants, failed, device)
    return failed, seconds


@dataclass(frozen=True)
class Settings:
    """How every case is measured."""

    device: str
    quick: bool
    variants: tuple[str, ...]
    rounds: int
    compiles: int


def measure(
    case: Case,
    settings: Settings,
    fused_first: bool,
    say: Callable[[str], None],
    lock: AbstractContextManager[Any] | None = None,
) -> Json:
    """Compile, then under the lock check and time, every variant of a case."""
    device, quick = settings.device, settings.quick
    say("building")
    model = build(case, case.attn, device, quick)
    values = model_config(case, quick)[1]
    inputs = make_inputs(case, values, device)
    variants = make_variants(case, model, inputs, settings.variants, device, quick)
    failed, firsts = compile_variants(variants, settings.compiles, fused_first, device, say)
    row: Json = {"failed": failed}
    row["sites"] = site_counts(variants["fused"].sites) if "fused" in variants else {}
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

    device, quick, failed = settings.device, settings.quick, row["failed"]
    graphs = counters["stats"]["unique_graphs"]
    errors: Json = {}
    row["difference_from_stock"] = {}
    if case.dropout == 0.0:
        say("checking")
        compared = compared_inputs(case, values, inputs)
        for variant in variants.values():
            variant.inputs = compared
        reference = make_reference(case, model, compared, device, quick)
        collect(device)
        errors, row["difference_from_stock"] = check(case, variants, reference, failed, device)
        if "stock" not in errors and "fused" in errors:
            plain = uncompiled(case, model, compared, reference.output.shape[1])
            errors["uncompiled"] = reference.compare(plain, plain.output())
        for variant in variants.values():
            variant.inputs = inputs
        del reference
    row["error"] = errors
    row["correct"] = is_correct(case, errors)
    collect(device)

    say("timing")
    fixed = static_bytes(model, inputs)
    row["peak_gib"] = {}

    def find_peak(name: str, variant: Variant) -> None:
        with variant.switched():
            for _ in range(3):
                variant.step()
        model.zero_grad(set_to_none=True)
        peak = peak_bytes(variant.step, device)
        if peak is not None:
            row["peak_gib"][name] = round((peak + fixed) / 2**30, 4)

    for name, variant in list(variants.items()):
        attempt(name, partial(find_peak, name, variant), variants, failed, device)
    calls = {name: variant.step for name, variant in variants.items()}
    times = interleave(calls, device, settings.rounds, block_seconds=1e-2, max_calls=20) if calls else {}
    row["recompiled"] = counters["stats"]["unique_graphs"] != graphs
    row["median_ms"] = {name: round(t.median * 1e3, 4) for name, t in times.items()}
    row["spread"] = {name: round(t.spread, 4) for name, t in times.items()}
    row["compiles_s"] = {n: [round(x - times[n].median, 2) for x in firsts[n]] for n in times}
    row["compile_s"] = {n: statistics.median(x[1:] or x) for n, x in row["compiles_s"].items()}
    pairs = [("stock", "fused"), ("fused", "limit"), ("fused", "sdpa"), ("stock", "limit")]
    ratios = {f"{a}/{b}": ratio(times, a, b) for a, b in pairs if row["correct"] is not False}
    row["ratio"] = {name: value for name, value in ratios.items() if value is not None}


def set_up() -> None:
    """Settings of a process that measures."""
    warnings.filterwarnings("ignore", message=".*force_disable_caches")
    register_by_hand()
    torch._dynamo.config.recompile_limit = 64


def work(task: tuple[Case, Settings, bool], path: Path) -> tuple[Json, bool]:
    """In a worker: measure one case. The others compile meanwhile; the device is one's alone."""
    case, settings, fused_first = task
    set_up()
    start = time.monotonic()
    try:
        row = measure(case, settings, fused_first, lambda text: None, FileLock(path))
    except Exception as error:
        return {"name": case.name, "raised": one_line(error, 300)}, not is_fatal(error)
    row["seconds"] = round(time.monotonic() - start, 1)
    free(settings.device)
    return {**asdict(case), **row}, True


def free(device: str) -> None:
    """Give the memory of the last case back."""
    torch._dynamo.reset()
    collect(device)


def warm_up(device: str) -> None:
    """Compile a tiny inference and a tiny training step, so that no variant pays for what a process does
    once."""
    for train, names in ((False, ["stock", "fused"]), (True, ["fused"])):
        case = Case("warm-up", "bert-base", "eager", 2, 64, train=train)
        model = build(case, case.attn, device, quick=True)
        inputs = make_inputs(case, model_config(case, quick=True)[1], device)
        for variant in make_variants(case, model, inputs, names, device, quick=True).values():
            variant.first_step(device)
        free(device)


# The command -------------------------------------------------------------------------------------------


def attentions(row: Json) -> str:
    """How many attentions were fused, of how many."""
    found = [(text, n) for text, n in row["sites"].get("what", {}).items() if text.startswith("attention: ")]
    return f"{sum(n for text, n in found if ': fused: ' in text)}/{sum(n for _, n in found)}"


def kernels(row: Json) -> dict[str, int]:
    """What each fused site became, with its number."""
    what = row["sites"].get("what", {})
    return {text.split(": fused: ", 1)[1]: n for text, n in what.items() if ": fused: " in text}


def describe(row: Json) -> str:
    """A case's outcome in one line."""
    if "median_ms" not in row:
        return f"failed: {row['failed']}"
    text = " ".join(f"{name} {ms:.2f} ms" for name, ms in row["median_ms"].items())
    text += "".join(f", {name} {value:.3f}" for name, value in row["ratio"].items())
    text += f", attention {attentions(row)}"
    text += "".join(f", {n} x {kernel}" for kernel, n in kernels(row).items())
    if row["correct"] is False:
        text += ", WRONG"
    if row["recompiled"]:
        text += ", RECOMPILED while it was timed"
    if row["failed"]:
        text += "".join(f", {name} failed: {reason}" for name, reason in row["failed"].items())
    return text + f" ({row['seconds']:.0f} s)"


def print_table(rows: list[Json]) -> None:
    """The final table."""
    from rich.console import Console
    from rich.table import Table

    def number(values: Json, name: str, digits: int) -> str:
        return f"{values[name]:.{digits}f}" if name in values else "-"

    def pair(values: Json, digits: int) -> str:
        return f"{number(values, 'stock', digits)} {number(values, 'fused', digits)}"

    def error(row: Json) -> str:
        parts = [
            max(e["out"], e.get("grad", 0.0)) for e in (row["error"].get(n) for n in ("stock", "fused")) if e
        ]
        return " ".join(f"{x:.1e}" for x in parts) or "-"

    columns = ["case", "attentions fused", "stock ms", "fused ms", "limit ms", "sdpa ms", "stock/fused"]
    columns += [
        "fused/limit",
        "fused/sdpa",
        "GiB stock fused",
        "compile s stock fused",
        "error stock fused",
        "",
    ]
    table = Table(title="stock and fused torch.compile, medians")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
    for row in rows:
        verdict = {True: "ok", False: "WRONG", None: ""}[row["correct"]]
        ms = row["median_ms"]
        table.add_row(
            row["name"],
            attentions(row),
            *(
                "no memory" if "out of memory" in row["failed"].get(name, "") else number(ms, name, 2)
                for name in ("stock", "fused", "limit", "sdpa")
            ),
            *(number(row["ratio"], name, 3) for name in ("stock/fused", "fused/limit", "fused/sdpa")),
            pair(row["peak_gib"], 2),
            pair(row["compile_s"], 1),
            error(row),
            verdict,
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def apply_settings(settings: Sequence[str]) -> None:
    """Put toggles into the environment and start again: a backward is compiled in a thread of autograd,
    which sees what the environment said at the import, and no assignment of this thread."""
    wanted: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        variable = "INDUCTOR_FUSIONS" if name == "enabled" else f"INDUCTOR_FUSIONS_{name.upper()}"
        if not equals or variable not in inductor_fusions.config.variables():
            raise SystemExit(
                f"--set takes NAME=VALUE with a toggle of inductor_fusions.config, not {setting!r}"
            )
        wanted[variable] = value
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "bench.models", *sys.argv[1:]])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.models", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file; cases that it has are skipped")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--only", type=re.compile, help="only cases whose name matches this expression")
    parser.add_argument(
        "--budget", type=float, help="seconds after which no case is started that would not end"
    )
    parser.add_argument("--mode", choices=MODES, help="compile every case in this mode")
    parser.add_argument("--variants", default="stock,fused,limit,sdpa", help="which to measure")
    parser.add_argument("--rounds", type=int, default=24, help="interleaved blocks of each variant")
    parser.add_argument("--jobs", type=int, default=1, help="processes: one has the device, others compile")
    parser.add_argument("--quick", action="store_true", help="2 layers, tiny inputs: to try the script")
    parser.add_argument(
        "--again", action="store_true", help="measure and replace cases that the file has too"
    )
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument(
        "--compiles", type=int, default=1, help="compile stock and fused so often; the first is left out"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a toggle of inductor_fusions.config, for this run; repeatable",
    )
    options = parser.parse_args()
    apply_settings(options.set)
    device: str = options.device
    quick: bool = options.quick
    wanted = tuple(options.variants.split(","))
    settings = Settings(device, quick, wanted, options.rounds, options.compiles)
    budget = Budget(options.budget)
    cases = [quick_case(case) if quick else case for case in CASES]
    if options.mode:
        cases = [
            replace(case, mode=options.mode, name=f"{case.name.removesuffix(f' {case.mode}')} {options.mode}")
            for case in cases
        ]
        cases = list({case.name: case for case in cases}.values())
    cases = [case for case in cases if not options.only or options.only.search(case.name)]
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return
    header = environment(device, "bench.models")
    header["inductor_fusions"] = getattr(inductor_fusions, "__version__", None)
    header["jobs"] = options.jobs
    header["settings"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith("INDUCTOR_FUSIONS")}
    results = Results(options.out, header, key=lambda row: str(row["name"]))
    todo = [case for case in cases if options.again or case.name not in results]
    tasks = [(case, settings, i % 2 == 1) for i, case in enumerate(todo)]
    expected = {False: 15.0 if quick else 50.0, True: 20.0 if quick else 80.0}
    failed: list[str] = []
    with Progress(len(todo)) as progress:

        def done(case: Case, row: Json) -> None:
            if "raised" in row:
                progress.step(f"{case.name}: failed: {row['raised']}")
                failed.append(case.name)
            else:
                results.append(row)
                progress.step(f"{case.name}: {describe(row)}")

        if options.jobs > 1:
            died = {"raised": "the process died"}
            for task, row in run_tasks(
                work, tasks, options.jobs, lambda: budget.left > expected[True], deadline=lambda: budget.left
            ):
                done(task[0], row or died)
            tasks = []
        set_up()
        if tasks:
            progress.say("warming up")
            warm_up(device)
        for case, _, fused_first in tasks:
            if budget.left < expected[case.train]:
                progress.say(f"{case.name}: left for the next run, {budget.left:.0f} s are too few")
                continue
            start = time.monotonic()

            def say(text: str, name: str = case.name) -> None:
                progress.say(f"{name}: {text}")

            try:
                row = measure(case, settings, fused_first, say)
                row["seconds"] = round(time.monotonic() - start, 1)
                done(case, {**asdict(case), **row})
            except Exception as error:
                if is_fatal(error):
                    raise
                done(case, {"raised": one_line(error, 300)})
            free(device)
    names = {case.name for case in cases}
    print_table([row for row in results.rows if row["name"] in names])
    left = len(todo) - progress.done
    print(f"{len(results.rows)} cases in {options.out}, {left} left, {len(failed)} failed")
    print(f"{budget.elapsed:.0f} s")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
