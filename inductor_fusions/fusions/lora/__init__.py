"""Linears with low-rank adapters: `x W + s * (x A) B` as two kernels, in both directions.

`adapters` and `recognise` read linears with adapters from a post-grad graph, `groups` puts those on one
input together, and `sites` and `emitter` decide and rewrite; `sums` and `accumulate_sites` do it for those
that are added to what is in memory. `gradients` has what is left of a backward then, and `gather` lets few
kernels (`split`) split up float32 inputs of the graph. `profit` says what is measured. `op` has the
operations: products with narrow matrices, of which `narrow`, `narrow_kernel` and `lowering` make a kernel,
and whole linears on few rows, of which `decode` makes two; `accumulate` has that of sums. `inputs` is what
is done before autograd.
"""

from __future__ import annotations

from ...fusion import Fusion
from ...graph.torch_ops import spellings
from . import accumulate_kernel, decode, inputs, lowering, merged, op, split
from .sites import ANCHORS, candidates

FUSION = Fusion(
    name="lora",
    stage="post_grad",
    summary="linears with low-rank adapters, and their gradients, to a narrow product and a block GEMM",
    marks=(op.ROUNDED,),
)
FUSION.group(lambda: ANCHORS)(candidates)

#: What is done before autograd; the toggle of `lora` is that of both.
INPUTS = inputs.FUSION
INPUTS.anchor(lambda: spellings("linear"))(merged.merged_weight)

lowering.register()
decode.register()
split.register()
accumulate_kernel.register()
