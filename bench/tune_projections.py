"""Measure every configuration of the block GEMM against stock, over the linears of real models.

A row is one block GEMM at one number of tokens: QKV, gate and up with the activation between, the gradient
of an input that linears share (a sum of products), the gradients of their weights, a linear with an
activation. Its candidates:

    stock          what `torch.compile` makes of it without the fusions
    max_autotune   the same with mode="max-autotune-no-cudagraphs"
    bare           the products alone, by the library, one by one
    limit          one library product on weights that were concatenated beforehand (copied: no choice)
    row ..., tiled ..., persistent ...
                   the configurations of `heuristics.candidates`

Each candidate runs as a CUDA graph that calls it on several sets of operands in turn, enough of them that
nothing stays in the L2 cache. Times are those of one call: medians over blocks that take turns, with the
interquartile range over the median as `spread`. A first look drops the slow configurations; what is left is
measured with stock side by side. A configuration whose error against float64 exceeds 1.5 times that of
stock plus eps is listed under `wrong` and gets no time.

Compilation dominates, so worker processes (`--jobs`) compile rows side by side while one at a time has the
device to itself.

    python -m bench.tune_projections --out bench/results/projections_h200.json --budget 560
    python -m bench.tune_projections --out bench/results/projections_h200.json --table nvidia_h200

The second writes what was measured into `configs/devices/nvidia_h200.json` and measures nothing.
"""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench import device_table, tuning
from bench.common import (
    DTYPES,
    Json,
    apart,
    error_limit,
    interleave,
    is_fatal,
    one_line,
    relative_error,
)
from bench.pool import FileLock
from inductor_fusions import tables

#: Operands of one graph together, as a multiple of the L2 cache.
PAST_L2 = 2.5
#: Most calls in one graph.
MOST_SETS = 64
#: Configurations that are measured to the end, after a first look.
FINALISTS = 4
#: Rows of an output that are compared with float64: the first ones and the last ones.
CHECKED_ROWS = 64

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}

Tensors = list[torch.Tensor]


# The grid ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One block GEMM to measure.

    Attributes:
        kind: as in `heuristics.Problem`.
        tokens: rows of the input; for gradients of weights, their K.
        inner: widths of the inputs: one for linears that share theirs, one for each term of a sum. For
            gradients of weights: the width of the input.
        outer: widths of the outputs; for gradients of weights, of the linears' outputs.
        dtype: a key of `DTYPES`.
        activation: what follows; of the first of a gated pair.
    """

    kind: str
    tokens: int
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    dtype: str = "bfloat16"
    activation: str = ""

    @property
    def key(self) -> str:
        """How `--only` and the progress name it."""
        sizes = f"{'+'.join(map(str, self.inner))}->{'+'.join(map(str, self.outer))}"
        return " ".join(filter(None, [self.kind, sizes, self.activation, f"m{self.tokens}", self.dtype]))

    @property
    def groups(self) -> list[int]:
        """Group of each product."""
        return [0] * len(self.inner) if self.kind == "sum" else list(range(len(self.outer)))


SMALL, LARGE = (1, 4, 16, 32, 64), (128, 256, 512, 1024, 2048, 4096, 8192)
#: Rows whose neighbours bracket all that lie between, for what is wanted at many sizes.
FEW = (512, 2048, 8192)


def grid() -> list[Row]:
    """What is measured, the widths of the documentation first."""
    rows: list[Row] = []
    for width, outs in (
        (4096, (4096, 1024, 1024)), (768, (768,) * 3), (1024, (1024,) * 3), (2048, (2048, 512, 512)),
        (4096, (4096,) * 3),
    ):  # fmt: skip
        rows += [Row("shared_a", m, (width,), outs) for m in SMALL + LARGE]
    for width in (768, 1024):  # batches of encoders
        rows += [Row("shared_a", 16384, (width,), (width,) * 3)]
        rows += [Row("sum", m, (width,) * 3, (width,)) for m in (4096, 8192, 16384)]
        rows += [Row("shared_b", m, (width,), (width,) * 3) for m in (4096, 8192, 16384)]
    for width, hidden, activation in ((4096, 14336, "silu"), (2048, 8192, "silu"), (4096, 11008, "silu")):
        rows += [Row("gated", m, (width,), (hidden,) * 2, activation=activation) for m in SMALL + LARGE]
        rows += [Row("shared_a", m, (width,), (hidden,) * 2) for m in LARGE[3:]]
        rows += [Row("sum", m, (hidden,) * 2, (width,)) for m in LARGE[3:]]
        rows += [Row("shared_b", m, (width,), (hidden,) * 2) for m in LARGE[3:]]
    for width, hidden, activation in (
        (2304, 9216, "gelu_tanh"), (4096, 12288, "silu"), (2560, 9728, "silu"), (3584, 18944, "silu"),
        (5120, 13824, "silu"), (768, 2048, "gelu_tanh"),
    ):  # fmt: skip
        rows += [Row("gated", m, (width,), (hidden,) * 2, activation=activation) for m in (1, 16, *FEW)]
        rows += [Row("sum", m, (hidden,) * 2, (width,)) for m in FEW[1:]]
    rows += [Row("shared_a", m, (2304,), (2048, 1024, 1024)) for m in (1, 16, *FEW)]
    for width, outs in ((4096, (4096, 1024, 1024)), (2048, (2048, 512, 512)), (768, (768,) * 3)):
        rows += [Row("sum", m, outs, (width,)) for m in LARGE[3:]]
        rows += [Row("shared_b", m, (width,), outs) for m in LARGE[3:]]
    for width, hidden in ((768, 3072), (1024, 4096)):
        for activation, sizes in (
            ("gelu", (*SMALL, *LARGE, 16384)),
            ("relu", (1, 16, *FEW, 16384)),
            ("gelu_tanh", (1, 16, *FEW, 16384)),
        ):
            rows += [Row("linear", m, (width,), (hidden,), activation=activation) for m in sizes]
    return list(dict.fromkeys(rows))


# Operands and candidates -------------------------------------------------------------------------------


@dataclass
class Operands:
    """One set of tensors: a and b of each product, in the layouts that a graph has them in."""

    a: Tensors
    b: Tensors

    def flat(self) -> Tensors:
        """Each tensor once."""
        return list({id(t): t for t in (*self.a, *self.b)}.values())


def make(row: Row, device: str, seed: int) -> Operands:
    """Random operands. Weights have the shape (out, in), as linears have them."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (made / shape[-1] ** 0.5).to(DTYPES[row.dtype])

    if row.kind == "sum":  # dX = sum of dY_i @ W_i
        return Operands([rand(row.tokens, n) for n in row.inner], [rand(n, row.outer[0]) for n in row.inner])
    if row.kind == "shared_b":  # dW_i = dY_i^T @ X
        x = rand(row.tokens, row.inner[0])
        return Operands([rand(row.tokens, n).t() for n in row.outer], [x] * len(row.outer))
    x = rand(row.tokens, row.inner[0])
    return Operands([x] * len(row.outer), [rand(n, row.inner[0]).t() for n in row.outer])


def unfused(row: Row, a: Tensors, b: Tensors) -> Tensors:
    """What the graph of a model has."""
    products = [x @ w for x, w in zip(a, b, strict=True)]
    act = ACTIVATIONS[row.activation]
    if row.kind == "gated":
        return [act(products[0]) * products[1]]
    if row.kind == "sum":
        total = products[0]
        for product in products[1:]:
            total = total + product
        return [total]
    return [act(y) for y in products]


def fused(row: Row, a: Tensors, b: Tensors) -> Tensors:
    """The same as one operation."""
    from inductor_fusions import ops

    activations = [row.activation, *[""] * row.groups[-1]]
    return ops.block_mm(a, b, groups=row.groups, gated=row.kind == "gated", activations=activations)


def problem(row: Row, operands: Operands) -> Any:
    """The problem that the lowering sees."""
    from inductor_fusions.fusions.block_mm import heuristics

    def shape(t: torch.Tensor) -> tuple[Any, Any]:
        return tuple(t.shape), tuple(t.stride())

    return heuristics.of_operands(
        [shape(t) for t in operands.a],
        [shape(t) for t in operands.b],
        row.groups,
        row.kind == "gated",
        DTYPES[row.dtype],
        [(id(x), id(w)) for x, w in zip(operands.a, operands.b, strict=True)],
        row.activation,
    )


Run = Callable[[Operands], Tensors]
_numbers = itertools.count()


def compiled(row: Row, fn: Callable[..., Tensors], operands: Operands, **options: Any) -> Run:
    """A function under `torch.compile`, compiled for `operands`.

    Dynamo keeps what it compiled by code object: each candidate has one of its own, or it would get the
    kernel of the one before.
    """

    def call(a: Tensors, b: Tensors) -> Tensors:
        return fn(row, a, b)

    own = apart(call, f"candidate_{next(_numbers)}")
    run = torch.compile(own, dynamic=False, **options)
    run(operands.a, operands.b)
    return lambda one: run(one.a, one.b)  # type: ignore[no-any-return]


def stock(row: Row, operands: Operands, mode: str | None) -> Run:
    """Stock's own, with the fusions switched off."""
    from inductor_fusions import config

    with config.patch(enabled=False):
        return compiled(row, unfused, operands, mode=mode)


def ours(row: Row, operands: Operands, chosen: Any) -> Run:
    """One configuration."""
    from unittest import mock

    from inductor_fusions import config
    from inductor_fusions.fusions.block_mm import heuristics

    choice = heuristics.Choice(chosen, "")
    with config.patch(policy="always"), mock.patch.object(heuristics, "choose", lambda p, device: choice):
        return compiled(row, fused, operands)


def bare(row: Row) -> Run:
    """The products alone, by the library."""

    def run(one: Operands) -> Tensors:
        return [x @ w for x, w in zip(one.a, one.b, strict=True)]

    return run


def limit(row: Row, sets: Sequence[Operands]) -> Run:
    """One product of the library on concatenated operands, which are made here."""
    joined: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for one in sets:
        if row.kind == "sum":
            pair = torch.cat(one.a, dim=1), torch.cat(one.b, dim=0)
        elif row.kind == "shared_b":
            pair = torch.cat([x.t() for x in one.a], dim=1).t(), one.b[0]
        else:
            pair = one.a[0], torch.cat([w.t() for w in one.b], dim=0).t()
        joined[id(one)] = pair
    return lambda one: [joined[id(one)][0] @ joined[id(one)][1]]


# Measuring ---------------------------------------------------------------------------------------------


def count_of_sets(row: Row, operands: Operands, device: str) -> int:
    """So many sets of operands that they do not fit into the L2 cache together."""
    if device != "cuda":
        return 2
    size = sum(t.numel() * t.element_size() for t in operands.flat())
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(MOST_SETS, round(PAST_L2 * cache / size + 0.5)))


def as_graph(run: Run, sets: Sequence[Operands], device: str) -> Callable[[], object]:
    """One call of `run` on each set, as a CUDA graph."""
    if device != "cuda":
        return lambda: [run(one) for one in sets]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(sets[0])
        run(sets[-1])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in sets:
            run(one)
    return graph.replay


def reference(row: Row, one: Operands) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
    """The first and the last rows of each output in float64, and how to cut them from outputs."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] <= 2 * CHECKED_ROWS else torch.cat([x[:CHECKED_ROWS], x[-CHECKED_ROWS:]])

    a, b = [rows(x).double() for x in one.a], [w.double() for w in one.b]
    return unfused(row, a, b), lambda outputs: [rows(y) for y in outputs]


def worst_error(run: Run, one: Operands, expected: Tensors, cut: Callable[[Tensors], Tensors]) -> float:
    """The largest error of an output; NaN wins."""
    found = [relative_error(y, z) for y, z in zip(cut(run(one)), expected, strict=True)]
    return float("nan") if any(x != x for x in found) else max(found)


def name_of(chosen: Any) -> str:
    """A configuration as a short name."""
    tile = f"{chosen.block_m}x{chosen.block_n}x{chosen.block_k}"
    return (
        f"{chosen.template} {tile} w{chosen.num_warps} s{chosen.num_stages} "
        f"g{chosen.group_m} p{chosen.subtiles} x{chosen.per_processor}"
    )


def measure(row: Row, device: str, options: Json, lock: AbstractContextManager[Any]) -> Json:
    """Compile, check and time every candidate of a row."""
    from inductor_fusions.fusions.block_mm import heuristics

    result: Json = {name: {} for name in ("times_us", "spread", "first_us", "error", "wrong", "skipped")}
    started = time.monotonic()
    with torch.no_grad():
        first = make(row, device, 0)
        posed = problem(row, first)
        arch = heuristics.capability(torch.device("cuda")) if device == "cuda" else 80
        configs = {name_of(c): c for c in heuristics.candidates(posed, arch)}
        runs: dict[str, Run] = {"stock": stock(row, first, None), "bare": bare(row)}
        for name, chosen in configs.items():
            try:
                runs[name] = ours(row, first, chosen)
            except Exception as error:
                result["skipped"][name] = one_line(error)
        result["compile_s"] = round(time.monotonic() - started, 2)
        with lock:
            started = time.monotonic()
            if options["max_autotune"]:
                runs["max_autotune"] = stock(row, first, "max-autotune-no-cudagraphs")
            sets = [first, *(make(row, device, s) for s in range(1, count_of_sets(row, first, device)))]
            runs["limit"] = limit(row, sets)
            time_all(row, device, options["quick"], runs, sets, configs, result)
            result["measure_s"] = round(time.monotonic() - started, 2)
    result["sets"] = len(sets)
    result["problem"] = posed.key
    if device == "cuda":
        result["capability"] = list(torch.cuda.get_device_capability())
    best = min((n for n in result["times_us"] if n in configs), key=result["times_us"].get, default=None)
    result["best"] = best
    result["config"] = configs[best].to_json() if best else None
    del runs, sets, first
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
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
        try:
            if name in configs or name == "max_autotune":
                error = result["error"][name] = worst_error(run, sets[0], expected, cut)
                if not error <= allowed:
                    result["wrong"][name] = f"error {error:.2e}, allowed {allowed:.2e}"
                    continue
            calls[name] = as_graph(run, sets, device)
        except Exception as error:
            if is_fatal(error):
                raise
            result["skipped"][name] = one_line(error)
    rounds, block = (3, 1e-3) if quick else (15, 4e-3)
    look = interleave({n: c for n, c in calls.items() if n in configs or n == "stock"}, device, 3, 1e-3)
    result["first_us"] = {n: round(t.median * 1e6 / len(sets), 3) for n, t in look.items()}
    ranked = sorted((n for n in look if n in configs), key=lambda n: look[n].median)
    final = {n: c for n, c in calls.items() if n not in configs or n in ranked[:FINALISTS]}
    for name, timing in interleave(final, device, rounds, block).items():
        result["times_us"][name] = round(timing.median * 1e6 / len(sets), 3)
        result["spread"][name] = round(timing.spread, 4)


def set_up(device: str) -> None:
    """Settings of the process that measures."""
    import torch._dynamo.config
    import torch._inductor.config as inductor

    import inductor_fusions  # noqa: F401 - installs the passes

    # Two configurations are the same operation: only the first would be compiled.
    inductor.force_disable_caches = True
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if device == "cuda":
        inductor.compile_threads = 1  # the workers are parallel as it is


def work(task: tuple[Row, str, Json], lock: Path) -> tuple[Json | None, bool]:
    """In a worker: measure one row."""
    row, device, options = task
    set_up(device)
    try:
        return measure(row, device, options, FileLock(lock)), True
    except Exception as error:
        return {"failed": one_line(error)}, not is_fatal(error)


# Tables ------------------------------------------------------------------------------------------------


def gain(row: Json) -> float:
    """The time of stock, the faster of its two, over that of the best configuration; 0 without one."""
    times = row["times_us"]
    if not row.get("best"):
        return 0.0
    return float(min(times[n] for n in ("stock", "max_autotune") if n in times) / times[row["best"]])


def plain_gain(row: Json) -> float:
    """The time of stock without autotuning over that of the best configuration; 0 without one.

    Tables are for that mode: where Inductor autotunes, the configurations compete with its own each time.
    """
    times = row["times_us"]
    return float(times["stock"] / times[row["best"]]) if row.get("best") else 0.0


def table_rows(rows: Sequence[Json]) -> list[Json]:
    """What the package looks up: `heuristics.measured` says how it is read."""
    found = []
    for row in rows:
        ratio = round(plain_gain(row), 3)
        found.append(
            {
                **row["problem"],
                "tokens": row["tokens"],
                "gain": ratio,
                "config": row["config"] if ratio >= tables.MARGIN else None,
                "capability": row["capability"],
            }
        )
    return found


def write_table(path: Path, rows: Sequence[Json]) -> None:
    """Put the rows into a device's table, in place of those of the same problems that it has."""
    data = json.loads(path.read_text())
    found = {
        json.dumps({**row, "gain": 0, "config": None}, sort_keys=True): row
        for row in (*data.get("block_mm", []), *table_rows(rows))
    }
    device_table.write(path, {**data, "block_mm": list(found.values())})


# The command -------------------------------------------------------------------------------------------


def describe(result: Json) -> str:
    """A row's outcome in a few words."""
    names = [n for n in ("stock", "max_autotune", "bare", "limit", result["best"]) if n in result["times_us"]]
    text = ", ".join(f"{name} {result['times_us'][name]:.1f}" for name in names)
    if result["wrong"]:
        text += f"; wrong: {len(result['wrong'])}"
    seconds = f"compile {result['compile_s']:.0f} s, measure {result['measure_s']:.0f} s"
    return f"{text} us: {gain(result):.2f}x ({seconds})"


def print_summary(rows: Sequence[Json]) -> None:
    """Gain over stock and distance from the limit of every row."""
    from rich.console import Console
    from rich.table import Table

    columns = ("row", "stock", "autotuned", "bare", "limit", "ours", "stock / ours", "ours / limit", "kernel")
    table = Table(*columns, title="microseconds")
    for row in rows:
        times, best = row["times_us"], row["best"]

        def cell(name: str | None, times: Json = times) -> str:
            return f"{times[name]:.1f}" if name in times else "-"

        ratio = f"{times[best] / times['limit']:.2f}" if best and "limit" in times else "-"
        table.add_row(
            row["key"], cell("stock"), cell("max_autotune"), cell("bare"), cell("limit"), cell(best),
            f"{gain(row):.2f}", ratio, best or "-",
        )  # fmt: skip
    Console(width=170).print(table)


def main() -> None:
    """The command line."""
    parser = tuning.parser("bench.tune_projections", __doc__, table=True)
    parser.add_argument("--no-autotune", action="store_true", help="leave stock's max-autotune out")
    options = parser.parse_args()
    device: str = options.device
    if tuning.wrote_table(options, write_table):
        return
    rows = tuning.select(grid(), options)
    settings = {"quick": options.quick, "max_autotune": not options.no_autotune}
    results, failed = tuning.measure(
        "bench.tune_projections",
        options,
        [[row] for row in rows],
        work,
        lambda group: (group[0], device, settings),
        describe,
        jobs=tuning.processes(options, share=0.85, most=14),
        seconds=20.0,
    )
    print_summary([row for row in results.rows if row["key"] in {r.key for r in rows}])
    tuning.end(failed)


if __name__ == "__main__":
    main()
