"""Measure the pairwise dot products of a DLRM's features against stock, alone and in a model.

    interaction d64 b8192      27 vectors of width 64: all pairs of them, behind the dense features
    dlrm d64 b8192             13 dense and 26 sparse features of width 64, their pairs, two MLPs

each in inference, and with `train` in a forward and a backward. `stock`, `max_autotune` (the same with
mode="max-autotune-no-cudagraphs") and `fused` are timed side by side, by the wall clock and on the device
alone; the result, and every gradient, is compared with float64 first. On a GPU the tiles of the kernels are
searched before, for each shape.

    python -m bench.dot_interaction --out bench/results/dot_interaction_h200.json --budget 400
    python -m bench.dot_interaction --out bench/results/dot_interaction_h200.json --table nvidia_h200
    python -m bench.dot_interaction --quick --device cpu --out /tmp/try.json
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

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
from bench.outer_product import mlp
from inductor_fusions import config
from inductor_fusions.fusions import dot_interaction

#: Samples of a thread block, and its warps.
TILES = tuple(itertools.product((1, 2, 4), (1, 2, 4)))
VARIANTS: dict[str, Json] = {
    "stock": {},
    "max_autotune": {"mode": "max-autotune-no-cudagraphs"},
    "fused": {},
}


class Interaction(nn.Module):
    """The pairs of all features, as the reference implementation of DLRM writes them."""

    def forward(self, dense: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """dense (rows, width), features (rows, number, width) -> (rows, width + number of pairs)."""
        z = torch.bmm(features, features.transpose(1, 2))
        count = features.shape[1]
        i, j = torch.tril_indices(count, count, -1, device=features.device)
        return torch.cat([dense, z[:, i, j]], dim=1)


class DLRM(nn.Module):
    """A recommendation model whose interaction is the dot products of its features.

    Dense features go through a bottom MLP of 13, 512, 256 and `width`; each sparse one is looked up in a
    table of `entries` rows. The top MLP has 1024, 1024, 512, 256 and 1.
    """

    def __init__(
        self,
        width: int = 64,
        sparse: int = 26,
        entries: int = 1000,
        hidden: Sequence[int] = (1024, 1024, 512, 256),
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(entries, width) for _ in range(sparse))
        self.entries = entries
        self.bottom = mlp(13, 512, 256, width)
        self.interaction = Interaction()
        self.top = mlp(width + (sparse + 1) * sparse // 2, *hidden, 1, last=nn.Sigmoid())

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """dense (rows, 13), sparse (rows, number of sparse features) of integers -> (rows, 1)."""
        first = self.bottom(dense)
        found = [table(sparse[:, i] % self.entries) for i, table in enumerate(self.tables)]
        out: torch.Tensor = self.top(self.interaction(first, torch.stack([first, *found], dim=1)))
        return out


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        kind: "interaction" or "dlrm".
        samples: rows of a batch.
        train: with a backward.
        width: of a feature.
        features: how many there are, the dense one among them.
    """

    kind: str
    samples: int
    train: bool
    width: int
    features: int = 27

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.kind} d{self.width} b{self.samples}" + (" train" if self.train else "")


def grid(quick: bool) -> list[Row]:
    """What is measured, the most important first."""
    if quick:
        return [Row(kind, 16, train, 8, 5) for kind in ("interaction", "dlrm") for train in (False, True)]
    found = [
        Row("interaction", samples, train, width)
        for samples in (8192, 2048, 32768, 512)
        for width in (64, 128)
        for train in (False, True)
    ]
    whole = [Row("dlrm", 8192, train, width) for width in (64, 128) for train in (False, True)]
    return [*found[:4], *whole, *found[4:]]


def make(row: Row, device: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its inputs, in bfloat16."""
    torch.manual_seed(0)
    if row.kind == "dlrm":
        small = row.samples < 64
        model: nn.Module = DLRM(
            row.width, row.features - 1, 50 if small else 1000, (16, 8) if small else (1024, 1024, 512, 256)
        )
        inputs: tuple[torch.Tensor, ...] = (
            torch.rand(row.samples, 13).bfloat16(),
            torch.randint(0, 2**31, (row.samples, row.features - 1)),
        )
    else:
        model = Interaction()
        shapes = (row.samples, row.width), (row.samples, row.features, row.width)
        inputs = tuple(torch.randn(shape).bfloat16() for shape in shapes)
    return model.to(device, torch.bfloat16), tuple(t.to(device) for t in inputs)


def search(row: Row, device: str) -> list[int]:
    """The tiles that are fastest on the device: samples and warps of the forward, and of the backward."""
    if device != "cuda":
        return []
    from inductor_fusions.fusions.dot_interaction import kernels

    dense = torch.randn(row.samples, row.width, device=device).bfloat16()
    t = torch.randn(row.samples, row.features, row.width, device=device).bfloat16()
    found: list[int] = []
    dy: Any = None

    def once(tile: tuple[int, int]) -> torch.Tensor:
        if dy is None:
            return kernels.interaction(t, dense, False, False, [*tile, *tile], lambda kernel: kernel)
        return kernels.gradient(dy, t, row.width, False, False, [*tile, *tile], lambda kernel: kernel)

    for _ in range(2 if row.train else 1):
        calls = {f"{tile}": lambda tile=tile: once(tile) for tile in TILES}
        times = interleave(calls, device, 5, 0.005, run_ahead=True)
        found += min(TILES, key=lambda tile: times[f"{tile}"].median)
        dy = once(TILES[0])
    return found if row.train else found * 2


@contextmanager
def as_measured(tiles: list[int], device: str) -> Iterator[None]:
    """The fusion takes these tiles, whatever the tables say."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dot_interaction, "measured", lambda t, site: ("", tiles)))
        if device == "cpu":  # where the operation is what torch makes of it, to try the script
            stack.enter_context(mock.patch.object(dot_interaction, "check_device", lambda t: None))
        yield


def measure(row: Row, device: str, quick: bool) -> Json:
    """One row of the results."""
    model, inputs = make(row, device)
    leaves = [t.requires_grad_(row.train) for t in inputs if t.is_floating_point()]
    with torch.no_grad():
        cotangent = torch.randn_like(model(*inputs))
    wanted = [*leaves, *model.parameters()]

    def step(
        fn: Callable[..., Any], args: Sequence[Any] = inputs, to: Any = cotangent, of: Any = wanted
    ) -> list[torch.Tensor]:
        with torch.set_grad_enabled(row.train):
            out = fn(*args)
        return [out.detach(), *torch.autograd.grad(out, of, to)] if row.train else [out]

    tiles = search(row, device)
    calls: dict[str, Callable[[], list[torch.Tensor]]] = {}
    compile_s, sites = {}, 0
    for name, options in VARIANTS.items():
        if quick and name == "max_autotune":  # minutes on a CPU
            continue
        torch._dynamo.reset()
        inductor_fusions.clear()
        start = time.perf_counter()
        settings = {"policy": "profitable"} if name == "fused" else {"enabled": False}
        with config.patch(**settings), fresh_cache(), as_measured(tiles, device):
            compiled = torch.compile(copy.copy(model), **options)
            step(compiled)
        compile_s[name] = round(time.perf_counter() - start, 2)
        sites = inductor_fusions.report().count("fused", "dot_interaction")
        calls[name] = lambda compiled=compiled: step(compiled)
    wide = copy.deepcopy(model).double()
    args = [t.detach().double().requires_grad_(row.train) if t.is_floating_point() else t for t in inputs]
    exact = step(
        wide, args, cotangent.double(), [*(t for t in args if t.is_floating_point()), *wide.parameters()]
    )
    error = {
        name: max(relative_error(x, z) for x, z in zip(call(), exact, strict=True))
        for name, call in calls.items()
    }
    del exact, wide, args
    rounds, block = (3, 0.001) if quick else (9, 0.03)
    times = {"times_us": interleave(calls, device, rounds, block)}
    if device == "cuda":
        times["device_us"] = interleave(calls, device, rounds, block, run_ahead=True)
    return {
        "key": row.key, "kind": row.kind, "samples": row.samples, "train": row.train, "width": row.width,
        "features": row.features, "dense": True, "dtype": "bfloat16", "fused": sites, "tiles": tiles,
        **{
            clock: {name: round(1e6 * t.median, 2) for name, t in found.items()}
            for clock, found in times.items()
        },
        "spread": {name: round(t.spread, 4) for name, t in times["times_us"].items()},
        "peak_bytes": {name: peak_bytes(call, device) for name, call in calls.items()},
        "error": error, "correct": error["fused"] <= error_limit(error["stock"], torch.bfloat16),
        "compile_s": compile_s,
    }  # fmt: skip


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


def table(path: Path, rows: list[Json]) -> None:
    """Write the rows of interactions alone into the table of a device, in place of those that it has."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"schema": 1, "attention": []}
    names = ("dtype", "train", "features", "width", "dense", "samples")
    data["dot_interaction"] = [
        {**{name: row[name] for name in names}, "gain": gain(row), "tiles": row["tiles"]}
        for row in rows
        if row["kind"] == "interaction" and row["fused"]
    ]
    device_table.write(path, data)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.dot_interaction", description=__doc__.split("\n\n")[0]
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
    results = Results(
        options.out, environment(options.device, "bench.dot_interaction"), key=lambda r: r["key"]
    )
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
                f"{row.key}: {found['times_us']}, {gain(found)}x, correct {found['correct']}, "
                f"fused {found['fused']}, tiles {found['tiles']}"
            )


if __name__ == "__main__":
    main()
