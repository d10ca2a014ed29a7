"""Symbolic shapes and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


def known_true(condition: Any) -> bool:
    """True where `condition` (a bool or a SymBool) holds without adding a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition)) or _is_guarded(condition)


def _is_guarded(condition: Any) -> bool:
    """Whether an equality follows from guards that operations of the graph have made.

    torch makes two symbols one where they are equal, but does not conclude from a guard on two quotients.
    """
    node = getattr(condition, "node", None)
    asked = None if node is None else _sides(node.expr)
    if node is None or asked is None or node.shape_env is None:
        return False
    equal = [sides for guard in node.shape_env.guards if (sides := _sides(guard.expr)) is not None]
    known, before = {asked[0]}, 0
    while before < len(known):
        before = len(known)
        known.update(*(sides for sides in equal if not known.isdisjoint(sides)))
    return asked[1] in known


def _sides(relation: Any) -> tuple[Any, Any] | None:
    """Both sides of an equality; None of anything else."""
    return relation.args if relation.is_Relational and relation.rel_op == "==" else None


def holds_now(condition: Any) -> bool:
    """Whether a condition on sizes holds. If that is not certain, a guard is added; False without a hint.

    For conditions that a kernel relies on: for sizes that break the guard, the graph is compiled again.
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
    """The kind of a sympy expression, and its operands.

    The kind is "integer", "symbol", "add", "mul", "max", "min", "floordiv" or "other".
    """
    if expression.is_Integer:
        return "integer", ()
    if expression.is_Symbol:
        return "symbol", ()
    if expression.is_Add:
        return "add", tuple(expression.args)
    if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
        return "mul", (expression.base,) * int(expression.exp)
    known = {"Max": "max", "Min": "min", "FloorDiv": "floordiv"}  # torch has classes of its own for them
    other = known.get(type(expression).__name__, "other")
    return ("mul" if expression.is_Mul else other), tuple(expression.args)


def value_of(node: fx.Node) -> Any:
    """The fake value of a node, in a graph of Dynamo's or of aten operations; None where it has none."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def fake_mode_of(graph: fx.Graph) -> Any | None:
    """The FakeTensorMode under which the values of `graph` were made."""
    from torch._subclasses.fake_tensor import FakeTensor

    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def share_fake_mode(graph: fx.Graph) -> None:
    """Give the values of a graph, and of those that it runs, one FakeTensorMode.

    `make_fx` with real inputs, whose graphs `torch._inductor.compile` takes, makes each value in a mode of
    its own, and no operation takes values of two modes.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    owner = graph.owning_module
    inner = [] if owner is None else [each for each in owner.modules() if isinstance(each, fx.GraphModule)]
    nodes = [node for each in dict.fromkeys([graph, *(m.graph for m in inner)]) for node in each.nodes]
    values = [value for value in map(value_of, nodes) if isinstance(value, FakeTensor)]
    mode = values[0].fake_mode if values else None
    if all(value.fake_mode is mode for value in values):
        return

    def shared(value: Any) -> Any:
        if not isinstance(value, FakeTensor) or value.fake_mode is mode:
            return value
        with torch.no_grad(), computing_fakes(mode):
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad)

    for node in nodes:
        for key in node.meta.keys() & {"example_value", "val"}:
            node.meta[key] = pytree.tree_map_only(torch.Tensor, shared, node.meta[key])


def is_batched(tensor: Any) -> bool:
    """Whether a fake value lives inside torch.vmap, with a dim that its shape does not show.

    Other transforms may be inside of it, as for gradients of each sample.
    """
    functorch = torch._C._functorch
    while isinstance(tensor, torch.Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def records_gradients(value: Any) -> bool:
    """Whether autograd records operations on a fake value, also inside a transform of torch.func.

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
    """The tensor that owns the memory of a value: all samples inside torch.vmap, the local part of a DTensor.

    None if there are several.
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
    """Whether a fake value is dense: each element once in memory, without gaps. Adds no guard."""
    return bool(torch._prims_common.is_non_overlapping_and_dense_or_false(tensor))


def is_wrapper(tensor: Any) -> bool:
    """Whether a value is a tensor around others, such as a DTensor: not every operation is defined for it."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return isinstance(tensor, torch.Tensor) and bool(is_traceable_wrapper_subclass(tensor))


def subclass_given(node: Any) -> type | None:
    """The subclass of Tensor that the caller passes for an input of Dynamo's graph, if it is one.

    Dynamo traces through `__torch_function__`, and the value of the node is that of a plain tensor. What runs
    gets the tensor as it is, and torch (2.13) runs no operation on it in the first call. A Parameter is none.
    """
    given = node.meta.get("grapharg") if isinstance(node, fx.Node) else None
    return subclass_of(getattr(given, "example", None))


#: Attribute of a fake tensor: the subclass of Tensor of what it stands for.
STANDS_FOR = "_inductor_fusions_stands_for"


def subclass_of(tensor: Any) -> type | None:
    """The subclass of Tensor that a value is of, or stands for. A Parameter is of none."""
    from torch.fx.experimental.proxy_tensor import HANDLED_TYPES

    if isinstance(tensor, torch.nn.Parameter):
        tensor = tensor.data
    if not isinstance(tensor, torch.Tensor):
        return None
    kind = getattr(tensor, STANDS_FOR, None) or type(tensor)
    return None if kind in HANDLED_TYPES else kind


def without_subclass(value: Any) -> Any:
    """A tensor of a subclass as a plain one, whatever mode holds outside; other values as they are."""
    from torch.utils._python_dispatch import _disable_current_modes

    if not isinstance(value, torch.Tensor) or subclass_of(value) is not type(value):
        return value
    with _disable_current_modes():
        return value.as_subclass(torch.Tensor)


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


def fake_result(fake_mode: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The fake result of a call, without a gradient; None if it raises, or if its sizes depend on data."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    shape_env = getattr(fake_mode, "shape_env", None)
    ignoring = contextlib.nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()
    with suppress_guards(fake_mode), torch.no_grad(), computing_fakes(fake_mode), ignoring:
        try:
            found = function(*args, **kwargs)
        except Exception:  # of any kind: the graph is as the other pass has left it, and torch compiles that
            return None
    known: set[Any] = set()
    for value in pytree.tree_leaves((args, kwargs)):
        known |= free_unbacked_symbols(value) if isinstance(value, (torch.Tensor, torch.SymInt)) else set()
    for value in pytree.tree_leaves(found):
        if isinstance(value, (torch.Tensor, torch.SymInt)) and free_unbacked_symbols(value) - known:
            return None
    return found


class Fakes:
    """Fake values of calls. Those of operators are computed once for all calls with arguments alike.

    Alike are numbers, strings and dtypes that are equal, and fake tensors of one layout. Each value is a
    tensor of its own, of new memory or of that of an argument, and no view for autograd: as in the graphs
    that AOTAutograd traces. Where a size is symbolic the call is computed each time.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def call(self, fake_mode: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The results of a call: fake values without a gradient."""
        tensors: list[torch.Tensor] = []
        key = None
        if isinstance(function, torch._ops.OpOverload) and not function._schema.is_mutable:
            with contextlib.suppress(_Unlike):
                key = (function, _alike((args, kwargs), fake_mode, tensors))
        known = self._known.get(key)
        if known is None:
            with suppress_guards(fake_mode), torch.no_grad(), computing_fakes(fake_mode):
                found = function(*args, **kwargs)
            if key is None:
                return found
            try:
                known = self._known[key] = _layouts(found, fake_mode, tensors, set())
            except _Unlike:
                return found
        with torch.no_grad():
            return _made(known, fake_mode, tensors)


class _Unlike(Exception):
    """A call whose result is not remembered."""


#: Arguments that are alike where they are equal and of one type.
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


def _alike(argument: Any, fake_mode: Any, tensors: list[torch.Tensor]) -> Any:
    """A key of an argument, equal for two that give equal results; its tensors are added to `tensors`."""
    kind = type(argument)
    if kind in _PLAIN:
        return kind, argument
    if isinstance(argument, (tuple, list)):
        return tuple, *(_alike(item, fake_mode, tensors) for item in argument)
    if isinstance(argument, dict):
        return dict, *((name, _alike(item, fake_mode, tensors)) for name, item in argument.items())
    layout = _layout(argument, fake_mode)
    tensors.append(argument)
    return layout


def _layout(tensor: Any, fake_mode: Any) -> tuple[Any, ...]:
    from torch._subclasses.fake_tensor import FakeTensor

    if type(tensor) is not FakeTensor or tensor.fake_mode is not fake_mode or tensor.constant is not None:
        raise _Unlike
    if tensor.layout is not torch.strided or tensor.dtype.is_complex or tensor.is_neg():
        raise _Unlike
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    if not all(type(size) is int for size in (*shape, *strides, offset)):
        raise _Unlike
    return shape, strides, tensor.dtype, tensor.device, offset


def _layouts(found: Any, fake_mode: Any, tensors: list[torch.Tensor], taken: set[int]) -> Any:
    """The layouts of the results of a call: one, or a tuple or list of them.

    With each is the number of the argument whose memory it is in; None: its own. `taken` has that of others.
    """
    if type(found) in (tuple, list):
        return type(found), [_layouts(item, fake_mode, tensors, taken) for item in found]
    layout = _layout(found, fake_mode)
    memory = found.untyped_storage()._cdata
    owners = [i for i, each in enumerate(tensors) if each.untyped_storage()._cdata == memory]
    shape, strides, dtype, *_, offset = layout
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    needed = (last + 1) * dtype.itemsize if found.numel() else 0
    whole = offset == 0 and found.untyped_storage().nbytes() == needed
    if memory in taken or found.requires_grad or any(found is each for each in tensors):
        raise _Unlike
    if len(owners) > 1 or not (owners or whole) or (owners and tensors[owners[0]].dtype != dtype):
        raise _Unlike
    taken.add(memory)
    return *layout, owners[0] if owners else None


def _made(layout: Any, fake_mode: Any, tensors: list[torch.Tensor]) -> Any:
    """New fake tensors with these layouts."""
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    if isinstance(layout[0], type):
        kind, items = layout
        return kind(_made(item, fake_mode, tensors) for item in items)
    shape, strides, dtype, device, offset, owner = layout
    with in_kernel_invocation_manager(fake_mode):
        if owner is None:
            stored = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        else:
            stored = tensors[owner].as_strided(shape, strides, offset)
    return FakeTensor(fake_mode, stored, device)
