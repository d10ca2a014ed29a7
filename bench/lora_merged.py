"""Measure an adapter that is merged into its weight in each step, against two products.

    merged 2048->2048 r16 m4096 train      F.linear(x, w + 2 * (b @ a)), with a frozen w
    alone 2048->2048 r16 m4096             F.linear(x, 2 * (b @ a))

in bfloat16, in inference, and with `train` in a forward and a backward. Stock and the package are timed side
by side, by the wall clock and on the device alone; the result, and every gradient, is compared with float64
first.

    python -m bench.lora_merged --out bench/results/lora_merged_h200.json --budget 300
    python -m bench.lora_merged --out bench/results/lora_merged_h200.json --table nvidia_h200
    python -m bench.lora_merged --quick --device cpu --out /tmp/try.json
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from bench import device_table, interactions, tuning
from bench.common import Json
from inductor_fusions import config
from inductor_fusions.fusions.lora import merged

#: What a row of the table has of a problem.
COLUMNS = ("inner", "outer", "rank", "base", "train", "dtype", "tokens")


@dataclass(frozen=True)
class Row:
    """One measurement: widths, rank, rows of x; with a frozen weight or not, with a backward or not."""

    inner: int
    outer: int
    rank: int
    tokens: int
    base: bool
    train: bool
    dtype: str = "bfloat16"

    @property
    def key(self) -> str:
        """Its name."""
        kind = "merged" if self.base else "alone"
        return f"{kind} {self.inner}->{self.outer} r{self.rank} m{self.tokens}" + " train" * self.train


def grid(quick: bool) -> list[Row]:
    """What is measured, the most important first."""
    if quick:
        return [Row(96, 64, 4, 32, base, train) for base in (True, False) for train in (True, False)]
    wide = [(2048, 2048), (4096, 4096), (1024, 1024), (4096, 14336), (14336, 4096)]
    between = [(1536, 1536), (3072, 3072), (2048, 8192), (8192, 2048)]
    return [
        *(Row(*widths, 16, tokens, True, True) for tokens in (4096, 512) for widths in (*wide, *between)),
        *(Row(*widths, 16, tokens, True, False) for widths in wide[:2] for tokens in (1, 16, 512, 4096)),
        *(Row(2048, 2048, 16, tokens, False, train) for tokens in (4096, 512) for train in (True, False)),
        *(Row(4096, 4096, 64, 4096, True, train) for train in (True, False)),
        *(Row(*widths, 16, 16, True, True) for widths in wide[:2]),
        *(Row(*wide[2], 16, tokens, True, False) for tokens in (1, 512, 4096)),
        *(Row(*widths, 16, tokens, True, False) for widths in between[1:] for tokens in (1, 512)),
        Row(2048, 2048, 16, 1, False, False),
        *(Row(*widths, 16, 16384, True, True) for widths in wide[:3]),
    ]


class Merged(nn.Module):
    """A linear whose weight is computed in each step."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        weight = torch.randn(row.outer, row.inner) / row.inner**0.5
        self.register_buffer("weight", weight if row.base else None)
        self.a = nn.Parameter(torch.randn(row.rank, row.inner) / row.inner**0.5)
        self.b = nn.Parameter(torch.randn(row.outer, row.rank) / row.rank**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = 2.0 * (self.b @ self.a)
        return F.linear(x, change if self.weight is None else self.weight + change)


def measure(row: Row, device: str, quick: bool) -> Json:
    """One row of the results."""
    torch.manual_seed(0)
    with torch.device(device):
        module = Merged(row).bfloat16()
        x = torch.randn(row.tokens, row.inner).bfloat16().requires_grad_(row.train)
        cotangent = torch.randn(row.tokens, row.outer).bfloat16() if row.train else None

    def once(call: Callable[..., Any]) -> interactions.Tensors:
        return interactions.step(call, (x,), module, cotangent)

    def exact() -> interactions.Tensors:
        wide, given = copy.deepcopy(module).double(), x.detach().double().requires_grad_(row.train)
        return interactions.step(wide, (given,), wide, None if cotangent is None else cotangent.double())

    variants = interactions.variants(lambda: config.patch(policy="profitable"), True)
    anywhere = mock.patch.object(merged, "check_device", lambda _: None)
    with mock.patch.object(merged.MergedWeight, "decided", lambda *_: ""), anywhere:
        found = interactions.measure(
            module, once, exact, torch.bfloat16, "lora_input", device, quick, variants
        )
    return {"key": row.key, **asdict(row), **found}


def table(path: Path, rows: list[Json]) -> None:
    """Write the rows into the table of a device, in place of those that it has."""
    device_table.put(path, "lora_merged", interactions.table_rows(rows, COLUMNS))


def main() -> None:
    """The command line."""
    tuning.script("bench.lora_merged", __doc__, grid, measure, interactions.describe, table)


if __name__ == "__main__":
    main()
