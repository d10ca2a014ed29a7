"""Measure linears with adapters against stock and against the frozen linear, over configurations.

A row is one or more linears on one input, with an adapter each, at one number of tokens:

    forward    y_g = x @ W_g + s * (x @ A_g) @ B_g, as PEFT spells it
    backward   dx = sum of dY_g @ W_g + s * (dY_g @ B_g) @ A_g
    gradient   dB = s * dY^T @ h, or dA = dh^T @ x: one narrow product over all tokens
    step       forward and backward of one linear, through autograd

Its candidates:

    stock          what `torch.compile` makes of it without the fusions
    max_autotune   the same with mode="max-autotune-no-cudagraphs"
    frozen         the linears without adapters, by the library
    the others     the fusion, in the configurations of its kernels: of the block GEMM first, then of the
                   narrow product beside the best of those; for few rows, of the pair of kernels

Each candidate is a CUDA graph that calls it on several sets of operands in turn, so that nothing stays in the
L2 cache. A candidate whose error against float64 exceeds 1.5 times that of stock plus eps gets no time; where
there is dropout, outputs are compared with stock's, which draws the same masks.

    python -m bench.tune_lora --out bench/results/lora_h200.json --budget 560
    python -m bench.tune_lora --out bench/results/lora_h200.json --table nvidia_h200

The second writes what was measured into `configs/devices/nvidia_h200.json` and measures nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    one_line,
    peak_bytes,
    relative_error,
)
from bench.pool import FileLock
from bench.tune_projections import CHECKED_ROWS, MOST_SETS, PAST_L2, is_fatal, plain_gain, set_up
from inductor_fusions import tables

#: Factor of every adapter: lora_alpha / r.
SCALE = 2.0
#: Configurations that are measured to the end, after a first look.
FINALISTS = 3
#: Configurations that are tried: of the block GEMM, and of the narrow product beside the best of them.
BLOCK_CHOICES, NARROW_CHOICES = 6, 4

Tensors = list[torch.Tensor]


# The grid ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One problem.

    Attributes:
        kind: "forward", "backward", "gradient" or "step".
        tokens: rows of x.
        inner, outer: widths of the input and of each linear; of a gradient, `inner` is the width of the
            large matrix, and `outer` are the ranks where several adapters read it.
        rank: of each adapter.
        adapters: dtype of the adapters, a key of `DTYPES`.
        dropout: in front of each adapter.
        large: dtype of the large matrix of a gradient.
    """

    kind: str
    tokens: int
    inner: int
    outer: tuple[int, ...]
    rank: int = 16
    adapters: str = "float32"
    dropout: float = 0.0
    large: str = "bfloat16"

    @property
    def key(self) -> str:
        """How `--only` and the progress name it."""
        sizes = f"{self.inner}->{'+'.join(map(str, self.outer or (self.rank,)))}"
        extra = [f"dropout{self.dropout}"] if self.dropout else []
        extra += [self.large] if self.kind == "gradient" else []
        return " ".join([self.kind, sizes, f"r{self.rank}", self.adapters, *extra, f"m{self.tokens}"])


#: K and N of the linears that LoRAFusion reports, and of Llama 3 8B.
SQUARE = ((4096, 4096), (5120, 5120), (8192, 8192), (4096, 14336), (14336, 4096))
#: The linears of a layer of Llama 3.2 1B, by input.
LLAMA_1B = ((2048, (2048, 512, 512)), (2048, (2048,)), (2048, (8192, 8192)), (8192, (2048,)))


def grid() -> list[Row]:
    """What is measured: decode and the shapes of the models first."""
    rows: list[Row] = []
    for adapters in ("float32", "bfloat16"):
        for inner, outer in LLAMA_1B:
            rows += [Row("forward", m, inner, outer, 16, adapters) for m in (1, 4, 8, 16, 4096)]
            rows.append(Row("backward", 4096, inner, outer, 16, adapters))
        # Behind a dropout of its own each of gate and up stands alone.
        rows.append(Row("forward", 4096, 2048, (8192,), 16, adapters))
        for outer_width in (4096, 14336):
            rows += [Row("forward", m, 4096, (outer_width,), 16, adapters) for m in (1, 4, 8, 16)]
        # Of the input of q, k and v, and of that of gate and up.
        rows += [Row("gradient", 4096, 2048, (16,) * count, 16, adapters) for count in (3, 2)]
        for width in (512, 2048, 8192):
            rows.append(Row("gradient", 4096, width, (), 16, adapters))
        if adapters == "float32":
            rows += [Row("gradient", 4096, w, (), 16, adapters, large="float32") for w in (2048, 8192)]
    for adapters in ("float32", "bfloat16"):
        for inner, width in SQUARE:
            for tokens in (4096, 8192, 2048):
                rows += [
                    Row(kind, tokens, inner, (width,), 16, adapters)
                    for kind in ("forward", "backward", "step")
                ]
    for inner, width in SQUARE:
        for kind in ("forward", "step"):
            rows += [Row(kind, m, inner, (width,), 16, "bfloat16", 0.1) for m in (4096, 8192, 2048)]
    for rank in (64, 128):
        for adapters in ("float32", "bfloat16"):
            for kind in ("forward", "backward", "step"):
                rows += [Row(kind, 4096, inner, (width,), rank, adapters) for inner, width in SQUARE]
            rows += [Row("forward", m, 4096, (4096,), rank, adapters) for m in (1, 4, 16)]
    for adapters in ("float32", "bfloat16"):
        rows += [Row("forward", m, 4096, (4096, 1024, 1024), 16, adapters) for m in (1, 4, 16, 2048, 4096)]
        rows += [Row("gradient", m, 4096, (), 16, adapters) for m in (2048, 4096, 8192)]
        rows += [Row("gradient", m, 14336, (), 16, adapters) for m in (2048, 4096, 8192)]
    return list(dict.fromkeys(rows))


# Operands and functions --------------------------------------------------------------------------------


@dataclass
class Operands:
    """One set of tensors.

    Attributes:
        x: what is read: x; dY of each linear; or the large matrix and the small ones of a gradient.
        w: weights, shape (out, in).
        a, b: adapters, shapes (r, in) and (out, r).
    """

    x: Tensors
    w: Tensors
    a: Tensors
    b: Tensors

    def flat(self) -> Tensors:
        """Every tensor."""
        return [*self.x, *self.w, *self.a, *self.b]


def make(row: Row, device: str, seed: int) -> Operands:
    """Random operands."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def rand(dtype: str, *shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return (made / shape[-1] ** 0.5).to(DTYPES[dtype])

    if row.kind == "gradient":
        large = rand(row.large, row.tokens, row.inner)
        ranks = row.outer or (row.rank,)
        return Operands([large, *(rand(row.adapters, row.tokens, r) for r in ranks)], [], [], [])
    w = [rand("bfloat16", n, row.inner) for n in row.outer]
    a = [rand(row.adapters, row.rank, row.inner) for _ in row.outer]
    b = [rand(row.adapters, n, row.rank) for n in row.outer]
    widths = row.outer if row.kind == "backward" else (row.inner,)
    found = Operands([rand("bfloat16", row.tokens, width) for width in widths], w, a, b)
    if row.kind == "step":
        for t in (*found.x, *found.a, *found.b):
            t.requires_grad_()
        found.x.append(rand("bfloat16", row.tokens, row.outer[0]))  # the cotangent
    return found


def forward(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """As PEFT spells it."""
    outputs = []
    for weight, down, up in zip(w, a, b, strict=True):
        base = F.linear(x[0], weight)
        inside = x[0].to(down.dtype)
        if row.dropout:
            inside = F.dropout(inside, row.dropout)
        outputs.append((base + F.linear(F.linear(inside, down), up) * SCALE).to(base.dtype))
    return outputs


def backward(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """The gradient of the input, as autograd spells it."""
    total: torch.Tensor | None = None
    for dy, weight, down, up in zip(x, w, a, b, strict=True):
        through = ((dy.to(up.dtype) * SCALE) @ up) @ down
        part = through.to(dy.dtype) + dy @ weight
        total = part if total is None else total + part
    assert total is not None
    return [total]


def gradient(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """dB; for dA, the same is stored transposed."""
    large, *small = x
    return [(large.to(b.dtype) * SCALE).t() @ b for b in small]


def narrow_gradient(row: Row, x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
    """The same as the operation that the fusion puts into graphs."""
    from inductor_fusions.fusions.lora.op import NARROW_MM

    large, *small = x
    count = len(small)
    found: Tensors = NARROW_MM(large.t(), small, [SCALE] * count, [0.0] * count, False)
    return found


def frozen(row: Row, one: Operands) -> Tensors:
    """The linears without adapters."""
    if row.kind == "backward":
        return [dy @ weight for dy, weight in zip(one.x, one.w, strict=True)]
    return [F.linear(one.x[0], weight) for weight in one.w]


FUNCTIONS = {"forward": forward, "backward": backward, "gradient": gradient, "step": forward}
Run = Callable[[Operands], Tensors]


def compiled(row: Row, fn: Callable[..., Tensors], operands: Operands, **options: Any) -> Run:
    """A function under `torch.compile`, compiled for `operands`; with its backward, for a step."""

    def call(x: Tensors, w: Tensors, a: Tensors, b: Tensors) -> Tensors:
        return fn(row, x, w, a, b)

    own = apart(call, f"candidate_{next(_numbers)}")
    compiled_call = torch.compile(own, dynamic=False, **options)

    def run(one: Operands) -> Tensors:
        if row.kind != "step":
            return compiled_call(one.x, one.w, one.a, one.b)  # type: ignore[no-any-return]
        (y,) = compiled_call(one.x[:1], one.w, one.a, one.b)
        return [y, *torch.autograd.grad([y], [one.x[0], *one.a, *one.b], [one.x[1]])]

    run(operands)
    return run


def _count() -> Iterator[int]:
    import itertools

    return itertools.count()


_numbers = _count()


def stock(row: Row, operands: Operands, mode: str | None) -> Run:
    """Stock's own, with the fusions switched off."""
    from inductor_fusions import config

    with config.patch(enabled=False):
        return compiled(row, FUNCTIONS[row.kind], operands, mode=mode)


@dataclass(frozen=True)
class Choice:
    """Configurations of the kernels of one candidate; None: the default one."""

    block: Any = None
    narrow: Any = None
    decode: Any = None

    @property
    def name(self) -> str:
        """Short."""
        parts = []
        for kind, chosen in (("block", self.block), ("narrow", self.narrow), ("pair", self.decode)):
            if chosen is not None:
                parts.append(f"{kind} " + "-".join(str(v) for v in chosen.to_json().values()))
        return ", ".join(parts) or "defaults"


class Seen:
    """The problems that the lowerings met."""

    def __init__(self) -> None:
        self.block: list[Any] = []
        self.narrow: list[Any] = []
        self.decode: list[Any] = []


@contextlib.contextmanager
def choosing(choice: Choice, seen: Seen) -> Iterator[None]:
    """Inside, the kernels get these configurations."""
    from unittest import mock

    from inductor_fusions import config
    from inductor_fusions.fusions.block_mm import heuristics
    from inductor_fusions.fusions.lora import decode, lowering, narrow

    def block(posed: Any, device: torch.device) -> Any:
        seen.block.append(posed)
        arch = heuristics.capability(device)
        return heuristics.Choice(choice.block or heuristics.default(posed, arch), "")

    def thin(shape: Any, device: torch.device) -> Any:
        seen.narrow.append(shape)
        return choice.narrow or narrow.default(shape)

    def pair(shape: Any, device: torch.device) -> Any:
        seen.decode.append(shape)
        return choice.decode or decode.default(shape, heuristics.capability(device))

    others = {"qkv": False, "gated_mlp": False, "linear_epilogue": False}
    with (
        config.patch(policy="always", **others),
        mock.patch.object(heuristics, "choose", block),
        mock.patch.object(lowering, "choose", thin),
        mock.patch.object(decode, "choose", pair),
        nullcontext() if torch.cuda.is_available() else on_the_cpu(),
    ):
        yield


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Inside, the CPU counts as a device, to try the script: the operations are products one by one."""
    from unittest import mock

    from inductor_fusions.fusions.block_mm import guards
    from inductor_fusions.fusions.lora import profit

    with (
        mock.patch.object(guards, "check_device", lambda node: None),
        mock.patch.object(profit, "capability", lambda device: 80),
    ):
        yield


def ours(row: Row, operands: Operands, choice: Choice, seen: Seen) -> Run:
    """The fusion in one configuration.

    Raises:
        RuntimeError: nothing was fused.
    """
    import inductor_fusions

    fn = narrow_gradient if row.kind == "gradient" else FUNCTIONS[row.kind]
    inductor_fusions.clear()
    with choosing(choice, seen):
        run = compiled(row, fn, operands)
    sites = list(inductor_fusions.report())
    if row.kind != "gradient" and not any(s.fusion == "lora" and s.verdict == "fused" for s in sites):
        raise RuntimeError(f"not fused: {[s.reason for s in sites]}")
    return run


# Measuring ---------------------------------------------------------------------------------------------


def reference(row: Row, one: Operands) -> tuple[Tensors, Callable[[Tensors], Tensors]]:
    """The first and the last rows of each output in float64, and how to cut them from outputs."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[0] <= 2 * CHECKED_ROWS else torch.cat([x[:CHECKED_ROWS], x[-CHECKED_ROWS:]])

    def wide(tensors: Tensors) -> Tensors:
        return [t.detach().double() for t in tensors]

    if row.kind == "gradient":
        large, *small = wide(one.x)
        return [SCALE * rows(large.t()) @ b for b in small], lambda outputs: [rows(y) for y in outputs]
    if row.kind == "step":
        # Every gradient of the adapters needs all tokens.
        x, dy = wide(one.x)
        (weight,), (down,), (up,) = wide(one.w), wide(one.a), wide(one.b)
        h, dh = x @ down.t(), SCALE * dy @ up
        exact = [rows(x) @ weight.t() + SCALE * rows(h) @ up.t(), rows(dy) @ weight + rows(dh) @ down]
        exact += [rows(dh.t() @ x), rows(SCALE * dy.t() @ h)]
        return exact, lambda outputs: [rows(y) for y in outputs]
    x = [rows(t.double()) for t in one.x]
    plain = Row(row.kind, row.tokens, row.inner, row.outer, row.rank)
    exact = FUNCTIONS[row.kind](plain, x, wide(one.w), wide(one.a), wide(one.b))
    return exact, lambda outputs: [rows(y) for y in outputs]


class Judge:
    """Says whether a candidate is right."""

    def __init__(self, row: Row, one: Operands, stock_run: Run) -> None:
        self.row, self.one = row, one
        if row.dropout:
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
        return max(errors), ""


def as_graph(row: Row, run: Run, sets: Sequence[Operands], device: str) -> Callable[[], object]:
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


def frozen_run(row: Row) -> Run:
    """The library's linears alone; of a step, with the gradient of the input."""

    def run(one: Operands) -> Tensors:
        if row.kind != "step":
            return frozen(row, one)
        return [F.linear(one.x[0].detach(), one.w[0]), one.x[1] @ one.w[0]]

    return run


def first_choices(row: Row, seen: Seen, arch: int, quick: bool) -> list[Choice]:
    """What to try: configurations of the kernel that does most of the work."""
    from inductor_fusions.fusions.block_mm import heuristics
    from inductor_fusions.fusions.lora import decode, narrow

    found = [Choice()]
    if seen.decode:
        found += [Choice(decode=c) for c in decode.candidates(seen.decode[0], arch)]
    elif seen.block and row.kind != "step":
        wanted = heuristics.candidates(seen.block[0], arch)
        found += [Choice(block=c) for c in wanted[:BLOCK_CHOICES]]
    elif row.kind == "gradient" and seen.narrow:
        found += [Choice(narrow=c) for c in spread(narrow.candidates(seen.narrow[0]), 10)]
    return found[:3] if quick else found


def second_choices(best: Choice, seen: Seen, quick: bool) -> list[Choice]:
    """Configurations of the narrow product beside the best block GEMM."""
    from inductor_fusions.fusions.lora import narrow

    if best.block is None or not seen.narrow:
        return []
    wanted = spread(narrow.candidates(seen.narrow[0]), NARROW_CHOICES)
    return [Choice(block=best.block, narrow=c) for c in wanted][: 2 if quick else None]


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """So many of them, evenly."""
    step = max(1, -(-len(items) // count))
    return list(items[::step])


def measure(row: Row, device: str, options: Json, lock: AbstractContextManager[Any]) -> Json:
    """Compile, check and time every candidate of a row."""
    from inductor_fusions.fusions.block_mm import heuristics

    result: Json = {name: {} for name in ("times_us", "spread", "error", "wrong", "skipped")}
    started = time.monotonic()
    seen, quick = Seen(), options["quick"]
    with torch.set_grad_enabled(row.kind == "step"):
        first = make(row, device, 0)
        arch = heuristics.capability(torch.device("cuda")) if device == "cuda" else 80
        runs: dict[str, Run] = {"stock": stock(row, first, None)}
        judge = Judge(row, first, runs["stock"])
        result["error"]["stock"] = max(judge.stock)
        choices: dict[str, Choice] = {}

        def attempt(choice: Choice) -> None:
            try:
                run = ours(row, first, choice, seen)
                error, wrong = judge.judge(run)
            except Exception as problem:
                if is_fatal(problem):
                    raise
                result["skipped"][choice.name] = one_line(problem)
                return
            result["error"][choice.name] = error
            if wrong:
                result["wrong"][choice.name] = wrong
            else:
                runs[choice.name], choices[choice.name] = run, choice

        attempt(Choice())
        for choice in first_choices(row, seen, arch, quick)[1:]:
            attempt(choice)
        sets = [first, *(make(row, device, s) for s in range(1, count_of_sets(first, device)))]
        result["compile_s"] = round(time.monotonic() - started, 2)
        with lock:
            looked = look(row, device, runs, sets)
        best = min((n for n in choices if n in looked), key=looked.__getitem__, default=None)
        started = time.monotonic()
        if best is not None:
            before = set(choices)
            for choice in second_choices(choices[best], seen, quick):
                attempt(choice)
            fresh = {n: r for n, r in runs.items() if n not in before and n in choices}
            if options["max_autotune"]:
                runs["max_autotune"] = stock(row, first, "max-autotune-no-cudagraphs")
            if row.kind != "gradient":
                runs["frozen"] = frozen_run(row)
            result["compile_s"] = round(result["compile_s"] + time.monotonic() - started, 2)
            with lock:
                started = time.monotonic()
                looked |= look(row, device, fresh, sets)
                time_all(row, device, quick, runs, looked, choices, sets, result)
        result["measure_s"] = round(time.monotonic() - started, 2)
    conclude(row, device, result, choices, seen, len(sets))
    runs.clear()
    sets.clear()
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return result


def count_of_sets(operands: Operands, device: str) -> int:
    """So many sets of operands that they do not fit into the L2 cache together."""
    if device != "cuda":
        return 2
    size = sum(t.numel() * t.element_size() for t in operands.flat())
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(MOST_SETS, round(PAST_L2 * cache / size + 0.5)))


def look(row: Row, device: str, runs: dict[str, Run], sets: Sequence[Operands]) -> dict[str, float]:
    """A first, short measurement of each; seconds of one graph."""
    calls = {}
    for name, run in runs.items():
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            calls[name] = as_graph(row, run, sets, device)
    found = interleave(calls, device, 3, 1e-3) if calls else {}
    return {name: timing.median for name, timing in found.items()}


def time_all(
    row: Row,
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
    calls = {name: as_graph(row, runs[name], sets, device) for name in wanted}
    rounds, block = (3, 1e-3) if quick else (15, 4e-3)
    for name, timing in interleave(calls, device, rounds, block).items():
        result["times_us"][name] = round(timing.median * 1e6 / len(sets), 3)
        result["spread"][name] = round(timing.spread, 4)
    if row.kind == "step":
        best = min((n for n in wanted if n in choices), key=result["times_us"].__getitem__)
        peaks = {name: peak_bytes(lambda n=name: runs[n](sets[0]), device) for name in ("stock", best)}  # type: ignore[misc]
        result["peak_bytes"] = {"stock": peaks["stock"], "ours": peaks[best]}


def conclude(row: Row, device: str, result: Json, choices: dict[str, Choice], seen: Seen, sets: int) -> None:
    """The best candidate, and what a table needs of it."""
    times = result["times_us"]
    best = min((n for n in times if n in choices), key=times.__getitem__, default=None)
    result |= {"sets": sets, "best": best}
    if device == "cuda":
        result["capability"] = list(torch.cuda.get_device_capability())
    if best is None:
        return
    from inductor_fusions.fusions.block_mm import heuristics
    from inductor_fusions.fusions.lora import decode, narrow

    arch = heuristics.capability(torch.device("cuda")) if device == "cuda" else 80
    choice = choices[best]
    if seen.decode:
        shape = seen.decode[0]
        chosen = choice.decode or decode.default(shape, arch)
        result["decode"] = {**shape.key, "config": chosen.to_json()}
    if seen.block and row.kind in ("forward", "backward"):
        posed = seen.block[0]
        chosen = choice.block or heuristics.default(posed, arch)
        result["block"] = {**posed.key, "config": chosen.to_json()}
    if seen.narrow and row.kind != "step":
        thin = choice.narrow
        result["narrow"] = [
            {**narrow.key(shape), "config": (thin or narrow.default(shape)).to_json()}
            for shape in dict.fromkeys(seen.narrow)
        ]


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


def sections(rows: Sequence[Json]) -> dict[str, list[Json]]:
    """What the package looks up: `profit` says how it is read."""
    found: dict[str, list[Json]] = {"lora": [], "block_mm": [], "narrow_mm": [], "lora_decode": []}
    for row in rows:
        if row["dropout"] or row["kind"] == "step" or not row.get("best"):
            continue
        ratio, tokens = round(plain_gain(row), 3), row["tokens"]
        if row["kind"] == "gradient":
            found["narrow_mm"] += [{**thin, "tokens": tokens, "gain": ratio} for thin in row["narrow"]]
            continue
        forward_row = row["kind"] == "forward"
        inner = [row["inner"]] if forward_row else list(row["outer"])
        outer = list(row["outer"]) if forward_row else [row["inner"]]
        ranks = [[row["rank"]] for _ in outer] if forward_row else [[row["rank"]] * len(inner)]
        found["lora"].append(
            {
                "inner": inner, "outer": outer, "ranks": ranks, "dtype": "bfloat16",
                "adapters": row["adapters"], "layout": "t" if forward_row else "n",
                "tokens": tokens, "gain": ratio,
            }
        )  # fmt: skip
        if "decode" in row:
            found["lora_decode"].append({**row["decode"], "tokens": tokens})
        for thin in row.get("narrow", ()):
            found["narrow_mm"].append({**thin, "tokens": tokens, "gain": ratio})
        if "block" in row:
            block = dict(row["block"])
            chosen = block.pop("config")
            block |= {"tokens": tokens, "gain": ratio, "capability": row["capability"]}
            found["block_mm"].append({**block, "config": chosen if ratio >= tables.MARGIN else None})
    return found


def write_table(path: Path, rows: Sequence[Json]) -> None:
    """Put the rows into a device's table, in place of those of the same problems that it has."""
    data = json.loads(path.read_text())

    def same(row: Json) -> str:
        return json.dumps({**row, "gain": 0, "config": None}, sort_keys=True)

    for name, new in sections(rows).items():
        merged = {same(row): row for row in (*data.pop(name, []), *new)}
        if merged:
            data[name] = list(merged.values())
    device_table.write(path, data)


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


def print_summary(rows: Sequence[Json]) -> None:
    """Gain over stock and distance from the frozen linear of every row, and their geometric means."""
    from rich.console import Console
    from rich.table import Table

    columns = ("row", "stock", "autotuned", "frozen", "ours", "stock / ours", "ours / frozen")
    table = Table(*columns, title="microseconds")
    for row in rows:
        times, best = row["times_us"], row["best"]
        cells = [f"{times[n]:.1f}" if n in times else "-" for n in ("stock", "max_autotune", "frozen", best)]
        ratio = f"{times[best] / times['frozen']:.3f}" if best and "frozen" in times else "-"
        plain = f"{times['stock'] / times[best]:.2f}" if best else "-"
        table.add_row(row["key"], *cells, plain, ratio)
    Console(width=150).print(table)


def main() -> None:
    """The command line."""
    parser = tuning.parser("bench.tune_lora", __doc__, table=True)
    parser.add_argument("--no-autotune", action="store_true", help="leave stock's max-autotune out")
    options = parser.parse_args()
    device: str = options.device
    if tuning.wrote_table(options, write_table):
        return
    rows = tuning.select(grid(), options)
    settings = {"quick": options.quick, "max_autotune": not options.no_autotune}
    results, failed = tuning.measure(
        "bench.tune_lora",
        options,
        [[row] for row in rows],
        work,
        lambda group: (group[0], device, settings),
        describe,
        jobs=tuning.processes(options, share=0.85, most=14),
        seconds=30.0,
    )
    print_summary([row for row in results.rows if row["key"] in {r.key for r in rows}])
    tuning.end(failed)


if __name__ == "__main__":
    main()
