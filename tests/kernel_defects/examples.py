"""Programs that reach a kernel which is known to be wrong, for the tests here and for those on a GPU."""

from __future__ import annotations

from typing import Any

import torch

#: Of the program below: heads, queries and keys, head dim.
HEADS, LENGTH, DIM = 4, 24, 32


def scaled_query(x: Any, w: Any, k: Any, v: Any, seen: Any) -> Any:
    """q is computed in the graph, with its heads last in memory, and few queries: flex attention decodes."""
    q = (x @ w).view(-1, LENGTH, HEADS, DIM).transpose(1, 2) * 0.5
    scores = (q @ k.mT).masked_fill(~(seen[:, None, :, None] & seen[:, None, None, :]), -6e4)
    return torch.softmax(scores, -1) @ v


def of_scaled_query(device: str) -> list[torch.Tensor]:
    """Its inputs."""
    shapes = (3, LENGTH, 64), (64, HEADS * DIM), (3, HEADS, LENGTH, DIM), (3, HEADS, LENGTH, DIM)
    inputs = [(torch.randn(shape, device=device) * 0.5).half() for shape in shapes]
    return [*inputs, torch.ones(3, LENGTH, dtype=torch.bool, device=device)]
