"""Finds pairwise dot products of the features of a sample, in Dynamo's torch-level graph.

    z = torch.bmm(t, t.transpose(1, 2))
    torch.cat([dense, z[:, i, j]], dim=1)

Other forms: `z.flatten(1)[:, k]` and `gather`; rows `z[:, i, :i]` or elements that `cat` or `stack`
concatenates; z times a number; `(t[:, i] * t[:, j]).sum(-1)`, also of features that `split` takes apart, or
that are tensors of their own, and that `cat` or `stack` concatenates. If the graph has the pairs as numbers,
or by `tril_indices` and `triu_indices`, and they are a triangle, it has a kernel of its own. Contents of
buffers and inputs are never read: the kernel takes the tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...effects.liveness import readers
from ...graph.dims import WHOLE, Selection, is_over_last, permuted_by, selection
from ...graph.einsum import equation_of
from ...graph.torch_ops import Op, concrete, read, scaled_by
from ...operands import tensor, value

#: Views that may give all products as one row of each sample.
FLATTENS = ("flatten", "reshape", "view")
#: Dense features of more columns are concatenated by others.
WIDEST_DENSE = 1024


@dataclass(frozen=True)
class InteractionSite:
    """The pairs of one batch of features.

    Attributes:
        pairs: z[:, i, j], or what gives the same.
        t: the features, (samples, features, width); or one tensor for each of them, without their dim or with
            one of size 1.
        between: what is computed on the way, in order: z and its view; or both gathers and their product.
        indices: i and j, or the cells of z in a row, as they are in the graph.
        cat: the concatenation that reads the pairs behind `dense`, or None.
        dense: what stands before the pairs, (samples, columns), or None.
        kept: whether a last dim of size 1 is behind the pairs.
        scales: by what the products are multiplied or divided before they are selected.
    """

    pairs: fx.Node
    t: fx.Node | tuple[fx.Node, ...]
    between: tuple[fx.Node, ...]
    indices: tuple[Any, ...]
    cat: fx.Node | None
    dense: fx.Node | None
    kept: bool = False
    scales: tuple[tuple[str, float], ...] = ()

    @property
    def features(self) -> torch.Tensor:
        """All features, (samples, features, width)."""
        return value(self.t) if isinstance(self.t, fx.Node) else put_beside([value(each) for each in self.t])

    @property
    def gathers(self) -> bool:
        """Whether features are gathered before they are multiplied."""
        return squared(self.between[0]) is None

    @property
    def last(self) -> fx.Node:
        """The node that is replaced."""
        return self.pairs if self.cat is None else self.cat

    @property
    def replaced(self) -> set[fx.Node]:
        """The nodes that the pairs are computed by, without the features and other inputs of the graph."""
        made = {x for node in (*self.between, self.pairs) for x in (node, *node.all_input_nodes)}
        made -= {self.t} if isinstance(self.t, fx.Node) else {*self.t}
        return {x for x in (*made, *_sources(self.indices)) if x.op not in ("placeholder", "get_attr")}


def site(node: fx.Node) -> InteractionSite | None:
    """The pairs that a node is: a gather from products of features with themselves, or a sum of products."""
    op = read(node)
    if op is None or op.inplace:
        return None
    if op.name in ("sum", "einsum"):
        found = _of_sum(op) if op.name == "sum" else _of_pairs(op)
        return (
            None if found is None else InteractionSite(node, *found, *_cat(node), kept=op["keepdim"] is True)
        )
    if op.name in ("cat", "stack"):
        return _of_parts(op)
    z, scales, nodes = without_scales(op.input)
    found = _of_gather(op, z)
    if found is None:
        return None
    t, between, index = found
    if scales:  # not those of what is concatenated with the pairs
        return InteractionSite(node, t, (*between, *nodes), index, None, None, scales=scales)
    return InteractionSite(node, *found, *_cat(node))


def without_scales(node: Any) -> tuple[Any, tuple[tuple[str, float], ...], tuple[fx.Node, ...]]:
    """Look through factors: the scaled node, ("mul" or "div", number) in order, and the nodes passed."""
    op = read(node)
    if op is None or op.inplace or op.name not in ("mul", "div"):
        return node, (), ()
    first, second = op.only("input", "other")
    if op.name == "mul" and isinstance(first, (int, float)):
        first, second = second, first
    before, after = tensor(first), tensor(node)
    if scaled_by(op) is None or before is None or after is None or before.dtype != after.dtype:
        return node, (), ()
    inner, scales, nodes = without_scales(first)
    return inner, (*scales, (op.name, second)), (*nodes, node)


def _of_gather(op: Op, z: Any) -> tuple[fx.Node, tuple[fx.Node, ...], tuple[Any, ...]] | None:
    """The features, what is between, and the indices of z[:, i, j] and z.flatten(1)[:, k]."""
    index = op["index"]
    if op.name == "index_select":
        index = (WHOLE, index) if op.only("input", "dim", "index")[1] in (1, -1) else None
    elif op.name in ("gather", "take_along_dim"):
        index = _of_all_samples(op)
    elif isinstance(index, tuple) and index[:1] == (Ellipsis,) and len(index) == _rank(z):
        index = (WHOLE, *index[1:])
    if not isinstance(z, fx.Node) or not isinstance(index, tuple) or index[:1] != (WHOLE,):
        return None
    if not all(map(is_index, index[1:])):
        return None
    if len(index) == 3:
        t = squared(z)
        return None if t is None else (t, (z,), index[1:])
    view = read(z)
    if len(index) != 2 or view is None or view.name not in FLATTENS or not is_flattened(z):
        return None
    t = squared(view.input)
    return None if t is None else (t, (view.input, z), index[1:])


def _rank(node: Any) -> int:
    found = tensor(node)
    return -1 if found is None else found.dim()


def _of_all_samples(op: Op) -> tuple[Any, ...] | None:
    """The index of a `gather` along dim 1 of a matrix that takes the same columns of each row."""
    _, dim, index = op.only("input", "dim", "indices" if op.name == "take_along_dim" else "index")
    before, after = tensor(op.input), tensor(op.node)
    if before is None or after is None or before.dim() != 2 or dim not in (1, -1):
        return None
    while (held := tensor(index)) is not None and held.dim() > 1:
        by, taken = read(index), selection(index, adds=True)
        inner = None if by is None else tensor(by.input)
        if by is None or inner is None or not inner.dim():
            return None
        if not known_true(inner.shape[-1] == held.shape[-1]):
            return None
        if by.name not in ("expand", "repeat", "unsqueeze") and (taken is None or taken.dims):
            return None
        index = by.input
    return (WHOLE, index) if known_true(after.shape[0] == before.shape[0]) else None


def _of_parts(op: Op) -> InteractionSite | None:
    """Read a `stack` of elements z[:, i, j], or a `cat` of rows z[:, i, :i] that may be behind dense ones."""
    parts, dim = op.only("tensors", "dim")
    if not isinstance(parts, (list, tuple)) or len(parts) < 2 or dim not in (1, -1):
        return None
    last = selection(parts[-1])
    t = None if last is None else squared(last.source)
    if last is None or t is None:
        return None
    first = selection(parts[0])
    dense = parts[0] if op.name == "cat" and (first is None or first.source is not last.source) else None
    if dense is not None and not _is_dense(dense, parts[-1]):
        return None
    cells: list[tuple[int, int]] = []
    for part in parts[dense is not None :]:
        taken = selection(part)
        own = None if taken is None or taken.source is not last.source else _cells(taken)
        if own is None or _rank(part) != 1 + (op.name == "cat"):
            return None
        cells += own
    between = (last.source, *parts[dense is not None :])
    indices = [i for i, _ in cells], [j for _, j in cells]
    if not cells:
        return None
    return InteractionSite(op.node, t, between, indices, None if dense is None else op.node, dense)


def _cells(taken: Selection) -> list[tuple[int, int]] | None:
    """The cells of a sample that are taken of z, a range of a row or a column, or one."""
    spans = [taken.range(dim) for dim in range(1, len(taken.index))]
    steps = [part.step for part in taken.index if isinstance(part, slice)]
    if len(spans) != 2 or taken.index[0] is not WHOLE or any(step is not None for step in steps):
        return None
    if not all(span is not None and all(type(at) is int for at in span) for span in spans):
        return None
    rows, columns = (range(*span) for span in spans if span is not None)
    return [(i, j) for i in rows for j in columns]


def put_beside(features: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of one feature each as one."""
    return torch.stack(features, 1) if features[0].dim() == 2 else torch.cat(features, 1)


#: The features, the nodes between them and the pairs, and (i, j).
_Pairs = tuple[fx.Node | tuple[fx.Node, ...], tuple[fx.Node, ...], tuple[Any, ...]]


def _of_sum(op: Op) -> _Pairs | None:
    """Read (t[:, i] * t[:, j]).sum(-1)."""
    product, *_ = op.only("input", "dim", "keepdim")
    by = read(product)
    if by is None or by.name != "mul" or not is_over_last(op):
        return None
    sides = by.only("input", "other")
    made = tensor(product)
    return _of_sides(sides, (*sides, product)) if made is not None and made.dim() == 3 else None


def _of_sides(sides: tuple[Any, ...], between: tuple[fx.Node, ...]) -> _Pairs | None:
    """Read both features of each pair: rows of one tensor, or tensors of their own beside each other."""
    (left, i), (right, j) = (gathered(side) or (None, []) for side in sides)
    if left is not None or right is not None:
        return (left, between, (i, j)) if left is not None and left is right else None
    first, second = (list(features_of(side)) for side in sides)
    features = list(dict.fromkeys((*first, *second)))
    if len(first) != len(second) or len(features) >= len(first):  # such as norms of all
        return None
    if len({str(value(each).shape) for each in features}) > 1:  # broadcast, or with and without their dim
        return None
    return tuple(features), between, ([features.index(x) for x in first], [features.index(x) for x in second])


def features_of(node: Any) -> tuple[fx.Node, ...]:
    """The tensors of one feature each that a node puts beside each other; () of another node."""
    op, whole = read(node), tensor(node)
    parts, dim = op.only("tensors", "dim") if op is not None and op.name in ("cat", "stack") else ((), None)
    held = [tensor(part) for part in parts] if isinstance(parts, (list, tuple)) else []
    if not held or whole is None or whole.dim() != 3 or dim not in (1, -2):
        return ()
    for t in held:
        if t is None or t.dtype != whole.dtype or (t.dim() == 3 and not known_true(t.shape[1] == 1)):
            return ()
    return tuple(parts)


def _of_pairs(op: Op) -> _Pairs | None:
    """Read the einsum "bpd,bpd->bp" of t[:, i] and t[:, j]."""
    found = equation_of(op)
    if (
        found is None
        or len(found.first) != 3
        or found.first != found.second
        or found.result != found.first[:2]
    ):
        return None
    sides = found.left, found.right
    return _of_sides(sides, sides)


def is_flattened(node: fx.Node) -> bool:
    """Whether a node has the products of features with themselves as one row of each sample."""
    z = node.args[0] if node.args else None
    if not isinstance(z, fx.Node) or squared(z) is None:
        return False
    flat, whole = tensor(node), tensor(z)
    if flat is None or whole is None or flat.dim() != 2:
        return False
    return str(flat.shape[0]) == str(whole.shape[0])


def gathered(node: Any) -> tuple[fx.Node, Any] | None:
    """The features of which a node has some rows of each sample, and their indices."""
    op = read(node)
    if op is None or op.inplace:
        return None
    if op.name in ("cat", "stack"):
        return _put_together(op)
    if op.name == "index_select":
        source, dim, rows = op.only("input", "dim", "index")
        found = tensor(source)
        fits = found is not None and found.dim() == 3 and dim in (1, -2) and is_index(rows)
        return (source, rows) if fits else None
    if node.target is not operator.getitem:
        return None
    source, index = op.input, op["index"]
    found = tensor(source)
    if found is None or found.dim() != 3 or not isinstance(index, tuple) or len(index) != 2:
        return None
    return (source, index[1]) if index[0] == WHOLE and is_index(index[1]) else None


def _put_together(op: Op) -> tuple[fx.Node, Any] | None:
    """Read a `stack` of rows t[:, k], or a `cat` of t[:, k : k + 1]: t and the numbers of the rows.

    `unbind` and `split` give such rows as well.
    """
    parts, dim = op.only("tensors", "dim")
    if not isinstance(parts, (list, tuple)) or dim not in (1, -2):
        return None
    taken = [each for each in map(selection, parts) if each is not None and is_row(each, op.name == "cat")]
    sources = {each.source for each in taken}
    if len(taken) != len(parts) or len(sources) != 1:
        return None
    return sources.pop(), [each.index[1].start if op.name == "cat" else each.index[1] for each in taken]


def is_row(taken: Selection, keeps_dim: bool) -> bool:
    """Whether one row of each sample is taken."""
    if len(taken.index) != 3 or not keeps_dim:
        return len(taken.index) == 3 and taken.number(1) is not None
    part, row = taken.index[1], tensor(taken.nodes[0])
    one = taken.dims == [1] and row is not None and known_true(row.shape[1] == 1)
    return one and isinstance(part, slice) and type(part.start) is int


def is_index(index: Any) -> bool:
    """Whether an index is a list of numbers, or a vector of integers."""
    found = tensor(index)
    if found is None:
        numbers = concrete(index) if isinstance(index, (list, tuple)) else (None,)
        return all(type(number) in (int, torch.SymInt) for number in numbers)
    return found.dim() == 1 and found.dtype in (torch.int64, torch.int32)  # others are masks


def squared(z: fx.Node) -> fx.Node | None:
    """t, where z is t times its transpose, sample by sample."""
    product = tensor(z)
    if product is None or product.dim() != 3:
        return None
    op = read(z)
    if op is None or op.name not in ("bmm", "matmul"):
        return _features_of_einsum(op) if op is not None and op.name == "einsum" else None
    first, second = op.only("input", "other")
    held = tensor(first)
    if held is None or held.dim() != 3:
        return None
    turned = [0, 2, 1]
    return first if permuted_by(second, turned) is first or permuted_by(first, turned) is second else None


def _features_of_einsum(op: Op) -> fx.Node | None:
    """The features of an einsum "bid,bjd->bij", with any letters, or None."""
    found = equation_of(op)
    if found is None or found.left is not found.right or len(found.first) != 3 or len(found.result) != 3:
        return None
    b, i, d, j = (*found.first, found.second[1])
    same = found.second == b + j + d and len({b, i, d, j}) == 4
    return found.left if same and found.result in (b + i + j, b + j + i) else None


def _cat(pairs: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The concatenation that alone reads the pairs, behind one matrix, and that matrix."""
    (user, *others) = readers(pairs) or (None,)
    op = read(user)
    if user is None or others or op is None or op.name != "cat":
        return None, None
    parts, dim = op.only("tensors", "dim")
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or parts[1] is not pairs or dim not in (1, -1):
        return None, None
    return (user, parts[0]) if _is_dense(parts[0], pairs) else (None, None)


def _is_dense(node: Any, pairs: Any) -> bool:
    """Whether a node has dense features that the kernel writes in front of pairs."""
    dense, held = tensor(node), tensor(pairs)
    if dense is None or held is None or dense.dim() != 2:
        return False
    alike = (dense.dtype, dense.device) == (held.dtype, held.device)
    return alike and isinstance(dense.shape[1], int) and dense.shape[1] <= WIDEST_DENSE


def _sources(values: Any) -> Iterator[fx.Node]:
    """The nodes that indices are made by."""
    for node in values:
        while isinstance(node, fx.Node) and node.op != "placeholder":
            yield node
            node = node.args[0] if node.args else None
