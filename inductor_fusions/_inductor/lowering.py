"""Lowering operations of ours: registered where Inductor keeps its own, and made of values of Inductor."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .graphs import trace_decomposed
from .loading import when_one_is_loaded

#: What is known of operations of ours: those that are lowered, and where others are traced instead.
_lowered: set[Any] = set()
_decomposed: dict[Any, Callable[..., bool]] = {}


def decompose_in_graphs(op: Any, fn: Callable[..., Any], where: Callable[..., bool]) -> None:
    """Have an operation of ours traced as `fn` where AOTAutograd makes a graph: Inductor sees its kernels.

    As torch.library.triton_op, which imports Inductor at once, and so cannot be used while that is imported.
    `torch.export` keeps the operation.

    Args:
        op: what torch.library.custom_op returned.
        fn: the same in functions of torch and kernels in torch.library.wrap_triton.
        where: takes the same arguments and returns whether it is traced; else a graph keeps the operation.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    def decompose(mode: Any, overload: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        if custom_triton_ops_decomposition_disabled():
            return mode.__torch_dispatch__(overload, types, args, kwargs)
        if not all(issubclass(t, FakeTensor) or t in (torch.Tensor, FunctionalTensor) for t in types):
            return NotImplemented
        with mode:
            if where(*args, **kwargs):
                return fn(*args, **kwargs)
        return mode.__torch_dispatch__(overload, types, args, kwargs)

    op.register_torch_dispatch(FunctionalTensorMode, decompose)
    _decomposed[op._opoverload] = where


def register_lowering_when_loaded(op: Any, lower: Callable[..., Any]) -> None:
    """Register `lower` as Inductor's lowering of an operation of ours, once Inductor has its own."""

    def register() -> None:
        lowering = importlib.import_module("torch._inductor.lowering")
        if op not in lowering.lowerings:
            lowering.register_lowering(op, type_promotion_kind=None)(lower)

    _lowered.add(op)
    # Inductor may be in the middle of importing its lowerings; it imports the others later.
    modules = "torch._inductor.lowering", "torch._inductor.graph", "torch._inductor.compile_fx"
    when_one_is_loaded(modules, register)


def makes_a_package() -> bool:
    """Whether Inductor compiles ahead of time now, to what runs without Python (AOTInductor)."""
    return importlib.import_module("torch._inductor.virtualized").V.aot_compilation is True


def needs_python(op: Any, *args: Any) -> bool:
    """Whether compiled code calls an operation of ours as it is, in Python.

    Args:
        op: any target of a node.
        args: its arguments, with fake tensors.
    """
    if getattr(op, "namespace", "") != "inductor_fusions" or op in _lowered:
        return False
    if op in _decomposed:
        return not _decomposed[op](*args)
    return not op.has_kernel_for_dispatch_key("CompositeImplicitAutograd")


def call_lowering(op: Any, *args: Any) -> Any:
    """The value that Inductor's lowering of an operation returns."""
    lowering = importlib.import_module("torch._inductor.lowering")
    return lowering.lowerings[op](*args)


def call_eagerly(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of an operation as it is, from generated code."""
    lowering = importlib.import_module("torch._inductor.lowering")
    return lowering.fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)


def lower_as(compute: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """The operation that is lowered now, as the operations of torch that `compute` is made of.

    Args:
        compute: gives a tensor or a list of tensors, from the arguments of the operation.
        arguments: these, with values of Inductor for tensors.
    """
    virtualized = importlib.import_module("torch._inductor.virtualized").V
    lowering = importlib.import_module("torch._inductor.lowering")
    fakes = fx.node.map_arg(virtualized.graph.current_node.args, lambda node: node.meta["val"])
    flat, spec = pytree.tree_flatten(list(fakes))
    places = [i for i, each in enumerate(flat) if isinstance(each, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(places, tensors, strict=True))
        found = compute(*pytree.tree_unflatten([given.get(i, x) for i, x in enumerate(flat)], spec))
        return tuple(found) if isinstance(found, list) else (found,)

    traced = trace_decomposed(of_tensors, [flat[i] for i in places], virtualized.fake_mode)
    for node in traced.graph.output_node().all_input_nodes:
        node.meta["dislike_padding"] = True  # the caller may see it, behind a view
    values = pytree.tree_leaves(list(arguments))
    found = list(lowering.process_subgraph_nodes(traced, [values[i] for i in places]))
    return found if isinstance(virtualized.graph.current_node.meta["val"], (list, tuple)) else found[0]


def realize(values: Sequence[Any]) -> list[Any]:
    """The values stored in memory, with fixed strides."""
    ir = importlib.import_module("torch._inductor.ir")
    found = []
    for value in values:
        value = ir.ExternKernel.realize_input(value)
        value.freeze_layout()
        found.append(value)
    return found


def in_memory(value: Any) -> bool:
    """Whether a value of Inductor is stored, or a view of a stored one; not computed in a loop."""
    ir = importlib.import_module("torch._inductor.ir")
    return bool(ir.is_storage_and_layout(value))


def value_key(value: Any) -> tuple[Any, ...]:
    """Equal for two values of Inductor that are one matrix in memory."""
    layout = value.get_layout()
    return (value.get_name(), tuple(layout.size), tuple(layout.stride), layout.offset)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A value of Inductor in another dtype."""
    if value.get_dtype() == dtype:
        return value
    return call_lowering(torch.ops.prims.convert_element_type.default, value, dtype)


def sizes(value: Any) -> tuple[Any, ...]:
    """The sizes of a value of Inductor, as ints where they are."""
    return tuple(static(size) for size in value.get_size())


def strides(value: Any) -> tuple[Any, ...]:
    """The strides of a value of Inductor, as ints where they are."""
    return tuple(static(stride) for stride in value.get_stride())


def static(size: Any) -> Any:
    """A size of Inductor's, as an int if it is a number."""
    return int(size) if getattr(size, "is_Integer", isinstance(size, int)) else size


def lower_attention_backward(
    op: Any,
    arguments: Sequence[Any],
    keywords: dict[str, Any],
    like: int,
    laid_out: Sequence[int],
    order: Callable[[Sequence[int]], Sequence[int]],
) -> Any:
    """A call of a backward of SDPA that gives some operands the layout of another one.

    Args:
        op: the operation of aten; the node that is lowered has the same arguments.
        arguments, keywords: values of Inductor, and numbers.
        like: position of the operand whose layout the others get.
        laid_out: their positions. One that has the layout, or has none yet, is not copied.
        order: gives the dims from the outermost to the innermost one, of strides.
    """
    ir, lowering = (importlib.import_module(f"torch._inductor.{name}") for name in ("ir", "lowering"))
    graph = importlib.import_module("torch._inductor.virtualized").V.graph
    others = [None if i in laid_out else argument for i, argument in enumerate(arguments)]
    # As stock lowers the operation: rows in order, mask aligned.
    held = list(lowering.sdpa_constraint(graph.current_node, *others)[0])
    (held[like],) = realize([held[like]])
    dims = order([_number(graph, stride) for stride in held[like].get_stride()])
    for i in laid_out:
        strides: dict[int, Any] = {}
        step: Any = 1
        for dim in reversed(dims):
            strides[dim] = step
            step = step * arguments[i].get_size()[dim]
        exact = [strides[dim] for dim in range(len(dims))]
        held[i] = ir.ExternKernel.require_exact_strides(arguments[i], exact)
        # cuDNN reads vectors: a part that begins elsewhere is copied (pytorch#191576).
        (held[i],) = realize([held[i]])
        if not _begins_aligned(held[i]):
            held[i] = ir.ExternKernel.copy_input(held[i])
            held[i] = ir.ExternKernel.require_exact_strides(held[i], exact)
    return lowering.fallback_handler(op, add_to_fallback_set=False)(*held, **keywords)


def _begins_aligned(value: Any) -> bool:
    """Whether a value in memory is known to begin at a multiple of 16 bytes from where its memory does."""
    offset = value.get_layout().offset * value.get_dtype().itemsize
    return isinstance(static(offset), int) and static(offset) % 16 == 0


def _number(graph: Any, size: Any) -> int:
    """A size of Inductor's as a number: for a symbolic one, that of the tensors it was traced with."""
    if isinstance(size, int) or size.is_Integer:
        return int(size)
    return int(graph.sizevars.optimization_hint(size))
