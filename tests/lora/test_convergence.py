"""A small real task: adapters of a character model, trained on a text of the repository."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

import torch._dynamo
from torch._inductor import compile_fx

from inductor_fusions import config
from tests.block_mm.support import Run, _fuse
from tests.lora.spellings import Adapted

TEXT = (Path(__file__).resolve().parents[2] / "LICENSE").read_bytes()
STEPS, BATCH, LENGTH, WIDTH, RANK = 200, 4, 32, 64, 8


def adapted(inner: int, outer: int) -> Adapted:
    found = Adapted(nn.Linear(inner, outer).bfloat16(), inner, outer, RANK)
    nn.init.zeros_(found.b.weight)
    return found


class Model(nn.Module):
    """Says the next character from the four before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH).bfloat16().requires_grad_(False)
        self.mix, self.up = adapted(4 * WIDTH, WIDTH), adapted(WIDTH, 2 * WIDTH)
        self.gate, self.down = adapted(WIDTH, 2 * WIDTH), adapted(2 * WIDTH, WIDTH)
        self.head = adapted(WIDTH, 256)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        x = self.embed(characters)
        x = torch.cat([F.pad(x, (0, 0, shift, 0))[:, : x.shape[1]] for shift in range(4)], dim=-1)
        x = self.mix(x)
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return self.head(x)


def curve(seed: int, fused: bool) -> tuple[list[float], Run]:
    """The loss of each step."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    data = torch.tensor(list(TEXT))
    generator = torch.Generator().manual_seed(seed)
    found, losses = Run(), []
    inner = functools.partial(_fuse, found, 90, {})
    backend: Any = functools.partial(compile_fx.compile_fx, inner_compile=inner) if fused else "eager"
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    with config.patch(policy="always", strict=True):
        for _ in range(STEPS):
            starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
            rows = torch.stack([data[s : s + LENGTH + 1] for s in starts.tolist()])
            loss = F.cross_entropy(compiled(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    torch._dynamo.reset()
    return losses, found


def smooth(losses: list[float], window: int = 20) -> torch.Tensor:
    """Means of neighbouring steps."""
    return torch.tensor(losses).unfold(0, window, window).mean(dim=1)


@pytest.mark.slow
def test_loss_within_the_band_of_seeds() -> None:
    """Fused and unfused differ by less than the order of the data makes."""
    ours, found = curve(0, fused=True)
    assert any("lora" in node.name for node in found.graphs[0].nodes)
    stock = [smooth(curve(seed, fused=False)[0]) for seed in range(3)]
    band = torch.stack(stock).amax(0) - torch.stack(stock).amin(0)
    assert smooth(ours)[-1] < smooth(ours)[0] - 0.5
    assert bool(((smooth(ours) - stock[0]).abs() <= band + 1e-3).all())
