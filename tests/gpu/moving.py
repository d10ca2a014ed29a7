"""A function and its arguments, moved to a device and to other dtypes with all that they hold."""

from __future__ import annotations

import copy
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

HALF = (torch.bfloat16, torch.float16)


@dataclass
class Program:
    """A function and its arguments, as they are run.

    Attributes:
        fn: a function or a module.
        args, kwargs: its arguments, tensors on the device.
        dynamic: as in `torch.compile`.
        reference: what is run in float64 instead of `fn`.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic: bool | None = None
    reference: Callable[..., Any] | None = None

    def cast(self, device: str, dtypes: Mapping[torch.dtype, torch.dtype]) -> Program:
        """The same program with its tensors on a device, in other dtypes; those of the function, too."""
        move = _Move(device, dtypes)
        # Arguments first: a tensor that is also in the function stays one.
        args, kwargs = move.tree(self.args), move.tree(self.kwargs)
        reference = None if self.reference is None else move.function(self.reference)
        return Program(move.function(self.fn), args, kwargs, self.dynamic, reference)

    def dtypes(self) -> set[torch.dtype]:
        """Floating dtypes of two bytes or more among the arguments and the parameters of a module."""
        tensors = [t for t in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, torch.Tensor)]
        if isinstance(self.fn, nn.Module):
            tensors += [*self.fn.parameters(), *self.fn.buffers()]
        return {t.dtype for t in tensors if t.is_floating_point() and t.itemsize > 1}


def mapping(present: set[torch.dtype], dtype: torch.dtype) -> dict[torch.dtype, torch.dtype]:
    """What each dtype of a program becomes. One that mixes float32 and half precision goes on doing so."""
    mixed = torch.float32 in present and bool(present & set(HALF))
    kept = {torch.float64, *((torch.float32,) if mixed else ())}
    return {old: dtype for old in present if old not in kept}


def device_of(program: Program) -> str:
    for t in _tensors(program):
        if t.dim() and t.device.type != "cpu":
            return str(t.device)
    return "cpu"


def _tensors(program: Program) -> Iterator[torch.Tensor]:
    for t in pytree.tree_leaves((program.args, program.kwargs)):
        if isinstance(t, torch.Tensor):
            yield t
    if isinstance(program.fn, nn.Module):
        yield from program.fn.parameters()
        yield from program.fn.buffers()


class _Move:
    """Copies of tensors, modules and functions with all that they hold, on a device and in other dtypes."""

    def __init__(self, device: str, dtypes: Mapping[torch.dtype, torch.dtype]) -> None:
        self.device, self.dtypes = torch.device(device), dtypes
        self.memo: dict[int, Any] = {}
        self.kept: list[Any] = []  # what the memo's keys are addresses of

    def tree(self, tree: Any) -> Any:
        return pytree.tree_map(self.value, tree)

    def value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, (list, tuple, dict)):
            return self.tree(value)
        return self.function(value)

    def tensor(self, x: torch.Tensor) -> torch.Tensor:
        if id(x) in self.memo:
            moved: torch.Tensor = self.memo[id(x)]
            return moved
        dtype = self.dtypes.get(x.dtype, x.dtype)
        device = x.device if x.dim() == 0 else self.device  # a number may stay on the CPU
        with torch.no_grad():
            moved = x.detach()
            if (dtype, device) != (x.dtype, x.device):
                moved = _moved(moved, device, dtype)
        for name in [name for name in vars(x) if name.startswith("_dynamo_")]:  # marked dynamic
            setattr(moved, name, getattr(x, name))
        moved.requires_grad_(x.requires_grad)
        self.kept.append(x)
        self.memo[id(x)] = moved
        return moved

    def module(self, module: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        for t in itertools.chain(module.parameters(), module.buffers()):
            moved = self.tensor(t.detach())
            made = nn.Parameter(moved, t.requires_grad) if isinstance(t, nn.Parameter) else moved.clone()
            if isinstance(t, nn.Parameter):
                made.data = made.data.clone()
            memo[id(t)] = made
        found: nn.Module = copy.deepcopy(module, memo)
        return found

    def function(self, fn: Any) -> Any:
        """The same function; another one where what it closes over has to move."""
        if id(fn) in self.memo:
            return self.memo[id(fn)]
        made = fn
        if isinstance(fn, nn.Module):
            made = self.module(fn)
        elif isinstance(fn, functools.partial):
            made = functools.partial(self.function(fn.func), *self.tree(fn.args), **self.tree(fn.keywords))
        elif isinstance(fn, types.MethodType) and isinstance(fn.__self__, nn.Module):
            made = getattr(self.function(fn.__self__), fn.__name__)
        elif isinstance(fn, types.FunctionType) and fn.__closure__:
            made = self.closure(fn)
        self.kept.append(fn)
        self.memo[id(fn)] = made
        return made

    def closure(self, fn: types.FunctionType) -> types.FunctionType:
        self.memo[id(fn)] = fn  # one that closes over itself stays
        cells, changed = [], False
        for cell in fn.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                cells.append(cell)
                continue
            moved = self.value(value)
            changed |= moved is not value and not _equal(moved, value)
            cells.append(types.CellType(moved))
        if not changed:
            return fn
        made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, tuple(cells))
        made.__kwdefaults__ = fn.__kwdefaults__
        return made


def _equal(a: Any, b: Any) -> bool:
    """Whether a structure is as it was: containers are made anew, what is in them need not be."""
    if isinstance(a, (list, tuple, dict)):
        pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
        return all(x is y for x, y in pairs)
    return a is b


def _moved(x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A copy with the same strides, also where they overlap or leave gaps."""
    if x.layout != torch.strided or (type(x) is not torch.Tensor and not isinstance(x, nn.Parameter)):
        return x.to(device, dtype)
    count = x.untyped_storage().nbytes() // x.element_size()
    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), 0, (count,), (1,))
    return flat.to(device, dtype).as_strided(x.size(), x.stride(), x.storage_offset())
