"""Linears with low-rank adapters: `x W + s * (x A) B` as two kernels, in both directions.

`adapters`, `first_products`, `reached` and `recognise` read linears with adapters from a post-grad graph,
`groups` puts those on one input together, and `sites` and `emitter` decide and rewrite; `sums` and
`accumulate_sites` do it for those that are added to what is in memory. `gradients` has what is left of a
backward then, and `gather` lets few kernels (`split`) split up float32 inputs of the graph. `profit` says
what is measured. `op` has the operations: products with narrow matrices, of which `narrow`, `narrow_kernel`
and `lowering` make a kernel, and whole linears on few rows, of which `decode` makes two; `accumulate` has
that of sums. `inputs` is what is done before autograd.
"""

from __future__ import annotations

import torch.nn.functional as F

from ..._inductor import register_lowering_when_loaded
from ...fusion import Fusion
from ...graph.torch_ops import forms
from ...lowering import lower_by
from . import accumulate, accumulate_kernel, decode, factors, inputs, lowering, merged, op, split
from .sites import ANCHORS, candidates

FUSION = Fusion(
    name="lora",
    stage="post_grad",
    summary="linears with low-rank adapters, and their gradients, to a skinny GEMM and a grouped GEMM",
    marks=(op.ROUNDED,),
)
FUSION.group(lambda: ANCHORS)(candidates)

#: What is done before autograd; the toggle of `lora` is that of both.
INPUTS = inputs.FUSION
INPUTS.anchor(lambda: forms("linear", "matmul"))(merged.merged_weight)
INPUTS.anchor(lambda: forms("linear", "matmul"))(factors.vectors)
INPUTS.anchor(lambda: [F.conv1d, F.conv2d, F.conv3d])(merged.merged_convolution)

lower_by(op.NARROW_MM, "narrow_mm", lowering.kernel, op.narrow_mm)
lower_by(op.LORA_LINEAR, "lora_linear", lambda *given: decode.Lowering(*given).kernels(), op.lora_linear)
lower_by(split.LORA_SPLIT, "lora_split", split.kernel)
lower_by(accumulate.LORA_ACCUMULATE, "lora_accumulate", accumulate_kernel.kernel, accumulate.accumulate)
# Where the fusion of adapters has not read the graph, and taken the mark out.
register_lowering_when_loaded(op.ROUNDED, lambda y: y)
