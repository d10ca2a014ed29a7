"""One form of attention as people write it, and the table of them; modules that are made of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.support.modules import Module

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


def named(names: str, parts: Iterable[Any]) -> dict[str, Any]:
    """Parts by their names."""
    return dict(zip(names.split(), parts, strict=True))


def argument(spec: Spec) -> Any:
    """The value of one argument."""
    return (torch.randn(spec) * 0.7).requires_grad_() if isinstance(spec, tuple) else spec()


def collector(table: dict[str, Any], kind: Callable[..., Any]) -> Callable[..., Callable[[Any], Any]]:
    """A decorator that adds a function or a class to `table`, under its name, as a form of this kind."""

    def form(*specs: Any, name: str = "", **options: Any) -> Callable[[Any], Any]:
        def add(made: Any) -> Any:
            known = name or made.__name__
            assert known not in table, known
            table[known] = kind(known, made, specs, **options)
            return made

        return add

    return form


def tables(form: Callable[..., Any]) -> Callable[..., Callable[..., None]]:
    """`forms(*specs, **options)(name=row, ...)`: the `form`s of a table, which have these options in common.

    A row is a function, or a tuple of a function and further arguments. With `of`, it is what differs from
    form to form, and `of` makes the function of it.
    """

    def forms(*specs: Any, of: Callable[[Any], Any] = lambda row: row, **options: Any) -> Callable[..., None]:
        def add(**rows: Any) -> None:
            for name, row in rows.items():
                function, *further = row if isinstance(row, tuple) else (row,)
                form(*specs, *further, name=name, **options)(of(function))

        return add

    return forms


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
forms = tables(form)
