"""One form of linears as people write them, and the tables of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .form import collector, tables

#: A shape of a random tensor that takes a gradient; "frozen 8x4" of one that takes none; or what makes it.
Spec = tuple[int, ...] | str | Callable[[], Any]


@dataclass(frozen=True)
class LinearForm:
    """A function, or a class of modules, with what it is called with.

    Attributes:
        name: of the function or class.
        made: the function, or the class of the module.
        specs: its arguments.
        left: products of the forward that stay stock's, in inference and in training.
        reasons: what is said in inference and in training: a part of the reason of a site; "": no reason.
        random: whether numbers are drawn in training.
        silent: a fusion that must say nothing.
    """

    name: str
    made: Any
    specs: tuple[Spec, ...]
    left: tuple[int, int] = (0, 0)
    reasons: tuple[str, str] = ("", "")
    random: bool = False
    silent: str = ""

    def build(self, train: bool, dtype: torch.dtype) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What is called, and its arguments: the same at each call."""
        torch.manual_seed(0)
        function = self.made().train(train).to(dtype) if isinstance(self.made, type) else self.made
        return function, tuple(argument(spec, dtype) for spec in self.specs)


def argument(spec: Spec, dtype: torch.dtype) -> Any:
    """The value of one argument."""
    if callable(spec):
        return spec()
    frozen = isinstance(spec, str)
    shape = tuple(map(int, spec.split()[1].split("x"))) if isinstance(spec, str) else spec
    return (torch.randn(shape) * 0.5).to(dtype).requires_grad_(not frozen)


def low_rank(width: int, out: int, rank: int) -> tuple[nn.Linear, nn.Linear]:
    """A and B, without biases."""
    return nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False)


LINEAR_FORMS: dict[str, LinearForm] = {}
form = collector(LINEAR_FORMS, LinearForm)
forms = tables(form)
