"""Measure a linear on a full outer product against stock, alone and in a DLRM.

    linear n432->512 b2048         all pairs of 432 features, read by a linear of 512 outputs
    dlrm b2048                     13 dense and 26 sparse features of width 16, all pairs of their 432, an MLP

each in inference, and with `train` in a forward and a backward. `stock` and `fused` are timed side by side;
the result, and every gradient, is compared with float64 first.

    python -m bench.outer_product --out bench/results/outer_product_h200.json --budget 300
    python -m bench.outer_product --out bench/results/outer_product_h200.json --table nvidia_h200
    python -m bench.outer_product --quick --device cpu --out /tmp/try.json
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import inductor_fusions
from bench import device_table
from bench.common import (
    Budget,
    Json,
    Progress,
    Results,
    environment,
    error_limit,
    fresh_cache,
    interleave,
    one_line,
    peak_bytes,
    relative_error,
)
from inductor_fusions import config


def mlp(*widths: int, last: nn.Module | None = None) -> nn.Sequential:
    """Linears with a ReLU behind each; behind the last one `last`, or a ReLU."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1], last if last is not None else nn.ReLU())


class Pairs(nn.Module):
    """All products of two features of one row: (rows, n) -> (rows, n * n)."""

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return (z[:, :, None] * z[:, None, :]).flatten(1)


class DLRM(nn.Module):
    """A recommendation model whose interaction is the full outer product of its features.

    Dense features go through a bottom MLP of 13, 512, 256, 64 and `width`; each sparse one is hashed by a
    modulus into a table of `entries` rows. The top MLP has 512, 256 and 1.

    Args:
        width: of an embedding.
        sparse: how many sparse features there are.
        entries: rows of each table.
        hidden: widths of the top MLP.
    """

    def __init__(
        self, width: int = 16, sparse: int = 26, entries: int = 1000, hidden: tuple[int, int] = (512, 256)
    ) -> None:
        super().__init__()
        self.entries = entries
        self.tables = nn.ModuleList(nn.Embedding(entries, width) for _ in range(sparse))
        self.bottom = mlp(13, 512, 256, 64, width)
        self.pairs = Pairs()
        count = (sparse + 1) * width
        self.top = mlp(count * count, *hidden, 1, last=nn.Sigmoid())

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """dense (rows, 13), sparse (rows, number of sparse features) of integers -> (rows, 1)."""
        found = [table(sparse[:, i] % self.entries) for i, table in enumerate(self.tables)]
        features = torch.cat([self.bottom(dense), *found], dim=1)
        out: torch.Tensor = self.top(self.pairs(features))
        return out


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        kind: "linear" or "dlrm".
        rows: samples.
        train: with a backward.
        features, columns: of the linear.
    """

    kind: str
    rows: int
    train: bool
    features: int = 432
    columns: int = 512

    @property
    def key(self) -> str:
        """Its name."""
        sizes = f" n{self.features}->{self.columns}" if self.kind == "linear" else ""
        return f"{self.kind}{sizes} b{self.rows}" + (" train" if self.train else "")


def grid(quick: bool) -> list[Row]:
    """What is measured, the most important first."""
    if quick:
        return [Row("linear", 32, train, 24, 16) for train in (False, True)]
    kinds = [
        Row(kind, rows, train)
        for rows in (2048, 128)
        for train in (False, True)
        for kind in ("linear", "dlrm")
    ]
    return [*kinds, *(Row("linear", rows, train) for rows in (512, 8192) for train in (False, True))]


def make(row: Row, device: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its inputs, in bfloat16."""
    torch.manual_seed(0)
    if row.kind == "dlrm":
        model: nn.Module = DLRM()
        inputs: tuple[torch.Tensor, ...] = (
            torch.rand(row.rows, 13).bfloat16(), torch.randint(0, 2**31, (row.rows, 26)),
        )  # fmt: skip
    else:
        model = nn.Sequential(Pairs(), nn.Linear(row.features**2, row.columns))
        inputs = (torch.randn(row.rows, row.features).bfloat16(),)
    return model.to(device, torch.bfloat16), tuple(t.to(device) for t in inputs)


def measure(row: Row, device: str, quick: bool) -> Json:
    """One row of the results."""
    model, inputs = make(row, device)
    leaf = inputs[0].requires_grad_(row.train)
    with torch.no_grad():
        cotangent = torch.randn_like(model(*inputs))
    wanted = [leaf, *model.parameters()]

    def step(fn: Callable[..., Any], cotangent: torch.Tensor = cotangent) -> list[torch.Tensor]:
        with torch.set_grad_enabled(row.train):
            out = fn(*inputs)
        return [out, *torch.autograd.grad(out, wanted, cotangent)] if row.train else [out]

    calls, sites, compile_s = {}, 0, 0.0
    for name in ("stock", "fused"):
        settings = {"enabled": False} if name == "stock" else {"policy": "always"}
        torch._dynamo.reset()
        inductor_fusions.clear()
        start = time.perf_counter()
        with config.patch(**settings), fresh_cache():
            compiled = torch.compile(copy.copy(model))
            step(compiled)
        compile_s = max(compile_s, time.perf_counter() - start)
        sites = inductor_fusions.report().count("fused", "outer_product_linear")
        calls[name] = lambda compiled=compiled: step(compiled)
    rows_of_result = {name: call() for name, call in calls.items()}
    exact = reference(row, device)
    error = {
        name: max(relative_error(x, z) for x, z in zip(found, exact, strict=True))
        for name, found in rows_of_result.items()
    }
    del rows_of_result, exact
    times = interleave(calls, device, 3 if quick else 9, 0.001 if quick else 0.05)
    return {
        "key": row.key, "kind": row.kind, "rows": row.rows, "train": row.train, "p": row.features,
        "q": row.features, "columns": row.columns, "dtype": "bfloat16", "fused": sites,
        "times_us": {name: round(1e6 * t.median, 2) for name, t in times.items()},
        "spread": {name: round(t.spread, 4) for name, t in times.items()},
        "peak_bytes": {name: peak_bytes(call, device) for name, call in calls.items()},
        "error": error, "correct": error["fused"] <= error_limit(error["stock"], torch.bfloat16),
        "compile_s": round(compile_s, 2),
    }  # fmt: skip


def reference(row: Row, device: str) -> list[torch.Tensor]:
    """Result and gradients in float64, in slices of 256 samples, since a row of products is wide."""
    model, inputs = make(row, device)
    with torch.no_grad():
        shape = model(*inputs)
    torch.manual_seed(0)
    make(row, device)  # the same random numbers as in `measure`
    cotangent = torch.randn_like(shape).double()
    wide = model.double()
    outputs, grads = [], []
    sums: list[torch.Tensor] = [torch.zeros_like(p) for p in wide.parameters()] if row.train else []
    for start in range(0, row.rows, 256):
        part = [
            t[start : start + 256].double() if t.is_floating_point() else t[start : start + 256]
            for t in inputs
        ]
        part[0].requires_grad_(row.train)
        with torch.set_grad_enabled(row.train):
            out = wide(*part)
        outputs.append(out.detach())
        if row.train:
            first, *found = torch.autograd.grad(
                out, [part[0], *wide.parameters()], cotangent[start : start + 256]
            )
            grads.append(first)
            for total, one in zip(sums, found, strict=True):
                total += one
    return [torch.cat(outputs), *([torch.cat(grads), *sums] if row.train else [])]


def table(path: Path, rows: list[Json]) -> None:
    """Write the rows of linears alone into the table of a device, in place of those that it has."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"schema": 1, "attention": []}
    data["outer_product_linear"] = [
        {
            **{name: row[name] for name in ("dtype", "train", "p", "q", "columns", "rows")},
            "gain": round(row["times_us"]["stock"] / row["times_us"]["fused"], 3) if row["correct"] else 0.0,
        }
        for row in rows
        if row["kind"] == "linear" and row["fused"]
    ]
    device_table.write(path, data)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.outer_product", description=__doc__.split("\n\n")[0]
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, required=True, help="JSON file; rows that it has are skipped")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument("--only", type=re.compile, help="only rows whose name matches this expression")
    parser.add_argument("--budget", type=float, help="seconds after which no row is started")
    parser.add_argument("--quick", action="store_true", help="small sizes and few blocks, to try the script")
    parser.add_argument("--table", help="write configs/devices/TABLE.json from the file and stop")
    options = parser.parse_args()
    if options.table:
        rows = json.loads(options.out.read_text())["rows"]
        table(Path("configs/devices") / f"{options.table}.json", rows)
        return
    budget = Budget(options.budget)
    results = Results(options.out, environment(options.device, "bench.outer_product"), key=lambda r: r["key"])
    wanted = [row for row in grid(options.quick) if not options.only or options.only.search(row.key)]
    todo = [row for row in wanted if row.key not in results]
    slowest = 5.0
    with Progress(len(todo)) as progress:
        for row in todo:
            if budget.left < 1.5 * slowest:
                break
            start = time.monotonic()
            try:
                found = measure(row, options.device, options.quick)
            except torch.OutOfMemoryError as error:
                progress.step(f"{row.key}: {one_line(error)}")
                continue
            finally:
                slowest = max(slowest, time.monotonic() - start)
            results.append(found)
            progress.step(
                f"{row.key}: {found['times_us']}, correct {found['correct']}, fused {found['fused']}"
            )


if __name__ == "__main__":
    main()
