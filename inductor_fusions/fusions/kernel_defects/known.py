"""Kernels of torch and cuDNN that are known to be wrong and that a compiled attention can reach.

One entry per defect: where it is, when it occurs, and what is done instead.
`tests/gpu/test_kernel_defects.py` and `test_other_defects.py` reproduce each one in the bare kernel, so that
an entry which is no longer needed is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """A kernel that returns a wrong result or raises.

    Attributes:
        name: short, for reports and tests.
        where: the backend, or the template of Inductor.
        seen: versions of torch and of cuDNN on which it was seen.
        condition: when it occurs.
        effect: what happens then.
        instead: what a compiled graph does.
        source: where it is described, or the file of torch that has it.
    """

    name: str
    where: str
    seen: str
    condition: str
    effect: str
    instead: str
    source: str


CUDNN_PLANS = Defect(
    name="cudnn_plans",
    where="backward of cuDNN attention",
    seen="torch 2.11, cuDNN 9.19",
    condition="an earlier backward in the thread had q, k, v and a mask of the same sizes and strides, but "
    "another layout of the output or of its gradient",
    effect="wrong gradients: the key of the plan cache lacks the strides of the output and its gradient",
    instead="both get the layout of q; compiled calls use a dropout probability that eager calls do not "
    "(-0.0 for 0, else the next float), so they have cache entries of their own",
    source="aten/src/ATen/native/cudnn/MHA.cpp (MHAParams), since pytorch#141147",
)
CUDNN_PADDED_KEYS = Defect(
    name="cudnn_padded_keys",
    where="backward of cuDNN attention",
    seen="torch 2.11, cuDNN 9.19",
    condition="not causal, a number of keys that is 64 modulo 128, and a query whose logsumexp is below "
    "-88.7 (bfloat16) or -11 (float16), with or without a mask",
    effect="NaN in the gradient of q: the last tile is padded with keys of score 0, and exp(0 - logsumexp) "
    "overflows",
    instead="without a mask, flash attention computes the gradients; with one, keys, values and mask are "
    "padded to whole tiles with masked keys; with a mask and dropout, or a symbolic number of keys, the "
    "scores of such rows are shifted by their logsumexp; with dropout and without a mask the call is left as "
    "it is",
    source="pytorch#196678",
)
CUDNN_ONE_QUERY = Defect(
    name="cudnn_one_query",
    where="backward of cuDNN attention",
    seen="cuDNN 9.19; 9.25 and 9.26, by its report",
    condition="one query, no mask, and a logsumexp far below 0 (-122)",
    effect="NaN in the gradients of k and v",
    instead="flash attention or matrix products compute the gradients",
    source="NVIDIA/cudnn-frontend#1072",
)
CUDNN_DECODING = Defect(
    name="cudnn_decoding",
    where="cuDNN attention",
    seen="Blackwell (10.x, 11.x), cuDNN 9.19 to 9.25.0 but not 9.24.1, by its report; torch 2.15 does not "
    "call it there",
    condition="one query, as in decoding",
    effect="wrong values",
    instead="flash attention or matrix products compute it; with dropout the call is left as it is",
    source="pytorch#193893, pytorch#194927",
)
CUDNN_MISALIGNED = Defect(
    name="cudnn_misaligned",
    where="backward of cuDNN attention",
    seen="torch 2.11, by its report",
    condition="the address of the gradient is not a multiple of 16 bytes",
    effect="an exception, after which the CUDA context is unusable",
    instead="the gradient is copied",
    source="pytorch#191576",
)
MASK_ALONE = Defect(
    name="mask_alone",
    where="backward of efficient attention",
    seen="torch 2.6, by its report; fixed by pytorch#188302",
    condition="the mask requires a gradient, and q, k and v do not",
    effect="an illegal memory access: the forward does not save the logsumexp that the backward reads",
    instead="the attention is left as written",
    source="pytorch#148476",
)
LONG_MASK = Defect(
    name="long_mask",
    where="efficient attention",
    seen="torch 2.14, by its report; fixed by pytorch#187225",
    condition="a mask of more than 2^32 pairs of queries and keys in one head",
    effect="wrong values: the offset of a row of the mask has 32 bits",
    instead="the attention is left as written",
    source="pytorch#187227",
)
NEGATIVE_SCALE = Defect(
    name="negative_scale",
    where="flash and cuDNN attention",
    seen="torch 2.11, cuDNN 9.19",
    condition="a scale of 0 or below",
    effect="NaN: a tile is padded with scores of -inf before it is scaled",
    instead="the sign, or the 0, is moved into q",
    source="aten/src/ATen/native/transformers/cuda/attention.cu",
)
WHOLE_DROPOUT = Defect(
    name="whole_dropout",
    where="flash, efficient and cuDNN attention",
    seen="torch 2.11, cuDNN 9.19",
    condition="a dropout probability of 1",
    effect="an exception, or NaN (efficient)",
    instead="the attention is left as written",
    source="aten/src/ATen/native/transformers/cuda/attention.cu",
)
EMPTY_OPERANDS = Defect(
    name="empty_operands",
    where="backward of cuDNN and flash attention",
    seen="torch 2.11",
    condition="a batch size, a length or a head dim of 0",
    effect="an exception",
    instead="the attention is left as written",
    source="aten/src/ATen/native/transformers/cuda/attention.cu",
)
FLEX_DECODING_QUERY = Defect(
    name="flex_decoding_query",
    where="flex attention, template for short queries",
    seen="torch 2.11 to 2.13",
    condition="inference, fewer than 128 queries, and q is computed in the same graph",
    effect="wrong values: the template reads q with the strides from before its layout was fixed",
    instead="the layout of q is fixed first",
    source="torch/_inductor/kernel/flex/flex_decoding.py",
)

FLEX_COUNTS = Defect(
    name="flex_counts",
    where="flex attention",
    seen="the sources of torch 2.11 to 2.13",
    condition="a captured tensor has 2^31 elements or more",
    effect="wrong elements are read, or an illegal memory access: indices have 32 bits",
    instead="flex attention is not used",
    source="pytorch#145869",
)
ONE_NUMBER = Defect(
    name="one_number",
    where="Inductor's Triton templates",
    seen="torch 2.11 to 2.13",
    condition="an output of one element",
    effect="a wrong value: the store has no mask, so the whole tile is written to that element",
    instead="no template is used",
    source="torch/_inductor/select_algorithm.py",
)

BROADCAST_NUMBER = Defect(
    name="broadcast_number",
    where="Inductor's lowering of SDPA",
    seen="torch 2.11; fixed in the sources of 2.13",
    condition="an operand on a GPU is a broadcast scalar, such as the gradient of a sum, and its last dim is "
    "not a multiple of 8",
    effect="an exception: the lowering reads the last size of a 0-d tensor",
    instead="the operand is copied",
    source="torch/_inductor/lowering.py (sdpa_constraint)",
)

FLASH_EXPANDED = Defect(
    name="flash_expanded",
    where="backward of flash attention",
    seen="torch 2.11",
    condition="queries, keys or values are expanded over a dim, such as one head of keys for all heads",
    effect="an exception: the kernel lays their gradient out otherwise than the fake kernel says",
    instead="the operand is copied for the backward",
    source="torch/_meta_registrations.py (meta__scaled_dot_product_flash_backward)",
)

#: Every defect, as docs/reliability.md lists them.
KNOWN = (
    CUDNN_PLANS,
    CUDNN_PADDED_KEYS,
    CUDNN_ONE_QUERY,
    CUDNN_DECODING,
    CUDNN_MISALIGNED,
    MASK_ALONE,
    LONG_MASK,
    NEGATIVE_SCALE,
    WHOLE_DROPOUT,
    EMPTY_OPERANDS,
    FLEX_DECODING_QUERY,
    FLEX_COUNTS,
    ONE_NUMBER,
    BROADCAST_NUMBER,
    FLASH_EXPANDED,
)
