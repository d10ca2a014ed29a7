"""Linears as one block GEMM: some groups of columns, each a sum of products, then an epilogue.

    Y_g = activation_g(sum_i scale_gi * A_gi @ B_gi + bias_g)

`normal_form` reads the products of a post-grad graph, `placement` finds where one operation can stand
for several of them, `guards` says whether it may and should, and `op` is that operation. `lowering` makes a
kernel of it, rendered by `template` in the configuration that `heuristics` chooses. The fusions `qkv`,
`gated_mlp` and `linear_epilogue` say which products they want.
"""

from __future__ import annotations

from .lowering import register

register()
