"""Reports adapters that the kernels do not take: of a high or symbolic rank, of blocks of columns, of
transposed inputs, of some of the tokens, and of a sum of narrow products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from ..._inductor import hint, is_backward, known_true
from ...block_mm import guards
from ...fusion import Candidate, LeftToStock, Reported
from ...graph.additions import added_matrix, additions_behind, summands
from ...graph.products import Product, batched_linear, is_floating, multiplied, product
from ...graph.search import computed_of
from ...operands import value
from ...reasons import Reason
from .adapters import MOST_RANK, is_low_rank, source
from .first_products import product_in
from .unsupported import core_of, origin, terms_of, turned

BLOCKS = Reason.SHAPES(
    "one matrix multiplies each block of the columns (LoKr, MoRA), so its product has more rows than the "
    "linear that it is added to"
)
TRANSPOSED = Reason.LAYOUT(
    "A and B multiply the transposed input from the left, and the kernels multiply the input from the right"
)
SUM = Reason.LIMIT(
    "B multiplies a sum or a difference of narrow products (as in LoReFT), and the kernels support "
    "one A for each B"
)
#: The most nodes between the input of a linear and a product of blocks of its columns.
_MOST_BETWEEN = 48


def candidates(products: Sequence[Product]) -> Iterator[Candidate]:
    """Every such adapter that is added to a linear, or to what a linear adds to."""
    for up in products:
        yield from _wide(up)
        yield from _transposed(up)
        yield from _of_blocks(up)
        yield from _of_sum(up)
        yield from _of_rows_apart(up)


def _wide(up: Product) -> Iterator[Candidate]:
    """An adapter whose rank is above that of the kernels, or unknown, added to a linear on its input."""
    rank = value(up.a).shape[1]
    # With a function between them, two wide linears are an MLP.
    down = product(core_of(up.a)) if isinstance(rank, int) else _first_product(up.a)
    if down is None:
        return
    if _is_wide(rank, down.inner, value(up.node).shape[1]):
        said = Reason.LIMIT(f"the adapter has rank {rank}, and the kernels support {MOST_RANK}")
    elif not isinstance(rank, int) and _is_low_rank(rank, down, value(up.node).shape[1]):
        said = Reason.SYMBOLIC("the rank of the adapter is symbolic")
    else:
        return
    if (top := _sum_with_base(up, down.a)) is not None:
        yield Reported(top, LeftToStock(said), {"adapter": guards.text(up.node)})


def _transposed(up: Product) -> Iterator[Candidate]:
    """An adapter `(B @ (A @ x.T)).T`, added to a linear on x."""
    down = _first_product(up.b)
    if down is None or not _is_low_rank(value(up.b).shape[0], down, value(up.node).shape[0]):
        return
    if (top := _sum_with_base(up, down.b)) is not None:
        why = LeftToStock(TRANSPOSED, "F.linear(F.linear(x, a), b)")
        yield Reported(top, why, {"adapter": guards.text(up.node)})


def _first_product(matrix: fx.Node) -> Product | None:
    """The product of as many elements that a matrix is a function of."""
    return product_in(matrix, str(value(matrix).numel()))


def _is_low_rank(rank: Any, down: Product, columns: Any) -> bool:
    """As `is_low_rank`, of sizes some of which may be symbolic."""
    return is_low_rank(*map(hint, (rank, value(down.a).shape[1], columns)))


def _sum_with_base(up: Product, x: fx.Node) -> fx.Node | None:
    """The last sum that an adapter is added in, also times a gate, if a product on its input is a term.

    A trained gate reads the adapter for its gradient as well. In a backward, it multiplies what A reads.
    """
    sums = additions_behind([up.node, *up.node.users])
    others = [found for found in _products_in(sums[-1] if sums else None) if found.node is not up.node]
    inputs = {origin(x), *(origin(each) for each, _ in multiplied(source(x).base))}
    return sums[-1] if any(origin(found.a) in inputs for found in others) else None


def _of_blocks(base: Product) -> Iterator[Candidate]:
    """A product of blocks of the columns of a linear's input, which is added to that linear."""
    rows, size = value(base.node).shape[0], value(base.node).numel()
    for top in additions_behind([base.node]):
        terms = terms_of(top)
        others = [p for p in map(product, terms) if p is not None and p.node is not base.node]
        if len(terms) != 2 or len(others) != 1 or base.node not in terms:
            continue
        up = others[0]
        more = known_true(value(up.node).shape[0] > rows) and known_true(value(up.node).numel() == size)
        if more and up.inner <= MOST_RANK and _is_of(up.a, source(base.a).base):
            yield Reported(top, LeftToStock(BLOCKS), {"adapter": guards.text(up.node)})


def _of_sum(up: Product) -> Iterator[Candidate]:
    """An adapter whose B multiplies a sum of products of low rank, added to a linear on an input of these, or
    to that input. In a backward, adapters that share A have such a sum.
    """
    core = core_of(up.a)
    if not isinstance(core, fx.Node) or not summands(core) or is_backward(up.node.graph):
        return
    rank, columns = value(up.a).shape[1], value(up.node).shape[1]
    if not is_low_rank(rank, columns):
        return
    inputs = [down.a for down in _products_in(core) if is_low_rank(rank, down.inner)]
    tops = [_sum_with_base(up, x) or _sum_with(up, x) for x in inputs] if len(inputs) > 1 else []
    if (top := next(filter(None, tops), None)) is not None:
        yield Reported(top, LeftToStock(SUM), {"adapter": guards.text(up.node)})


def _sum_with(up: Product, x: fx.Node) -> fx.Node | None:
    """A sum that an adapter and the input x are terms of."""
    tops = additions_behind([up.node, *up.node.users])
    own = ((top, [origin(term) for term in terms_of(top) if is_floating(term)]) for top in tops)
    return next((top for top, terms in own if origin(x) in terms), None)


def _of_rows_apart(up: Product) -> Iterator[Candidate]:
    """An adapter of some of the tokens: its A is a batch of products, as their rows are apart in memory."""
    down = core_of(up.a)
    batch = batched_linear(down)
    if batch is not None and is_low_rank(*value(batch[1]).shape[::-1], value(up.node).shape[1]):
        why = LeftToStock(guards.BATCHED_LINEAR, "contiguous() on the input")
        yield Reported(up.node, why, {"adapter": guards.text(up.node)})


def _is_of(node: fx.Node, origin: fx.Node) -> bool:
    """Whether a matrix is computed of another one, by a few operations."""
    return origin in computed_of(node, _MOST_BETWEEN)


def _is_wide(rank: Any, *sizes: Any) -> bool:
    """Whether a size would be the rank of an adapter between these sizes, were it not too large."""
    known = all(isinstance(size, int) for size in (rank, *sizes))
    return known and rank > MOST_RANK and all(2 * rank <= size for size in sizes)


def _products_in(node: Any) -> Iterator[Product]:
    """The products that a sum adds up."""
    if not isinstance(node, fx.Node):
        return
    if (found := product(node)) is not None:
        yield found
    terms = terms_of(node) if found is None else [added_matrix(found)]
    for term in terms:
        yield from _products_in(turned(core_of(term)))
