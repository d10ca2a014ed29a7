"""Inputs on each device there is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def on(device: torch.device, value: Any) -> Any:
    """Modules, and tensors in any structure, moved to a device; leaves stay leaves."""

    def move(t: torch.Tensor) -> torch.Tensor:
        return t.detach().to(device).requires_grad_(t.requires_grad)

    return (
        value.to(device) if isinstance(value, nn.Module) else pytree.tree_map_only(torch.Tensor, move, value)
    )
