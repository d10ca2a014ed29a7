"""Attention over short sequences: the keys of a head are one tile, and the whole softmax happens in it.

Windows of an image, patches and short sentences have tens of keys. A kernel that goes over the keys in
blocks, or that is given one dense mask, spends its time elsewhere; here one program loads the keys of a head,
adds up its masks in registers, and is done with a softmax that needs no running maximum.

`op` is the operation, `plan` its tiles, `lowering` and `templates` its kernels in Inductor, and `terms` says
which attentions become it. It is an operation with a lowering of ours to a Triton template, as `block_mm` is:
one node until Inductor lowers it, so that passes and reports see it, launched as Inductor's own kernels are
(CUDA graphs, AOTInductor), and its source is part of the package that `FusionPass.uuid()` hashes. A Triton
kernel that AOTAutograd traces would be decomposed for the device of the trace, and cannot be fused with what
follows it.
"""

from __future__ import annotations

from ....lowering import lower_by
from . import lowering, op

lower_by(op.SHORT_ATTENTION, "short_attention", lowering.forward)
lower_by(op.SHORT_ATTENTION_BACKWARD, "the backward of short_attention", lowering.backward)
