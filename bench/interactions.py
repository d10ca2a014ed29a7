"""What the measurements of interactions share: a small module, stock, autotuned and fused, in one process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import inductor_fusions
from bench.common import (
    Json,
    apart,
    both_clocks,
    compiled_only,
    error_limit,
    fresh_cache,
    peak_bytes,
    relative_error,
)
from inductor_fusions import config
from inductor_fusions.checking.budget import worst

Tensors = list[torch.Tensor]

#: Options of `torch.compile`.
VARIANTS: dict[str, Json] = {
    "stock": {},
    "max_autotune": {"mode": "max-autotune-no-cudagraphs"},
    "fused": {},
}


def mlp(*widths: int, last: nn.Module | None = None) -> nn.Sequential:
    """Linears with a ReLU behind each; behind the last one `last`, or a ReLU."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last if last is not None else nn.ReLU())


def step(call: Callable[..., Any], inputs: Sequence[torch.Tensor], module: nn.Module, to: Any) -> Tensors:
    """The result; with a cotangent, the gradients of the floating inputs and of the parameters as well."""
    with torch.set_grad_enabled(to is not None):
        out = call(*inputs)
    if to is None:
        return [out]
    wanted = [t for t in inputs if t.is_floating_point()]
    return [out.detach(), *torch.autograd.grad(out, [*wanted, *module.parameters()], to)]


def measure(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    cotangent: torch.Tensor | None,
    exact: Tensors,
    fusion: str,
    device: str,
    quick: bool,
    fused: Callable[[], AbstractContextManager[None]] = nullcontext,
    variants: Mapping[str, Json] = VARIANTS,
) -> Json:
    """Compile each variant, compare it with float64, and time them in turns.

    Args:
        module, inputs: what is measured. In training, floating inputs require a gradient.
        cotangent: of the result, in training; None in inference.
        exact: what `step` gives in float64.
        fusion: whose sites are counted.
        device: "cuda" or "cpu".
        quick: short blocks, and nothing is autotuned.
        fused: what the fused variant is compiled in, beside the fusions.
        variants: options of `torch.compile`, by name.

    Returns:
        Times by the wall clock and, on a GPU, on the device alone; spreads, peak memory, errors, seconds of
        compiling, and the number of fused sites.
    """
    calls: dict[str, Callable[[], Tensors]] = {}
    compile_s, sites = {}, 0
    torch._dynamo.reset()
    for name, options in variants.items():
        if quick and name == "max_autotune":  # minutes on a CPU
            continue
        inductor_fusions.clear()
        start = time.perf_counter()
        with config.patch(enabled=name == "fused"), fresh_cache(), fused():
            compiled = torch.compile(apart(module, name), **options)
            step(compiled, inputs, module, cotangent)
        compile_s[name] = round(time.perf_counter() - start, 2)
        found = inductor_fusions.report().count("fused", fusion)
        if name == "fused":
            sites = found
        elif found:
            raise AssertionError(f"{name} was fused")
        calls[name] = lambda compiled=compiled: step(compiled, inputs, module, cotangent)
    with compiled_only():
        error = {
            name: worst(relative_error(x, z) for x, z in zip(call(), exact, strict=True))
            for name, call in calls.items()
        }
        rounds, block = (3, 0.001) if quick else (9, 0.03)
        times = both_clocks(calls, device, rounds, block)
        peak = {name: peak_bytes(call, device) for name, call in calls.items()}
    return {
        "fused": sites, **times, "peak_bytes": peak, "error": error,
        "correct": error["fused"] <= error_limit(error["stock"], next(module.parameters(), inputs[0]).dtype),
        "compile_s": round(sum(compile_s.values()), 2), "compile_s_of": compile_s,
    }  # fmt: skip


def describe(row: Json) -> str:
    """A row in one line."""
    tiles = f", tiles {row['tiles']}" if "tiles" in row else ""
    return f"{row['times_us']}, {gain(row)}x, correct {row['correct']}, fused {row['fused']}{tiles}"


def table_rows(rows: Sequence[Json], problem: Sequence[str], config: Sequence[str] = ()) -> list[Json]:
    """What the table of a device has of rows that were fused: the columns of their problem, the gain, and the
    configuration."""
    return [
        {**{n: row[n] for n in problem}, "gain": gain(row), **{n: row[n] for n in config}}
        for row in rows
        if row["fused"]
    ]


def gain(row: Json) -> float:
    """The time of stock's best over that fused, the worse one of both clocks; 0 where it is wrong."""
    if not row["correct"] or not row["fused"]:
        return 0.0
    ratios = [
        min(times[name] for name in times if name != "fused") / times["fused"]
        for times in (row["times_us"], row.get("device_us"))
        if times
    ]
    return round(min(ratios), 3)
