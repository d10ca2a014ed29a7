"""Which dims and inputs an opaque mask depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...._inductor import known_true
from ....graph import torch_ops
from ....inplace import arguments, current, inputs, readers
from ....writes import storage
from ..aliasing import written
from .interpreter import Interpreter, adds_dims_in_front
from .proofs import LARGEST_FILL
from .values import Affine, dims, identity, is_known, substitute

_POINTWISE = (
    "add sub rsub mul div neg eq ne lt le gt ge bitwise_and bitwise_or bitwise_not logical_and logical_or "
    "logical_not where masked_fill clamp minimum maximum cpu cuda"
).split()


def constant_over(node: Any, dim: int, interpreter: Interpreter) -> bool:
    """Whether a value is the same at every index of `dim` (negative), as its graph shows.

    A padding mask that was expanded to (batch, 1, q_len, kv_len) is constant over the queries: the
    kernel can read one row of it.
    """
    tensor = torch_ops.tensor(node)
    if tensor is None or -dim > tensor.dim() or known_true(tensor.shape[dim] == 1):
        return True
    known = interpreter.read(node)
    if is_known(known) and dim not in dims(known):
        return True
    if isinstance(node, torch_ops.Seen):
        return _seen_constant(node, dim, interpreter)
    op = torch_ops.read(node)
    if op is None or op.inplace or interpreter.mutations.touch(node):
        return False
    with interpreter.reading(op.node):
        return _made_constant(op, tensor, dim, interpreter)


def _seen_constant(seen: Any, dim: int, interpreter: Interpreter) -> bool:
    """The same for an operand whose views do no more than permute dims."""
    for place, (method, args) in reversed(list(enumerate(seen.steps))):
        if method == "permute":
            dim = args[dim] - len(args)
        elif not (method == "reshape" and place == 0 and adds_dims_in_front(seen.node, args[0])):
            return False
    return constant_over(seen.node, dim, interpreter)


def _made_constant(op: torch_ops.Op, tensor: torch.Tensor, dim: int, interpreter: Interpreter) -> bool:
    """Whether an operation makes the same at every index of a dim, of what it reads."""
    name, rank = op.name, tensor.dim()
    if name in _POINTWISE or name in torch_ops.CASTS or name in torch_ops.COPIES or name == "detach":
        tensors = [n for n in inputs(op.node) if torch_ops.tensor(n) is not None]
        if name == "to" or name == "type_as":
            tensors = tensors[:1]
        return all(constant_over(n, dim, interpreter) for n in tensors)
    source = torch_ops.tensor(op.input)
    if source is None:
        return False
    if name in ("expand", "expand_as", "broadcast_to"):
        return constant_over(op.input, dim, interpreter)
    if name in torch_ops.TRANSPOSES:
        order = torch_ops.permutation(op)
        return order is not None and constant_over(op.input, order[dim % rank] - source.dim(), interpreter)
    if name == "unsqueeze" and isinstance(op["dim"], int):
        position = dim % rank
        new = op["dim"] % rank
        if position == new:
            return True
        return constant_over(op.input, (position - (position > new)) - source.dim(), interpreter)
    if name == "getitem":
        return _indexed_constant(op, source, tensor, dim, interpreter)
    return False


def _indexed_constant(
    op: torch_ops.Op, source: torch.Tensor, result: torch.Tensor, dim: int, interpreter: Interpreter
) -> bool:
    index = op["index"] if isinstance(op["index"], tuple) else (op["index"],)
    if any(isinstance(i, bool) for i in index):
        return False  # it makes a dim
    tensors = [i for i in index if torch_ops.tensor(i) is not None]
    if tensors:
        whole = len(tensors) == len(index) == source.dim()
        return whole and all(constant_over(i, dim, interpreter) for i in tensors)
    used = sum(i is not None and i is not Ellipsis for i in index)
    here, there = 0, 0
    for item in index:
        steps = source.dim() - used if item is Ellipsis else 1
        for _ in range(steps):
            if item is None:
                if there - result.dim() == dim:
                    return True
                there += 1
                continue
            if item is Ellipsis or isinstance(item, slice):
                if there - result.dim() == dim:
                    return constant_over(op.input, here - source.dim(), interpreter)
                there += 1
            here += 1
    return constant_over(op.input, here + (dim + result.dim() - there) - source.dim(), interpreter)


def vanishes_at_own_key(node: Any, interpreter: Interpreter) -> bool:
    """Whether a bias is 0 wherever key == query, or NaN in all of a head: a slope times their distance."""
    tensor, op = torch_ops.tensor(node), torch_ops.read(node)
    if tensor is None or tensor.dim() < 2 or interpreter.mutations.touch(node):
        return False
    there = substitute(interpreter.read(node), lambda dim: identity(-2 if dim == -1 else dim))
    if isinstance(there, Affine):
        return there.is_constant and known_true(there.const == 0)
    if op is None or op.inplace:
        return False
    if op.name == "mul":
        sides = (op.input, op["other"]), (op["other"], op.input)
        return any(_is_slope(x, interpreter) and vanishes_at_own_key(y, interpreter) for x, y in sides)
    if op.name == "neg" or op.name in torch_ops.CASTS or keeps_indices(op):
        return tensor.is_floating_point() and vanishes_at_own_key(op.input, interpreter)
    return False


def _is_slope(node: Any, interpreter: Interpreter) -> bool:
    """Whether a value is the same for all queries and keys."""
    if not isinstance(node, fx.Node):
        return isinstance(node, (int, float))
    own = not interpreter.mutations.touch(node)
    return own and all(constant_over(node, dim, interpreter) for dim in (-2, -1))


def keeps_indices(op: torch_ops.Op) -> bool:
    """Whether an operation gives what its operand holds at the same indices, counted from the right."""
    source, result = torch_ops.tensor(op.input), torch_ops.tensor(op.node)
    if source is None or result is None:
        return False
    if op.name in torch_ops.COPIES or op.name in ("expand", "expand_as", "broadcast_to"):
        return True
    if op.name == "getitem":
        index = op["index"] if isinstance(op["index"], tuple) else (op["index"],)
        if not all(item is None or item is Ellipsis or item == slice(None) for item in index):
            return False
    elif op.name not in torch_ops.VIEWS:
        return False
    extra = result.dim() - source.dim()  # dims of size 1 in front
    return extra >= 0 and all(
        known_true(a == b) for a, b in zip(result.shape, (*([1] * extra), *source.shape), strict=True)
    )


def may_hide_rows(node: Any) -> bool:
    """Whether a bias may add a finite number so low that it absorbs the scores (number + score = number).

    Only then can a fully masked row have a finite result: the mean of the values. A learned bias
    or a relative-position table holds no such number; a mask given by the user may.
    """
    seen: set[fx.Node] = set()
    stack = [torch_ops.source(node)]
    while stack:
        top = stack.pop()
        if not isinstance(top, fx.Node):
            if isinstance(top, (int, float)) and not isinstance(top, bool):
                if top <= LARGEST_FILL or top >= -LARGEST_FILL:
                    return True
            continue
        if top in seen:
            continue
        seen.add(top)
        stack.extend(_written_into(top))
        tensor = torch_ops.tensor(top)
        if tensor is not None and not tensor.is_floating_point() and torch_ops.read(top) is None:
            continue  # integers and conditions add nothing by themselves
        op = torch_ops.read(top)
        if op is None:
            # A leaf: parameters are learned numbers, any other input may be a mask.
            if tensor is None or tensor.is_floating_point():
                if tensor is None or not (tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)):
                    return True
            continue
        if op.name in _DRAWN:
            continue
        if tensor is not None and not tensor.is_floating_point():
            continue
        moved = op.name in _REARRANGED and isinstance(op.input, fx.Node)
        stack.extend([op.input] if moved else _numbers(top))
    return False


def holds_fills_alone(node: Any) -> bool:
    """Whether a bias is made of zeros and of numbers so low that they hide a key, which bear to be rounded.

    Numbers that the graph is given, or learns, are neither, but where such a low number multiplies them.
    """
    seen: set[fx.Node] = set()
    stack = [torch_ops.source(node)]
    while stack:
        current = stack.pop()
        if not isinstance(current, fx.Node) or current in seen:
            continue
        seen.add(current)
        stack.extend(_written_into(current))
        tensor, op = torch_ops.tensor(current), torch_ops.read(current)
        if tensor is not None and not tensor.is_floating_point():
            continue
        if op is None or op.name in _DRAWN:
            return False
        numbers = _numbers(current)
        if op.name == "mul" and any(isinstance(each, float) and each <= LARGEST_FILL for each in numbers):
            continue
        stack.extend([op.input] if op.name in _REARRANGED else numbers)
    return may_hide_rows(node)


def _written_into(node: fx.Node) -> list[Any]:
    """What the graph writes into the memory of a node, and its views, which may be written to as well."""
    found: list[Any] = []
    for user in readers(node):
        if node in [current(each, user) for each in written(user)]:
            found += _numbers(user)
        elif (memory := storage(user)) is not None and memory == storage(node):
            found.append(user)
    return found


#: Results of these hold what their input does: sizes and indices among their arguments add nothing.
_REARRANGED = torch_ops.VIEWS | torch_ops.TRANSPOSES | {"expand", "repeat", "getitem", "slice", "select"}
#: Results of these are sums of products of activations and weights, or bounded: never a fill.
_DRAWN = frozenset(
    "linear matmul bmm baddbmm einsum embedding layer_norm sigmoid softmax conv2d conv1d normalize".split()
)


def _numbers(node: fx.Node) -> list[Any]:
    found: list[Any] = []

    def visit(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            for item in argument:
                visit(item)
        elif isinstance(argument, (fx.Node, int, float)):
            found.append(argument)

    args, kwargs = arguments(node)
    for argument in (*args, *kwargs.values()):
        visit(argument)
    return found
