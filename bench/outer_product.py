"""Measure a linear on a full outer product against stock, alone and in a DLRM.

    linear n432->512 b2048         all pairs of 432 features, read by a linear of 512 outputs
    dlrm b2048                     13 dense and 26 sparse features of width 16, all pairs of their 432, an MLP

in bfloat16, and in float32 where TF32 is allowed; each in inference, and with `train` in a forward and a
backward. `stock`, `max_autotune` (the same with mode="max-autotune-no-cudagraphs") and `fused` are timed
side by side, by the wall clock and on the device alone; the result, and every gradient, is compared with
float64 first.

    python -m bench.outer_product --out bench/results/outer_product_h200.json --budget 300
    python -m bench.outer_product --out bench/results/outer_product_h200.json --table nvidia_h200
    python -m bench.outer_product --quick --device cpu --out /tmp/try.json
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bench import device_table, interactions, tuning
from bench.common import DTYPES, Json
from inductor_fusions import config


class Pairs(nn.Module):
    """All products of two features of one row: (rows, n) -> (rows, n * n)."""

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return (z[:, :, None] * z[:, None, :]).flatten(1)


class DLRM(interactions.DLRM):
    """A recommendation model whose interaction is the full outer product of its features."""

    def __init__(
        self, width: int = 16, sparse: int = 26, entries: int = 1000, hidden: Sequence[int] = (512, 256)
    ) -> None:
        super().__init__(sparse, entries, (512, 256, 64, width), (((sparse + 1) * width) ** 2, *hidden))
        self.pairs = Pairs()

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """As of `features` -> (rows, 1)."""
        out: torch.Tensor = self.top(self.pairs(torch.cat(self.features(dense, sparse), dim=1)))
        return out


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        kind: "linear" or "dlrm".
        rows: samples.
        train: with a backward.
        features, columns: of the linear.
        dtype: "bfloat16" or "float32".
    """

    kind: str
    rows: int
    train: bool
    features: int = 432
    columns: int = 512
    dtype: str = "bfloat16"

    @property
    def key(self) -> str:
        """Its name."""
        sizes = f" n{self.features}->{self.columns}" if self.kind == "linear" else ""
        dtype = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        return f"{self.kind}{sizes} b{self.rows}{dtype}" + (" train" if self.train else "")


def grid(quick: bool) -> list[Row]:
    """What is measured, the most important first."""
    if quick:
        return [Row("linear", 32, train, 24, 16) for train in (False, True)]
    kinds = [
        Row(kind, rows, train, dtype=dtype)
        for rows in (2048, 128)
        for dtype in ("float32", "bfloat16")
        for train in (False, True)
        for kind in ("linear", "dlrm")
    ]
    more = [
        Row("linear", rows, train, dtype=dtype)
        for rows in (512, 8192)
        for dtype in ("float32", "bfloat16")
        for train in (False, True)
    ]
    return [*kinds, *more]


def make(row: Row, device: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its inputs."""
    torch.manual_seed(0)
    dtype = DTYPES[row.dtype]
    if row.kind == "dlrm":
        model: nn.Module = DLRM()
        dense, sparse = interactions.draw(row.rows, 26)
        inputs: tuple[torch.Tensor, ...] = dense.to(dtype), sparse
    else:
        model = nn.Sequential(Pairs(), nn.Linear(row.features**2, row.columns))
        inputs = (torch.randn(row.rows, row.features).to(dtype),)
    return model.to(device, dtype), tuple(t.to(device) for t in inputs)


def measure(row: Row, device: str, quick: bool) -> Json:
    """One row of the results."""
    torch.set_float32_matmul_precision("high")
    model, inputs = make(row, device)
    with torch.no_grad():
        cotangent = torch.randn_like(model(*inputs)) if row.train else None
    inputs[0].requires_grad_(row.train)
    found = interactions.measure(
        model, lambda call: interactions.step(call, inputs, model, cotangent),
        lambda: reference(row, model, inputs, cotangent), DTYPES[row.dtype], "outer_product_linear", device,
        quick, interactions.variants(lambda: config.patch(policy="always"), quick),
    )  # fmt: skip
    return {
        "key": row.key, "kind": row.kind, "rows": row.rows, "train": row.train, "p": row.features,
        "q": row.features, "columns": row.columns, "dtype": row.dtype, **found,
    }  # fmt: skip


def reference(
    row: Row, model: nn.Module, inputs: Sequence[torch.Tensor], cotangent: torch.Tensor | None
) -> interactions.Tensors:
    """Result and gradients in float64, in slices of 256 samples, since a row of products is wide."""
    wide = copy.deepcopy(model).double()
    parts = []
    for start in range(0, row.rows, 256):
        rows = slice(start, start + 256)
        first, *rest = [t[rows].detach() for t in inputs]
        given = [first.double().requires_grad_(row.train), *rest]
        parts.append(
            interactions.step(wide, given, wide, None if cotangent is None else cotangent[rows].double())
        )
    of_rows, of_weights = (2, len(parts[0])) if row.train else (1, 1)
    found = list(zip(*parts, strict=True))
    return [*map(torch.cat, found[:of_rows]), *(sum(each) for each in found[of_rows:of_weights])]


def table(path: Path, rows: list[Json]) -> None:
    """Write the rows of linears alone into the table of a device, in place of those that it has."""
    names = ("dtype", "train", "p", "q", "columns", "rows")
    alone = [row for row in rows if row["kind"] == "linear"]
    device_table.put(path, "outer_product_linear", interactions.table_rows(alone, names))


def main() -> None:
    """The command line."""
    tuning.script("bench.outer_product", __doc__, grid, measure, interactions.describe, table)


if __name__ == "__main__":
    main()
