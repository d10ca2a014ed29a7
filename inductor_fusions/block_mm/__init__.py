"""The grouped GEMM: groups of output columns, each a sum of products with an epilogue.

    Y_g = activation_g(sum_i scale_gi * A_gi @ B_gi + bias_g)

`guards` says whether products of a graph may and should become one operation, and `op` is that operation.
`lowering` makes a kernel of it, rendered by `template` in the configuration that `heuristics` chooses. The
fusions `qkv`, `gated_mlp` and `linear_epilogue` say which products they want; `norm_linear` says which calls
apply a norm to their input.
"""

from __future__ import annotations

from ..lowering import lower_by
from .lowering import Lowering
from .op import BLOCK_MM, Call, composite

lower_by(
    BLOCK_MM,
    "block_mm",
    lambda *given: Lowering(*given).kernel(),
    lambda *given: composite(Call(*given), as_stock=True),
)
