"""Reads the subgraph that computes a mask into a value of the algebra."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...._inductor import is_batched, known_true
from ....effects.inplace import arguments, inputs
from ....graph import torch_ops
from ....graph.dims import bounds, per_dim
from ....operands import Seen, same_shape
from ..aliasing import Mutations, adds_nothing
from .algebra import as_bool, choose, compare, conjunction, substitute
from .dtypes import held, of_dtype
from .proofs import reduce
from .values import (
    BOOL,
    Affine,
    Bool,
    Data,
    Element,
    Unknown,
    Value,
    affine,
    dims,
    identity,
    is_known,
    is_unit,
    renamed,
    size,
)


class Interpreter:
    """Reads nodes of one graph into `Value`s, each once.

    A value is that which its node made. An operation reads an operand as it is when the operation runs: what
    was overwritten in between is known where the operation in between is (`x *= y`, `x[:] = y`), else opaque.

    Args:
        mutations: which values of the graph are overwritten, and when.
        bindings: for the body of a higher-order operation, what its placeholders stand for outside,
            as (interpreter of the outer graph, node there).
        known: values of nodes that need not be read.
    """

    def __init__(
        self,
        mutations: Mutations,
        bindings: Mapping[fx.Node, tuple[Interpreter, Any]] | None = None,
        known: Mapping[fx.Node, Value] | None = None,
    ) -> None:
        self.mutations = mutations
        self._bindings = bindings or {}
        self._memo: dict[fx.Node, Value] = dict(known or {})
        #: The operation that is being read, and the depth of nested reads.
        self._reader: fx.Node | None = None
        self._depth = 0

    def read(self, node: Any) -> Value:
        """The value of a node or of a number; None where it is unknown, or overwritten after it was made.

        In a rule, and inside `reading`: the value that the operation reads.
        """
        if isinstance(node, bool):
            return node
        if isinstance(node, (int, float, torch.SymInt, torch.SymFloat)):
            return Affine(node)
        if isinstance(node, Seen):
            return seen_through(self.read(node.node), node)
        if not isinstance(node, fx.Node):
            return None
        writer = self.mutations.last(node, self._reader)
        if writer is None:
            return self._made(node)
        return self._overwritten(node, writer) if self._reader is not None else None

    @contextlib.contextmanager
    def reading(self, at: fx.Node | None) -> Iterator[None]:
        """Inside, values are those that a node of the graph would read; without one, those that stay."""
        before, self._reader = self._reader, at
        try:
            yield
        finally:
            self._reader = before

    def _overwritten(self, node: fx.Node, writer: fx.Node) -> Value:
        """The value of a node right after the last node that wrote to its memory, if that wrote all of it."""
        if self.mutations.targets(writer) != [node] or self._depth > DEEPEST:
            return None
        operation = torch_ops.read(writer)
        if operation is None:
            return None
        self._depth += 1
        try:
            with self.reading(writer):
                if operation.name == "setitem":
                    return self._assigned(node, writer)
                return self._made(writer) if operation.inplace and operation.input is node else None
        finally:
            self._depth -= 1

    def _assigned(self, node: fx.Node, writer: fx.Node) -> Value:
        """The value of `node` after `node[index] = value`: a number in a box or by a mask, or all of it."""
        target = torch_ops.tensor(node)
        args, _ = arguments(writer)
        if target is None or is_batched(target) or len(args) != 3 or not _has_memory_of_each(target):
            return None
        mask, given = torch_ops.tensor(args[1]), args[2]
        if mask is not None:
            whole = mask.dtype == torch.bool and same_shape(mask.shape, target.shape)
            inside = self.boolean(args[1]) if whole else None
        else:
            inside = _box(torch_ops.concrete(args[1]), target.shape)
        source = torch_ops.tensor(given)
        if source is not None:
            same = source.dtype == target.dtype and source.dim() <= target.dim() and not is_batched(source)
            return self.read(given) if same and inside is True else None
        number = torch_ops.concrete(given)
        if not isinstance(number, (bool, int, float)):
            return None
        written = of_dtype(number, target.dtype)
        return _simplified(choose(inside, written, self.read(node)), target)

    def _made(self, node: fx.Node) -> Value:
        """The value that a node has made.

        Long chains of nodes are read from their start, so that Python's stack does not grow with them.
        """
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._memo:
                stack.pop()
                continue
            pending = [n for n in self._operands(top) if n not in self._memo]
            if pending:
                stack.extend(pending)
                continue
            self._memo[top] = self._evaluate(top)
            stack.pop()
        return self._memo[node]

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        operation = torch_ops.read(node)
        if operation is None or operation.name not in RULES.keys() | ELEMENTWISE:
            return []
        return [n for n in inputs(node) if isinstance(torch_ops.value(n), torch.Tensor)]

    def _evaluate(self, node: fx.Node) -> Value:
        if node in self._bindings:
            outer, operand = self._bindings[node]
            with outer.reading(None):
                return outer.read(operand)
        known = torch_ops.value(node)
        if isinstance(known, (int, float, torch.SymInt, torch.SymFloat)):
            return Affine(known)
        operation = torch_ops.read(node)
        if operation is None or not isinstance(known, torch.Tensor) or "out" in node.kwargs:
            return self._unknown(node)
        rule = RULES.get(operation.name)
        if rule is None or (operation.inplace and not _is_written_alone(operation, known)):
            return self._unknown(node)
        with self.reading(node):
            found = _simplified(held(rule(self, operation), known.dtype, known.shape), known)
        return self._unknown(node) if found is None or size(found) > LARGEST else found

    def _unknown(self, node: fx.Node) -> Value:
        """A node as data: a condition, an integer, or what is not computed with further."""
        tensor = torch_ops.tensor(node)
        if tensor is None or is_batched(tensor):
            return None
        if self.mutations.touch(node):
            return Unknown(node) if tensor.dtype == torch.bool else None
        element = Element.of(node, tensor, self._varies(node))
        if tensor.dtype == torch.bool:
            return element
        return affine(0, {element: 1}) if tensor.dtype in (torch.int32, torch.int64) else Data(element)

    def _varies(self, node: fx.Node) -> set[int] | None:
        """The dims over which alone a result may vary, from those of its operands; None for any."""
        operation = torch_ops.read(node)
        operands = [] if operation is None else _elementwise(operation)
        with self.reading(node):
            found = [self.read(operand) for operand in operands]
        return set().union(*map(dims, found)) if found and all(map(is_known, found)) else None

    def boolean(self, node: Any) -> Bool | None:
        """A value as a condition: numbers are true where they are not zero."""
        return as_bool(self.read(node))

    def number(self, node: Any) -> float | None:
        """A number, or a tensor that the graph makes from a number; None for anything else."""
        found = self.read(torch_ops.concrete(node))
        if not isinstance(found, Affine) or not found.is_constant:
            return None
        return float(found.const) if isinstance(found.const, (int, float)) else None

    def is_constant_over(self, node: Any, *over: int) -> bool:
        """Whether a value is proved to be the same at every index of these dims (negative).

        A padding mask that was expanded to (batch, 1, q_len, kv_len) is constant over the queries: the
        kernel can read one row of it.
        """
        found = self.read(node)
        return is_known(found) and dims(found).isdisjoint(over)

    def source(self, node: Any) -> Any:
        """The first tensor with the numbers of a node at the same indices, counted from the right."""
        found, result = self.read(node), torch_ops.tensor(node)
        source = found.element.node if isinstance(found, Data) else node
        own, graph = torch_ops.tensor(source), getattr(torch_ops.source(node), "graph", None)
        if source is node or own is None or result is None or source.graph is not graph:
            return node
        shapes = zip(reversed(own.shape), reversed(result.shape), strict=False)
        fits = own.dim() <= result.dim() and all(known_true(a == 1) or known_true(a == b) for a, b in shapes)
        return source if fits and self.read(source) == found else node

    def vanishes_at_own_key(self, node: Any) -> bool:
        """Whether a bias is 0 where key == query, or NaN in all of a head: a slope times their distance."""
        tensor, found = torch_ops.tensor(node), self.read(node)
        if tensor is None or tensor.dim() < 2:
            return False
        there = substitute(found, lambda dim: identity(-2 if dim == -1 else dim))
        if isinstance(there, Affine):
            return there.is_constant and known_true(there.const == 0)
        op = torch_ops.read(self.source(node))
        if op is None or not isinstance(found, Data):
            return False
        with self.reading(op.node):
            if op.name == "mul":
                sides = (op.input, op["other"]), (op["other"], op.input)
                return any(self.is_constant_over(x, -2, -1) and self.vanishes_at_own_key(y) for x, y in sides)
            same = op.name == "neg" or op.name in torch_ops.CASTS
            return same and tensor.is_floating_point() and self.vanishes_at_own_key(op.input)


def _simplified(value: Value, tensor: torch.Tensor) -> Value:
    """A value of a tensor: an index of a dim of size 1 is 0, whatever the dim is expanded to later."""
    if any(known_true(extent == 1) for extent in tensor.shape):
        value = substitute(value, lambda dim: Affine(0) if is_unit(tensor, dim) else identity(dim))
    return reduce(value, tensor.shape) if isinstance(value, BOOL) else value


def _is_written_alone(op: torch_ops.Op, tensor: torch.Tensor) -> bool:
    """Whether what an operation writes over its first operand is what it gives otherwise."""
    return (op.name in IN_PLACE or adds_nothing(op)) and _has_memory_of_each(tensor)


def _has_memory_of_each(tensor: torch.Tensor) -> bool:
    """Whether no dim is expanded, so that an element does not have the memory of another one.

    Windows that overlap (`unfold`, `as_strided`) have it too, but they are read as data.
    """
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return all(known_true(size == 1) or known_true(stride != 0) for size, stride in sizes)


def _elementwise(op: torch_ops.Op) -> list[fx.Node]:
    """The operands of an operation whose result varies over no other dims than they do; none if unknown."""
    if op.name in torch_ops.CASTS or op.name == "repeat":
        return [op.input]
    if op.name == "getitem":
        index = op["index"] if isinstance(op["index"], tuple) else (op["index"],)
        dtypes = [None if (t := torch_ops.tensor(item)) is None else t.dtype for item in index]
        return [] if len(index) != rank_of(op.input) or {None, torch.bool} & {*dtypes} else list(index)
    if op.name not in ELEMENTWISE:
        return []
    return [n for n in inputs(op.node) if torch_ops.tensor(n) is not None]


def seen_through(value: Value, seen: Any) -> Value:
    """A value at the indices that an operand's views give it; None where they do more than permute dims."""
    if isinstance(value, bool) or (isinstance(value, Affine) and value.is_constant):
        return value if all(isinstance(method, str) for method, _ in seen.steps) else None
    for place, (method, args) in enumerate(seen.steps):
        if method == "permute":
            rank = len(args)
            value = substitute(value, renamed({d - rank: i - rank for i, d in enumerate(args)}))
        elif method == "bool":
            value = as_bool(value)
        elif not (method == "reshape" and place == 0 and adds_dims_in_front(seen.node, args[0])):
            return None
    return value


def adds_dims_in_front(node: Any, shape: Any) -> bool:
    """Whether a shape is that of a tensor, with dims of size 1 in front."""
    tensor = torch_ops.tensor(node)
    own = () if tensor is None else tuple(tensor.shape)
    extra = len(shape) - len(own)
    return extra >= 0 and all(known_true(a == b) for a, b in zip(shape, (*([1] * extra), *own), strict=True))


#: Operations whose result, at each index, depends on that of their operands at the same index alone.
ELEMENTWISE = torch_ops.COPIES | frozenset(
    "add sub rsub mul div neg eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor bitwise_not logical_and "
    "logical_or logical_xor logical_not where masked_fill clamp minimum maximum cpu cuda detach".split()
)
#: Operations whose result, written over their first operand, is what they give otherwise.
IN_PLACE = frozenset(
    "add sub mul neg abs log sqrt masked_fill fill zero fill_diagonal tril triu bitwise_and bitwise_or "
    "bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not".split()
)
#: The largest depth of nested reads of overwritten values.
DEEPEST = 40
#: The most parts of a value: a larger one is read as data. A value that is read twice counts twice.
LARGEST = 256


def _box(index: Any, shape: Sequence[Any]) -> Bool | None:
    """Where an index of slices is in a tensor: True if it is all of it. None of any other index."""
    parts, conditions = per_dim(index, len(shape)), list[Bool | None]()
    if parts is None or len(parts) != len(shape):
        return None
    for dim, (part, extent) in enumerate(zip(parts, shape, strict=True), -len(shape)):
        if type(part) is int:
            part = slice(part, part + 1 or None)
        if not isinstance(part, slice) or part.step not in (None, 1):
            return None
        start, stop = bounds(part, extent)
        if not known_true(start >= 0) or not known_true(stop <= extent):
            return None
        if not known_true(start == 0):
            conditions.append(compare("ge", identity(dim), Affine(start)))
        if not known_true(stop == extent):
            conditions.append(compare("lt", identity(dim), Affine(stop)))
    return conjunction([each for each in conditions if each is not None])


#: The value of an operation, from those of its arguments.
Rule = Callable[[Interpreter, torch_ops.Op], Value]
#: The rule of each operation, by its name in `torch_ops`. The modules of rules fill it in.
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule for operations of these names."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def rank_of(node: Any) -> int:
    """The number of dims of a tensor; 0 for anything else."""
    tensor = torch_ops.tensor(node)
    return tensor.dim() if tensor is not None else 0
