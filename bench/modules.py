"""Attention and adapters as others write them: cases of `python -m inductor_fusions bench`.

Each module is written as in its field (diffusion, segmentation, proteins, speech, sets, graphs, trainers of
adapters), at sizes of that field, and runs in inference and in training. `tests/forms` has more spellings, at
sizes of a test.

    python -m inductor_fusions bench --suite modules --device cuda --out bench/results/modules_h100.json
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.attention_modules import (
    Axial,
    Band,
    Capped,
    ChannelsFirst,
    CosineWindows,
    Cross,
    DecomposedPositions,
    Graph,
    HeadsInTheBatch,
    KeysFirst,
    OneKeyHead,
    PairBias,
    Resampler,
    ShiftedPositions,
    Slopes,
    TrilBuffer,
    ValuesFirst,
)
from bench.cases import Case, ModuleWork, Tensors, Work

Shape = tuple[int, ...]


class Adapted(nn.Module):
    """A frozen linear of `width` columns from as many, and an adapter of a rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, width) * width**-0.5)
        self.b = nn.Parameter(torch.randn(width, rank) * rank**-0.5)


class WeightNorm(Adapted):
    """DoRA (arXiv:2402.09353): the columns of the sum of base and adapter have learned norms."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__(width, rank)
        self.columns = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        merged = self.base.weight + 2.0 * (self.b @ self.a)
        scale = self.columns / torch.linalg.norm(merged, dim=1).detach()
        low = F.linear(F.linear(x, self.a), self.b)
        return (scale - 1) * self.base(x) + scale * 2.0 * low + self.base(x)


class Vectors(Adapted):
    """VeRA (arXiv:2310.11454): vectors between both matrices and behind them; only these are trained."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__(width, rank)
        self.requires_grad_(False)
        self.columns, self.ranks = (nn.Parameter(torch.rand(n) + 0.5) for n in (width, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.linear(self.ranks * F.linear(x, self.a), self.b)
        out: torch.Tensor = self.base(x) + self.columns * low
        return out


class Gated(Adapted):
    """A router's number for each row scales the adapter."""

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + gates.sigmoid() * F.linear(F.linear(x, self.a), self.b)
        return out


class MergedEachStep(Adapted):
    """A parametrization: the adapter is added to the weight in each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.base.weight + 2.0 * (self.b @ self.a))


@dataclass(frozen=True)
class Module:
    """A module and the shapes of its inputs, for a GPU and in sizes that a CPU compiles and runs in seconds.

    Attributes:
        make: the module, from its arguments.
        large, small: (arguments, shapes of random inputs).
        masks: (which inputs) are 0 or 1, with ones in front.
    """

    make: Callable[..., nn.Module]
    large: tuple[tuple[Any, ...], Sequence[Shape]]
    small: tuple[tuple[Any, ...], Sequence[Shape]]
    masks: tuple[int, ...] = ()

    def draw(self, shapes: Sequence[Shape]) -> Tensors:
        """A set of inputs: normally distributed, or masks that hide the last quarter of some rows."""
        return tuple(_mask(s) if i in self.masks else torch.randn(s) for i, s in enumerate(shapes))


def _mask(shape: Shape) -> torch.Tensor:
    lengths = torch.randint(shape[-1] * 3 // 4, shape[-1] + 1, (*shape[:-1], 1))
    return (torch.arange(shape[-1]) < lengths).long()


#: Arguments and shapes of an adapted linear.
_ADAPTED = (((4096, 16), [(2, 2048, 4096)]), ((16, 4), [(2, 8, 16)]))

MODULES: dict[str, Module] = {
    "channels first": Module(
        ChannelsFirst, ((512, 8), [(8, 512, 32, 32)]), ((16, 2), [(2, 16, 4, 4)])
    ),
    "values first": Module(ValuesFirst, ((256,), [(8, 256, 32, 32)]), ((16,), [(2, 16, 4, 4)])),
    "cross": Module(
        Cross, ((320, 8, 768), [(8, 4096, 320), (8, 77, 768)]), ((16, 2, 24), [(2, 32, 16), (2, 7, 24)])
    ),
    "decomposed positions": Module(
        DecomposedPositions, ((768, 12, 32), [(4, 1024, 768)]), ((16, 2, 4), [(2, 16, 16)])
    ),
    "cosine windows": Module(
        CosineWindows, ((96, 3, 64, 64), [(2048, 64, 96)]), ((16, 2, 16, 4), [(8, 16, 16)])
    ),
    "pair bias": Module(
        PairBias, ((256, 8, 128), [(1, 128, 256, 256), (1, 256, 256, 128), (1, 128, 256)]),
        ((16, 2, 8), [(1, 4, 16, 16), (1, 16, 16, 8), (1, 4, 16)]), masks=(2,),
    ),
    "shifted positions": Module(
        ShiftedPositions, ((512, 8), [(16, 512, 512), (1, 1023, 512)]),
        ((16, 2), [(2, 16, 16), (1, 31, 16)]),
    ),
    "keys first": Module(KeysFirst, ((1024, 16), [(1024, 4, 1024)]), ((16, 2), [(16, 2, 16)])),
    "tril buffer": Module(TrilBuffer, ((768, 12, 1024), [(16, 1024, 768)]), ((16, 2, 32), [(2, 16, 16)])),
    "slopes": Module(Slopes, ((1024, 16), [(4, 2048, 1024)]), ((16, 2), [(2, 16, 16)])),
    "band": Module(
        Band, ((768, 12, 128), [(2, 4096, 768), (2, 4096)]), ((16, 2, 4), [(2, 16, 16), (2, 16)]),
        masks=(1,),
    ),
    "capped": Module(Capped, ((2048, 16), [(2, 2048, 2048)]), ((16, 2), [(2, 16, 16)])),
    "one key head": Module(OneKeyHead, ((2048, 16), [(2, 2048, 2048)]), ((16, 2), [(2, 16, 16)])),
    "heads in the batch": Module(
        HeadsInTheBatch, ((256, 4), [(32, 1024, 256), (32, 1024, 256)]),
        ((16, 2), [(2, 8, 16), (2, 16, 16)]),
    ),
    "graph": Module(
        Graph, ((256, 8), [(16, 256, 256), (16, 256, 256, 8), (16, 256, 256)]),
        ((16, 2), [(2, 8, 16), (2, 8, 8, 2), (2, 8, 8)]), masks=(2,),
    ),
    "axial": Module(Axial, ((256, 8), [(4, 128, 128, 256)]), ((16, 2), [(2, 8, 8, 16)])),
    "resampler": Module(Resampler, ((1024, 16, 64), [(16, 1024, 1024)]), ((16, 2, 4), [(2, 16, 16)])),
    "norm of the weight": Module(WeightNorm, _ADAPTED[0], _ADAPTED[1]),
    "norm of the weight, few rows": Module(WeightNorm, ((4096, 16), [(16, 4096)]), _ADAPTED[1]),
    "vectors": Module(Vectors, _ADAPTED[0], _ADAPTED[1]),
    "vectors, few rows": Module(Vectors, ((4096, 16), [(16, 4096)]), _ADAPTED[1]),
    "gated adapter": Module(
        Gated, ((4096, 16), [(2, 2048, 4096), (2, 2048, 1)]), ((16, 4), [(2, 8, 16), (2, 8, 1)])
    ),
    "merged each step": Module(MergedEachStep, _ADAPTED[0], _ADAPTED[1]),
    "merged each step, few rows": Module(MergedEachStep, ((4096, 16), [(16, 4096)]), _ADAPTED[1]),
}  # fmt: skip


def work(name: str, train: bool, dtype: str, device: str) -> Work:
    """A module on a device."""
    module = MODULES[name]
    arguments, shapes = module.small if device == "cpu" else module.large
    return ModuleWork(
        partial(module.make, *arguments), None, partial(module.draw, shapes), dtype, train, device
    )


def cases(device: str) -> list[Case]:
    """Each module in inference, then each in training."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    return [
        Case(
            "modules", f"{name}{' train' if train else ''}", dtype, train, partial(work, name, train, dtype),
            quick=name == "tril buffer",
        )
        for train in (False, True)
        for name in MODULES
    ]  # fmt: skip
