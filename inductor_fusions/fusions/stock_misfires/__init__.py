"""Rewrites graphs that Inductor's own attention patterns misread.

Before torch 2.15 those patterns ignore some constants: the dim of a softmax, the order of a permutation,
`alpha` of an addition, a divisor. If a graph differs from attention only by such a constant, they replace it
by attention, and the result is silently wrong (pytorch#196468, #195320). Each such operation gets an equal
form here, which the pattern reads correctly or not at all:

| graph | equal form |
|---|---|
| `softmax(x, dim)`, not over the last dim | `softmax(x, dim).unsqueeze(0).squeeze(0)` |
| `e / e.sum(dim, keepdim=True)`, not over the last dim | the same behind the sum |
| `add(x, y, alpha=a)` | `add(x, a * y)` |
| q, k or v permuted otherwise than by the pattern | several permutations, the last ones as it assumes them |
| `scores / c`, where c is not sqrt(head_dim) (torch 2.11) | `scores.unsqueeze(0).squeeze(0) / c` |
| `q / c` with such a c | `(q / c).unsqueeze(0).squeeze(0)` |
| both where c is a tensor | the same |

With any torch, the attention that a pattern inserts saves its result for its backward, while a matrix product
does not. If a result leaves the graph in training, the caller gets a copy (`returned`). Inductor drops the
copy if nothing saves the result.

Views cost nothing, and a factor is computed in the kernel of the addition. Only operations between two matrix
products are changed. Attention that was fused before has none left.

torch 2.13 and 2.14 also have patterns (29 and 30) for decomposed SDPA. SDPA is decomposed if no backend
supports the call: the last dim of q, k or v is not contiguous, v has another head dim, or the mask requires a
gradient. These patterns ignore the permutations of q, k and v as well, so the permutations of every SDPA call
are rewritten too.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..._inductor import (
    Match,
    is_body,
    patterns_ignore_constants,
    patterns_ignore_the_scale,
    patterns_match_decomposed_sdpa,
)
from ...effects.inplace import inputs, readers
from ...fusion import Candidate, Fusion, Scope
from ...graph.torch_ops import forms
from .permutations import permuted, permuted_for
from .reductions import REDUCTIONS, OverOtherDims, softmax_dims
from .returned import returned
from .scores import Alpha, divided
from .walk import between, name_of, nearest_product

_SDPA = "scaled_dot_product_attention"


FUSION = Fusion(
    name="stock_misfires",
    stage="pre_grad",
    summary="graphs that stock's attention patterns misread to equivalent graphs",
    exact=True,
    after=("attention",),
)


@FUSION.anchor(lambda: forms(_SDPA, *REDUCTIONS))
def read(scope: Scope, match: Match) -> Iterator[Candidate]:
    """Graphs that stock's patterns would misread: around a softmax between two products, and before SDPA."""
    node = match.output_node()
    if name_of(node) == _SDPA and patterns_match_decomposed_sdpa():
        yield from permuted_for(node)
    found = softmax_dims(node)
    if found is None:
        return
    dims, rank = found
    product, output = nearest_product(node, inputs), nearest_product(node, readers)
    if product is None or output is None:
        return
    over_keys = dims == (rank - 1,)
    divisions: list[Candidate] = []
    if patterns_ignore_constants():
        for each in between(node, product):
            if name_of(each) == "add" and each.kwargs.get("alpha", 1) != 1:
                yield Alpha(each)
        divisions += divided(node, product, patterns_ignore_the_scale())
        yield from permuted(product, output)
        if not over_keys:
            yield OverOtherDims(node, dims)
    if over_keys and not is_body(scope.graph):
        yield from returned(output)
    yield from divisions
