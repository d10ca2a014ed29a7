"""Symbolic shapes and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import fx


def known_true(condition: Any) -> bool:
    """True where `condition` (a bool or a SymBool) holds without adding a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def holds_now(condition: Any) -> bool:
    """Whether a condition on sizes holds, with a guard where that is not certain; False where none is known.

    For what a kernel must be sure of. The graph serves other sizes as before, those that break it excepted.
    """
    if known_true(condition):
        return True
    return not isinstance(condition, bool) and condition.node.has_hint() and bool(condition)


def hint(size: Any) -> int:
    """The value of an int, or the hint of a SymInt, without adding a guard."""
    if isinstance(size, int):
        return size
    node = size.node
    return int(node.hint) if node.hint is not None else 1


def range_of(size: Any) -> tuple[int, int, int] | None:
    """(least, now, most) of a symbolic size, without adding a guard; None of one that has no value now."""
    node = getattr(size, "node", None)
    if node is None or not node.has_hint() or node.shape_env is None:
        return None
    found = node.shape_env.bound_sympy(node.expr)
    low = int(found.lower) if found.lower.is_Integer else 0
    high = int(found.upper) if found.upper.is_Integer else 2**62
    return low, hint(size), high


def expression(size: torch.SymInt) -> Any:
    """The sympy expression of a symbolic size."""
    return size.node.expr


def symbol_parts(expression: Any) -> tuple[str, tuple[Any, ...]]:
    """("integer" | "symbol" | "add" | "mul" | "max" | "min" | "other", operands) of a sympy expression."""
    if expression.is_Integer:
        return "integer", ()
    if expression.is_Symbol:
        return "symbol", ()
    if expression.is_Add:
        return "add", tuple(expression.args)
    if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
        return "mul", (expression.base,) * int(expression.exp)
    known = {"Max": "max", "Min": "min"}  # torch has classes of its own for them
    other = known.get(type(expression).__name__, "other")
    return ("mul" if expression.is_Mul else other), tuple(expression.args)


def fake_mode_of(graph: fx.Graph) -> Any | None:
    """The FakeTensorMode under which the values of `graph` were made."""
    from torch._subclasses.fake_tensor import FakeTensor

    for node in graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def is_batched(tensor: Any) -> bool:
    """Whether a fake value lives inside torch.vmap, with a dim that its shape does not show."""
    return isinstance(tensor, torch.Tensor) and bool(torch._C._functorch.is_batchedtensor(tensor))


def records_gradients(value: Any) -> bool:
    """Whether autograd records what is done with a fake value, in a transform of torch.func as well.

    True of what is not known.
    """
    if isinstance(value, (tuple, list)):
        return any(map(records_gradients, value))
    while isinstance(value, torch.Tensor):
        if value.requires_grad:
            return True
        if not torch._C._functorch.is_functorch_wrapped_tensor(value):
            return False
        value = torch._C._functorch.get_unwrapped(value)
    return value is None


def with_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that has the memory of a value: all samples inside torch.vmap, the local one of a DTensor.

    None where that is not one tensor.
    """
    while True:
        if torch._C._functorch.is_batchedtensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        elif is_wrapper(tensor):
            held = parts_of(tensor)
            if len(held) != 1:
                return None
            tensor = held[0]
        else:
            return tensor


def parts_of(wrapper: Any) -> list[torch.Tensor]:
    """The tensors that a tensor is around, such as the local one of a DTensor."""
    held = (getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0])
    return [part for part in held if isinstance(part, torch.Tensor)]  # later versions name the mesh as well


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a fake value lie in memory once each, without gaps; adds no guard."""
    return bool(torch._prims_common.is_non_overlapping_and_dense_or_false(tensor))


def is_wrapper(tensor: Any) -> bool:
    """Whether a value is a tensor around others, such as a DTensor: not every operation is defined for it."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return isinstance(tensor, torch.Tensor) and bool(is_traceable_wrapper_subclass(tensor))


@contextlib.contextmanager
def suppress_guards(fake_mode: Any | None) -> Iterator[None]:
    """Questions about sizes asked inside add no guard to the user's graph."""
    shape_env = getattr(fake_mode, "shape_env", None)
    with shape_env.suppress_guards() if shape_env is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def computing_fakes(fake_mode: Any | None) -> Iterator[None]:
    """Operations inside give fake values whose symbolic sizes stay symbolic, as in Dynamo.

    By the decompositions in Python: those in C++ make numbers of the batch of a matrix product (torch 2.11).
    """
    from torch._dispatch.python import enable_python_dispatcher

    with fake_mode if fake_mode is not None else contextlib.nullcontext(), enable_python_dispatcher():
        yield
