"""Reports adapters with other than matrix products: of embeddings, convolutions, batches of matrices."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from ..._inductor import known_true
from ...block_mm import guards
from ...fusion import Candidate, LeftToStock, Reported
from ...graph.additions import additions_behind, is_sum, summands
from ...graph.products import (
    CASTS,
    RESHAPES,
    identity,
    is_pointwise,
    multiplied,
    product,
    repeated_matrix,
    through,
    transpose_of,
    users_behind,
)
from ...graph.search import computed_of, reached
from ...operands import tensor, value
from ...reasons import Reason
from .adapters import MOST_RANK, is_low_rank, source, step
from .first_products import product_in
from .reached import is_added_to_product

aten = torch.ops.aten

#: Anchors.
BASES = (
    aten.embedding.default, aten.convolution.default, aten.bmm.default, aten.baddbmm.default,
    aten.repeat.default, aten.expand.default, aten._fft_c2r.default, aten._fft_c2c.default,
)  # fmt: skip
#: Batches of products: of the second one, what is added to them comes first.
_BATCHES = (aten.bmm.default, aten.baddbmm.default)
EMBEDDING = Reason.NO_MATRIX(
    "the adapter belongs to an embedding, whose base is a look-up and not a matrix product"
)
CONVOLUTION = Reason.NO_MATRIX("the adapter belongs to a convolution, whose base is not a matrix product")
UP = Reason.NO_MATRIX("the second product of the adapter is a convolution, and only linears are fused")
CIRCULANT = Reason.NO_MATRIX(
    "a convolution by Fourier transforms is added to a linear (C3A), and only products are fused"
)
CONVOLVED = Reason.NO_MATRIX(
    "a convolution of A with B makes the weight of a linear in each step, and only products are taken apart"
)
BATCH = Reason.LIMIT(
    "the adapters are a batch, one for each sample, expert or block, and the kernels support one matrix each"
)
PART = Reason.LAYOUT(
    "what B reads is a part of wider rows, so torch makes a batch of products with the one B of it"
)
TURNED = Reason.LAYOUT(
    "A and B multiply the input from the left, so torch makes a batch of products with each of them"
)
ROTATED = Reason.LIMIT(
    "blocks of the columns of the linear's input are multiplied by a matrix each (OFT), a batch of products, "
    "and the kernels support one matrix each"
)
ROTATED_WEIGHT = Reason.LIMIT(
    "blocks of the columns of the linear's weight, or of another right operand, are multiplied by a matrix "
    "each (OFT), a batch of products, and the kernels support one matrix each"
)
REPEATED = Reason.SHAPES("the result of a skinny GEMM is repeated to the columns of the base (MoRA)")
MERGED = Reason.MERGED(
    "the matrices of a batch, one for each expert, are added to products of low rank in each step"
)
#: The most operations that make the blocks of a rotation.
_MOST_OF_BLOCKS = 64
#: What may be between the experts' results and the base: a sum of them, with weights.
_OVER_DIMS = (aten.sum.dim_IntList, aten.mean.dim)
_SUMS = (aten.bmm.default, aten.mul.Tensor, *_OVER_DIMS)
#: What may be between both products: channels in front, blocks in another order.
_TURNED = (
    aten.permute.default, aten.clone.default, aten.expand.default, aten.split.Tensor,
    aten.split_with_sizes.default, operator.getitem,
)  # fmt: skip


def candidates(bases: Sequence[fx.Node]) -> Iterator[Candidate]:
    """Every sum of an embedding or a convolution with its adapter, and every such second product of one.

    Args:
        bases: the matches of `BASES` in a graph.
    """
    for node in bases:
        said = _of_up(node)
        if said:
            yield Reported(node, LeftToStock(said), {"adapter": guards.text(node)})
    for node in _sums_of(bases):
        terms = [core_of(term) for term, _ in summands(node)]
        if len(terms) != 2:
            continue
        for base, up in (terms, terms[::-1]):
            reason = _reason(base, up)
            if reason:
                details = {"base": guards.text(base), "adapter": guards.text(up)}
                yield Reported(node, LeftToStock(reason), details)
                break


def _of_up(up: fx.Node) -> str:
    """Why a second product of an adapter is not fused; "" if it is none."""
    if up.target in _BATCHES:
        if _is_of_wider_rows(up):
            return PART
        first, (count, rank, columns) = _narrow(up)
        inner: Any = 0
        x: Any = None
        if (packed := product(first)) is not None:  # the experts share x: each A has some columns of one
            rows, width = value(packed.node).shape
            inner = packed.inner if known_true(width == count * rank) else 0
            if not inner and known_true(rows == count * rank):  # or some rows, where x is transposed
                inner, x = packed.inner, packed.b
        elif isinstance(first, fx.Node) and first.target in _BATCHES:
            inner = value(_batch_operands(first)[0]).shape[2]
        if is_low_rank(rank, inner, columns):
            left, right = map(repeated_matrix, _batch_operands(up))
            said = BATCH if left is right is None else PART if left is None else TURNED
            return said if _is_added(up, (*_TURNED, *RESHAPES, *_SUMS), first, x=x) else ""
        return MERGED if _is_merged(_batch_operands(up)[1]) else _of_rotation(up)
    if up.target is aten._fft_c2r.default:
        return CIRCULANT if _is_added(up, (*_TURNED, *RESHAPES, *CASTS)) else ""
    if up.target is aten._fft_c2c.default:
        if getattr(turned(up.args[0]), "target", None) not in (aten.bmm.default, aten.mul.Tensor):
            return ""  # no spectra are multiplied
        parts = users_behind(up, frozenset({aten.view_as_real.default}))
        return CIRCULANT if any(x.target is aten.select.int and is_added_to_product(x) for x in parts) else ""
    if up.target in (aten.repeat.default, aten.expand.default):
        found = product(turned(up.args[0]))
        width = 0 if found is None else value(found.node).shape[1]
        narrow = found is not None and is_low_rank(width) and known_true(found.inner == width)
        wider = found is not None and not known_true(value(up).numel() == value(found.node).numel())
        return REPEATED if narrow and wider and _is_added(up, _TURNED, columns=width) else ""
    weight: Any = up.args[1]
    if not _is_convolution(up) or any(size != 1 for size in value(weight).shape[2:]):
        return ""
    found = product(turned(up.args[0]))
    if found is None and is_low_rank(value(weight).shape[1], value(up).shape[2]):
        return CONVOLVED if value(up).shape[0] == 1 and _is_weight(up) else ""
    if found is None or found.inner < 2 * value(found.node).shape[1]:
        return ""
    return UP if is_low_rank(value(found.node).shape[1]) else ""


def _is_of_wider_rows(up: fx.Node) -> bool:
    """Whether the one B of a batch of products reads a function of columns of a product of low rank."""
    left, right = _batch_operands(up)
    if repeated_matrix(right) is None or not is_added_to_product(up):
        return False
    read = through(left, frozenset({aten.expand.default}))
    if known_true(value(read).stride(-2) == value(read).shape[-1]):
        return False  # all columns
    down = product_in(read, str(value(read).numel()))
    rank = None if down is None else value(down.node).shape[1]
    return down is not None and is_low_rank(rank, down.inner, value(up).shape[2])


def _narrow(up: fx.Node) -> tuple[Any, tuple[Any, Any, Any]]:
    """What makes the narrow operand of a batch of products, and (number, rank, columns) of the batch.

    It is the left one, unless only the right one is a product: the samples may be columns.
    """
    left, right = _batch_operands(up)
    first, second = unweighted(left), unweighted(right)
    count, rows, columns = value(up).shape
    is_right = product(first) is None and getattr(first, "target", None) not in _BATCHES
    is_right = is_right and isinstance(second, fx.Node) and second.target in _BATCHES
    return (
        (second, (count, value(right).shape[1], rows))
        if is_right
        else (first, (count, value(left).shape[2], columns))
    )


def _is_added(
    node: fx.Node, passed: Sequence[Any], first: Any = None, columns: Any = None, x: Any = None
) -> bool:
    """Whether a result is added to a product, behind operations of `passed`.

    Args:
        first: the first product of a batch of adapters; a batch of products is a base if it reads what this
            reads, and else another gradient, as of an attention without a softmax.
        columns: how many it had before it was repeated: a sum with as many is the gradient of a mean.
        x: what a product must read to be a base, or its transpose; None if any product is one.
    """
    inside = reached([node], lambda each: [user for user in each.users if user.target in passed])
    ends = [user for each in inside for user in each.users if user.target not in passed]
    own = [] if first is None else _batch_operands(first)

    added = turned(core_of(node.args[0]))
    if node.target is aten.baddbmm.default and _is_base(added, own, value(node).numel(), x):
        return True

    def has_base(addition: fx.Node) -> bool:
        if columns is not None and known_true(value(addition).shape[-1] == columns):
            return False
        return first is None or any(
            _is_base(term, own, value(addition).numel(), x) for term in terms_of(addition)
        )

    return any(_adds_product(each) and has_base(each) for each in additions_behind([node, *ends]))


def _of_rotation(node: fx.Node) -> str:
    """Why square matrices that multiply blocks of the columns of a linear's operand are left; else "".

    The blocks are no activations: a linear attention looks the same otherwise.
    """
    x, blocks = _batch_operands(node)
    source = turned(x)
    while isinstance(source, fx.Node) and source.target in _BATCHES:  # which is rotated before (BOFT)
        source = turned(_batch_operands(source)[0])
    _, rank, columns = value(blocks).shape
    width = value(source).shape[-1] if tensor(source) is not None and value(source).dim() else 0
    sizes = all(isinstance(size, int) for size in (rank, columns, width))
    if not sizes or rank != columns or rank > MOST_RANK or width <= rank or width % rank:
        return ""
    if _is_computed(blocks):
        return ""
    behind = users_behind(node, frozenset((*_TURNED, *RESHAPES)))
    linears = [p for p in map(product, behind) if p is not None and p.inner == width]
    if not linears:
        return ""
    return ROTATED if any(turned(p.a) is node for p in linears) else ROTATED_WEIGHT


def _is_computed(matrices: fx.Node) -> bool:
    """Whether a linear, or very many operations, make matrices: they are activations, and no weights."""
    found = list(computed_of(matrices, _MOST_OF_BLOCKS + 1))
    return len(found) > _MOST_OF_BLOCKS or any(product(each) is not None for each in found)


def _adds_product(node: fx.Node) -> bool:
    """Whether both terms of an addition are products or sums. A residual is no base, nor is an attention."""
    terms = [t for t in terms_of(node) if isinstance(t, fx.Node)]
    inside = [unweighted(t.args[0]) if t.target in _OVER_DIMS else t for t in terms]  # of the experts
    known = [t.target in BASES or is_sum(t) or product(t) is not None for t in inside]
    return all(known) and len(terms) == len(summands(node))


def terms_of(node: fx.Node) -> list[Any]:
    """What an addition adds, behind casts, views and factors."""
    return [unweighted(term) for term, _ in summands(node)]


def _is_base(term: Any, own: Sequence[fx.Node], size: Any, x: Any) -> bool:
    """Whether a term, or one of a sum that it is, may be the base of adapters whose input is `own`, or x."""
    if not isinstance(term, fx.Node):
        return False
    if summands(term):
        return any(_is_base(each, own, size, x) for each in terms_of(term))
    if term.target not in _BATCHES:
        found = product(term)
        reads = found is not None and (x is None or origin(x) in (origin(found.a), origin(found.b)))
        return term.target in BASES or reads
    sides = zip(own, _batch_operands(term), strict=False)
    return known_true(value(term).numel() == size) and any(identity(a) == identity(b) for a, b in sides)


def origin(matrix: fx.Node) -> tuple[Any, ...]:
    """A key of what is in memory of a matrix or its transpose."""
    return identity(source(transpose_of(matrix) or matrix).base)


def _batch_operands(node: fx.Node) -> list[fx.Node]:
    """Both operands of a product, without what is added to it."""
    return [x for x in node.args[-2:] if isinstance(x, fx.Node)]


def _is_weight(node: fx.Node, steps: int = 8) -> bool:
    """Whether a matrix, or the sum with another one, is the weight of a linear."""
    below = (*_TURNED, *RESHAPES, *CASTS, aten.squeeze.dim, aten.index_put.default)
    for user in node.users:
        found = product(user)
        if found is not None and found.b is node:
            return True
        if steps and (user.target in below or is_pointwise(user)) and _is_weight(user, steps - 1):
            return True
    return False


def _is_merged(matrices: Any) -> bool:
    """Whether the right operand of a batch of products has products of low rank in it, of weights alone."""
    if not isinstance(matrices, fx.Node) or _is_computed(matrices):
        return False
    terms = terms_of(turned(core_of(matrices)))
    batches = [term for term in terms if isinstance(term, fx.Node) and term.target in _BATCHES]
    if len(batches) == len(terms):
        return False  # nothing is merged into
    lefts = ((each, _batch_operands(each)[0]) for each in batches)
    return any(is_low_rank(value(left).shape[2], *value(each).shape[1:]) for each, left in lefts)


def turned(node: Any) -> Any:
    """The node that a node permutes, reshapes and splits."""
    while isinstance(node, fx.Node) and (node.target in _TURNED or node.target in RESHAPES):
        node = node.args[0]
    return node


def unweighted(node: Any) -> Any:
    """The node that a node casts, views, permutes, and multiplies by numbers or broadcast tensors."""
    found = turned(core_of(node))
    for x, by in multiplied(found) if isinstance(found, fx.Node) else ():
        factor, whole = tensor(by), tensor(x)  # None of a number that is an input
        if factor is not None and whole is not None and known_true(factor.numel() < whole.numel()):
            return unweighted(x)
    return found


def _sums_of(bases: Sequence[fx.Node]) -> list[fx.Node]:
    """The additions, in graph order, that read a base through casts, reshapes and numeric factors."""

    def passed(node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if not summands(user) and core_of(user) is not user]

    readers = {user for node in reached(bases, passed) for user in node.users}
    return sorted(user for user in readers if summands(user))


def core_of(node: Any) -> Any:
    """The node that a node casts, reshapes and multiplies by numbers."""
    while isinstance(node, fx.Node) and (below := step(node)) is not None and below.kept is None:
        node = below.inner
    return node


def _reason(base: Any, up: Any) -> str:
    """Why an adapter of a base is not fused; "" if it is none."""
    if not isinstance(base, fx.Node) or not isinstance(up, fx.Node):
        return ""
    p = product(up)
    if p is not None:
        down = core_of(p.a)
        found = _is_embedding(base) and _is_embedding(down) and base.args[1] is down.args[1]
        return EMBEDDING if found and is_low_rank(value(down).shape[-1]) else ""
    if not _is_convolution(base) or not _is_convolution(up):
        return ""
    weight: Any = up.args[1]
    kernel, down = value(weight).shape[2:], _convolution_above(up.args[0])
    if (
        any(size != 1 for size in kernel)
        or not _is_convolution(down)
        or not is_low_rank(value(down).shape[1])
    ):
        return ""
    inputs: list[Any] = [base.args[0], down.args[0]]
    first, second = (through(x, CASTS) for x in inputs)
    return CONVOLUTION if first is second else ""


def _convolution_above(node: Any) -> Any:
    """The only convolution that a node is a function of, element by element."""

    def inside(each: fx.Node) -> list[fx.Node]:
        passed = not _is_convolution(each) and (is_pointwise(each) or core_of(each) is not each)
        return each.all_input_nodes if passed else []

    found = list(filter(_is_convolution, reached([node], inside, _MOST_OF_BLOCKS)))
    return found[0] if len(found) == 1 else None


def _is_embedding(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.embedding.default and tensor(node) is not None


def _is_convolution(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.convolution.default and tensor(node) is not None
