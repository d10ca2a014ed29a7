"""Fake tensors on a CUDA device that is not in this machine, beside tensors that are in it."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .loading import inductor_config
from .shapes import STANDS_FOR, is_wrapper, subclass_of


@contextlib.contextmanager
def on_absent_device(
    fn: Callable[..., Any], args: Any, kwargs: Any
) -> Iterator[tuple[Callable[..., Any], Any, Any]]:
    """A copy of a function and of its arguments with fake tensors on "cuda:0"; computing gives fakes inside.

    Args:
        fn: a module, a method of one, or a function; parameters and buffers are those that are moved.
        args, kwargs: of which tensors are moved.

    Raises:
        ValueError: inside, a value of a tensor is read, or all elements were selected and an error follows.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    mode, assumed = _between_graphs()
    memo: dict[int, Any] = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            with mode, torch.no_grad():
                if is_wrapper(tensor):
                    fake = mode.from_tensor(tensor).to("cuda:0")
                else:
                    fake = torch.empty_strided(
                        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda:0"
                    )
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            memo[id(tensor)] = fake.requires_grad_(tensor.requires_grad)
            # Sizes that are marked dynamic, the scales of a quantised weight.
            beside = {name: value for name, value in vars(tensor).items() if name not in vars(fake)}
            if not is_wrapper(tensor):
                vars(fake).update(moved_with(beside))
                vars(fake)[STANDS_FOR] = subclass_of(tensor)
        found: torch.Tensor = memo[id(tensor)]
        return found

    def moved_with(found: Any) -> Any:
        """A copy of `found`, with the tensors in it moved."""
        how: Any = {"__deepcopy__": lambda tensor, memo: moved(tensor)}
        with mock.patch.multiple(torch.Tensor, **how), mock.patch.multiple(nn.Parameter, **how):
            return copy.deepcopy(found, memo)

    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    if isinstance(module, nn.Module):
        for tensor in [*module.parameters(), *module.buffers()]:
            moved(tensor)
    args, kwargs = (pytree.tree_map_only(torch.Tensor, moved, each) for each in (args, kwargs))
    fn = copy.deepcopy(fn, memo)
    with inductor_config().patch(shape_padding=False), mode:  # padding is timed on the device
        try:
            yield fn, args, kwargs
        except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
            raise ValueError(
                f"tensors of an absent GPU have no values, but {_reader(error)} reads one"
            ) from error
        except Exception as error:
            if not assumed:
                raise
            # Its message may tell what is not so, such as that labels are out of range.
            selected = " and ".join(dict.fromkeys(assumed))
            raise ValueError(
                f"tensors of an absent GPU have no values: {selected} selected all elements, "
                f"with which {_reader(error)} raised {type(error).__name__}"
            ) from error


#: Most elements of a tensor on the CPU whose values are known.
_KNOWN = 2**16


def _between_graphs() -> tuple[Any, list[str]]:
    """A mode of fake tensors in which code between graphs finds the values and sizes that it reads.

    Beside it the names of operations whose results had an unknown size.

    Small tensors on the CPU have their values, as beside a GPU; torch drops those that something on the GPU
    overwrites. A result of unknown size has as many elements as its largest operand, which is as many as
    `masked_select` and others give: an unknown size would be an input of the next graph, which autograd
    cannot trace.
    """
    from torch._guards import TracingContext
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # No subclass: operators of higher order have rules for FakeTensorMode itself alone.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    dispatch, converter, computes = mode.dispatch, mode.fake_tensor_converter, False
    assumed: list[str] = []
    forget = converter.invalidate_constant_aliases

    def has_value(tensor: torch.Tensor) -> bool:
        plain = tensor.layout is torch.strided and not isinstance(tensor, FakeTensor)
        return plain and tensor.device.type == "cpu" and tensor.numel() <= _KNOWN

    def forget_dense(tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:  # others have no single memory, and are no constants
            forget(tensor)

    def treat(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal computes
        if computes or TracingContext.try_get() is not None:  # a part of an operation, or of a graph
            return dispatch(func, types, args, kwargs)
        operands = pytree.tree_leaves((args, kwargs))
        fakes = [each for each in operands if isinstance(each, FakeTensor)]
        if any(each.constant is None for each in fakes):
            for each in _in_lists(func, args):  # torch drops the values of what is written by itself
                if isinstance(each, FakeTensor) and each.constant is not None:
                    forget(each.constant)
        computes = True
        try:
            found: Any = dispatch(func, types, args, kwargs)
        finally:
            computes = False
        if _makes_constant(func, operands) and found.device.type == "cpu" and found.numel() <= _KNOWN:
            made = func(*args, **{**(kwargs or {}), "pin_memory": None})
            return converter.from_real_tensor(mode, made, make_constant=True)
        most = max((each.numel() for each in fakes), default=None)

        def known(result: torch.Tensor) -> torch.Tensor:
            if most is None or all(isinstance(size, int) for size in result.shape):
                return result
            assumed.append(func.name().removeprefix("aten::").partition(".")[0])
            return result.new_empty([size if isinstance(size, int) else most for size in result.shape])

        return pytree.tree_map_only(FakeTensor, known, found)

    vars(mode).update(dispatch=treat, may_turn_const=has_value)
    vars(converter).update(invalidate_constant_aliases=forget_dense)
    return mode, assumed


def _in_lists(func: Any, args: Any) -> list[Any]:
    """The operands in lists of an operation that overwrites some."""
    overwrites = isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable
    return pytree.tree_leaves(
        [each for each in args if isinstance(each, (list, tuple))] if overwrites else []
    )


def _makes_constant(func: Any, operands: list[Any]) -> bool:
    """Whether an operation makes a tensor from numbers alone, the same each time."""
    varies = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return (
        func.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in func.tags
        and any(argument.name == "pin_memory" for argument in func._schema.arguments)
        and not any(isinstance(operand, varies) for operand in operands)
    )


def _reader(error: BaseException) -> str:
    """The line of the user's code that raised: the last one that is neither torch's nor ours."""
    ours = tuple(str(Path(file).parent) for file in (torch.__file__, Path(__file__).parent))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f"{each.filename}:{each.lineno}" for each in frames if not each.filename.startswith(ours)]
    return theirs[-1] if theirs else "the model"
