"""Measure every configuration of the grouped GEMM against stock, over the linears of real models.

A row is one grouped GEMM at one number of tokens: QKV, gate and up with the activation between, the gradient
of an input that linears share (a sum of products), the gradients of their weights, a linear with an
activation. Its candidates:

    stock          what `torch.compile` makes of it without the fusions
    max_autotune   the same with mode="max-autotune-no-cudagraphs"
    bare           the products alone, by the library, one by one
    limit          one library product on weights that were concatenated beforehand (copied: no choice)
    row ..., tiled ..., persistent ...
                   the configurations of `configurations.candidates`

Each candidate runs as a CUDA graph that calls it on several sets of operands in turn, enough of them that
nothing stays in the L2 cache. Times are those of one call: medians over blocks that take turns, with the
interquartile range over the median as `spread`. A first look (`first_us`) drops the slow configurations; what
is left is measured with stock side by side. A configuration whose error against float64 exceeds 1.5 times
that of stock plus eps is listed under `wrong` and gets no time.

Compilation dominates, so worker processes (`--jobs`) compile rows side by side while one at a time has the
device to itself.

    python -m bench.tune_projections --out bench/results/projections_h200.json --budget 560
    python -m bench.tune_projections --out bench/results/projections_h200.json --table nvidia_h200

The second writes what was measured into `configs/devices/nvidia_h200.json` and measures nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import device_table, tuning
from bench.common import DTYPES, Json, error_limit, free, interleave, relative_error, skipping
from bench.pool import FileLock
from bench.projections import (
    Operands,
    Row,
    Run,
    Tensors,
    bare,
    grid,
    limit,
    make,
    ours,
    problem,
    stock,
    unfused,
)
from bench.tuning_linears import as_graph, checked_rows, count_of_sets, gain, plain_gain, set_up, settled
from inductor_fusions.checking.budget import worst
from inductor_fusions.decisions import problems

#: Configurations that are measured to the end, after a first look.
FINALISTS = 4


# Measuring ---------------------------------------------------------------------------------------------


def reference(row: Row, one: Operands) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
    """The first and the last rows of each output in float64, and how to cut them from outputs."""
    a, b = [checked_rows(x).double() for x in one.a], [w.double() for w in one.b]
    return unfused(row, a, b), lambda outputs: [checked_rows(y) for y in outputs]


def worst_error(run: Run, one: Operands, expected: Tensors, cut: Callable[[Tensors], Tensors]) -> float:
    """The largest error of an output."""
    return worst(relative_error(y, z) for y, z in zip(cut(run(one)), expected, strict=True))


def name_of(chosen: Any) -> str:
    """A configuration as a short name."""
    tile = f"{chosen.block_m}x{chosen.block_n}x{chosen.block_k}"
    return (
        f"{chosen.template} {tile} w{chosen.num_warps} s{chosen.num_stages} "
        f"g{chosen.group_m} p{chosen.subtiles} x{chosen.per_processor}" + " across" * chosen.across
    )


def named(text: str) -> Any:
    """The configuration that `name_of` gave a name."""
    from inductor_fusions.block_mm.configurations import Config

    template, tile, *others = text.removesuffix(" across").split()
    numbers = [int(size) for size in tile.split("x")] + [int(word[1:]) for word in others]
    return Config(template, *numbers, across=text.endswith(" across"))


def measure(row: Row, options: argparse.Namespace, lock: FileLock) -> Json:
    """Compile, check and time every candidate of a row."""
    from inductor_fusions.block_mm import configurations, heuristics

    result: Json = {name: {} for name in ("times_us", "spread", "error", "wrong", "skipped")}
    device: str = options.device
    set_up(device)
    started = time.monotonic()
    with torch.no_grad():
        first = make(row, device, 0)
        posed = problem(row, first)
        arch = heuristics.capability(torch.device("cuda")) if device == "cuda" else 80
        configs = {name_of(c): c for c in configurations.candidates(posed, arch)}
        runs: dict[str, Run] = {"stock": stock(row, first, None), "bare": bare(row)}
        for name, chosen in configs.items():
            with skipping(result["skipped"], name):
                runs[name] = ours(row, first, chosen)
        result["compile_s"] = round(time.monotonic() - started, 2)
        with lock:
            started = time.monotonic()
            if not options.no_autotune:
                runs["max_autotune"] = stock(row, first, "max-autotune-no-cudagraphs")
            sets = [first, *(make(row, device, s) for s in range(1, count_of_sets(first.flat(), device)))]
            runs["limit"] = limit(row, sets)
            time_all(row, device, options.quick, runs, sets, configs, result)
            result["measure_s"] = round(time.monotonic() - started, 2)
    result["problem"] = posed.key
    if device == "cuda":
        result["capability"] = list(torch.cuda.get_device_capability())
    best = min((n for n in result["times_us"] if n in configs), key=result["times_us"].get, default=None)
    result["best"] = best
    result["config"] = asdict(configs[best]) if best else None
    del runs, sets, first
    free(device)
    return result


def time_all(
    row: Row,
    device: str,
    quick: bool,
    runs: dict[str, Run],
    sets: Sequence[Operands],
    configs: Json,
    result: Json,
) -> None:
    """Check every candidate, then time those that are right: all of them shortly, the best ones well."""
    expected, cut = reference(row, sets[0])
    result["error"]["stock"] = worst_error(runs["stock"], sets[0], expected, cut)
    allowed = error_limit(result["error"]["stock"], DTYPES[row.dtype])
    calls: dict[str, Callable[[], object]] = {}
    for name, run in runs.items():
        with skipping(result["skipped"], name):
            if name in configs or name == "max_autotune":
                error = result["error"][name] = worst_error(run, sets[0], expected, cut)
                if not error <= allowed:
                    result["wrong"][name] = f"error {error:.2e}, allowed {allowed:.2e}"
                    continue
            calls[name] = as_graph(run, sets, device)
    look = interleave({n: c for n, c in calls.items() if n in configs or n == "stock"}, device, 3, 1e-3)
    result["first_us"] = {n: round(t.median * 1e6 / len(sets), 3) for n, t in look.items()}
    ranked = sorted((n for n in look if n in configs), key=lambda n: look[n].median)
    final = {n: c for n, c in calls.items() if n not in configs or n in ranked[:FINALISTS]}
    result |= settled(final, device, quick, len(sets))


# Tables ------------------------------------------------------------------------------------------------


def table_rows(rows: Sequence[Json]) -> list[Json]:
    """What the package looks up: `decisions` says how it is read."""
    found = []
    for row in rows:
        ratio = round(plain_gain(row), 3)
        found.append(
            {
                **row["problem"],
                "tokens": row["tokens"],
                "gain": ratio,
                "config": row["config"] if ratio >= problems.MARGIN else None,
                "capability": row["capability"],
            }
        )
    return found


def write_table(path: Path, rows: Sequence[Json]) -> None:
    """Put the rows into a device's table, in place of those of the same problems that it has."""
    device_table.merge(path, {"block_mm": table_rows(rows)})


# The command -------------------------------------------------------------------------------------------


def describe(result: Json) -> str:
    """A row's outcome in a few words."""
    names = [n for n in ("stock", "max_autotune", "bare", "limit", result["best"]) if n in result["times_us"]]
    text = ", ".join(f"{name} {result['times_us'][name]:.1f}" for name in names)
    if result["wrong"]:
        text += f"; wrong: {len(result['wrong'])}"
    seconds = f"compile {result['compile_s']:.0f} s, measure {result['measure_s']:.0f} s"
    return f"{text} us: {gain(result):.2f}x ({seconds})"


def main() -> None:
    """The command line."""
    parser = tuning.parser("bench.tune_projections", __doc__, table=True)
    parser.add_argument("--no-autotune", action="store_true", help="leave stock's max-autotune out")
    options = parser.parse_args()
    if not tuning.wrote_table(options, write_table):
        jobs = tuning.processes(options, share=0.85, most=14)
        tuning.run("bench.tune_projections", options, grid(), measure, describe, jobs, 20.0)


if __name__ == "__main__":
    main()
