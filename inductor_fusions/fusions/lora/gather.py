"""Float32 matrices that are inputs of a graph, split up for its products many at a time.

Each by itself would be a kernel of a microsecond, which the host launches more slowly than the device runs
it. So one kernel splits the matrices of about one layer, in the order in which they are read. It runs right
before the first one is needed, so that none is in memory for long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...effects.writes import written
from ...fusion import Candidate
from ...graph.builder import Builder, substitute
from ...graph.facts import change, move
from ...graph.products import VIEWS, transpose_of, unviewed
from ...operands import known_size, tensor, value
from ...reasons import Reason
from . import narrow, narrow_kernel
from .op import NARROW_MM
from .split import LORA_SPLIT

aten = torch.ops.aten

#: Most matrices that one kernel splits up: a layer's of a model where every linear has an adapter.
MOST = 24
#: Most bytes of what one kernel makes. Larger matrices take longer than a launch.
MOST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class _Wanted:
    """A matrix that is read in parts.

    Attributes:
        reader: a skinny GEMM, or a call of the operation for this matrix alone.
        index: of the matrix in the skinny GEMM, or of the output.
        matrix: as it lies in memory, but for `turned`.
        turned: whether it is transposed there.
        form: what the operation takes for it.
    """

    reader: fx.Node
    index: int
    matrix: fx.Node
    turned: bool
    form: tuple[int, int, int]

    @property
    def stored(self) -> fx.Node | None:
        """The matrix as it is in memory, if a node holds it so; else None."""
        return transpose_of(self.matrix) if self.turned else self.matrix

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for two matrices whose part of a kernel is the same code."""
        return (self.form, self.turned, tuple(value(self.matrix).shape), tuple(value(self.matrix).stride()))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parts."""
        read = self.reader.args[0 if self.reader.target is NARROW_MM else -1]
        if isinstance(read, fx.Node):
            return value(read).dtype
        assert isinstance(read, torch.dtype)
        return read


def is_input(matrix: fx.Node) -> bool:
    """Whether a matrix is an input of the graph, or a view of one."""
    return unviewed(matrix).op in ("placeholder", "get_attr")


def takes(matrix: fx.Node) -> bool:
    """Whether a float32 matrix may be split up together with others, at any place.

    It is an input that nothing in the graph writes to, of known sizes, and not so large that it is better
    made when it is read.
    """
    found = tensor(matrix)
    if found is None or found.dim() != 2 or found.dtype != torch.float32 or not is_input(matrix):
        return False
    chain = list(_chain(matrix))
    if any(other.op != "placeholder" for view in chain[1:] for other in view.all_input_nodes[1:]):
        return False
    known = all(isinstance(n, int) for n in (*found.shape, *found.stride()))
    return known and 1 in found.stride() and _bytes(matrix) <= MOST_BYTES and not _is_written(chain[0])


def candidates(graph: fx.Graph) -> Iterator[Candidate]:
    """One candidate for all matrices that the products of fused adapters read in parts."""
    wanted = list(_wanted(graph))
    if wanted:
        yield Gathered(graph, wanted)


class Gathered(Candidate):
    """Matrices that few kernels split up instead of many."""

    reported = False

    def __init__(self, graph: fx.Graph, wanted: Sequence[_Wanted]) -> None:
        self.graph, self.wanted, self.anchor = graph, wanted, wanted[0].reader
        self.chunks: list[list[_Wanted]] = []

    def guard(self) -> None:
        for dtype, device in dict.fromkeys((w.dtype, value(w.matrix).device) for w in self.wanted):
            alike = [w for w in self.wanted if w.dtype == dtype and value(w.matrix).device == device]
            self.chunks += [c for c in _chunks(alike) if len(c) > 1 or c[0].reader.target is NARROW_MM]
        if not self.chunks:
            raise Reason.NOT_FASTER.rejected("each matrix is already split by its own kernel")

    def rewrite(self) -> str:
        index = {node: i for i, node in enumerate(self.graph.nodes)}
        moved: set[fx.Node] = set()
        made = [each for chunk in self.chunks for each in _make(chunk, index, moved)]
        for w, part in made:
            if w.reader.target is NARROW_MM:
                right: Any = w.reader.args[1]
                parts = [*right[: w.index], part, *right[w.index + 1 :]]
                change(w.reader, args=(w.reader.args[0], parts, *w.reader.args[2:]))
            else:
                for output in list(w.reader.users):
                    substitute(output, part)
        return f"{len(self.wanted)} matrices in {len(self.chunks)} kernels"


def _bytes(matrix: fx.Node) -> int:
    """The approximate number of bytes of the parts of a matrix."""
    return 3 * 2 * int(value(matrix).numel())


def _chain(matrix: fx.Node) -> Iterator[fx.Node]:
    """An input and the views of it up to a matrix, in order."""
    found = [matrix]
    while found[-1].op == "call_function":
        found.append(found[-1].all_input_nodes[0])
    yield from reversed(found)


def _is_written(node: fx.Node) -> bool:
    """Whether something in the graph writes to a tensor, or to a view of it."""
    return any(node in written(user) or (user.target in VIEWS and _is_written(user)) for user in node.users)


def _wanted(graph: fx.Graph) -> Iterator[_Wanted]:
    """The inputs that are split up, in the order in which they are read."""
    for node in graph.nodes:
        if node.target is LORA_SPLIT:
            matrices, *forms, _ = node.args
            if len(matrices) == 1 and takes(matrices[0]):  # one of ours
                yield _Wanted(node, 0, matrices[0], False, tuple(form[0] for form in forms))
        elif node.target is NARROW_MM:
            x, right, *_ = node.args
            count = _summands(value(x), [value(b) for b in right])
            if count > 1 and all(map(takes, right)):
                for i, b in enumerate(right):
                    yield _Wanted(node, i, b, value(b).stride(1) != 1, (count, 0, 0))


def _summands(x: torch.Tensor, right: Sequence[torch.Tensor]) -> int:
    """How many summands of its narrow matrices a skinny GEMM has made in front; 1: none."""
    if any(b.dim() != 2 or b.dtype != torch.float32 for b in right):
        return 1
    rows, inner = map(known_size, x.shape)
    ranks = tuple(int(b.shape[1]) for b in right)
    return narrow_kernel.ahead(narrow.Shape(rows, inner, ranks, "n", x.dtype, torch.float32))


def _chunks(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """The matrices that one kernel splits at a time.

    Where layers are alike, so are the chunks of each: a kernel is compiled once for all of them.
    """
    period = _period([w.kind for w in wanted])
    # Several layers, or an even part of one.
    length = period * (MOST // period) if period <= MOST else -(-period // -(-period // MOST))
    whole = period * max(1, MOST // period)
    for start in range(0, len(wanted), whole):
        layer = wanted[start : min(start + whole, len(wanted))]
        for first in range(0, len(layer), length):
            chunk: list[_Wanted] = []
            for w in layer[first : first + length]:
                if chunk and sum(_bytes(other.matrix) for other in (*chunk, w)) > MOST_BYTES:
                    yield chunk
                    chunk = []
                chunk.append(w)
            yield chunk


def _period(kinds: Sequence[Any]) -> int:
    """The number of matrices after which most of them repeat; that of all, if they do not."""
    best, share = max(1, len(kinds)), 2 / 3
    for period in range(1, len(kinds) // 2 + 1):
        pairs = list(zip(kinds, kinds[period:], strict=False))
        same = sum(first == second for first, second in pairs) / len(pairs)
        if same > share:
            best, share = period, same
        if share == 1:
            break
    return best


def _make(
    chunk: Sequence[_Wanted], index: dict[fx.Node, int], moved: set[fx.Node]
) -> list[tuple[_Wanted, fx.Node]]:
    """One call of the operation for a chunk, in front of its first reader; what each reads then."""
    before = chunk[0].reader
    build = Builder(before)
    distinct: dict[tuple[Any, ...], _Wanted] = {}
    for w in chunk:
        for node in _chain(w.stored or w.matrix):
            # Views, and attributes, that stand behind the place.
            if node.op != "placeholder" and node not in moved and index[node] > index[before]:
                move(node, before)
                moved.add(node)
        distinct.setdefault(_key(w), w)
    matrices = [w.stored or build.call(aten.permute.default, w.matrix, [1, 0]) for w in distinct.values()]
    forms = [list(each) for each in zip(*(w.form for w in distinct.values()), strict=True)]
    parts = build.parts(LORA_SPLIT, matrices, *forms, chunk[0].dtype)
    read = {
        key: build.call(aten.permute.default, part, [0, 2, 1]) if w.turned else part
        for (key, w), part in zip(distinct.items(), parts, strict=True)
    }
    return [(w, read[_key(w)]) for w in chunk]


def _key(w: _Wanted) -> tuple[Any, ...]:
    return (w.matrix, w.turned, w.form)
