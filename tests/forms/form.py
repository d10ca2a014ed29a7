"""One form of attention as people write it, and the table of them; modules that are made of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

#: q, k and v, (batch, heads, length, dim).
QKV = ((2, 4, 9, 8),) * 3

#: A shape (a random tensor that takes a gradient), or what makes the value.
Spec = tuple[int, ...] | Callable[[], Any]


@dataclass(frozen=True)
class Form:
    """A function, or a module, with what it is called with.

    Attributes:
        name: of the function or class.
        made: the function, the class of the module, or what a module of `parts` computes.
        specs: its arguments.
        parts: makes the parts of a module, which the function gets first.
        fused: attentions that become one operation where everything that is proved is fused.
        reasons: of the other sites, a code or a part of the message of each, in order.
    """

    name: str
    made: Any
    specs: tuple[Spec, ...]
    fused: int = 1
    reasons: tuple[str, ...] = ()
    parts: Callable[[], dict[str, Any]] | None = None

    def build(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What is called, in evaluation mode, and its arguments: the same at each call."""
        torch.manual_seed(0)
        if self.parts is not None:
            function = Module(self.made, self.parts()).eval()
        else:
            function = self.made().eval() if isinstance(self.made, type) else self.made
        return function, tuple(argument(spec) for spec in self.specs)


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


def named(names: str, parts: Iterable[Any]) -> dict[str, Any]:
    """Parts by their names."""
    return dict(zip(names.split(), parts, strict=True))


def argument(spec: Spec) -> Any:
    """The value of one argument."""
    return (torch.randn(spec) * 0.7).requires_grad_() if isinstance(spec, tuple) else spec()


def collector(table: dict[str, Any], kind: Callable[..., Any]) -> Callable[..., Callable[[Any], Any]]:
    """A decorator that adds a function or a class to `table`, under its name, as a form of this kind."""

    def form(*specs: Any, **options: Any) -> Callable[[Any], Any]:
        def add(made: Any) -> Any:
            name = made.__name__
            assert name not in table, name
            table[name] = kind(name, made, specs, **options)
            return made

        return add

    return form


def linears(width: int, *out: int, bias: bool = False) -> nn.ModuleList:
    """One linear from `width` to each of `out`."""
    return nn.ModuleList(nn.Linear(width, n, bias=bias) for n in out)


def heads(x: Any, n: int) -> Any:
    """(batch, length, n * dim) as (batch, n, length, dim)."""
    return x.view(*x.shape[:-1], n, -1).transpose(-2, -3)


def scored(q: Any, k: Any) -> Any:
    """The scores of q and k of width 8."""
    return q @ k.mT * 8**-0.5


def merged(x: Any) -> Any:
    """Heads as they were: the inverse of `heads`."""
    return x.transpose(1, 2).contiguous().flatten(2)


def some() -> torch.Tensor:
    """Which keys of two samples are seen."""
    return torch.tensor([[True] * 9, [True] * 5 + [False] * 4])


FORMS: dict[str, Form] = {}
form = collector(FORMS, Form)
