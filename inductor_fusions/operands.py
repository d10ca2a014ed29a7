"""The tensors that a fusion reads: their fake values, whether kernels take them, what is written in between.

What several fusions ask of them alike, above all on Dynamo's torch-level graph, which is not functional.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx

from .fusion import LeftToStock, Rejected
from .tables import dtype_name

#: `operator.iadd` and the like, and their names as methods.
_IN_PLACE = frozenset(
    {operator.setitem, operator.delitem, operator.iadd, operator.iand, operator.iconcat, operator.ifloordiv,
     operator.ilshift, operator.imatmul, operator.imod, operator.imul, operator.ior, operator.ipow,
     operator.irshift, operator.isub, operator.itruediv, operator.ixor}
)  # fmt: skip
_METHODS_IN_PLACE = frozenset(f"__{function.__name__}__" for function in _IN_PLACE)
#: Packages whose functions say by name or argument that they write; a call of any other may do anything.
_KNOWN_PACKAGES = frozenset({"torch", "operator", "_operator", "builtins", "math", __package__})
#: Arguments of functions of torch that have them write to what they are given.
_WRITING_ARGUMENTS = ("inplace", "max_norm")
#: Regions whose values autograd treats otherwise.
_GRADIENT_MODES = ("_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode")

#: Dtypes to compute in. A cast to a floating dtype that is none of them (float8) quantises.
_COMPUTED_IN = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def holds(dtype: torch.dtype, *others: torch.dtype) -> bool:
    """Whether a dtype has all numbers of one of `others`, and both are dtypes to compute in.

    A cast may be left out where its dtype holds that of the operands, or that of the result, which is rounded
    itself: the error budget has room for it. Where it holds neither, the graph rounds for a purpose.
    """
    if dtype not in _COMPUTED_IN:
        return False
    mine, theirs = torch.finfo(dtype), map(torch.finfo, _COMPUTED_IN.intersection(others))
    return any(mine.eps <= each.eps and mine.max >= each.max for each in theirs)


def tensor(node: Any) -> torch.Tensor | None:
    """The fake value of a node, in a graph of Dynamo's or of aten operations, where it is a tensor."""
    found = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def known_size(size: Any) -> int | None:
    """A size that is a number; None for a symbolic one."""
    return size if isinstance(size, int) else None


def text(value: torch.Tensor | None) -> str:
    """Dtype and shape for reports, such as "float32[8, 16]"; "" of None."""
    return "" if value is None else f"{dtype_name(value.dtype)}{list(value.shape)}"


def may_use_tf32() -> bool:
    """Whether torch may multiply float32 as TF32 on CUDA devices.

    `torch.get_float32_matmul_precision` raises where it was said by `torch.backends` since.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def check_device(value: torch.Tensor, dtypes: Collection[torch.dtype] | None = None) -> None:
    """Leave what there is no kernel for to stock.

    Args:
        value: an operand or the result.
        dtypes: those that there are kernels for; None: they are not asked for here.

    Raises:
        LeftToStock: another device than CUDA, or another dtype.
    """
    device = value.device
    if device.type == "cpu":
        raise LeftToStock("on the CPU, where the library's matrix products are left as they are")
    if device.type != "cuda" or torch.version.hip is not None:
        raise LeftToStock(f"there is no kernel for devices of type {device.type}")
    if dtypes is not None and value.dtype not in dtypes:
        raise LeftToStock(
            f"there is no kernel for {dtype_name(value.dtype)}", f"use {' or '.join(map(dtype_name, dtypes))}"
        )


def check_between(nodes: Collection[fx.Node], last: fx.Node, where: str) -> None:
    """Refuse where something happens between what an operation replaces, in Dynamo's graph.

    That is a write in place, or gradients that are switched on or off, after the first of `nodes`; or a
    transform of torch.func anywhere before `last`.

    Args:
        nodes: from the first of these in the graph on, nothing may happen.
        last: the node that is replaced, where the operation reads its operands.
        where: between what and what this is, for the reason.

    Raises:
        Rejected: something does.
    """
    inside = False
    for node in last.graph.nodes:
        inside = inside or node in nodes
        if node is last:
            return
        name = _name(node)
        if name in ("_grad_increment_nesting", "_jvp_increment_nesting"):
            raise Rejected("behind torch.func.grad or jvp, which the operation has no rule for")
        if inside and name in _GRADIENT_MODES:
            raise Rejected(f"gradients are switched on or off between {where}")
        if inside and (written(node) or _writes_statistics(node, {*nodes, last})):
            raise Rejected(f"{node.name} writes in place between {where}")


def check_kept(operands: Collection[fx.Node], last: fx.Node) -> None:
    """Refuse where an operand is overwritten later on in Dynamo's graph.

    For an operation that keeps its operands for the backward: what it replaces need not have kept them.

    Args:
        operands: of the operation.
        last: the node that is replaced.

    Raises:
        Rejected: one is.
    """
    kept = {_memory(node) for node in operands} - {None} | {0}
    behind = False
    for node in last.graph.nodes:
        if behind and any(_memory(other) in kept for other in written(node)):
            raise Rejected(f"{node.name} overwrites an operand, which is kept for the backward")
        behind = behind or node is last


def written(node: fx.Node) -> list[fx.Node]:
    """What a node of Dynamo's graph may write to: all that it is given, where that is not known.

    Running statistics of normalisations do not count.
    """
    target: Any = node.target
    found = _nodes_in(node.kwargs["out"]) if "out" in node.kwargs else []
    if node.op == "call_module":
        return node.all_input_nodes
    if node.op not in ("call_function", "call_method"):
        return []
    if _writes_by_name(_name(node)) or target in _IN_PLACE:
        return [*found, *_nodes_in(node.args[0] if node.args else node.all_input_nodes)]
    if node.op == "call_method" or _only_reads(target):
        return found
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        writes = any(not x.kwarg_only or x.name in node.kwargs for x in _written_arguments(target))
    elif isinstance(target, torch._ops.HigherOrderOperator):
        # It does what its bodies do; one without any, such as a kernel of the user's own, may do anything.
        inner = list(_nodes_of_bodies(node))
        writes = not inner or any(map(written, inner))
    else:
        writes = _is_opaque(target) or any(_given(node, name) for name in _WRITING_ARGUMENTS)
    return node.all_input_nodes if writes else found


def _writes_by_name(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _METHODS_IN_PLACE


@functools.lru_cache(maxsize=4096)
def _only_reads(target: Any) -> bool:
    """Whether no call of a function or operation writes to what it is given, unless by `out`."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return not _written_arguments(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return False
    return not _is_opaque(target) and not set(_parameters(target)).intersection(_WRITING_ARGUMENTS)


def _is_opaque(function: Callable[..., Any]) -> bool:
    """Whether a function may do anything: one of another package, or of NumPy, which Dynamo wraps."""
    module = getattr(function, "__module__", None) or "torch"
    return module.startswith("torch._dynamo.") or module.partition(".")[0] not in _KNOWN_PACKAGES


def _nodes_in(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return found


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _written_arguments(target: Any) -> list[Any]:
    """The arguments that an operation writes to, of all its overloads."""
    packet = isinstance(target, torch._ops.OpOverloadPacket)
    overloads = [getattr(target, name) for name in target.overloads()] if packet else [target]
    arguments = (argument for overload in overloads for argument in overload._schema.arguments)
    return [x for x in arguments if x.alias_info is not None and x.alias_info.is_write]


def _nodes_of_bodies(call: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the graphs that a higher-order operation runs."""
    for argument in call.all_input_nodes:
        body: Any = call.graph.owning_module if argument.op == "get_attr" else None
        for name in str(argument.target).split("."):
            body = getattr(body, name, None)
        if isinstance(body, fx.GraphModule):
            yield from body.graph.nodes


@functools.lru_cache(maxsize=1024)
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of a function; none where it does not say."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _given(call: fx.Node, name: str) -> Any:
    """An argument of a call by its name, however it is given; None where it is not."""
    assert callable(call.target)
    return {**dict(zip(_parameters(call.target), call.args, strict=False)), **call.kwargs}.get(name)


def _writes_statistics(call: fx.Node, reads: Collection[fx.Node]) -> bool:
    """Whether a normalisation updates statistics that are in the memory of what others read."""
    if "norm" not in _name(call):
        return False
    memory = {_memory(node) for node in call.all_input_nodes if node is not call.args[0]}
    return any(_memory(x) in memory - {None} for node in reads for x in (node, *node.all_input_nodes))


def _memory(node: fx.Node) -> Any:
    """What tells the memory of a tensor from that of others; 0 where it is not known, None of no tensor."""
    found = tensor(node)
    try:
        return None if found is None else found.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0
