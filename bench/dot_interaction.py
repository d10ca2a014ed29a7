"""Measure the pairwise dot products of a DLRM's features against stock, alone and in a model.

    interaction d64 b8192      27 vectors of width 64: all pairs of them, behind the dense features
    given d64 b8192            the same pairs, whose indices are in a buffer
    gathered d64 b8192         the same, by two gathers of the features, a product and a sum
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

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench import device_table, interactions, tuning
from bench.common import Json, interleave
from inductor_fusions.fusions import dot_interaction

#: Samples of a thread block, and its warps.
TILES = tuple(itertools.product((1, 2, 4), (1, 2, 4)))


class Interaction(nn.Module):
    """The pairs of all features, as the reference implementation of DLRM writes them."""

    def forward(self, dense: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """dense (rows, width), features (rows, number, width) -> (rows, width + number of pairs)."""
        z = torch.bmm(features, features.transpose(1, 2))
        count = features.shape[1]
        i, j = torch.tril_indices(count, count, -1, device=features.device)
        return torch.cat([dense, z[:, i, j]], dim=1)


class Given(nn.Module):
    """The same pairs: which they are is in a buffer, as torchrec's InteractionArch has it."""

    def __init__(self, count: int = 27) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.tril_indices(count, count, -1), persistent=False)

    def forward(self, dense: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """As `Interaction`."""
        z = torch.bmm(features, features.transpose(1, 2))
        return torch.cat([dense, z[:, self.pairs[0], self.pairs[1]]], dim=1)


class Gathered(Given):
    """The same pairs without the matrix of all products, as product-based networks write them."""

    def forward(self, dense: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """As `Interaction`."""
        first, second = features[:, self.pairs[0]], features[:, self.pairs[1]]
        return torch.cat([dense, (first * second).sum(-1)], dim=1)


#: Modules of features, and what their rows of a table have as `pairs`.
ALONE: dict[str, tuple[type[nn.Module], str]] = {
    "interaction": (Interaction, "triangle"), "given": (Given, "given"), "gathered": (Gathered, "gathered"),
}  # fmt: skip


class DLRM(interactions.DLRM):
    """A recommendation model whose interaction is the dot products of its features."""

    def __init__(
        self,
        width: int = 64,
        sparse: int = 26,
        entries: int = 1000,
        hidden: Sequence[int] = (1024, 1024, 512, 256),
    ) -> None:
        top = width + (sparse + 1) * sparse // 2, *hidden
        super().__init__(sparse, entries, (512, 256, width), top)
        self.interaction = Interaction()

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """As of `features` -> (rows, 1)."""
        found = self.features(dense, sparse)
        out: torch.Tensor = self.top(self.interaction(found[0], torch.stack(found, dim=1)))
        return out


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        kind: "dlrm", or one of `ALONE`.
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
        return [Row(kind, 16, train, 8, 5) for kind in (*ALONE, "dlrm") for train in (False, True)]
    found = [
        Row(kind, samples, train, width)
        for samples in (8192, 2048, 32768, 512)
        for kind in ALONE
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
        dense, sparse = interactions.draw(row.samples, row.features - 1)
        inputs: tuple[torch.Tensor, ...] = dense.bfloat16(), sparse
    else:
        made, _ = ALONE[row.kind]
        model = Interaction() if made is Interaction else made(row.features)
        shapes = (row.samples, row.width), (row.samples, row.features, row.width)
        inputs = tuple(torch.randn(shape).bfloat16() for shape in shapes)
    return model.to(device, torch.bfloat16), tuple(t.to(device) for t in inputs)


def search(row: Row, device: str) -> list[int]:
    """The tiles that are fastest on the device: samples and warps of the forward, and of the backward."""
    if device != "cuda":
        return []
    from inductor_fusions.fusions.dot_interaction import kernels
    from inductor_fusions.fusions.dot_interaction.op import Pairs, Triangle

    i, j = torch.tril_indices(row.features, row.features, -1, device=device)
    pairs: Pairs = i * row.features + j if row.kind in ("given", "gathered") else Triangle(False, False)
    dense = torch.randn(row.samples, row.width, device=device).bfloat16()
    t = torch.randn(row.samples, row.features, row.width, device=device).bfloat16()
    found: list[int] = []
    dy: Any = None

    def once(tile: tuple[int, int]) -> torch.Tensor:
        if dy is None:
            return kernels.interaction(t, dense, pairs, [*tile, *tile])
        return kernels.gradient(dy, t, row.width, pairs, [*tile, *tile])

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
        measured = lambda t, site, pairs: ("", tiles)  # noqa: E731
        stack.enter_context(mock.patch.object(dot_interaction, "measured", measured))
        if device == "cpu":  # where the operation is what torch makes of it, to try the script
            stack.enter_context(mock.patch.object(dot_interaction, "check_kernel", lambda t: None))
        yield


def measure(row: Row, device: str, quick: bool) -> Json:
    """One row of the results."""
    model, inputs = make(row, device)
    with torch.no_grad():
        cotangent = torch.randn_like(model(*inputs)) if row.train else None
    tiles = search(row, device)
    args = [t.double() if t.is_floating_point() else t for t in inputs]
    for t in (*inputs, *args):
        t.requires_grad_(row.train and t.is_floating_point())
    wide = copy.deepcopy(model).double()
    to = None if cotangent is None else cotangent.double()
    found = interactions.measure(
        model, lambda call: interactions.step(call, inputs, model, cotangent),
        lambda: interactions.step(wide, args, wide, to), torch.bfloat16, "dot_interaction", device, quick,
        interactions.variants(lambda: as_measured(tiles, device), quick),
    )  # fmt: skip
    return {
        "key": row.key, "kind": row.kind, "samples": row.samples, "train": row.train, "width": row.width,
        "features": row.features, "dense": True, "dtype": "bfloat16", "tiles": tiles, **found,
    }  # fmt: skip


def table(path: Path, rows: list[Json]) -> None:
    """Write the rows of interactions alone into the table of a device, in place of those that it has."""
    names = ("dtype", "train", "features", "width", "dense", "samples")
    alone = [{**row, "pairs": ALONE[row["kind"]][1]} for row in rows if row["kind"] in ALONE]
    device_table.put(path, "dot_interaction", interactions.table_rows(alone, (*names, "pairs"), ("tiles",)))


def main() -> None:
    """The command line."""
    tuning.script("bench.dot_interaction", __doc__, grid, measure, interactions.describe, table)


if __name__ == "__main__":
    main()
