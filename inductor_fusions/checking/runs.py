"""Runs a function once, with or without gradients, without changing its arguments."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .._inductor import GROUPED_MM, gradients_in_modes, is_wrapper, parts_of, subclass_of

Inputs = Sequence[Any] | Mapping[str, Any]
Outcome = tuple[Any, dict[str, torch.Tensor | None], tuple[torch.Tensor, ...]]


class Float64Mode(TorchFunctionMode):
    """Replaces every floating dtype by float64: in casts, in factories, and as the default dtype.

    A cast to float8 is kept, because it quantises.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func = torch.Tensor.double
        kwargs = {name: self._wide(value) for name, value in (kwargs or {}).items()}
        if func is GROUPED_MM and args[0].dtype == torch.float64 and kwargs.get("bias") is None:
            return _grouped_mm(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
        return func(*map(self._wide, args), **kwargs)

    @staticmethod
    def _wide(value: Any) -> Any:
        wide = isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize > 1
        return torch.float64 if wide else value

    def __enter__(self) -> Any:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm`, which takes no float64, product by product.

    Args:
        a, b: matrices, or stacks of them; where both or neither are, the result is a stack.
        offs: where each group ends: of the rows of `a`, of the columns of `b`, or of K of two matrices. What
            is behind the last one is zero. None for two stacks.
    """
    if offs is None:
        return torch.bmm(a, b)
    ends = [int(end) for end in offs.tolist()]
    groups = list(zip([0, *ends], ends, strict=False))
    if b.dim() == 3:
        parts = [a[start:end] @ b[i] for i, (start, end) in enumerate(groups)]
        return torch.cat([*parts, a.new_zeros(a.shape[0] - ends[-1], b.shape[2])])
    if a.dim() == 3:
        parts = [a[i] @ b[:, start:end] for i, (start, end) in enumerate(groups)]
        return torch.cat([*parts, a.new_zeros(a.shape[1], b.shape[1] - ends[-1])], 1)
    return torch.stack([a[:, start:end] @ b[start:end] for start, end in groups])


def run(
    call: Callable[..., Any],
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    train: bool,
    cotangents: Sequence[torch.Tensor] | None = None,
    in_modes: bool = False,
    alike: bool = False,
) -> Outcome:
    """Run once, on copies of the arguments.

    Args:
        call: what is run: `fn`, or `fn` compiled.
        fn: whose parameters are differentiated.
        train: differentiate as well; else everything runs without gradients.
        cotangents: one for each floating output that requires a gradient, instead of random ones (the same
            at each call).
        in_modes: torch function modes hold in what the backward runs again, too.
        alike: as of `copied`.

    Returns:
        Outputs, gradients by name (see `leaves`), and the cotangents.

    Raises:
        TypeError: `fn` cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function or a module, not {type(fn).__name__}")
    args, kwargs = copied((tuple(args), dict(kwargs)), train, alike)
    if not train:
        with torch.no_grad():
            return call(*args, **kwargs), {}, ()
    differentiated = leaves(fn, args, kwargs)
    with torch.enable_grad():
        outputs = call(*args, **kwargs)
    tensors = [
        leaf
        for leaf in pytree.tree_leaves(outputs)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
    ]
    if cotangents is None:
        cotangents = [_cotangent(i, tensor) for i, tensor in enumerate(tensors)]
    if len(cotangents) != len(tensors):
        raise AssertionError(f"{len(tensors)} outputs require a gradient, not {len(cotangents)}")
    grads: dict[str, torch.Tensor | None] = dict.fromkeys(differentiated)
    if tensors and differentiated:
        given = [c.to(t.dtype) for c, t in zip(cotangents, tensors, strict=True)]
        gradients = gradients_in_modes if in_modes else partial(torch.autograd.grad, allow_unused=True)
        found = gradients(tensors, list(differentiated.values()), given)
        grads = dict(zip(differentiated, found, strict=True))
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, outputs), grads, tuple(cotangents)


def exact(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    train: bool,
    cotangents: Sequence[torch.Tensor],
) -> Outcome:
    """Run once, eagerly and in float64; a module as a copy. Arguments as of `run`."""
    wide = copy.deepcopy(fn).double() if isinstance(fn, nn.Module) else fn
    wide_args, wide_kwargs = cast((args, kwargs), torch.float64)
    with Float64Mode():
        given = [c.double() for c in cotangents]
        return run(wide, wide, wide_args, wide_kwargs, train, given, in_modes=True)


def _cotangent(index: int, tensor: torch.Tensor) -> torch.Tensor:
    if is_wrapper(tensor):
        made = torch.zeros_like(tensor)
        for part in parts_of(made):
            part.copy_(_cotangent(index, part))
        return made
    generator = torch.Generator().manual_seed(1000 + index)
    # Another device may be torch's default one, which the generator is not on.
    values = torch.randn(tensor.shape, dtype=torch.float64, generator=generator, device="cpu")
    return values.to(tensor.device, tensor.dtype)


def leaves(fn: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    """The tensors to differentiate with respect to: inputs by position ("0", "1.key") or by keyword,
    parameters of a module by their name."""
    found: dict[str, torch.Tensor] = {}
    for where in (list(args), kwargs):
        for path, leaf in pytree.tree_flatten_with_path(where)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                found[".".join(_step(key) for key in path)] = leaf
    if isinstance(fn, nn.Module):
        found.update((name, p) for name, p in fn.named_parameters() if p.requires_grad)
    return found


def _step(key: Any) -> str:
    """One step of a path in a tree of arguments: an index, a key or a field."""
    named = [getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name)]
    return str(named[0] if named else key)


def copied(tree: Any, train: bool, alike: bool = False) -> Any:
    """A tree with copies of its tensors, as leaves; a tensor that is given twice is copied once.

    Args:
        train: copies require a gradient where their originals do.
        alike: so they do without `train`, since a function may take gradients by itself, and they are of the
            same subclass of Tensor. Else they are plain ones, on which torch runs all.
    """
    memo: dict[int, torch.Tensor] = {}

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            with torch.no_grad():
                data = tensor.detach().clone() if is_wrapper(tensor) else _with_its_layout(tensor)
            kind = subclass_of(tensor) if alike and not is_wrapper(tensor) else None
            if kind is not None:  # its functions may read its attributes
                data = data.as_subclass(kind) if kind is type(tensor) else data
                vars(data).update({**vars(tensor), **vars(data)})
            for name in [name for name in vars(tensor) if name.startswith("_dynamo_")]:  # marked dynamic
                setattr(data, name, getattr(tensor, name))
            memo[id(tensor)] = data.requires_grad_(tensor.requires_grad and (train or alike))
        return memo[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, one, tree)


def _with_its_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, with strides and offset, in a copy of all memory that it is in."""
    data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return data.set_(
        tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """A tree with its floating tensors in another dtype."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, one, tree)


def near(tree: Any, sample: int) -> Any:
    """A tree with floating tensors near its own: each element is multiplied by 1 + 1e-3 of a random number.

    Args:
        sample: which ones; 0 are the arguments themselves.
    """
    if sample == 0:
        return tree

    def one(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point() or x.itemsize == 1 or type(x) is not torch.Tensor or 0 in x.stride():
            return x
        generator = torch.Generator().manual_seed(sample)
        noise = torch.randn(x.shape, generator=generator, device="cpu").to(x.device, x.dtype)
        found = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        found.copy_(x.detach() * (1 + 1e-3 * noise))
        for name in [name for name in vars(x) if name.startswith("_dynamo_")]:  # marked dynamic
            setattr(found, name, getattr(x, name))
        return found.requires_grad_(x.requires_grad)

    return pytree.tree_map_only(torch.Tensor, one, tree)


def split(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of inputs given as a sequence or as a mapping.

    Raises:
        TypeError: they are a tensor, whose rows would be taken for the arguments.
    """
    if isinstance(inputs, torch.Tensor):
        raise TypeError("the arguments of the function must be a sequence or a mapping, not a tensor: (x,)")
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


@contextlib.contextmanager
def own_buffers(fn: Callable[..., Any]) -> Iterator[None]:
    """A module that is run inside works on copies of its buffers: running statistics stay as they were."""
    if not isinstance(fn, nn.Module):
        yield
        return
    memo: dict[int, torch.Tensor] = {}
    kept = []
    for module in fn.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept.append((module, name, buffer))
                module._buffers[name] = memo.setdefault(id(buffer), buffer.detach().clone())
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer
