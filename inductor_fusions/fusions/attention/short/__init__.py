"""Attention over short sequences: the keys of a head are one tile, and the whole softmax happens in it.

Windows of an image, patches and short sentences have tens of keys. For these, a kernel that loops over blocks
of keys, or that reads one dense mask, spends most of its time on overhead. Here one program loads the keys of
a head, adds up its masks in registers, and computes a softmax without a running maximum.

`op` is the operation, `plan` its tiles, `lowering` and `templates` its kernels in Inductor, and `terms` says
which attentions become it. As `block_mm`, it is an operation that we lower to a Triton template. It is one
node until Inductor lowers it, so passes and reports see it. It is launched like Inductor's own kernels (CUDA
graphs, AOTInductor), and `FusionPass.uuid()` hashes its source. A Triton kernel that AOTAutograd traces would
be decomposed for the device of the trace, and could not be fused with what follows it.
"""

from __future__ import annotations

from ....lowering import lower_by
from . import lowering, op

lower_by(op.SHORT_ATTENTION, "short_attention", lowering.forward, op.forward)
lower_by(op.SHORT_ATTENTION_BACKWARD, "the backward of short_attention", lowering.backward)
