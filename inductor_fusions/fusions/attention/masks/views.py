"""Views in the interpreter: the same numbers at other indices."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...._inductor import known_true
from ....graph import torch_ops
from ....graph.dims import permutation, selection
from .algebra import choose, compare, substitute
from .interpreter import Interpreter, rank_of, rule
from .proofs import bounds
from .values import Affine, Value, affine, elements, identity, renamed


@rule(*torch_ops.TRANSPOSES, "getattr")
def _transpose(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    dims = permutation(op)
    if dims is None:
        return None
    rank = len(dims)
    return substitute(interpreter.read(op.input), renamed({d - rank: i - rank for i, d in enumerate(dims)}))


@rule("expand", "expand_as", "broadcast_to")
def _expand(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    return interpreter.read(op.input)  # dims count from the right, and an expanded dim had one index


@rule("repeat")
def _repeat(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    """Repeats of dims of size 1, which is what `expand` does as well."""
    source = torch_ops.tensor(op.input)
    given = torch_ops.concrete(op["repeats"] if op["repeats"] is not None else op.rest)
    times = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
    if source is None or not isinstance(times, (list, tuple)) or len(times) < source.dim():
        return None
    pairs = zip(reversed(source.shape), reversed(times), strict=False)
    if all(known_true(size == 1) or known_true(count == 1) for size, count in pairs):
        return interpreter.read(op.input)
    return None


@rule(*torch_ops.VIEWS)
def _view(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    """A view that only adds and removes dims of size 1."""
    found = interpreter.read(op.input)
    if isinstance(found, (bool, Affine)) and (isinstance(found, bool) or found.is_constant):
        return found
    source, target = torch_ops.tensor(op.input), torch_ops.tensor(op.node)
    if source is None or target is None:
        return None

    def wide(t: torch.Tensor) -> list[int]:
        return [d - t.dim() for d, size in enumerate(t.shape) if not known_true(size == 1)]

    before, after = wide(source), wide(target)
    if len(before) != len(after) or not all(
        known_true(source.shape[b] == target.shape[a]) for b, a in zip(before, after, strict=True)
    ):
        return None
    return substitute(found, renamed(dict(zip(before, after, strict=True))))


@rule("select", "narrow", "slice", "getitem")
def _selected(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    index = op["index"] if isinstance(op["index"], tuple) else (op["index"],)
    grid = torch_ops.read(op.input)
    if op.name == "getitem" and grid is not None and grid.name == "meshgrid":
        return _of_grid(interpreter, grid, op["index"])
    given, target = torch_ops.tensor(op.input), torch_ops.tensor(op.node)
    if given is not None and any(torch_ops.tensor(part) is not None for part in index):
        return _gathered(interpreter, interpreter.read(op.input), given, index)
    taken = selection(op.node, adds=True)
    source = None if taken is None else torch_ops.tensor(taken.source)
    if taken is None or source is None or target is None:
        return None
    mapping: dict[int, Affine] = {}
    for dim, (part, place) in enumerate(zip(taken.index, taken.places, strict=True)):
        if isinstance(part, fx.Node):
            return None
        if place is None:
            mapping[dim - source.dim()] = Affine(part)
            continue
        start, step = (0 if part.start is None else part.start), (1 if part.step is None else part.step)
        # A slice that begins at 0 may be of a dim that has no elements.
        begins = known_true(start == 0) or (known_true(start >= 0) and known_true(start < source.shape[dim]))
        if not begins or not isinstance(step, int):
            return None
        mapping[dim - source.dim()] = affine(start, {place - target.dim(): step})
    return substitute(interpreter.read(taken.source), mapping.get)


def _of_grid(interpreter: Interpreter, grid: torch_ops.Op, index: Any) -> Value:
    """One result of `torch.meshgrid`: the numbers of one vector along a dim of its own."""
    vectors = grid.rest[0] if len(grid.rest) == 1 and isinstance(grid.rest[0], (list, tuple)) else grid.rest
    if not isinstance(index, int) or not all(rank_of(vector) == 1 for vector in vectors):
        return None
    place = index % len(vectors)
    vector = vectors[place]
    if grid["indexing"] == "xy" and place < 2 <= len(vectors):
        place = 1 - place
    return substitute(interpreter.read(vector), renamed({-1: place - len(vectors)}))


@rule("cat")
def _cat(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    """Blocks beside each other; None if one holds data, which would be read at indices that it lacks."""
    rank, dim = rank_of(op.node), torch_ops.concrete(op["dim"] if op["dim"] is not None else 0)
    parts = op["tensors"]
    if not isinstance(dim, int) or not isinstance(parts, (list, tuple)) or not parts:
        return None
    dim = dim if dim < 0 else dim - rank
    ends, found = [0], list[Value]()
    for part in parts:
        tensor = torch_ops.tensor(part)
        if tensor is None or tensor.dim() != rank:  # an empty vector may be beside tensors of any rank
            return None
        value = interpreter.read(part)
        found.append(None if any(elements(value)) else _shifted(value, dim, ends[-1]))
        ends.append(ends[-1] + tensor.shape[dim])
    whole = found.pop()
    for end, value in zip(reversed(ends[1:-1]), reversed(found), strict=True):
        whole = choose(compare("lt", identity(dim), Affine(end)), value, whole)
    return whole


def _shifted(value: Value, dim: int, by: Any) -> Value:
    """A value whose first index along a dim is another one."""
    return substitute(value, lambda d: affine(-by, {dim: 1}) if d == dim else identity(d))


@rule("index")
def _index(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    """`aten.index`, which indexing is inside torch.vmap."""
    source = torch_ops.tensor(op.input)
    if source is None or not isinstance(op["indices"], (list, tuple)):
        return None
    return _gathered(interpreter, interpreter.read(op.input), source, tuple(op["indices"]))


@rule("_add_batch_dim")
def _into_vmap(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    """torch.vmap takes a dim away: its index becomes that of a level of samples."""
    given, rank = [torch_ops.concrete(x) for x in op.rest], rank_of(op.rest[0])
    if len(given) != 3 or not all(isinstance(x, int) for x in given[1:]):
        return None
    dim, level = given[1] % rank, given[2]
    places = {d - rank: d - (d > dim) - (rank - 1) for d in range(rank) if d != dim}
    return substitute(interpreter.read(op.rest[0]), renamed({**places, dim - rank: level}))


@rule("_remove_batch_dim")
def _out_of_vmap(interpreter: Interpreter, op: torch_ops.Op) -> Value:
    """The samples of a level of torch.vmap become a dim again."""
    given, rank = [torch_ops.concrete(x) for x in op.rest], rank_of(op.node)
    if len(given) != 4 or not all(isinstance(given[i], int) for i in (1, 3)):
        return None
    level, dim = given[1], given[3] % rank
    places = {d - (rank - 1): d + (d >= dim) - rank for d in range(rank - 1)}
    return substitute(interpreter.read(op.rest[0]), renamed(places), {level: identity(dim - rank)})


def _gathered(interpreter: Interpreter, found: Value, source: torch.Tensor, index: tuple[Any, ...]) -> Value:
    """`x[i, j, ...]` with one index tensor for each dim of x, each affine and in range."""
    if isinstance(found, (bool, Affine)) and (isinstance(found, bool) or found.is_constant):
        return found
    if len(index) != source.dim():
        return None
    mapping: dict[int, Affine] = {}
    for dim, item in enumerate(index):
        inner = interpreter.read(item)
        given = torch_ops.tensor(item)
        if not isinstance(inner, Affine) or given is None or given.dtype == torch.bool:
            return None
        low, _ = bounds(inner, given.shape)  # a negative index would count from the end
        if low is None or not known_true(low >= 0):
            return None
        mapping[dim - source.dim()] = inner
    return substitute(found, mapping.get)
