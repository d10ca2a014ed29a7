"""Modules that are a function and its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Module(nn.Module):
    """A module of parts.

    Args:
        compute: what it computes: a function of the module and of the arguments.
        parts: its modules, parameters and buffers, by name.
    """

    def __init__(self, compute: Callable[..., Any], parts: dict[str, Any]) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.compute(self, *args)
