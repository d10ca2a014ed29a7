"""What the measurements of interactions share: a small module, stock, autotuned and fused, in one process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(frozen=True)
class Variant:
    """How a module is compiled.

    Attributes:
        context: what it is compiled in.
        options: of `torch.compile`.
    """

    context: Callable[[], AbstractContextManager[Any]] = lambda: config.patch(enabled=False)
    options: Json = field(default_factory=dict)


def variants(fused: Callable[[], AbstractContextManager[Any]], quick: bool) -> dict[str, Variant]:
    """Stock, autotuned unless it is quick (minutes on a CPU), and fused."""
    autotuned = {} if quick else {"max_autotune": Variant(options={"mode": "max-autotune-no-cudagraphs"})}
    return {"stock": Variant(), **autotuned, "fused": Variant(fused)}


def mlp(*widths: int, last: nn.Module | None = None) -> nn.Sequential:
    """Linears with a ReLU behind each; behind the last one `last`, or a ReLU."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last if last is not None else nn.ReLU())


class DLRM(nn.Module):
    """A recommendation model without the interaction of its features, which `forward` of a subclass has.

    Args:
        sparse: how many sparse features there are, each hashed by a modulus into a table of `entries` rows.
        bottom: widths of the MLP behind the 13 dense features; the last one is that of all features.
        top: widths of the MLP behind the interaction, its input first and without the 1 at the end.
    """

    def __init__(self, sparse: int, entries: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        self.entries = entries
        self.tables = nn.ModuleList(nn.Embedding(entries, bottom[-1]) for _ in range(sparse))
        self.bottom = mlp(13, *bottom)
        self.top = mlp(*top, 1, last=nn.Sigmoid())

    def features(self, dense: torch.Tensor, sparse: torch.Tensor) -> Tensors:
        """dense (rows, 13), sparse (rows, number of sparse features) of integers -> each (rows, width)."""
        first = self.bottom(dense)
        return [first, *(table(sparse[:, i] % self.entries) for i, table in enumerate(self.tables))]


def draw(rows: int, sparse: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of a DLRM: dense features (rows, 13), and integers (rows, sparse)."""
    return torch.rand(rows, 13), torch.randint(0, 2**31, (rows, sparse))


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
    once: Callable[[Callable[..., Any]], Tensors],
    exact: Callable[[], Tensors],
    dtype: torch.dtype,
    fusion: str,
    device: str,
    quick: bool,
    chosen: Mapping[str, Variant],
) -> Json:
    """Compile each variant, time them in turns, and compare them with the exact results.

    Args:
        once: calls a compiled one, and gives results and gradients.
        exact: what that gives in float64; asked when nothing compiled is held any more.
        device: "cuda" or "cpu".
        chosen: by name, "stock" and "fused" among them.

    Returns:
        Times by the wall clock and, on a GPU, on the device alone; spreads, peak memory, errors, seconds of
        compiling, and the number of fused sites.
    """
    calls: dict[str, Callable[[], Tensors]] = {}
    compile_s, sites = {}, {}
    torch._dynamo.reset()
    for name, variant in chosen.items():
        inductor_fusions.clear()
        start = time.perf_counter()
        with variant.context(), fresh_cache():
            compiled = torch.compile(apart(module, name), **variant.options)
            once(compiled)
        compile_s[name] = round(time.perf_counter() - start, 2)
        sites[name] = inductor_fusions.report().count("fused", fusion)
        calls[name] = partial(once, compiled)
    if any(count for name, count in sites.items() if name != "fused"):
        raise AssertionError(f"fused: {sites}")
    with compiled_only():
        found = {name: call() for name, call in calls.items()}
        times = both_clocks(calls, device, *((3, 0.001) if quick else (9, 0.03)))
        peak = {name: peak_bytes(call, device) for name, call in calls.items()}
    calls.clear()
    torch._dynamo.reset()
    true = exact()
    error = {
        name: worst(relative_error(x, z) for x, z in zip(results, true, strict=True))
        for name, results in found.items()
    }
    return {
        "fused": sites["fused"], **times, "peak_bytes": peak, "error": error,
        "correct": error["fused"] <= error_limit(error["stock"], dtype),
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
