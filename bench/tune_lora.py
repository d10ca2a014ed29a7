"""Measure linears with adapters against stock and against the frozen linear, over configurations.

A row is one or more linears on one input, with an adapter each, at one number of tokens:

    forward    y_g = x @ W_g + s * (x @ A_g) @ B_g, as PEFT spells it
    backward   dx = sum of dY_g @ W_g + s * (dY_g @ B_g) @ A_g
    gradient   dB = s * dY^T @ h, or dA = dh^T @ x: one skinny GEMM over all tokens
    down       s * x @ A: the skinny GEMM of a forward by itself
    step       forward and backward of one linear, through autograd, in the table's configurations
    accumulate y = base + s * (x @ A) @ B, of a base that is in memory
    dropped    as backward, with a mask behind each (dY_g @ B_g) @ A_g

Its candidates:

    stock          what `torch.compile` makes of it without the fusions
    max_autotune   the same with mode="max-autotune-no-cudagraphs"
    frozen         the linears without adapters, by the library
    the others     the fusion, in the configurations of its kernels: of the grouped GEMM first, then of the
                   skinny GEMM beside the best of those; for few rows, of the pair of kernels; of the
                   kernel that adds to what is in memory

Each candidate is a CUDA graph that calls it on several sets of operands in turn, so that nothing stays in the
L2 cache. A candidate whose error against float64 exceeds 1.5 times that of stock plus eps gets no time; where
there is dropout, outputs are compared with stock's, which draws the same masks.

    python -m bench.tune_lora --out bench/results/lora_h200.json --budget 560
    python -m bench.tune_lora --out bench/results/lora_h200.json --table nvidia_h200

    python -m bench.tune_lora --odd --no-autotune --out bench/results/tiles_lora_h100.json --budget 540

The second writes what was measured into `configs/devices/nvidia_h200.json` and measures nothing. The third
times nearly all configurations (`first_us`) of problems that fill a device badly, for `bench.lora_tiles`.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from bench import tuning
from bench.common import Json, error_limit, free, interleave, relative_error, skipping
from bench.lora.candidates import (
    Choice,
    Run,
    Seen,
    first_choices,
    frozen_run,
    ours,
    plain,
    second_choices,
    stock,
)
from bench.lora.rows import ALONE, Row, grid, odd_grid
from bench.lora.spellings import ADDED, Operands, Tensors, make, reference
from bench.lora.table import write_table
from bench.pool import FileLock
from bench.tuning_linears import as_graph, count_of_sets, gain, set_up, settled
from inductor_fusions.checking.budget import worst

#: Configurations that are measured to the end, after a first look.
FINALISTS = 3


# Measuring ---------------------------------------------------------------------------------------------


class Judge:
    """Says whether a candidate is right."""

    def __init__(self, row: Row, one: Operands, stock_run: Run) -> None:
        self.row, self.one = row, one
        if row.dropout and row.kind != "gradient":
            self.expected, self.cut = self._seeded(stock_run), lambda outputs: outputs
        else:
            self.expected, self.cut = reference(row, one)
        self.stock = self._errors(stock_run)

    def _seeded(self, run: Run) -> Tensors:
        torch.manual_seed(0)
        return [y.detach().clone() for y in run(self.one)]

    def _errors(self, run: Run) -> list[float]:
        found = self.cut(self._seeded(run))
        return [relative_error(y, z) for y, z in zip(found, self.expected, strict=True)]

    def judge(self, run: Run) -> tuple[float, str]:
        """The largest error, and what is wrong or ""."""
        errors = self._errors(run)
        for i, (error, of_stock) in enumerate(zip(errors, self.stock, strict=True)):
            allowed = error_limit(of_stock, torch.bfloat16)
            if not error <= allowed:
                return error, f"output {i}: error {error:.2e}, allowed {allowed:.2e}"
        return worst(errors), ""


def measure(row: Row, options: argparse.Namespace, lock: FileLock) -> Json:
    """Compile, check and time every candidate of a row."""
    from inductor_fusions.block_mm import heuristics

    result: Json = {name: {} for name in ("times_us", "spread", "error", "wrong", "skipped")}
    started = time.monotonic()
    seen, quick, device = Seen(), options.quick, options.device
    set_up(device)
    with torch.set_grad_enabled(row.trains):
        first = make(row, device, 0)
        arch = heuristics.capability(torch.device("cuda")) if device == "cuda" else 80
        runs: dict[str, Run] = {"stock": stock(row, first, None)}
        with lock.shared():
            judge = Judge(row, first, runs["stock"])
        result["error"]["stock"] = worst(judge.stock)
        choices: dict[str, Choice] = {}

        def attempt(choice: Choice) -> None:
            with skipping(result["skipped"], choice.name):
                run = ours(row, first, choice, seen)
                with lock.shared():
                    result["error"][choice.name], wrong = judge.judge(run)
                if wrong:
                    result["wrong"][choice.name] = wrong
                else:
                    runs[choice.name], choices[choice.name] = run, choice

        attempt(Choice())
        for choice in first_choices(row, seen, arch, quick, options.odd)[1:]:
            attempt(choice)
        sets = [first, *(make(row, device, s) for s in range(1, count_of_sets(first.flat(), device)))]
        result["compile_s"] = round(time.monotonic() - started, 2)
        with lock:
            looked = look(device, runs, sets)
        best = min((n for n in choices if n in looked), key=looked.__getitem__, default=None)
        started = time.monotonic()
        if best is not None:
            before = set(choices)
            for choice in second_choices(choices[best], seen, quick):
                attempt(choice)
            fresh = {n: r for n, r in runs.items() if n not in before and n in choices}
            if row.kind not in ALONE:
                runs["frozen"] = frozen_run(row)
            result["compile_s"] = round(result["compile_s"] + time.monotonic() - started, 2)
            with lock:
                started = time.monotonic()
                if not options.no_autotune:
                    runs["max_autotune"] = stock(row, first, "max-autotune-no-cudagraphs")
                looked |= look(device, fresh, sets)
                time_all(device, quick, runs, looked, choices, sets, result)
        result["measure_s"] = round(time.monotonic() - started, 2)
        result["first_us"] = {n: round(t * 1e6 / len(sets), 3) for n, t in looked.items()}
    conclude(row, device, result, choices, seen)
    runs.clear()
    sets.clear()
    free(device)
    return result


def look(device: str, runs: dict[str, Run], sets: Sequence[Operands]) -> dict[str, float]:
    """A first, short measurement of each; seconds of one graph."""
    calls = {}
    for name, run in runs.items():
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            calls[name] = as_graph(run, sets, device)
    found = interleave(calls, device, 3, 1e-3) if calls else {}
    return {name: timing.median for name, timing in found.items()}


def time_all(
    device: str,
    quick: bool,
    runs: dict[str, Run],
    looked: dict[str, float],
    choices: dict[str, Choice],
    sets: Sequence[Operands],
    result: Json,
) -> None:
    """Time stock, the limits and the best candidates side by side."""
    ranked = sorted((n for n in looked if n in choices), key=looked.__getitem__)
    wanted = [n for n in runs if n not in choices or n in ranked[:FINALISTS]]
    result |= settled({n: as_graph(runs[n], sets, device) for n in wanted}, device, quick, len(sets))


def conclude(row: Row, device: str, result: Json, choices: dict[str, Choice], seen: Seen) -> None:
    """The best candidate, and what a table needs of it."""
    times = result["times_us"]
    best = min((n for n in times if n in choices), key=times.__getitem__, default=None)
    result["best"] = best
    if device == "cuda":
        result["capability"] = list(torch.cuda.get_device_capability())
    if best is None:
        return
    from inductor_fusions.block_mm import configurations, heuristics
    from inductor_fusions.fusions.lora import accumulate_kernel, decode, narrow

    result["shapes"] = {
        name: plain(shapes[0])
        for name, shapes in (("block", seen.block), ("narrow", seen.narrow), ("added", seen.added))
        if shapes
    }
    arch = heuristics.capability(torch.device("cuda")) if device == "cuda" else 80
    choice = choices[best]
    if seen.decode:
        shape = seen.decode[0]
        chosen = choice.decode or decode.default(shape)
        result["decode"] = {**shape.key, "config": asdict(chosen)}
    if seen.block and row.kind in ("forward", "backward") and not row.dropout:
        posed = seen.block[0]
        chosen = choice.block or configurations.default(posed, arch)
        result["block"] = {**posed.key, "config": asdict(chosen)}
    if seen.added and row.kind in ADDED:
        tile = seen.added[0]
        chosen = choice.added or accumulate_kernel.default(tile)
        result["added"] = {**accumulate_kernel.key(tile), "config": asdict(chosen)}
    elif row.kind == "step":
        result["masks"] = max((shape.masks for shape in seen.narrow), default=0)
    elif seen.narrow:
        thin = choice.narrow
        result["narrow"] = [
            {**narrow.key(shape), "config": asdict(thin or narrow.default(shape))}
            for shape in dict.fromkeys(seen.narrow)
        ]


# The command -------------------------------------------------------------------------------------------


def describe(result: Json) -> str:
    """A row's outcome in a few words."""
    times, best = result["times_us"], result["best"]
    text = ", ".join(f"{n} {times[n]:.1f}" for n in ("stock", "max_autotune", "frozen") if n in times)
    seconds = f"compile {result['compile_s']:.0f} s, measure {result['measure_s']:.0f} s"
    wrong = f"; wrong: {result['wrong']}" if result["wrong"] else ""
    skipped = f"; skipped {len(result['skipped'])}" if result["skipped"] else ""
    if best is None:
        return f"{text}; nothing to measure{wrong}; {result['skipped']} ({seconds})"
    ratio = f", {times[best] / times['frozen']:.2f} of frozen" if "frozen" in times else ""
    return (
        f"{text}, ours {times[best]:.1f} us: {gain(result):.2f}x{ratio}, {best}{wrong}{skipped} ({seconds})"
    )


def main() -> None:
    """The command line."""
    parser = tuning.parser("bench.tune_lora", __doc__, table=True)
    parser.add_argument("--no-autotune", action="store_true", help="leave stock's max-autotune out")
    parser.add_argument(
        "--odd", action="store_true", help="odd widths and nearly all configurations, for bench.lora_tiles"
    )
    options = parser.parse_args()
    if not tuning.wrote_table(options, write_table):
        jobs = tuning.processes(options, share=0.85, most=14)
        rows = odd_grid() if options.odd else grid()
        tuning.run("bench.tune_lora", options, rows, measure, describe, jobs, 30.0)


if __name__ == "__main__":
    main()
